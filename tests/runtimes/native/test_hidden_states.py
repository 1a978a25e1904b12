"""Drafters over hidden states in C's sessions: rounds as Python's, over texts that follow each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from edgespec.decoding.sampling import SamplingParams
from tests.runtimes.native.conftest import DRAFTERS
from tests.support.both_loops import GREEDY, SAMPLED, Both
from tests.support.c_sessions import Refused, RoundFound, settings_of

pytestmark = pytest.mark.usefixtures("native")
SETTINGS = (GREEDY, SAMPLED, replace(SAMPLED, acceptance="rejection", seed=-3),
            SamplingParams(0.7, top_k=20, repetition_penalty=1.2, seed=8, verification="block"))  # fmt: skip


@pytest.mark.parametrize("name", DRAFTERS)
def test_rounds_are_those_of_python(both: Callable[[str], Both], name: str) -> None:
    """Prompts are new, continue the text before, or begin as it does."""
    found, kind = both(name), DRAFTERS[name]
    rng, rounds, text = np.random.default_rng(3), list[RoundFound](), list[int]()
    for at in range(14):
        new = rng.integers(found.target.vocab_size, size=int(rng.integers(1, 30))).tolist()
        prompt = (new, [*text, *new], [*text[: len(text) // 2], *new])[at % 3]
        new_rounds = found.compare(prompt, SETTINGS[at % len(SETTINGS)], kind, int(rng.integers(1, 7)), 24)
        text = [*prompt, *(token for one in new_rounds for token in one.tokens)][:200]
        rounds += new_rounds
    assert any(one.accepted for one in rounds)
    assert any(one.rejected for one in rounds)


def test_a_draft_with_states_guesses_in_every_text(both: Callable[[str], Both]) -> None:
    """A text that is cut back further than states are kept begins again; what the last pass reached is forgotten."""
    found, rng = both("qwen3_5_delta"), np.random.default_rng(2)
    for size in (300, 30, 150, 2, 129, 16, 260, 15, 40):
        prompt = rng.integers(found.target.vocab_size, size=size).tolist()
        for method in ("speculative", "ngram,speculative", "self-spec,mtp"):
            found.compare(prompt, GREEDY, method, 4, 24)


@pytest.mark.parametrize("name", DRAFTERS)
def test_other_drafters_guess_too(both: Callable[[str], Both], name: str) -> None:
    session, kind = both(name).session, DRAFTERS[name]
    prompt = [5, 6, 7] * 5
    plain = session.generate(prompt, settings_of(GREEDY, "plain", 60))
    assert session.generate(prompt, settings_of(GREEDY, f"ngram,{kind}", 60, 4)) == plain
    assert session.counts().dropped == b""
    for fixed in (0, 1):
        text = session.generate([1, 2, 3], settings_of(GREEDY, kind, 60, fixed=fixed))
        assert text == session.generate([1, 2, 3], settings_of(GREEDY, "plain", 60))


@pytest.mark.parametrize("name", DRAFTERS)
def test_trees_are_refused(both: Callable[[str], Both], name: str) -> None:
    with pytest.raises(Refused, match="draws chains here"):
        both(name).session.begin([1], settings_of(method=DRAFTERS[name], branch=(2,)))
