"""Method auto's drafter: who drafts when, what looking costs, and that the text stays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from edgespec.control.adaptive import Adaptive
from edgespec.control.auto import CHECK, Switch
from edgespec.control.bandit import AGAIN, CREDIT, FULL, LONGEST_AGAIN, SHARE, Candidate, Standing
from edgespec.decoding.loop import decode
from edgespec.decoding.monitor import PLAIN
from edgespec.decoding.proposal import Proposal
from edgespec.decoding.request import DecodeOptions
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.stats import Stats
from edgespec.decoding.target import HeadTarget
from tests.support.timed_toy import DEAR, INT4, STOCK, Clock, Guesser, Rates, controlled, run, text
from tests.support.toy import Scripted, emitted, exact, hash_logits, hash_target, plain

CURVES = {"int4": INT4, "stock": STOCK, "dear": DEAR}


def never(length: int) -> float:
    return 0.0


def always(rate: float) -> Rates:
    return lambda length: rate


class Case:
    """Candidates over one clock and one curve; ``specs``: (name, rate, c, promise, prior, cheap)."""

    def __init__(self, curve: Mapping[int, float], specs: Sequence[tuple[Any, ...]], **how: Any) -> None:
        self.curve, self.clock = curve, Clock()
        self.guessers: dict[str, Guesser] = {}
        self.made: list[str] = []
        self.costs = {name: c for name, _, c, *_ in specs}
        candidates = []
        for name, rate, c, promise, prior, cheap in specs:
            guesser = Guesser(rate, c, self.clock, cheap=cheap, buckets=6 if cheap else 1, name=name, **how)
            self.guessers[name] = guesser
            candidates.append(Candidate(name, promise, self._maker(guesser, c, prior), cheap))
        self.switch = Switch(candidates)

    def _maker(self, guesser: Guesser, c: float, prior: float) -> Callable[[], Adaptive]:
        def make() -> Adaptive:
            self.made.append(guesser.name)
            return controlled(guesser, self.curve, c, prior)

        return make

    def run(self, monkeypatch: pytest.MonkeyPatch, new: int = 512, **how: Any) -> Any:
        made = run(monkeypatch, self.switch, self.clock, self.curve, new, costs=self.costs, **how)
        if "sampling" not in how:
            assert made.tokens == text(how.get("prompt", (1,)), new)
        assert made.stats.dropped_reason is None
        return made


def three(curve: Mapping[int, float], c: float, rate: Rates = never, prior: float = 0.8, **how: Any) -> Case:
    """A draft and heads of which much is promised, and n-grams."""
    specs = [
        ("draft", rate, c, 1.4, prior, False),
        ("heads", never, c / 2, 1.2, prior, False),
        ("ngram", never, 0.0, 1.0, 0.5, True),
    ]
    return Case(curve, specs, **how)


# -- what looking costs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("c", [0.02, 0.1, 0.3, 0.8])
@pytest.mark.parametrize("curve", CURVES)
def test_where_nothing_can_be_gained_it_costs_at_most_3_percent(
    monkeypatch: pytest.MonkeyPatch, curve: str, c: float
) -> None:
    """By counters: rows through the verify curve, and guesses times what one costs, over 512 tokens."""
    for prior in (0.5, 0.95):
        case = three(CURVES[curve], c, prior=prior)
        made = case.run(monkeypatch)
        assert made.stats.drafted > 3
        assert made.stats.accepted == 0
        assert made.counted == pytest.approx(made.steps)
        assert 1 < made.counted / 512 <= 1.03
        again = case.run(monkeypatch)
        assert again.counted / 512 <= 1.015  # what was learned stays


@pytest.mark.parametrize("curve", CURVES)
def test_one_cheap_candidate_costs_at_most_3_percent_however_many_kinds_its_guesses_are_of(
    monkeypatch: pytest.MonkeyPatch, curve: str
) -> None:
    case = Case(CURVES[curve], [("ngram", never, 0.0, 1.0, 0.5, True)])
    assert case.run(monkeypatch).counted / 512 <= 1.03
    # control alone, which gives every kind a chance of its own, has no such limit
    assert case.switch.name in ("ngram", PLAIN)


def test_looking_that_takes_time_is_paid_for_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cheap drafter that is not cheap: on a tiny model its look-ups are a tenth of a step."""

    class Slow(Guesser):
        def propose(self, tokens: list[int], budget: int) -> Proposal:
            self.clock.ms += 1.0
            self.asked.append(len(tokens))
            return Proposal(np.empty(0, np.int64))

    clock = Clock()
    slow = Slow(never, 0.0, clock, cheap=True, name="ngram")
    switch = Switch([Candidate("ngram", 1.0, lambda: controlled(slow, INT4, 0.0), cheap=True)])
    made = run(monkeypatch, switch, clock, INT4, 1024)
    assert made.loss <= 0.02
    assert made.switches[0][1:] == ("ngram", PLAIN)
    assert len(slow.asked) < 200


