"""Method auto's drafter: who drafts when, what looking costs, and that the text stays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from edgespec.control.adaptive import Adaptive, Control
from edgespec.control.auto import CHECK, SHARE, Auto, Candidate
from edgespec.control.learned import AGAIN, CREDIT, FULL, LONGEST_AGAIN, Standing
from edgespec.decoding.proposal import Proposal
from edgespec.decoding.stats import PLAIN
from tests.support.timed_toy import DEAR, INT4, STOCK, BusyClock, Clock, Guesser, Rates, controlled, run, text
from tests.support.toy import Scripted

CURVES = {"int4": INT4, "stock": STOCK, "dear": DEAR}


def never(length: int) -> float:
    return 0.0


def always(rate: float) -> Rates:
    return lambda length: rate


class Case:
    """Candidates over one clock and one curve; ``specs``: (name, rate, c, promise, prior, cheap, from the start)."""

    def __init__(
        self, curve: Mapping[int, float], specs: Sequence[tuple[Any, ...]], clock: Clock | None = None, **how: Any
    ) -> None:
        self.curve, self.clock = curve, clock or Clock()
        self.guessers: dict[str, Guesser] = {}
        self.made: list[str] = []
        self.costs = {name: c for name, _, c, *_ in specs}
        candidates = []
        for name, rate, c, promise, prior, cheap, *start in specs:
            guesser = Guesser(rate, c, self.clock, cheap=cheap, buckets=6 if cheap else 1, name=name, **how)
            self.guessers[name] = guesser
            candidates.append(Candidate(name, promise, self._maker(guesser, c, prior), cheap, *start))
        self.switch = Auto(candidates)

    def _maker(self, guesser: Guesser, c: float, prior: float) -> Callable[[], Control]:
        def make() -> Control:
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
    """Build a case of a draft and heads that promise much, and n-grams; ``rate`` is the draft's, ``c`` its cost."""
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
    # control without auto, which tries every kind, has no such limit
    assert case.switch.in_use in ("ngram", PLAIN)


def test_looking_that_takes_time_is_paid_for_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cheap drafter that is not cheap: on a tiny model its look-ups are a tenth of a step."""

    class Slow(Guesser):
        def propose(self, tokens: list[int], budget: int) -> Proposal:
            self.clock.ms += 1.0
            self.asked.append(len(tokens))
            return Proposal(np.empty(0, np.int64))

    clock = Clock()
    slow = Slow(never, 0.0, clock, cheap=True, name="ngram")
    switch = Auto([Candidate("ngram", 1.0, lambda: controlled(slow, INT4, 0.0), cheap=True)])
    made = run(monkeypatch, switch, clock, INT4, 1024)
    assert made.loss <= 0.02
    assert made.switches[0][1:] == ("ngram", PLAIN)
    assert len(slow.asked) < 200


def test_a_text_that_was_missed_is_read_at_most_once(monkeypatch: pytest.MonkeyPatch) -> None:
    case, reading = three(STOCK, 0.3), 0.02
    case.guessers["draft"].catch_up = reading
    assert case.run(monkeypatch, 2048).loss <= 0.015 + reading


@pytest.mark.parametrize(("rate", "c"), [(0.5, 0.05), (0.7, 0.05), (0.9, 0.05), (0.9, 0.3)])
@pytest.mark.parametrize("curve", ["int4", "stock"])
def test_gains_are_found_as_control_alone_finds_them(
    monkeypatch: pytest.MonkeyPatch, curve: str, rate: float, c: float
) -> None:
    clock = Clock()
    alone = controlled(Guesser(always(rate), c, clock), CURVES[curve], c, rate)
    wanted = run(monkeypatch, Adaptive([alone]), clock, CURVES[curve], 1024).steps
    found = three(CURVES[curve], c, always(rate), rate).run(monkeypatch, 1024).steps
    assert found <= 1.07 * wanted


# -- who drafts --------------------------------------------------------------------------------------------------------


def test_the_best_promise_begins_and_stays_while_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    case = three(INT4, 0.05, always(0.8))
    made = case.run(monkeypatch, 300)
    assert made.switches == []
    assert case.made == ["draft", "ngram"]  # nothing else costly was even loaded
    assert (case.switch.used, case.switch.in_use) == ("draft", "draft")
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
    assert case.made == ["draft", "ngram", "heads"]
    assert made.loss < -0.2
    # what gives less than the first one promises: that is tried again, ever more rarely
    assert all(left == "draft" or taken == "draft" for _, left, taken in others)
    first = made.stats.as_dict()["switches"][0]
    assert list(first) == ["round", "from", "to", "why"]
    assert "draft did not pay: " in first["why"] or "heads" in first["to"]
    assert f"from round {round_} heads, {first['why']}" in "; ".join(case.switch.details)


def test_one_that_must_see_a_text_from_its_start_waits_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [("draft", never, 0.1, 1.4, 0.8, False), ("eagle", always(0.9), 0.1, 1.3, 0.8, False, True)]
    case = Case(INT4, specs)
    case.run(monkeypatch, new=64)
    assert case.made == ["draft"]
    assert case.switch.in_use == PLAIN
    case.run(monkeypatch, new=64)
    assert case.switch.used == "eagle"
    assert case.switch.rounds[1] > 8


@pytest.mark.parametrize("busy", [(40, 0.25, 2), (15, 0.3, 3), (200, 0.4, 1.5)])
def test_other_work_on_the_machine_does_not_cost_a_gain(
    monkeypatch: pytest.MonkeyPatch, busy: tuple[float, float, float]
) -> None:
    """In busy moments rounds take longer than their tokens are worth, and so would plain steps."""
    specs = [("draft", always(0.6), 0.2, 1.3, 0.6, False), ("ngram", always(0.1), 0.0, 1.0, 0.5, True)]
    case = Case(INT4, specs, clock=BusyClock(*busy))
    for _ in range(12):
        case.run(monkeypatch, 100)
        assert case.switch.rounds.get(0, 0) > 0.9 * sum(case.switch.rounds.values())


def test_a_promise_much_beyond_what_is_measured_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [("draft", always(0.5), 0.3, 1.5, 0.6, False), ("heads", always(0.9), 0.02, 1.45, 0.6, False),
             ("ngram", never, 0.0, 1.0, 0.5, True)]  # fmt: skip
    case = Case(INT4, specs)
    made = case.run(monkeypatch, 600)
    assert ("draft", "heads") in [switch[1:] for switch in made.switches]
    assert case.switch.in_use == "heads"


def test_what_was_never_tried_is_tried_where_it_promises_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both promises are near what the first one gives; one that was tried must have given a tenth more."""
    specs = [("draft", always(0.5), 0.1, 1.3, 0.5, False), ("heads", always(0.9), 0.02, 1.27, 0.5, False)]
    case = Case(INT4, specs)
    made = case.run(monkeypatch, 600)
    first = made.stats.switches[0]
    assert (first["from"], first["to"], "draft at 1.2" in first["why"]) == ("draft", "heads", True)
    assert [switch[1:] for switch in made.switches] == [("draft", "heads")]


