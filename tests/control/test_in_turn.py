"""Drafters asked in turn: who wins, who learns what, and that the text stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgespec.control.adaptive import Adaptive, Control
from edgespec.decoding.drafter import HIDDEN, Drafter
from edgespec.decoding.loop import DecodeOptions, decode, run_pass
from edgespec.decoding.policy import Policy
from edgespec.decoding.proposal import EMPTY, Proposal, Verdict
from edgespec.decoding.stats import RoundTime, Stats
from edgespec.decoding.target import Output, Pass, SkipSet, Target
from edgespec.drafters.ngram import NGram
from edgespec.drafters.plain import Plain
from edgespec.drafters.self_spec import SelfSpec
from edgespec.drafters.speculative import Speculative
from edgespec.formulas.cost import CostModel
from tests.support.reference import FunctionTarget
from tests.support.rounds import Rounds
from tests.support.toy import FixedCosts, Scripted, chain, hash_logits, hash_target, plain, same_texts

VOCAB = 11
COST = {1: 1.0, 16: 1.5}


class Watcher(Scripted):
    """Records all calls."""

    def __init__(self, guesses: Any, name: str = "watcher", cheap: bool = False) -> None:
        super().__init__(lambda tokens, budget: guesses(tokens, budget))
        self.name, self.cheap = name, cheap
        self.times: list[tuple[int, float]] = []

    def observe(self, proposal: Proposal, verdict: Verdict, output: Output) -> None:
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
    both = Policy([first, second])
    stats = Stats()
    options = DecodeOptions(60, 4)
    found = [t for r in decode(target(), both, [1], options, stats) for t in r.tokens]
    assert found == plain(hash_logits(3, VOCAB, 1000), VOCAB, [1], 60)
    assert stats.dropped_reason is None
    assert stats.acceptance_rate == 1
    assert both.won[first] > 0 < both.won[second]
    for one in (first, second):
        assert len(one.seen) == len(one.times) == stats.rounds
        won = [proposal for proposal, _ in one.seen if len(proposal)]
        assert len(won) == both.won[one]
        assert {proposal.bucket for proposal in won} == {0}
        assert {n for n, _ in one.times} == {0, 2} or {n for n, _ in one.times} == {0, 1, 2}
    assert [v.next_token for _, v in first.seen] == [v.next_token for _, v in second.seen]
    assert not any(len(a) and len(b) for (a, _), (b, _) in zip(first.seen, second.seen, strict=True))
    assert both.reason == f"first won {both.won[first]} rounds, second won {both.won[second]} rounds"


def test_buckets_are_each_proposers_own() -> None:
    class Bucketed(Watcher):
        def propose(self, tokens: list[int], budget: int) -> Proposal:
            found = super().propose(tokens, budget)
            return Proposal(found.tokens, bucket=5) if len(found) else EMPTY

    first, second = Bucketed(every(3)), Bucketed(every(2), "second")
    both = Adaptive([Control(first, CostModel(COST, 0.1)), Control(second, CostModel(COST, 0.1))])
    list(decode(target(), both, [1], DecodeOptions(80, 4)))
    assert {p.bucket for one in (first, second) for p, _ in one.seen if len(p)} == {5}
    for control in both.controls:
        seen = control.learned.evidence
        assert seen.keys() == {5}
        assert seen[5].accepted[0] > 0.9 * seen[5].tested[0]


@pytest.mark.parametrize("where", ["begin", "propose", "observe", "timed"])
def test_a_proposer_that_fails_is_left_out_alone(where: str) -> None:
    def fail(*_: object) -> Any:
        raise RuntimeError("broken")

    bad, good = Watcher(every(2), "bad"), Watcher(every(2), "good")
    setattr(bad, where, fail)
    both = Policy([bad, good])
    stats = Stats()
    found = [t for r in decode(target(), both, [1], DecodeOptions(40, 4), stats) for t in r.tokens]
    assert found == plain(hash_logits(3, VOCAB, 1000), VOCAB, [1], 40)
    assert stats.dropped_reason is None
    assert [(drop["method"], drop["where"]) for drop in stats.drops] == [("bad", where)]
    assert both.won[good] > 0
    assert f"bad: left out: bad failed in {where}: RuntimeError: broken" in both.details
    setattr(bad, where, lambda *_: EMPTY if where == "propose" else None)
    assert len(list(decode(target(), both, [1], DecodeOptions(10, 4)))) > 0
    assert not both.lost


def test_layers_already_run_are_a_proposal() -> None:
    first, second = (Scripted(lambda tokens, budget: EMPTY), Scripted(lambda tokens, budget: chain([1])))
    first.name, first.runs_ahead = "ahead", True
    driven = Rounds(Policy([first, second]))
    assert driven.propose([1], 4) is EMPTY
    assert driven.drafting.winner == "ahead"


def test_hidden_states_are_asked_for_if_one_wants_them() -> None:
    one, other, model = Scripted(lambda tokens, budget: EMPTY), Plain(), target()
    asked: list[bool] = []

    def run(target: Target, wanted: Pass) -> Output:
        asked.append(wanted.hidden)
        return run_pass(target, wanted)

    list(decode(model, Policy([one, other]), [1], DecodeOptions(2), run=run))
    assert asked
    assert not any(asked)
    one.wants = HIDDEN
    asked.clear()
    both = Adaptive([Control(other, CostModel()), Control(one, CostModel())])
    list(decode(model, both, [1], DecodeOptions(2), run=run))
    assert asked
    assert all(asked)


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
    first, second = Control(poor, FixedCosts(COST, 0.0)), Control(good, FixedCosts(COST, 0.05))
    list(decode(target(), Adaptive([second]), [1], DecodeOptions(100, 4)))  # it has shown what it can
    both = Adaptive([first, second])
    list(decode(target(), both, [1], DecodeOptions(300, 4)))
    assert both.won[good] > 3 * both.won.get(poor, 0)
    alone = Adaptive([Control(poor, FixedCosts(COST, 0.0))])
    list(decode(target(), alone, [1], DecodeOptions(300, 4)))
    assert alone.won[poor] > 50  # it is worth it


def test_others_learn_the_cost_of_a_pass_but_not_of_a_draft() -> None:
    cost = CostModel(COST, 0.05)
    both = Adaptive([Control(Watcher(every(1), "second"), cost)])
    list(decode(target(), both, [1], DecodeOptions(60, 4, first=[Watcher(every(1), "first")])))
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
    def make(seed: int) -> tuple[FunctionTarget, Policy]:
        model = hash_target(seed)
        proposers = mix(seed, model)
        np.random.default_rng(seed).shuffle(proposers)
        if control:
            return model, Adaptive([Control(one, CostModel(COST, 0.05), fallback=bool(seed % 2)) for one in proposers])
        return model, Policy(proposers)

    same_texts(make, 50)


def test_nobody_is_no_chain() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Policy([])
    with pytest.raises(ValueError, match="at least one"):
        Adaptive([])


def test_what_a_request_forces_is_asked_first_and_for_it_alone() -> None:
    """The policy's own drafter ignores its rounds, and continues at the end of the text."""
    own, forced = Watcher(every(1), "own"), Watcher(every(2), "forced")
    control = Control(own, FixedCosts(COST, 0.05), prior=0.9)
    policy = Adaptive([control])
    list(decode(target(), policy, [1], DecodeOptions(60, 4, first=[forced]), stats := Stats()))
    assert policy.won[forced] > 5 < policy.won[own]
    assert control.drafted == policy.won[own]
    assert stats.acceptance_rate == 1
    list(decode(target(), policy, [1], DecodeOptions(20, 4)))
    assert set(policy.won) == {own}