def test_a_text_that_was_missed_is_paid_for_when_it_is_caught_up(monkeypatch: pytest.MonkeyPatch) -> None:
    cheap, dear = three(STOCK, 0.3), three(STOCK, 0.3)
    dear.guessers["draft"].catch_up = 0.1
    runs = [case.run(monkeypatch, 2048) for case in (cheap, dear)]
    assert 1 < len(dear.guessers["draft"].begun) < len(cheap.guessers["draft"].begun)
    assert runs[0].loss <= 0.015
    assert runs[1].loss <= 0.03  # each token is read at most once, but that would be 10 %


@pytest.mark.parametrize(("rate", "c"), [(0.5, 0.05), (0.7, 0.05), (0.9, 0.05), (0.9, 0.3)])
@pytest.mark.parametrize("curve", ["int4", "stock"])
def test_gains_are_found_as_control_alone_finds_them(
    monkeypatch: pytest.MonkeyPatch, curve: str, rate: float, c: float
) -> None:
    clock = Clock()
    alone = controlled(Guesser(always(rate), c, clock), CURVES[curve], c, rate)
    wanted = run(monkeypatch, alone, clock, CURVES[curve], 1024).steps
    found = three(CURVES[curve], c, always(rate), rate).run(monkeypatch, 1024).steps
    assert found <= 1.05 * wanted


# -- who drafts --------------------------------------------------------------------------------------------------------


def test_the_best_promise_begins_and_stays_while_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    case = three(INT4, 0.05, always(0.8))
    made = case.run(monkeypatch, 300)
    assert made.switches == []
    assert case.made == ["draft"]  # nothing else was even loaded
    assert (case.switch.used, case.switch.name) == ("draft", "draft")
    assert made.loss < -0.4
    assert made.stats.as_dict()["switches"] == []


def test_the_next_one_is_taken_where_it_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [("draft", never, 0.3, 1.4, 0.8, False), ("heads", always(0.8), 0.05, 1.2, 0.5, False),
             ("ngram", never, 0.0, 1.0, 0.5, True)]  # fmt: skip
    case = Case(STOCK, specs)
    made = case.run(monkeypatch)
    (round_, left, taken), *others = made.switches
    assert (left, taken, round_ % CHECK) == ("draft", "heads", 0)
    assert round_ <= 3 * CHECK
    assert case.switch.used == "heads"
    assert case.made == ["draft", "heads"]
    assert made.loss < -0.2
    # what gives less than the first one promises: that is tried again, ever more rarely
    assert all(left == "draft" or taken == "draft" for _, left, taken in others)
    first = made.stats.as_dict()["switches"][0]
    assert list(first) == ["round", "from", "to", "why"]
    assert "draft did not pay: 0." in first["why"]
    assert f"from round {round_} heads, as draft did not pay" in case.switch.reason or others


def test_a_promise_much_beyond_what_is_measured_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [("draft", always(0.5), 0.3, 1.5, 0.6, False), ("heads", always(0.9), 0.02, 1.45, 0.6, False),
             ("ngram", never, 0.0, 1.0, 0.5, True)]  # fmt: skip
    case = Case(INT4, specs)
    made = case.run(monkeypatch, 600)
    assert ("draft", "heads") in [switch[1:] for switch in made.switches]
    assert case.switch.name == "heads"


def test_when_nothing_pays_tries_get_rarer(monkeypatch: pytest.MonkeyPatch) -> None:
    case = three(STOCK, 0.1)
    made = case.run(monkeypatch, 6000)
    begun = np.diff(case.guessers["draft"].begun)
    assert len(begun) >= 4
    assert (begun[1:] >= begun[:-1]).all()
    assert begun[-1] > 4 * begun[0] >= 4 * AGAIN
    assert made.loss < SHARE
    # the others are neither asked nor told anything meanwhile
    seen = sum(guesser.observed for guesser in case.guessers.values())
    assert seen <= made.stats.rounds
    assert case.guessers["draft"].observed < 0.1 * made.stats.rounds


