"""Control of the draft length: it drafts while that is faster, stops when it is not, and tries again."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from edgespec.control.adaptive import MOST_BUCKETS, Adaptive, Control
from edgespec.decoding.drafter import Drafter
from edgespec.decoding.loop import DecodeOptions, decode
from edgespec.decoding.proposal import EMPTY, Proposal, Verdict
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.stats import RoundTime, Stats
from edgespec.decoding.target import Output
from edgespec.drafters.plain import Plain
from edgespec.formulas.cost import CostModel, expected_tokens
from tests.support.rounds import Rounds
from tests.support.timed_toy import Clock, Guesser, controlled, run
from tests.support.toy import FixedCosts, Scripted, chain, emitted, hash_logits, hash_target, plain

COST = {1: 1.0, 2: 1.2}  # a fifth of a pass for each further row


def replay(control: Control, rates: Callable[[int], float], rounds: int, budget: int = 8, seed: int = 0) -> list[int]:
    """Lengths of the proposals of ``rounds`` rounds, each guess of round i accepted with probability ``rates(i)``."""
    rng, driven = np.random.default_rng(seed), Rounds(control)
    lengths = []
    for i in range(rounds):
        proposal = driven.propose([1], budget)
        accepted = 0
        while accepted < len(proposal) and rng.random() < rates(i):
            accepted += 1
        driven.learn(proposal, range(accepted))
        lengths.append(len(proposal))
    return lengths


class Full(Scripted):
    """Offers as many guesses as it may."""

    def __init__(self, cheap: bool = False, bucket: Callable[[], int] = lambda: 0) -> None:
        super().__init__(lambda tokens, budget: Proposal(np.zeros(budget, np.int64), bucket=bucket()))
        self.cheap = cheap
        self.budgets: list[int] = []

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        self.budgets.append(budget)
        return super().propose(tokens, budget)

    def observe(self, proposal: Proposal, verdict: Verdict, output: Output) -> None:
        self.seen.append((proposal, verdict))


@pytest.mark.parametrize("cheap", [False, True])
def test_it_falls_back_when_guesses_are_wrong(cheap: bool) -> None:
    control = Control(Full(cheap), FixedCosts(COST, 0.1))
    lengths = replay(control, lambda i: 0.05, 1000)
    assert sum(n > 0 for n in lengths) < 45
    assert control.plain + control.drafted == 1000
    assert control.probes >= 5
    assert "did not pay" in control.reason
    assert control.drafted == sum(n > 0 for n in lengths)


@pytest.mark.parametrize("cheap", [False, True])
def test_it_drafts_long_when_guesses_are_right(cheap: bool) -> None:
    control = Control(Full(cheap), FixedCosts(COST, 0.05))
    lengths = replay(control, lambda i: 0.9, 300)
    assert np.mean(lengths[100:]) > 4
    assert control.plain < 30
    assert control.reason.startswith("drafting is on")


def test_a_good_but_costly_drafter_is_found_out_by_probes() -> None:
    lengths = replay(Control(Full(), FixedCosts(COST, 0.35)), lambda i: 0.93, 400)
    assert np.mean([n > 0 for n in lengths[200:]]) > 0.9


def test_probes_come_after_16_rounds_and_ever_more_rarely_up_to_128() -> None:
    control = Control(Full(), FixedCosts({1: 1.0, 2: 2.0}, 0.5))
    lengths = replay(control, lambda i: 0.0, 700)
    at = [i for i, n in enumerate(lengths) if n]
    assert lengths[at[1]] == 2
    assert np.diff(at).tolist() == [33, 65, 129, 129, 129, 129]


def test_it_starts_again_when_the_text_changes() -> None:
    control = Control(Full(), FixedCosts(COST, 0.05))
    lengths = replay(control, lambda i: 0.02 if i < 300 else 0.95, 800)
    assert np.mean([n > 0 for n in lengths[50:300]]) < 0.1
    assert np.mean([n > 0 for n in lengths[600:]]) > 0.9


def test_even_perfect_guesses_are_not_probed_for_ever_if_they_cannot_pay() -> None:
    lengths = replay(Control(Full(), FixedCosts({1: 1.0, 2: 2.0}, 1.0)), lambda i: 1.0, 500)
    assert sum(n > 0 for n in lengths) == 6


class Settled(CostModel):
    """Costs of passes that wait for a disk for nine tenths of their time; nothing is observed any more."""

    def __init__(self) -> None:
        curve = {1: 8.0, 2: 15.0, 4: 26.5, 8: 42.0}
        super().__init__(curve, 0.0, reads=curve)
        for rows in (1, 2, 4):
            for _ in range(20):
                super().observe_reads(rows, curve[rows], 90 * curve[rows] / 8)
                super().observe_verify(rows, 10 + rows)

    def observe_verify(self, n: int, ms: float, times: int = 1) -> None:
        pass

    def observe_reads(self, n: int, read: float, waited_ms: float) -> None:
        pass


@pytest.mark.parametrize(("rate", "drafts"), [(0.05, False), (0.7, False), (0.97, True)])
def test_guesses_must_be_worth_the_bytes_that_their_rows_read_also_to_be_probed(rate: float, drafts: bool) -> None:
    control = Control(Full(cheap=True), Settled(), prior=rate)
    lengths = replay(control, lambda i: rate, 400)
    if drafts:
        assert np.mean([n > 0 for n in lengths]) > 0.9
    else:
        assert control.drafted <= 8  # 2 % of the rounds


def test_without_fallback_it_always_drafts() -> None:
    control = Control(Full(), FixedCosts(COST, 0.5), fallback=False)
    assert set(replay(control, lambda i: 0.0, 100)) == {1}


def test_each_bucket_has_its_own_record() -> None:
    turn = iter(range(10**6))
    inner = Full(cheap=True, bucket=lambda: next(turn) % 2)
    driven = Rounds(Control(inner, FixedCosts(COST, 0.0)))
    rng = np.random.default_rng(0)
    lengths: dict[int, list[int]] = {0: [], 1: []}
    for i in range(600):
        proposal = driven.propose([1], 8)
        accepted = 0
        while accepted < len(proposal) and rng.random() < (0.05, 0.9)[i % 2]:
            accepted += 1
        driven.learn(proposal, range(accepted))
        lengths[i % 2].append(len(proposal))
    assert np.mean([n > 0 for n in lengths[0]]) < 0.15
    assert np.mean(lengths[1][100:]) > 4
    assert set(inner.budgets) == {8}  # cheap: asked for all, and cut afterwards


def test_a_costly_drafter_is_not_run_for_nothing() -> None:
    inner = Full()
    control = Control(inner, FixedCosts({1: 1.0, 2: 2.0}, 1.0))
    replay(control, lambda i: 0.0, 100)
    assert len(inner.budgets) == control.probes


def test_the_rows_of_a_tree_are_paid_for() -> None:
    """Two levels of ten siblings: if twenty rows cost this much, only the first level can be worth it."""
    tree = Proposal(np.arange(20), np.array([-1] * 10 + [0] * 10))
    inner = Scripted(lambda tokens, budget: tree.truncated(budget))
    inner.cheap = True
    inner.observe = lambda *args: None  # type: ignore[method-assign]
    steep = Control(inner, FixedCosts({1: 1.0, 11: 1.3, 21: 4.0}, 0.0))
    flat = Control(inner, FixedCosts({1: 1.0, 21: 1.1}, 0.0))
    for control, depth in ((steep, 1), (flat, 2)):
        driven = Rounds(control)
        for _ in range(50):
            proposal = driven.propose([1], 4)
            deep = max((proposal.depth(i) for i in range(len(proposal))), default=0)
            driven.learn(proposal, [0, 10][:deep])
        assert deep == depth


def test_the_clock_teaches_the_cost_unless_a_seeded_text_would_depend_on_it() -> None:
    for seeded in (False, True):
        control = Control(Full(), CostModel(COST, 0.05))
        driven = Rounds(control, params=SamplingParams(1.0, seed=1) if seeded else SamplingParams())
        drafted = []
        for _ in range(48):
            proposal = driven.propose([1], 4)
            drafted.append(len(proposal) > 0)
            # On this machine a pass costs as much for each row, and so does each guess.
            time = RoundTime(10.0 * len(proposal), 10.0 * (len(proposal) + 1), len(proposal) + 1)
            driven.learn(proposal, range(len(proposal)), time)
            driven.learn(EMPTY, (), RoundTime(0.0, 10.0, 1))
        assert (sum(drafted[40:]) > 4) is seeded


def test_what_a_drafter_missed_does_not_count_as_the_cost_of_its_steps() -> None:
    inner = Full()
    control = Control(inner, CostModel(COST, 0.05), prior=0.9)
    driven = Rounds(control)
    for inner.caught_up in (False, True):
        assert not control.cost.timings.drafts
        driven.learn(driven.propose([1], 2), (0,), RoundTime(8.0, 10.0, 3))
    assert {k: list(times) for k, times in control.cost.timings.drafts.items()} == {2: [8.0]}


def test_the_clock_of_the_loop_reaches_it() -> None:
    truth = hash_logits(1, 11)
    inner = Scripted(lambda tokens, budget: chain(plain(truth, 11, tokens, budget)))
    cost = CostModel(COST, 0.05)
    stats = Stats()
    list(decode(hash_target(1), Adaptive([Control(inner, cost, fallback=False)]), [1], DecodeOptions(60, 4), stats))
    assert stats.dropped_reason is None
    assert cost.timings.passes
    assert cost.timings.drafts


def test_a_seeded_text_depends_on_nothing_but_the_request() -> None:
    """Rejection sampling: what was learned before, and the clock, must not change it."""
    rng = np.random.default_rng(0)
    q = rng.dirichlet(np.ones(11), 11)

    def guess(tokens: list[int], budget: int) -> Proposal:
        draw = np.random.default_rng(len(tokens))
        drawn = [int(draw.choice(11, p=q[0])) for _ in range(budget)]
        return Proposal(np.array(drawn), None, np.repeat(q[:1], budget, 0))

    options = DecodeOptions(40, 4, sampling=SamplingParams(1.0, seed=7))
    fresh = emitted(hash_target(1), Adaptive([Control(Scripted(guess), CostModel(COST, 0.05))]), [1], options)
    used = Adaptive([control := Control(Scripted(guess), CostModel(COST, 0.05))])
    for ms in (1.0, 50.0):
        for _ in range(20):
            control.cost.observe_verify(1 + int(ms % 7), 3 * ms)
            control.cost.observe_draft(int(ms % 7), ms)
        emitted(hash_target(2), used, [3], DecodeOptions(50, 4))
    assert emitted(hash_target(1), used, [1], options) == fresh


def test_buckets_without_end_are_forgotten() -> None:
    bucket = iter(range(10 * MOST_BUCKETS))
    control = Control(Full(cheap=True, bucket=lambda: next(bucket)), FixedCosts(COST, 0.1))
    lengths = replay(control, lambda i: 0.9, 5 * MOST_BUCKETS)
    assert all(lengths)
    assert len(control._buckets) == len(control.learned.evidence) == MOST_BUCKETS


@pytest.mark.parametrize("most, said", [(1, "1 guess at"), (2, "2 guesses at"), (3, "3 guesses at")])
def test_it_says_how_many_guesses_it_drafts(most: int, said: str) -> None:
    control = Control(Full(), CostModel({1: 1.0, 16: 1.01}, 0.0), gamma_max=most, prior=0.9)
    replay(control, lambda i: 1.0, 1)
    assert said in control.reason


@pytest.mark.parametrize("at_once, steps", [(True, 1), (False, 3)])
def test_guesses_made_at_once_are_priced_as_one_step(at_once: bool, steps: int) -> None:
    inner = Full()
    inner.steps_at_once = at_once
    control = Control(inner, CostModel({1: 1.0, 4: 1.5}, 0.25))
    assert control.price(chain([1, 2, 3])) == 0.25 * steps + 1.5
    assert control.price(EMPTY) == 1.0


def test_it_says_what_it_decided() -> None:
    policy = Adaptive([Control(Plain(), CostModel())])
    assert (policy.name, policy.reason) == ("ar", "nothing was decoded yet")
    list(decode(hash_target(0), policy, [1], DecodeOptions(2)))
    assert policy.reason == "the drafter found nothing to propose"


@pytest.mark.parametrize("prior", [0.03, 0.33])
def test_what_pays_for_several_guesses_is_found_where_the_first_is_dear(
    monkeypatch: pytest.MonkeyPatch, prior: float
) -> None:
    """The first draft token costs a third of a pass, further ones a tenth: one token loses, three gain."""
    clock, curve = Clock(), {1: 1.0, 4: 1.05, 8: 1.4}
    guesser = Guesser(lambda _: 0.8, 0.1, clock, first=0.23)
    control = controlled(guesser, curve, prior, 0.8)
    made = run(monkeypatch, Adaptive([control]), clock, curve, 1024)
    best = max(expected_tokens(0.8, k) / (0.23 + 0.1 * k + control.cost.v(k + 1)) for k in range(1, 9))
    assert best > 1.4
    assert 1024 / made.steps > 0.95 * best


@pytest.mark.parametrize(
    ("sure", "took", "goes_on"), [(0.3, 1.8, False), (0.3, 1.05, True), (0.9, 1.2, True), (0.9, 2.4, False)]
)
def test_an_exit_that_was_asked_and_not_sure_has_cost_its_time(sure: float, took: float, goes_on: bool) -> None:
    """Whatever comes of it, asking takes ``took`` plain steps, and is worth 1 + ``sure`` tokens."""
    rng = np.random.default_rng(0)

    asked = list[bool]()

    def flight(tokens: list[int], budget: int) -> Proposal:
        asked[-1] = True
        return chain([0] * int(rng.random() < sure))

    cost = CostModel({1: 1.0, 2: 1.0})
    cost.observe_verify(1, 10.0, times=20)
    drafter = Scripted(flight)
    drafter.runs_ahead = True
    driven = Rounds(Control(drafter, cost, gamma_max=1, prior=0.9))
    for _ in range(400):
        asked.append(False)
        proposal = driven.propose([1], 1)
        ms = 10.0 * (took - 0.25) if asked[-1] else 0.0
        time = RoundTime(ms, 2.5 if asked[-1] else 10.0, 1 + len(proposal), False)
        driven.learn(proposal, range(len(proposal)), time)
    late = asked[200:]
    assert (sum(late) > 150) if goes_on else (sum(late) < 50)


class Sure(Drafter):
    """Knows how likely each token is right: nearly always, or seldom; stops before a token that is not worth it."""

    stops, mean = True, 0.8

    def __init__(self, share: float) -> None:
        self.rng, self.share = np.random.default_rng(1), share  # of guesses that are likely right

    def propose_until(self, tokens: list[int], budget: int, least_gain: Callable[[int], float]) -> Proposal:
        self.chances = np.where(self.rng.random(budget) < self.share, 0.97, 0.3)
        reach = np.cumprod(self.chances)
        count = next((n for n in range(1, budget) if reach[n - 1] * self.mean < least_gain(n)), budget)
        return Proposal(np.zeros(count, np.int64))


@pytest.mark.parametrize(("share", "cost"), [(0.8, 0.5), (0.9, 0.5), (0.8, 0.35), (0.3, 0.6)])
def test_a_drafter_that_stops_by_itself_is_told_what_a_guess_must_gain(share: float, cost: float) -> None:
    """Faster than any fixed length; where nothing is worth it, hardly slower than plain decoding."""
    inner, costs = Sure(share), FixedCosts({1: 1.0, 2: 1.03, 8: 1.3}, cost)
    inner.mean = share * 0.97 + (1 - share) * 0.3
    driven, tokens, steps = Rounds(Control(inner, costs, prior=inner.mean)), 0, 0.0
    rng = np.random.default_rng(2)
    for _ in range(3000):
        proposal = driven.propose([1], 8)
        count = len(proposal)
        wrong = rng.random(count) >= inner.chances[:count] if count else np.zeros(0, bool)
        right = int(wrong.argmax()) if wrong.any() else count
        driven.learn(proposal, range(right))
        tokens, steps = tokens + right + 1, steps + costs.d(count) + costs.v(count + 1)
    fixed = max(expected_tokens(inner.mean, n) / (costs.d(n) + costs.v(n + 1)) for n in range(1, 9))
    assert tokens / steps > max(1.03 * fixed, 0.97), (tokens / steps, fixed)
