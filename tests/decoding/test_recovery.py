"""Nonsense from a drafter: what it costs, and how the statistics say where it failed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from edgespec.control.adaptive import Adaptive
from edgespec.decoding.drafter import EMPTY, Proposal
from edgespec.decoding.target import Target
from edgespec.drafters.paradecode import LayersRun
from edgespec.formulas.cost import CostModel
from tests.decoding.test_monitor import VOCAB, right, watched
from tests.support.reference import FunctionTarget
from tests.support.toy import Scripted, hash_logits, plain

TARGET = cast(Target, SimpleNamespace(forward_from=None))

# -- recovery ----------------------------------------------------------------------------------------------------------

ONE, TREE = np.array([1]), np.array([1, 2, 3])
PARENTS = np.array([-1, 0, -1])


def tree_probs(value: float) -> Proposal:
    probs = np.full((3, VOCAB), 1 / VOCAB)
    probs[1, 4] = value
    return Proposal(TREE, PARENTS, probs)


def resumed(tokens: list[int], hidden: Any) -> Proposal:
    return Proposal(np.array(tokens, np.int64), head_start=LayersRun(np.array(hidden, np.float32), 1, 4))


NONSENSE: dict[str, Callable[[], Any]] = {
    "tree of NaN": lambda: tree_probs(np.nan),
    "tree of infinity": lambda: tree_probs(np.inf),
    "chain of NaN": lambda: Proposal(ONE, None, np.full((1, VOCAB), np.nan)),
    "probabilities of fewer nodes": lambda: Proposal(TREE, PARENTS, np.ones((2, VOCAB))),
    "NaN for a token": lambda: Proposal(np.array([np.nan])),
    "tokens of two dimensions": lambda: Proposal(np.array([[1, 2]])),
    "a child before its parent": lambda: Proposal(TREE, np.array([1, -1, -1])),
    "its own parent": lambda: Proposal(TREE, np.array([0, -1, -1])),
    "a negative token": lambda: Proposal(np.array([-1])),
    "hidden states of NaN": lambda: resumed([1], [[0.0], [np.nan]]),
    "hidden states of NaN without a guess": lambda: resumed([], [[np.nan]]),
    "too few hidden states": lambda: resumed([1, 2], [[0.0]]),
    "hidden states of a tree": lambda: Proposal(
        TREE, PARENTS, head_start=LayersRun(np.zeros((4, 2), np.float32), 1, 4)
    ),
    "nothing at all": lambda: None,
    "a list": lambda: [1, 2],
}


@pytest.mark.parametrize("name", NONSENSE)
@pytest.mark.parametrize("late", [0, 3])
def test_nonsense_costs_the_drafter_and_not_the_text(name: str, late: int) -> None:
    calls: list[int] = []

    def guess(tokens: list[int], budget: int) -> Proposal:
        calls.append(1)
        return right(4)(tokens, budget) if len(calls) <= late else NONSENSE[name]()

    text, stats = watched(Scripted(guess))
    assert text == plain(hash_logits(4, VOCAB), VOCAB, [1, 2], 25)
    assert len(calls) == late + 1
    (drop,) = stats.drops
    assert (drop["method"], drop["where"]) == ("scripted", "propose")
    assert stats.dropped_reason == f"scripted failed in propose: {drop['error']}"
    assert stats.drafted_rounds == late


@pytest.mark.parametrize("where", ["begin", "prefill", "observe", "timed"])
def test_a_drop_says_where(where: str) -> None:
    drafter = Scripted(right(4))

    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    setattr(drafter, where, broken)
    text, stats = watched(drafter)
    assert text == plain(hash_logits(4, VOCAB), VOCAB, [1, 2], 25)
    (drop,) = stats.drops
    assert drop["where"] == where
    assert drop["error"] == "RuntimeError: broken"


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_drafter_that_never_has_a_guess_costs_nothing(adaptive: bool) -> None:
    drafter: Any = Scripted(lambda *_: EMPTY)
    text, stats = watched(Adaptive(drafter, CostModel(), fallback=False) if adaptive else drafter)
    assert text == plain(hash_logits(4, VOCAB), VOCAB, [1, 2], 25)
    assert (stats.drops, stats.plain_rounds, stats.work_per_token) == ([], 25, 1.0)


def test_a_drafter_that_clings_to_its_first_guess() -> None:
    first: list[Proposal] = []

    def guess(tokens: list[int], budget: int) -> Proposal:
        first.append(right(4)(tokens, budget))
        return first[0]

    text, stats = watched(Scripted(guess))
    assert text == plain(hash_logits(4, VOCAB), VOCAB, [1, 2], 25)
    assert stats.dropped_reason is None


@pytest.mark.parametrize("hidden", [[[0.0], [np.nan]], [[np.inf], [0.0]], [[0.0]]])
def test_hidden_states_to_resume_from_are_looked_at(hidden: Any) -> None:
    proposal = resumed([1], hidden)
    assert proposal.head_start is not None
    with pytest.raises(ValueError, match=r"expected 2 rows|finite"):
        proposal.head_start.check(TARGET, proposal)


def test_a_target_without_hidden_states_is_never_asked_to_resume() -> None:
    assert not hasattr(FunctionTarget, "forward_from")
    text, stats = watched(Scripted(lambda *_: NONSENSE["hidden states of NaN"]()))
    assert stats.dropped_reason is not None
    assert len(text) == 25