def test_a_text_that_changes_its_character(monkeypatch: pytest.MonkeyPatch) -> None:
    """First it copies itself, then it does not and the draft pays, then nothing does, then it copies again."""
    copying: Rates = lambda n: 0.95 if n < 300 or n > 1800 else 0.0  # noqa: E731
    drafting: Rates = lambda n: 0.85 if 300 <= n < 1000 else 0.0  # noqa: E731
    specs = [("draft", drafting, 0.1, 1.3, 0.5, False), ("ngram", copying, 0.0, 1.0, 0.5, True)]
    case = Case(STOCK, specs)
    made = case.run(monkeypatch, 2400)
    proposed = {name: np.array(guesser.asked) for name, guesser in case.guessers.items()}
    assert ((proposed["ngram"] > 100) & (proposed["ngram"] < 290)).sum() > 20
    assert ((proposed["draft"] > 500) & (proposed["draft"] < 990)).sum() > 80
    assert ((proposed["ngram"] > 2100) & (proposed["ngram"] < 2400)).sum() > 30
    assert {"draft", "ngram"} <= {taken for _, _, taken in made.switches}
    assert made.loss < -0.3


def test_what_was_learned_stays_on_the_lane_and_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    case = three(STOCK, 0.2)
    case.run(monkeypatch, 400)
    again = case.run(monkeypatch, 40, prompt=(5, 6))
    assert again.switches[0][:2] == (0, "draft")
    assert "in earlier requests draft " in again.stats.monitor.control.switches[0].why
    assert again.switches[0][2] != "draft"
    assert "earlier requests" in case.switch.reason
    assert again.stats.drafted <= 3


def test_without_fallback_the_first_one_always_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    control = Adaptive(Guesser(never, 0.5, clock, name="draft"), controlled(Scripted(lambda *_: Proposal(
        np.empty(0, np.int64))), STOCK, 0.5).cost, fallback=False)  # fmt: skip
    switch = Switch([Candidate("draft", 1.4, lambda: control), Candidate("ngram", 1.0, pytest.fail, cheap=True)],
                    fallback=False)  # fmt: skip
    made = run(monkeypatch, switch, clock, STOCK, 200)
    assert made.switches == []
    assert made.stats.monitor.plain_rounds <= 1  # the last one, which has no room for a guess


def test_nothing_drafted_means_the_one_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    switch = Switch([Candidate("ngram", 1.0, lambda: controlled(
        Scripted(lambda tokens, budget: Proposal(np.empty(0, np.int64))), INT4, 0.0), cheap=True)])  # fmt: skip
    run(monkeypatch, switch, Clock(), INT4, 20)
    assert switch.used == "ngram"
    switch._take(None)
    assert (switch.used, switch.name) == ("ar", PLAIN)
    with pytest.raises(ValueError, match="at least one candidate"):
        Switch([])


# -- the text ----------------------------------------------------------------------------------------------------------


class Forced(Switch):
    """Goes to the next candidate, plain decoding among them, every ``every`` rounds."""

    def __init__(self, candidates: Sequence[Candidate], every: int) -> None:
        super().__init__(candidates)
        self.every = every

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        if self._seen and self._seen % self.every == 0:
            active = self._standings.active
            following = 0 if active is None else active + 1
            self._change(following if following < len(self.candidates) else None, "forced")
        return super().propose(tokens, budget)

    def _judge(self) -> None:
        pass


def _guess(name: str, seed: int, right: int) -> Callable[[], Adaptive]:
    """Chains of which every ``right``-th guess is wrong."""
    truth = hash_logits(seed, 11)

    def guess(tokens: list[int], budget: int) -> Proposal:
        found = plain(truth, 11, tokens, budget)
        return Proposal(np.array([t if (len(tokens) + i) % right else (t + 1) % 11 for i, t in enumerate(found)]))

    inner = Scripted(guess)
    inner.name = name
    return lambda: controlled(inner, INT4, 0.01)