def test_when_nothing_pays_tries_get_rarer(monkeypatch: pytest.MonkeyPatch) -> None:
    case = three(STOCK, 0.1)
    made = case.run(monkeypatch, 6000)
    begun = np.diff(case.guessers["draft"].begun)
    assert len(begun) >= 4
    assert (begun[2:] >= begun[1:-1]).all()
    assert begun[-1] > 3 * AGAIN
    assert made.loss < SHARE
    # the others get no calls during that time
    seen = sum(guesser.observed for guesser in case.guessers.values())
    assert seen <= made.stats.rounds
    assert case.guessers["draft"].observed < 0.1 * made.stats.rounds


def test_a_text_that_changes_its_character(monkeypatch: pytest.MonkeyPatch) -> None:
    """First it copies itself, then only the draft gains, then nothing does, then it copies again."""
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
    assert made.loss < -0.22


def test_what_was_learned_stays_on_the_lane_and_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    case = three(STOCK, 0.2)
    case.run(monkeypatch, 400)
    again = case.run(monkeypatch, 40, prompt=(5, 6))
    assert again.switches[0][:2] == (0, "draft")
    assert "in earlier requests draft " in again.stats.switches[0]["why"]
    assert again.switches[0][2] != "draft"
    assert "earlier requests" in "; ".join(case.switch.details)
    assert again.stats.drafted <= 4


def test_without_fallback_the_first_one_always_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    control = Control(Guesser(never, 0.5, clock, name="draft"), controlled(Scripted(lambda *_: Proposal(
        np.empty(0, np.int64))), STOCK, 0.5).cost, fallback=False)  # fmt: skip
    switch = Auto([Candidate("draft", 1.4, lambda: control), Candidate("ngram", 1.0, pytest.fail, cheap=True)],
                    fallback=False)  # fmt: skip
    made = run(monkeypatch, switch, clock, STOCK, 200)
    assert made.switches == []
    assert made.stats.plain_rounds <= 1  # the last one, which has no room for a guess


def test_nothing_drafted_means_the_one_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    switch = Auto([Candidate("ngram", 1.0, lambda: controlled(
        Scripted(lambda tokens, budget: Proposal(np.empty(0, np.int64))), INT4, 0.0), cheap=True)])  # fmt: skip
    run(monkeypatch, switch, Clock(), INT4, 20)
    assert switch.used == "ngram"
    switch.candidates[0].standing.back_off("did not pay")
    run(monkeypatch, switch, Clock(), INT4, 20)
    assert (switch.used, switch.in_use) == ("ar", PLAIN)
    with pytest.raises(ValueError, match="at least one candidate"):
        Auto([])


def test_a_budget_bounds_what_a_candidate_may_lose() -> None:
    one = Standing()
    assert (one.round_loss_limit, one.ready) == (CREDIT / 2, True)
    one.charge(-100)
    assert (one.budget, one.round_loss_limit) == (FULL, float("inf"))
    one.charge(100)
    assert (one.budget, one.round_loss_limit, one.exhausted) == (-CREDIT, 0.0, True)
    assert "lost what looking may cost" in one.past
    one = Standing()
    waits = []
    for _ in range(10):
        one.back_off("failed")
        waits.append(one.until)
    assert waits == [min(AGAIN * 2**i, LONGEST_AGAIN) for i in range(10)]
    one.accrue(0.0)
    assert (one.now, one.past) == (1, "failed")
