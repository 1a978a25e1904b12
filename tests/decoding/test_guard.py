"""Nonsense from a drafter costs its place in the request, never the text; the statistics say where it failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from edgespec.control.adaptive import Adaptive, Control
from edgespec.decoding.loop import DecodeOptions, decode
from edgespec.decoding.proposal import EMPTY, Proposal
from edgespec.decoding.stats import Stats
from edgespec.decoding.target import Output, Pass
from edgespec.drafters.plain import Plain
from edgespec.errors import EdgespecError
from edgespec.formulas.cost import CostModel
from tests.decoding.test_loop import truth_of
from tests.decoding.test_monitor import VOCAB, right, watched
from tests.support.reference import Function, FunctionTarget
from tests.support.toy import Scripted, chain, hash_logits, hash_target, plain

ONE, TREE = np.array([1]), np.array([1, 2, 3])
PARENTS = np.array([-1, 0, -1])


def raising() -> Proposal:
    raise RuntimeError("broken drafter")


def tree_probs(value: float) -> Proposal:
    probs = np.full((3, VOCAB), 1 / VOCAB)
    probs[1, 4] = value
    return Proposal(TREE, PARENTS, probs)


# (kind of error, part of the reason) -> an invalid proposal
NONSENSE: dict[tuple[str, str], Callable[[], Any]] = {
    ("an error", "RuntimeError: broken drafter"): raising,
    ("tree of NaN", "must be finite"): lambda: tree_probs(np.nan),
    ("tree of infinity", "must be finite"): lambda: tree_probs(np.inf),
    ("chain of NaN", "finite"): lambda: Proposal(ONE, None, np.full((1, VOCAB), np.nan)),
    ("a q that is no distribution", "sum to 1"): lambda: Proposal(TREE, PARENTS, np.full((3, VOCAB), 0.05)),
    ("probabilities of few tokens", "shape"): lambda: Proposal(ONE, None, np.ones((1, 3))),
    ("probabilities of few nodes", "(3, 11)"): lambda: Proposal(TREE, PARENTS, np.full((2, VOCAB), 1 / VOCAB)),
    ("NaN for a token", "integers"): lambda: Proposal(np.array([np.nan])),
    ("tokens of two dimensions", "integers"): lambda: Proposal(np.array([[1, 2]])),
    ("a child before its parent", "children"): lambda: Proposal(TREE, np.array([1, -1, -1])),
    ("its own parent", "children"): lambda: Proposal(TREE, np.array([0, -1, -1])),
    ("a negative token", "vocabulary"): lambda: Proposal(np.array([-1])),
    ("a token too large", "vocabulary"): lambda: chain([VOCAB]),
    ("nothing at all", "expected a Proposal, got NoneType"): lambda: None,
    ("a list", "expected a Proposal, got list"): lambda: [1, 2],
}


@pytest.mark.parametrize("what", NONSENSE, ids=lambda what: what[0])
@pytest.mark.parametrize("late", [0, 3])
def test_nonsense_costs_the_drafter_and_not_the_text(what: tuple[str, str], late: int) -> None:
    calls: list[int] = []

    def guess(tokens: list[int], budget: int) -> Proposal:
        calls.append(1)
        return right(4)(tokens, budget) if len(calls) <= late else NONSENSE[what]()

    text, stats = watched(Scripted(guess))
    assert text == plain(hash_logits(4, VOCAB), VOCAB, [1, 2], 25)
    assert len(calls) == late + 1
    (drop,) = stats.drops
    assert (drop["method"], drop["where"]) == ("scripted", "propose")
    assert stats.dropped_reason == f"scripted failed in propose: {drop['error']}"
    assert what[1] in drop["error"]
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
    text, stats = watched(Adaptive([Control(drafter, CostModel(), fallback=False)]) if adaptive else drafter)
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


class Ahead(FunctionTarget):
    """Takes what is left of passes, a quarter of the layers; notes their rows."""

    layers, can = 4, FunctionTarget.can | {"layers", "inputs"}

    def __init__(self, function: Function, vocab_size: int) -> None:
        super().__init__(function, vocab_size)
        self.rows: list[int] = []

    def run(self, wanted: Pass) -> Output:
        output = super().run(wanted)
        if wanted.layers is not None:
            assert wanted.tokens is not None
            assert wanted.layers == (3, 4)
            self.rows.append(len(wanted.tokens))
            output.share = 0.25
        return output


def running_ahead(guess: Callable[[list[int], int], Proposal]) -> Scripted:
    drafter = Scripted(guess)
    drafter.runs_ahead = True
    drafter.rest = lambda whole: whole._replace(inputs=np.zeros((1, 1), np.float32), layers=(3, 4))  # type: ignore[method-assign]
    return drafter


def test_a_pass_that_drafting_began_is_gone_on_with_as_the_chain_was_cut() -> None:
    """This holds for any verified part, also without draft tokens; only the rest of the pass counts as work."""
    truth, stats, target = truth_of(4), Stats(), Ahead(hash_logits(4, VOCAB), VOCAB)
    drafter = running_ahead(lambda tokens, budget: chain(truth(tokens, 4) if len(tokens) < 8 else []))
    text = [t for r in decode(target, drafter, [1, 2], DecodeOptions(9, 2), stats) for t in r.tokens]
    assert text == truth([1, 2], 9)
    assert stats.dropped_reason is None
    assert target.rows == [3, 3, 1, 1]  # the last round has no room for a draft token, so no drafter is asked
    assert stats.plain_rounds == 3


def test_a_pass_is_the_targets_own_where_drafting_failed() -> None:
    target, stats = Ahead(hash_logits(4, VOCAB), VOCAB), Stats()
    drafter = running_ahead(lambda tokens, budget: chain([VOCAB]))
    text = [t for r in decode(target, drafter, [1, 2], DecodeOptions(9, 2), stats) for t in r.tokens]
    assert text == truth_of(4)([1, 2], 9)
    assert "vocabulary" in str(stats.dropped_reason)
    assert target.rows == []


def test_an_interrupt_in_a_drafter_and_an_error_of_the_target_go_through() -> None:
    def interrupt(tokens: list[int], budget: int) -> Proposal:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(decode(hash_target(0), Scripted(interrupt), [1], DecodeOptions(4)))
    broken = FunctionTarget(lambda prefix: np.full(VOCAB, np.nan, np.float32), VOCAB)
    with pytest.raises(EdgespecError, match="finite logits for position 1"):
        list(decode(broken, Plain(), [1], DecodeOptions(4)))