@pytest.mark.parametrize("every", [1, 2, 3, 7])
def test_the_text_is_plain_decodings_wherever_it_switches(every: int) -> None:
    for seed in range(3):
        switch = Forced([Candidate(f"g{i}", 1.2, _guess(f"g{i}", seed, i)) for i in (2, 3, 5)], every)
        stats, options = Stats(), DecodeOptions(120, 5)
        found = [t for r in decode(hash_target(seed), switch, [1], options, stats) for t in r.tokens]
        assert found == plain(hash_logits(seed, 11), 11, [1], 120)
        assert stats.accepted > 5
        assert stats.dropped_reason is None
        taken = {at.taken for at in stats.monitor.control.switches}
        assert taken == {"g2", "g3", "g5", PLAIN}
        coupled = DecodeOptions(80, 5, sampling=SamplingParams(1.0, seed=5, acceptance="coupled"))
        wanted = emitted(hash_target(seed), Scripted(lambda *_: Proposal(np.empty(0, np.int64))), [1], coupled)
        assert emitted(hash_target(seed), switch, [1], coupled) == wanted


@pytest.mark.parametrize("every", [1, 2])
def test_the_distribution_of_sampled_text_is_the_targets(every: int) -> None:
    from tests.support.toy import chi_square, sample_texts

    vocab, truth = 5, hash_logits(2, 5, 3)

    def guess(flip: int) -> Callable[[], Adaptive]:
        q = np.full(vocab, 1 / vocab)

        def drawn(tokens: list[int], budget: int) -> Proposal:
            rng = np.random.default_rng()
            return Proposal(rng.integers(0, vocab, budget), None, np.repeat(q[None], budget, 0))

        def named(tokens: list[int], budget: int) -> Proposal:
            return Proposal(np.full(budget, (tokens[-1] + flip) % vocab))

        return lambda: controlled(Scripted(drawn if flip else named), INT4, 0.01)

    switch = Forced([Candidate("a", 1.2, guess(0)), Candidate("b", 1.2, guess(1))], every)
    params = SamplingParams(1.0)
    from tests.support.reference import FunctionTarget

    counts = sample_texts(FunctionTarget(truth, vocab, 64), switch, [1], 3, lambda i: SamplingParams(1.0), 4000)
    assert chi_square(counts, exact(truth, vocab, [1], 3, params)) > 1e-4


