"""What a drafter that breaks costs: its place in the request, never the text."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.decoding.drafter import Proposal
from edgespec.decoding.loop import DecodeOptions, decode
from edgespec.decoding.stats import Stats
from edgespec.decoding.target import Pass
from edgespec.drafters.paradecode import LayersRun
from edgespec.drafters.plain import Plain
from edgespec.errors import EdgespecError
from tests.decoding.test_loop import VOCAB, truth_of
from tests.support.reference import FunctionTarget
from tests.support.toy import Scripted, chain, hash_logits, hash_target


def raising(tokens: list[int], budget: int) -> Proposal:
    raise RuntimeError("broken drafter")


def nan_probs(tokens: list[int], budget: int) -> Proposal:
    return Proposal(np.array([1]), None, np.full((1, VOCAB), np.nan))


def nan_tree(tokens: list[int], budget: int) -> Proposal:
    probs = np.full((3, VOCAB), 1 / VOCAB)
    probs[2, 1] = np.nan
    return Proposal(np.array([1, 2, 3]), np.array([-1, -1, 0]), probs, False)


def resumed(rows: int, parents: list[int] | None = None) -> Callable[[list[int], int], Proposal]:
    above = None if parents is None else np.array(parents)
    return lambda tokens, budget: Proposal(
        np.array([1, 2])[:budget], above, head_start=LayersRun(np.zeros((rows, 4), np.float32), 1, 4)
    )


BROKEN: dict[str, Callable[[list[int], int], Proposal]] = {
    "RuntimeError: broken drafter": raising,
    "finite": nan_probs,
    "shape": lambda tokens, budget: Proposal(np.array([1]), None, np.ones((1, 3))),
    "must be finite": nan_tree,
    "sum to 1": lambda tokens, budget: Proposal(np.array([1, 2]), np.array([-1, -1]), np.full((2, VOCAB), 0.05)),
    "(2, 11)": lambda tokens, budget: Proposal(np.array([1, 2]), np.array([-1, -1]), np.full((1, VOCAB), 1 / VOCAB)),
    "cannot resume": resumed(3),
    "vocabulary": lambda tokens, budget: chain([VOCAB]),
    "children": lambda tokens, budget: Proposal(np.array([1, 2]), np.array([1, -1])),
    "TypeError": lambda tokens, budget: None,  # type: ignore[return-value,dict-item]
}


@pytest.mark.parametrize("reason", BROKEN)
@pytest.mark.parametrize("late", [0, 2])
def test_a_broken_drafter_is_dropped_and_the_text_stays(reason: str, late: int) -> None:
    truth = truth_of(4)
    calls: list[int] = []

    def guess(tokens: list[int], budget: int) -> Proposal:
        calls.append(1)
        return BROKEN[reason](tokens, budget) if len(calls) > late else chain(truth(tokens, budget))

    stats = Stats()
    rounds = list(decode(hash_target(4), Scripted(guess), [1, 2], DecodeOptions(25, 3), stats))
    assert [t for r in rounds for t in r.tokens] == truth([1, 2], 25)
    assert len(calls) == late + 1
    assert stats.dropped_reason is not None
    assert "scripted failed in propose" in stats.dropped_reason
    assert reason in stats.dropped_reason


class ResumingTarget(FunctionTarget):
    """A target that would resume a pass; notes how many rows it was given."""

    keep_hidden = False
    resumed: list[int]

    def forward_heads(self, group, hidden, top=0):  # type: ignore[no-untyped-def]
        raise NotImplementedError

    def forward_layers(self, rows, offset, first, last):  # type: ignore[no-untyped-def]
        raise NotImplementedError

    def forward_from(
        self, tokens: NDArray[np.int64], hidden: NDArray[np.float32], layer: int, best: bool = False
    ) -> Pass:
        assert len(tokens) == len(hidden)
        self.resumed.append(len(tokens))
        return self.forward(tokens)


@pytest.mark.parametrize("rows, parents", [(2, None), (1, None), (3, [-1, -1]), (3, [-1, 0])])
def test_layers_that_ran_ahead_must_be_those_of_the_chain(rows: int, parents: list[int] | None) -> None:
    target, stats = ResumingTarget(hash_logits(4, VOCAB), VOCAB), Stats()
    target.resumed = []
    text = [t for r in decode(target, Scripted(resumed(rows, parents)), [1, 2], DecodeOptions(9, 2), stats)
            for t in r.tokens]  # fmt: skip
    assert text == truth_of(4)([1, 2], 9)
    assert "expected 3 rows of a chain" in str(stats.dropped_reason)
    assert target.resumed == []


def test_a_chain_is_resumed_as_it_was_cut() -> None:
    truth, stats = truth_of(4), Stats()
    target = ResumingTarget(hash_logits(4, VOCAB), VOCAB)
    target.resumed = []

    def guess(tokens: list[int], budget: int) -> Proposal:
        out = truth(tokens, 4)
        return Proposal(np.array(out), head_start=LayersRun(np.zeros((5, 4), np.float32), 1, 4))

    text = [t for r in decode(target, Scripted(guess), [1, 2], DecodeOptions(9, 2), stats) for t in r.tokens]
    assert text == truth([1, 2], 9)
    assert stats.dropped_reason is None
    assert target.resumed == [3, 3, 3]


@pytest.mark.parametrize("where", ["begin", "observe", "timed"])
def test_a_drafter_may_break_anywhere(where: str) -> None:
    truth = truth_of(4)
    drafter = Scripted(lambda tokens, budget: chain(truth(tokens, budget)))

    def broken(*args: object) -> None:
        raise EdgespecError("draft logits are NaN")

    setattr(drafter, where, broken)
    stats = Stats()
    text = [t for r in decode(hash_target(4), drafter, [1, 2], DecodeOptions(9, 3), stats) for t in r.tokens]
    assert text == truth([1, 2], 9)
    assert "draft logits are NaN" in str(stats.dropped_reason)


def test_an_interrupt_in_a_drafter_and_an_error_of_the_target_go_through() -> None:
    def interrupt(tokens: list[int], budget: int) -> Proposal:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(decode(hash_target(0), Scripted(interrupt), [1], DecodeOptions(4)))
    broken = FunctionTarget(lambda prefix: np.full(VOCAB, np.nan, np.float32), VOCAB)
    with pytest.raises(EdgespecError, match="finite logits for position 1"):
        list(decode(broken, Plain(), [1], DecodeOptions(4)))
