"""Drafters asked in turn: who wins, who learns what, and that the text stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgespec.control.adaptive import Adaptive
from edgespec.control.chain import Chain
from edgespec.decoding.drafter import EMPTY, HIDDEN, Drafter, Proposal, Verdict
from edgespec.decoding.loop import DecodeOptions, decode
from edgespec.decoding.stats import RoundTime, Stats
from edgespec.decoding.target import Pass, SkipSet
from edgespec.drafters.ngram import NGram
from edgespec.drafters.plain import Plain
from edgespec.drafters.self_spec import SelfSpec
from edgespec.drafters.speculative import Speculative
from edgespec.formulas.cost import CostModel
from edgespec.plugins.paradecode.drafter import LayersRun
from tests.support.reference import FunctionTarget
from tests.support.toy import FixedCosts, Scripted, chain, hash_logits, hash_target, plain, same_texts

VOCAB = 11
COST = {1: 1.0, 16: 1.5}


class Watcher(Scripted):
    """Keeps all it is told."""

    def __init__(self, guesses: Any, name: str = "watcher", cheap: bool = False) -> None:
        super().__init__(lambda tokens, budget: guesses(tokens, budget))
        self.name, self.cheap = name, cheap
        self.times: list[tuple[int, float]] = []

    def observe(self, proposal: Proposal, verdict: Verdict, output: Pass) -> None:
        row = verdict.path[-1] + 1 if verdict.path else 0
        assert len(output.logits) >= len(proposal) + 1
        assert int(output.logits[row].argmax()) == verdict.next_token
        assert output.hidden is not None
        np.testing.assert_array_equal(output.hidden[row], output.logits[row])
        self.seen.append((proposal, verdict))

    def timed(self, proposal: Proposal, time: RoundTime) -> None:
        self.times.append((len(proposal), time.draft_ms))


def every(turn: int) -> Any:
    """Right guesses at every ``turn``-th length of the text."""
    truth = hash_logits(3, VOCAB, 1000)
    return lambda tokens, budget: (
        chain(plain(truth, VOCAB, tokens, min(budget, 2))) if len(tokens) % turn == 0 else EMPTY
    )


def target() -> FunctionTarget:
    return FunctionTarget(hash_logits(3, VOCAB, 1000), VOCAB)


def test_the_first_with_a_proposal_wins_and_everyone_learns_what_is_theirs() -> None:
    first, second = Watcher(every(3), "first"), Watcher(every(2), "second")
    both = Chain([first, second])
    stats = Stats()
    options = DecodeOptions(60, 4)
    found = [t for r in decode(target(), both, [1], options, stats) for t in r.tokens]
    assert found == plain(hash_logits(3, VOCAB, 1000), VOCAB, [1], 60)
    assert stats.dropped_reason is None
    assert stats.acceptance_rate == 1
    assert both.won[0] > 0 < both.won[1]
    for number, one in enumerate((first, second)):
        assert len(one.seen) == len(one.times) == stats.rounds
        won = [proposal for proposal, _ in one.seen if len(proposal)]
        assert len(won) == both.won[number]
        assert {proposal.bucket for proposal in won} == {0}
        assert {n for n, _ in one.times} == {0, 2} or {n for n, _ in one.times} == {0, 1, 2}
    assert [v.next_token for _, v in first.seen] == [v.next_token for _, v in second.seen]
    assert not any(len(a) and len(b) for (a, _), (b, _) in zip(first.seen, second.seen, strict=True))
    assert both.reason == f"first won {both.won[0]} rounds, second won {both.won[1]} rounds"


def test_buckets_are_each_proposers_own() -> None:
    class Bucketed(Watcher):
        def propose(self, tokens: list[int], budget: int) -> Proposal:
            found = super().propose(tokens, budget)
            return Proposal(found.tokens, bucket=5) if len(found) else EMPTY

    first, second = Bucketed(every(3)), Bucketed(every(2), "second")
    both = Chain([Adaptive(first, CostModel(COST, 0.1)), Adaptive(second, CostModel(COST, 0.1))])
    list(decode(target(), both, [1], DecodeOptions(80, 4)))
    assert {p.bucket for one in (first, second) for p, _ in one.seen if len(p)} == {5}
    for proposer in both.proposers:
        assert isinstance(proposer, Adaptive)
        seen = proposer.learned.evidence
        assert seen.keys() == {5}
        assert seen[5].accepted[0] > 0.9 * seen[5].tested[0]


@pytest.mark.parametrize("where", ["begin", "propose", "observe", "timed"])
def test_a_proposer_that_fails_is_left_out_alone(where: str) -> None:
    def fail(*_: object) -> Any:
        raise RuntimeError("broken")

    bad, good = Watcher(every(2), "bad"), Watcher(every(2), "good")
    setattr(bad, where, fail)
    both = Chain([bad, good])
    stats = Stats()
    found = [t for r in decode(target(), both, [1], DecodeOptions(40, 4), stats) for t in r.tokens]
    assert found == plain(hash_logits(3, VOCAB, 1000), VOCAB, [1], 40)
    assert stats.dropped_reason is None
    assert both.won[1] > 0
    assert "bad: left out: RuntimeError: broken" in both.details
    setattr(bad, where, lambda *_: EMPTY)
    assert len(list(decode(target(), both, [1], DecodeOptions(10, 4)))) > 0
    assert not both.failed


def test_layers_already_run_are_a_proposal() -> None:
    start = LayersRun(np.zeros((1, 4), np.float32), 1, 4)
    first = Scripted(lambda tokens, budget: Proposal(np.empty(0, np.int64), head_start=start))
    second = Scripted(lambda tokens, budget: chain([1]))
    assert Chain([first, second]).propose([1], 4).head_start is start


def test_hidden_states_are_asked_for_if_one_wants_them() -> None:
    one, other = Scripted(lambda tokens, budget: EMPTY), Plain()
    assert not Chain([one, other]).wants
    one.wants = HIDDEN
    assert Chain([other, Adaptive(one, CostModel())]).wants == HIDDEN


def test_a_vague_cheap_guess_does_not_take_the_place_of_a_good_draft() -> None:
    def guess(right: int) -> Any:
        truth = hash_logits(3, VOCAB, 1000)

        def guesses(tokens: list[int], budget: int) -> Proposal:
            if right == 1 and len(tokens) % 4 == 0:  # where it passes, the other one shows what it can
                return EMPTY
            found = np.array(plain(truth, VOCAB, tokens, budget))
            found[right:] = (found[right:] + 1) % VOCAB
            return chain(found)

        return guesses

    poor, good = Watcher(guess(1), "poor", cheap=True), Watcher(guess(9), "good")
    first, second = (
        Adaptive(poor, FixedCosts(COST, 0.0)),
        Adaptive(good, FixedCosts(COST, 0.05)),
    )
    both = Chain([first, second])
    list(decode(target(), Chain([second]), [1], DecodeOptions(100, 4)))  # it has shown what it can
    list(decode(target(), both, [1], DecodeOptions(300, 4)))
    assert both.won[1] > 3 * both.won[0]
    alone = Chain([Adaptive(poor, FixedCosts(COST, 0.0))])
    list(decode(target(), alone, [1], DecodeOptions(300, 4)))
    assert alone.won[0] > 50  # it does pay


def test_others_learn_the_cost_of_a_pass_but_not_of_a_draft() -> None:
    cost = CostModel(COST, 0.05)
    both = Chain([Watcher(every(1), "first"), Adaptive(Watcher(every(1), "second"), cost)])
    list(decode(target(), both, [1], DecodeOptions(60, 4)))
    assert 3 in cost.timings.passes
    assert not cost.timings.drafts


def mix(seed: int, model: FunctionTarget) -> list[Drafter]:
    function, other = hash_logits(seed, VOCAB), hash_logits(seed + 1, VOCAB)

    def draft(prefix: tuple[int, ...]) -> Any:
        return function(prefix) if sum(prefix) % 3 else other(prefix)

    model.draft = draft
    return [NGram(), SelfSpec(model, SkipSet((0,))), Speculative(FunctionTarget(draft, VOCAB), VOCAB)]


@pytest.mark.parametrize("control", [False, True])
def test_greedy_and_coupled_text_is_plain_text(control: bool) -> None:
    def make(seed: int) -> tuple[FunctionTarget, Chain]:
        model = hash_target(seed)
        proposers = mix(seed, model)
        np.random.default_rng(seed).shuffle(proposers)
        if control:
            proposers = [Adaptive(one, CostModel(COST, 0.05), fallback=bool(seed % 2)) for one in proposers]
        return model, Chain(proposers)

    same_texts(make, 50)


def test_nobody_is_no_chain() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Chain([])