def test_a_seeded_text_depends_on_nothing_but_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejection sampling: neither what was learned before nor the clock may change which guesses are made."""
    seeded = SamplingParams(1.0, seed=11)
    # times that are nothing like what control was given: by the clock nothing would be drafted
    fresh = three(INT4, 0.1, always(0.6), draws=True)
    expected = fresh.run(monkeypatch, 600, sampling=seeded)
    assert expected.stats.drafted > 100
    used = three(INT4, 0.1, always(0.6), draws=True)
    used.run(monkeypatch, 500, sampling=SamplingParams(1.0))
    used.switch._learned.each[0].purse = 0.0
    used.curve = DEAR
    for guesser in used.guessers.values():
        guesser.c *= 7
    again = used.run(monkeypatch, 600, sampling=seeded)
    assert again.tokens == expected.tokens
    assert again.switches == expected.switches
    assert again.stats.histogram == expected.stats.histogram
    free = used.run(monkeypatch, 600, sampling=SamplingParams(1.0))
    assert free.stats.drafted != expected.stats.drafted
    assert used.switch._standings is used.switch._learned


def test_seeded_requests_switch_by_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded = SamplingParams(1.0, seed=3)
    runs = [three(STOCK, 0.2, draws=True).run(monkeypatch, 300, sampling=seeded) for _ in range(2)]
    assert runs[0].switches == runs[1].switches != []


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["make", "bind", "begin", "propose", "observe", "timed"])
def test_a_candidate_that_fails_is_dropped_alone(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    case = three(INT4, 0.05, always(0.8))
    case.switch.candidates[1] = Candidate("heads", 1.2, lambda: controlled(
        Guesser(always(0.8), 0.02, case.clock, name="heads"), INT4, 0.02))  # fmt: skip

    def fail(*_: object) -> Any:
        raise RuntimeError("broken")

    if where == "make":
        case.switch.candidates[0] = Candidate("draft", 1.4, fail)
    else:
        setattr(case.guessers["draft"], where, fail)
    made = case.run(monkeypatch, 100)
    (drop,) = made.stats.monitor.drops
    assert (drop.method, drop.error) == ("draft", "RuntimeError: broken")
    assert made.switches[0][1:] == ("draft", "heads")
    assert "RuntimeError: broken" in case.switch.reason
    assert case.switch.used == "heads"
    assert made.loss < -0.2
    # it is in again in the next request, once its time has come
    learned = case.switch._learned
    assert not learned.ready(0)
    assert "broken" in case.run(monkeypatch, 20).stats.monitor.control.switches[0].why
    learned.now = learned.each[0].until
    assert learned.ready(0)


def test_nonsense_guesses_cost_a_candidate_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    case = three(INT4, 0.05, always(0.8))
    case.guessers["draft"].propose = lambda tokens, budget: Proposal(np.array([10**6]))  # type: ignore[method-assign]
    made = case.run(monkeypatch, 60)
    assert [drop.method for drop in made.stats.monitor.drops] == ["draft"]
    assert "outside the vocabulary" in made.stats.monitor.control.switches[0].why


def test_when_all_have_failed_decoding_is_plain_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Any:
        raise RuntimeError("gone")

    clock = Clock()
    switch = Switch([Candidate("draft", 1.4, fail), Candidate("ngram", 1.0, fail, cheap=True)])
    made = run(monkeypatch, switch, clock, INT4, 50)
    assert made.tokens == text([1], 50)
    assert [drop.method for drop in made.stats.monitor.drops] == ["draft", "ngram"]
    assert "gone" in (made.stats.dropped_reason or "")


# -- parts -------------------------------------------------------------------------------------------------------------


def test_hidden_states_are_asked_for_only_while_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.toy import FunctionTarget as Target  # type: ignore[attr-defined]

    class Heads(Target):
        keep_hidden = True

        def forward_heads(self, *_: object) -> Any:
            raise NotImplementedError

    target = Heads(hash_logits(1, 11), 11, 64)
    assert isinstance(target, HeadTarget)
    wanting, not_wanting = (Scripted(lambda tokens, budget: Proposal(np.array([1]))) for _ in range(2))
    wanting.wants_hidden = True
    seen: list[bool] = []
    wanting.observe = lambda proposal, verdict, output: seen.append(target.keep_hidden)  # type: ignore[method-assign]
    switch = Forced([Candidate("a", 1.2, lambda: controlled(not_wanting, INT4, 0.0)),
                     Candidate("b", 1.2, lambda: controlled(wanting, INT4, 0.0))], 3)  # fmt: skip

    found = []
    for _ in decode(target, switch, [1], DecodeOptions(30, 3)):
        found.append((switch.name, target.keep_hidden))
    assert {wanted for name, wanted in found if name == "b"} == {True}
    assert {wanted for name, wanted in found if name == "a"} == {False}
    assert seen
    assert all(seen)


def test_a_width_reaches_whoever_is_in_use() -> None:
    controls = [controlled(Scripted(lambda tokens, budget: Proposal(np.array([1]))), STOCK, 0.1) for _ in range(2)]
    switch = Forced([Candidate(f"g{i}", 1.2, partial(controls.__getitem__, i)) for i in range(2)], 2)
    switch.set_width(4)
    switch.bind(SamplingParams(), switch._noise)
    switch.begin([1])
    assert controls[0]._width == 4
    switch.set_width(2)
    assert controls[0]._width == 2
    switch._change(1, "test")
    switch.propose([1], 2)
    assert controls[1]._width == 2


def test_standings() -> None:
    standing = Standing(1.3)
    assert (standing.stake, standing.expected, standing.ready(0, 500)) == (CREDIT / 2, 1.3, True)
    standing.pay(-100)
    assert (standing.purse, standing.stake) == (FULL, float("inf"))
    standing.pay(100)
    assert (standing.purse, standing.stake, standing.broke) == (-CREDIT, 0.0, True)
    assert "lost what looking may cost" in standing.past(0)
    standing = Standing(1.3)
    waits = []
    for _ in range(10):
        standing.put_off(0, "failed")
        waits.append(standing.until)
    assert waits == [min(AGAIN * 2**i, LONGEST_AGAIN) for i in range(10)]
    assert standing.past(1) == "failed"
    standing.kept(1.7)
    assert (standing.expected, standing.wait) == (1.7, AGAIN)
    standing.gain = 0.9
    assert standing.expected == 1.3
    standing.reading, standing.read, standing.until = 0.01, 100, 0
    assert standing.ready(0, 300)
    assert not standing.ready(0, 400)