def test_probes_of_all_are_counted() -> None:
    """Tokens that are never accepted are drafted only as probes, and the statistics count them."""
    wrong = Scripted(lambda tokens, budget: chain([(tokens[-1] + 7) % 11] * budget))
    control = Control(wrong, CostModel({1: 1.0, 2: 2.0}, 1.0))
    list(decode(hash_target(3), Adaptive([control]), [1], DecodeOptions(200, 4), stats := Stats()))
    assert stats.probes == control.probes > 2


def test_a_batch_is_decided_for() -> None:
    """Two draft tokens are worth it for one request; where four requests share a pass, eight more rows are not."""
    curve = {1: 1.0, 3: 1.2, 4: 1.3, 12: 8.0}
    control = Control(Scripted(lambda tokens, budget: chain([1] * budget)), CostModel(curve, 0.0), prior=0.9)
    assert len(Rounds(control).propose([1], 2)) == 2
    assert len(Rounds(control, width=4).propose([1], 2)) == 0


def test_a_proposal_that_is_none_costs_that_drafter_alone() -> None:
    bad = Scripted(lambda tokens, budget: chain([99]))  # no such token
    bad.name = "bad"
    good = Scripted(lambda tokens, budget: chain([1]))
    both, stats = Policy([bad, good]), Stats()
    good.observe = lambda *_: None  # type: ignore[method-assign]
    list(decode(hash_target(3), both, [1], DecodeOptions(30, 4), stats))
    assert stats.dropped_reason is None
    assert [drop["method"] for drop in stats.drops] == ["bad"]
    assert "outside the vocabulary" in both.lost[bad]
    assert both.won[good] > 20
