"""After any method the cache holds what a prefill of the committed tokens would have written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from edgespec.engine.engine import Engine
from edgespec.runtimes.files.manifest import Operators
from edgespec.runtimes.opening import open_slot
from tests.conftest import PROMPTS
from tests.support.requests import caches_of

SETTINGS: dict[str, dict[str, Any]] = {
    "ar": {},
    "ngram": {},
    "speculative": {},
    "speculative tree": {"method": "speculative", "branch": (3, 2)},
    "speculative comb, sampled": {"method": "speculative", "branch": (2,), "temperature": 1.0, "seed": 3},
    "self-spec": {},
    "swift": {},
    "swift comb": {"method": "swift", "branch": (3,)},
    "medusa": {"nodes": 1},
    "medusa tree": {"method": "medusa", "nodes": 12},
    "blockwise": {},
    "blockwise refined": {"method": "blockwise", "cycles": 2},
    "paradecode": {"threshold": 0.3},
    "paradecode, sampled": {"method": "paradecode", "threshold": 0.2, "temperature": 1.0, "seed": 1},
    "chain": {"proposers": ("ngram", "paradecode", "medusa")},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_cache_is_that_of_a_prefill(engine: Callable[..., Engine], operators: Operators, name: str) -> None:
    """To the bit on native operators; stock ones add up the rows of a tree in another order."""
    made, error = engine("fp32"), 0.0 if operators == "native" else 1e-4
    settings = {"method": name} | SETTINGS[name]
    fresh = open_slot(made.model)
    accepted = 0
    for prompt, length in zip(PROMPTS[:5], (3, 11, 40, 64, 90), strict=True):
        result = made.generate(prompt, max_new_tokens=length, ignore_eos=True, fallback=False, **settings)
        assert result.stats.dropped_reason is None
        accepted += result.stats.accepted
        tokens = made.codec.encode(prompt) + result.tokens
        held, expected = caches_of(made, fresh, tokens)
        assert set(held) == set(expected)
        for part, values in held.items():
            np.testing.assert_allclose(values, expected[part], rtol=0, atol=error, err_msg=part)
    assert (accepted > 0) == (name != "ar")
