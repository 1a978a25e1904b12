"""Heads of 256, as Gemma's: all methods keep plain decoding's text, short and long, on both operators.

ONNX Runtime splits the sums of heads wider than 128 depending on the length of the text (docs/dev/runtime.md), so a
method could fail in a pass whose rows cross 64 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.decoding.settings import Settings
from edgespec.engine.engine import Engine
from edgespec.reports.proof import prove
from edgespec.runtimes.files.formats import Format
from edgespec.runtimes.files.manifest import Operators
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.shared import Model
from tests.lossless.conftest import HEADS, engine_of
from tests.lossless.test_matrix import CHAINS, plain_greedy
from tests.support import hf
from tests.support.requests import caches_of
from tests.support.wide import wide_config

PROMPTS = ("the boat that", "There was nothing left to do but wait. She had heard it before")
TOKENS = 90  # the texts cross 64
METHODS = ("ngram", "speculative", "self-spec", "swift", *HEADS, "chain", "auto")
PLAIN = Settings(max_new_tokens=TOKENS, ignore_eos=True, fallback=False)
DRAWN = PLAIN.changed(temperature=0.8, seed=3, acceptance="coupled")
Made = Callable[[Operators, Format], Engine]


@pytest.fixture(scope="module")
def maker(tmp_path_factory: pytest.TempPathFactory) -> Made:
    known: dict[tuple[Operators, Format], Engine] = {}
    source = hf.write_checkpoint(tmp_path_factory.mktemp("wide"), wide_config(256, layers=3, positions=512), seed=5)

    def get(operators: Operators, form: Format) -> Engine:
        if (operators, form) not in known:
            known[operators, form] = engine_of(tmp_path_factory.mktemp("bundle"), str(source), operators, form)
        return known[operators, form]

    return get


@pytest.mark.parametrize("form", ["int4", "fp32"])
def test_every_method_writes_plain_decodings_text(maker: Made, operators: Operators, form: Format) -> None:
    engine = maker(operators, form)
    graph = "native" if operators == "native" else "gated"
    slot = open_slot(Model(engine.bundle.path, engine.bundle.manifest.target, graph, 2))
    expected = [plain_greedy(slot, engine.codec.encode(prompt), TOKENS) for prompt in PROMPTS]
    sampled = [engine.generate(prompt, DRAWN, method="ar").tokens for prompt in PROMPTS]
    drafted: dict[str, int] = {}
    accepted = 0
    for method in METHODS:
        more: dict[str, Any] = CHAINS.get(method, {}) | ({"threshold": 0.05} if method == "paradecode" else {})
        for settings, texts in ((PLAIN.changed(**more), expected), (DRAWN.changed(**more), sampled)):
            for prompt, tokens in zip(PROMPTS, texts, strict=True):
                result = engine.generate(prompt, settings, method=method)
                assert result.tokens == tokens, f"{method} differs from plain decoding after {prompt!r}"
                assert result.stats.dropped_reason is None
                assert result.exact
                drafted[method] = drafted.get(method, 0) + result.stats.drafted
                accepted += result.stats.accepted
    # which may find that no method is faster
    assert all(count for method, count in drafted.items() if method != "auto")
    assert 0 < accepted < sum(drafted.values())


def test_trees_differ_at_near_ties_only(maker: Made, operators: Operators) -> None:
    engine = maker(operators, "int4")
    for method, more in (("speculative", {"branch": (2,), "gamma": 3}), ("medusa", {"nodes": 8})):
        (proof,) = prove(engine, PROMPTS, PLAIN.changed(**more), [method])
        assert proof.lossless, (method, proof.differences)


def test_the_cache_is_that_of_a_prefill(maker: Made, operators: Operators) -> None:
    """This holds for any pass that wrote a row, with any number of dummies after it."""
    engine = maker(operators, "fp32")
    fresh = open_slot(engine.model)
    for method in ("ar", "self-spec", "medusa", "paradecode"):
        result = engine.generate(PROMPTS[0], PLAIN, method=method, **CHAINS.get(method, {}))
        tokens = engine.codec.encode(PROMPTS[0]) + result.tokens
        held, expected = caches_of(engine, fresh, tokens)
        for part, values in expected.items():
            np.testing.assert_array_equal(held[part], values, err_msg=f"{method}: {part}")


def test_sequences_together_write_what_each_writes_alone(maker: Made, operators: Operators) -> None:
    engine = maker(operators, "int4")
    alone = [engine.generate(prompt, PLAIN, method="ar").tokens for prompt in PROMPTS]
    together = engine.generate_batch(PROMPTS, PLAIN, method="speculative")
    assert [one.tokens for one in together] == alone


def test_a_turn_goes_on_where_the_last_one_ended(maker: Made, operators: Operators, tmp_path: Path) -> None:
    engine = maker(operators, "int4")
    text = engine.codec.encode(PROMPTS[0])
    for more in (" and", " but she", ""):
        first = engine.generate(text, PLAIN.changed(max_new_tokens=24), method="speculative")
        other = engine.generate(text, PLAIN.changed(max_new_tokens=24), method="ngram" if more else "ar")
        assert first.tokens == other.tokens
        text = [*text, *first.tokens, *engine.codec.encode(more, special=False)]
