"""Control and method auto of the C interface decide as Python's do, round by round, on scripted drafters and times."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from edgespec.control.adaptive import Control
from edgespec.control.auto import Auto, Candidate
from edgespec.decoding.drafter import Drafter, DraftRequest
from edgespec.decoding.noise import Noise
from edgespec.decoding.policy import Ask, Outcome
from edgespec.decoding.proposal import EMPTY, Proposal, Verdict
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.stats import PLAIN, RoundTime, Stats
from edgespec.drafters.ngram import NGram
from edgespec.formulas.cost import CostModel
from tests.support.selftest import SANITIZED, compiled, host_compiler, linked
from tests.support.timed_toy import DEAR, INT4, STOCK

pytestmark = pytest.mark.usefixtures("native")
ROUNDS, AUTO_ROUNDS, TEXTS = 260, 120, 3
VERIFY = {1: 1.0, 2: 1.15, 4: 1.4, 8: 2.3}


class Scripted(Drafter):
    """A drafter that only has facts: the test says what it guesses."""

    def __init__(self, cheap: bool, stops: bool) -> None:
        self.cheap, self.stops = cheap, stops
        self.rates = NGram().rates if cheap else {}


def recorded(seed: int) -> dict[str, Any]:
    """Let Python decide on rounds of a few texts -> the rounds, with each decision."""
    rng = np.random.default_rng(seed)
    cheap, stops, reproducible = [(True, False), (False, False), (False, True)][seed % 3] + (seed % 5 == 4,)
    prior = [] if seed % 2 else rng.uniform(0.2, 0.9, 3).round(6).tolist()
    draft, most = float([0.0, 0.1, 0.4][seed // 3 % 3]), int(rng.integers(1, 9))
    drafter = Scripted(cheap, stops)
    control = Control(drafter, CostModel(VERIFY, draft), most, prior=prior or 0.5)
    text, rounds, quality, pace = list[int](), list[dict[str, Any]](), float(rng.uniform(0.2, 0.95)), 1.0
    for number in range(ROUNDS * TEXTS):
        if begins := number % ROUNDS == 0:
            control.begin(Stats(), reproducible)
        if number % 90 == 0:  # another kind of text, and another speed of the machine
            quality, pace = float(rng.uniform(0.1, 0.98)), float(rng.uniform(0.5, 3))
        budget, required = int(rng.integers(1, 10)), float([1.0, 1.0, 1.2][int(rng.integers(3))])
        new = rng.integers(3, size=int(rng.integers(1, 4))).tolist()
        text += new
        ask = control.choose(budget, required=required)
        bucket, guesses, gains, proposal = int(rng.integers(4)), list[int](), list[float](), EMPTY
        if ask is not None:
            size = int(rng.integers(ask.most + 1)) if cheap else ask.most
            if ask.least_gain is not None:
                gains = [ask.least_gain(depth) for depth in range(1, ask.most)]
                size = int(rng.integers(1, ask.most + 1))
            guesses = rng.integers(3, size=size).tolist()
            proposal = Proposal(np.array(guesses, np.int64), bucket=bucket)
        length = 0 if ask is None else ask.most
        if cheap and ask is not None:
            proposal = control.cut(proposal, text, ask.most)
            length = len(proposal)
        count = len(proposal)
        right = int(np.argmin([*(rng.random(count) < quality), False]))
        tested = min(right + 1, count)
        rows = count + 1
        pass_ms = round(float(10 * pace * CostModel(VERIFY).v(rows) * rng.uniform(0.9, 1.3)), 6)
        draft_ms = round(float(10 * pace * draft * count * rng.uniform(0.9, 1.3)), 6)
        drafter.caught_up = bool(rng.random() < 0.9)
        rounds.append({
            "begins": int(begins), "budget": budget, "required": required, "text": new, "bucket": bucket,
            "guesses": guesses, "length": length, "gains": gains, "verified": count, "right": right, "tested": tested,
            "caught_up": int(drafter.caught_up), "pass_ms": pass_ms, "draft_ms": draft_ms,
        })  # fmt: skip
        time = RoundTime(draft_ms, pass_ms, rows, False, "scripted", right + 1, count, right, rows)
        control.told(proposal if count else None, right, tested, time, True)
    rates = {str(bucket): list(known) for bucket, known in drafter.rates.items()}
    return {
        "cheap": cheap, "stops": stops, "reproducible": reproducible, "prior": prior, "verify": VERIFY, "draft": draft,
        "most": most, "rates": rates, "rounds": rounds,
    }  # fmt: skip


class Named(Drafter):
    """A drafter that only has facts: the test says what it guesses."""

    def __init__(self, name: str, cheap: bool, stops: bool, at_once: bool) -> None:
        self.name, self.cheap, self.stops, self.steps_at_once = name, cheap, stops, at_once
        self.rates = NGram().rates if cheap else {}


@dataclass
class AutoCase:
    """Candidates, and the rounds that Python's auto decided on."""

    seed: int
    rng: np.random.Generator = field(init=False)
    rounds: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = self.rng = np.random.default_rng(self.seed)
        self.verify = (INT4, STOCK, DEAR)[self.seed % 3]
        self.seeded = self.seed % 5 == 4
        self.drafters, self.specs, candidates = list[Named](), list[dict[str, Any]](), list[Candidate]()
        for at in range(int(rng.integers(1, 4))):
            stops = bool(rng.integers(3) == 0)
            self._add(candidates, f"costly {at}", float(rng.uniform(0.9, 2)), False, stops, bool(rng.integers(3) == 0),
                      float(rng.choice([0.02, 0.1, 0.4])))  # fmt: skip
        if self.seed % 4:
            self._add(candidates, "ngram", 1.0, True, False, False, 0.0)
        self.auto = Auto(candidates)

    def _add(self, to: list[Candidate], name: str, promise: float, cheap: bool, stops: bool, at_once: bool,
             draft: float) -> None:  # fmt: skip
        rng = self.rng
        drafter = Named(name, cheap, stops, at_once)
        spec = {
            "name": name, "promise": promise, "cheap": cheap, "stops": stops, "at_once": at_once, "draft": draft,
            "from_start": bool(not cheap and rng.integers(4) == 0), "fails": bool(not cheap and rng.integers(8) == 0),
            "prior": [] if rng.integers(2) else rng.uniform(0.2, 0.9, 3).tolist(), "most": int(rng.integers(1, 9)),
            "rates": {str(bucket): list(known) for bucket, known in drafter.rates.items()},
        }  # fmt: skip
        self.drafters.append(drafter)
        self.specs.append(spec)
        make = partial(self._made, drafter, spec)
        to.append(Candidate(name, promise, make, cheap, spec["from_start"]))

    def _made(self, drafter: Named, spec: dict[str, Any]) -> Control:
        if spec["fails"]:
            raise RuntimeError("it does not load")
        cost = CostModel(self.verify, spec["draft"])
        for rows, steps in self.verify.items():
            cost.observe_verify(rows, 10 * steps, 3)
        cost.observe_draft(1, 10 * spec["draft"], 3)
        return Control(drafter, cost, spec["most"], prior=spec["prior"] or 0.5)

    def _asked(self, ask: Ask, text: list[int]) -> tuple[dict[str, Any], Proposal]:
        """Let a drafter guess what it is asked for -> what was recorded of it, and what is verified."""
        rng, guesses, gains = self.rng, list[int](), list[float]()
        size = ask.most if ask.least_gain is None and not ask.reviewed else int(rng.integers(ask.most + 1))
        if ask.least_gain is not None:
            gains, size = [ask.least_gain(depth) for depth in range(1, ask.most)], max(size, 1)
        guesses, bucket = rng.integers(3, size=size).tolist(), int(rng.integers(4)) if ask.drafter.cheap else 0
        ms = round(float(rng.uniform(0, 0.05 if ask.drafter.cheap else 8)), 6)
        found = Proposal(np.array(guesses, np.int64), bucket=bucket) if guesses else EMPTY
        if ask.reviewed:
            found = self.auto.review(ask, found, text, ms)
        who = next(at for at, one in enumerate(self.drafters) if one is ask.drafter)
        return {
            "who": who, "most": ask.most, "looks": int(ask.looks), "gains": gains, "guesses": guesses, "bucket": bucket,
            "ms": ms, "length": len(found),
        }, found  # fmt: skip

    def record(self) -> dict[str, Any]:
        text, rng, quality, pace = list[int](), self.rng, 0.5, 1.0
        params = SamplingParams(0.8, seed=1) if self.seeded else SamplingParams()
        for number in range(AUTO_ROUNDS * TEXTS):
            begins = number % AUTO_ROUNDS == 0
            if begins:
                try:
                    self.auto.begin(DraftRequest([1], params, Noise(1)), Stats())
                except RuntimeError as error:
                    self.auto.lose(None, str(error))
            if number % 70 == 0:  # another kind of text, and another speed of the machine
                quality, pace = float(rng.uniform(0.05, 0.98)), float(rng.uniform(0.5, 3))
            budget, new = int(rng.integers(1, 10)), rng.integers(3, size=int(rng.integers(1, 4))).tolist()
            text += new
            asks = list[Ask]()
            try:
                asks = list(self.auto.choose(text, budget))
            except RuntimeError as error:
                self.auto.lose(None, str(error))
            told, proposal, winner = list[dict[str, Any]](), EMPTY, None
            for ask in asks:
                one, found = self._asked(ask, text)
                told.append(one)
                if len(found):
                    proposal, winner = found, ask
            count = len(proposal)
            right = int(np.argmin([*(rng.random(count) < quality), False]))
            pass_ms = round(float(10 * pace * CostModel(self.verify).v(count + 1) * rng.uniform(0.9, 1.3)), 6)
            draft_ms = round(sum(one["ms"] for one in told) + float(rng.uniform(0, 0.02)), 6)
            caught_up = bool(rng.random() < 0.9)
            for drafter in self.drafters:
                drafter.caught_up = caught_up
            time = RoundTime(draft_ms, pass_ms, count + 1, False, "scripted", right + 1, count, right, count + 1)
            took = [(ask, one["ms"]) for ask, one in zip(asks, told, strict=True)]
            self.auto.told(Outcome(proposal, Verdict(tuple(range(right)), 0), time, winner, took))
            lost = -1
            if asks and rng.integers(150) == 0:
                lost = told[0]["who"]
                self.auto.lose(self.drafters[lost], "it failed")
            estimates = [self.auto.estimate(at) for at in range(len(self.drafters))]
            self.rounds.append({
                "begins": int(begins), "budget": budget, "text": new, "asks": told, "right": right,
                "pass_ms": pass_ms, "draft_ms": draft_ms, "caught_up": int(caught_up), "lost": lost,
                "in_use": "" if self.auto.in_use == PLAIN else self.auto.in_use, "estimates": estimates,
            })  # fmt: skip
        return {"candidates": self.specs, "verify": self.verify, "seeded": self.seeded, "rounds": self.rounds}


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, list[dict[str, Any]]], str]:
    folder, compiler = tmp_path_factory.mktemp("control"), host_compiler()
    assert compiler, "no C++ compiler"
    names = ("mapping", "json", "cost", "control", "policy", "auto", "verify", "sampling")
    mains = "control_replay", "auto_replay"
    *objects, first, second = compiled(folder / "objects", compiler, (*names, *mains), (), SANITIZED)
    programs = {
        name: linked(folder / name, compiler, [*objects, main], SANITIZED)
        for name, main in zip(mains, (first, second), strict=True)
    }

    def run(name: str, cases: list[dict[str, Any]]) -> str:
        (folder / "cases.json").write_text(json.dumps(cases), "utf-8")
        return programs[name].run(str(folder / "cases.json"))

    return run


def test_decisions_are_those_of_python(replay: Callable[[str, list[dict[str, Any]]], str]) -> None:
    cases = [recorded(seed) for seed in range(30)]
    lengths = {one["length"] for case in cases for one in case["rounds"]}
    assert {0, 1, 2, 4} <= lengths
    assert replay("control_replay", cases) == "0 of 30 differ\n"


def test_another_decision_is_noticed(replay: Callable[[str, list[dict[str, Any]]], str]) -> None:
    case = recorded(1)
    case["rounds"][200]["length"] += 1
    with pytest.raises(AssertionError, match="differs in round 200"):
        replay("control_replay", [case])


def test_auto_decides_as_python_does(replay: Callable[[str, list[dict[str, Any]]], str]) -> None:
    cases = [AutoCase(seed).record() for seed in range(40)]
    rounds = [one for case in cases for one in case["rounds"]]
    assert len({one["in_use"] for one in rounds}) == 5
    changes = sum(one["in_use"] != other["in_use"] for one, other in pairwise(rounds))
    assert changes > 100
    assert sum(ask["looks"] for one in rounds for ask in one["asks"]) > 1000
    assert replay("auto_replay", cases) == "0 of 40 differ\n"


def test_another_decision_of_auto_is_noticed(replay: Callable[[str, list[dict[str, Any]]], str]) -> None:
    case = AutoCase(1).record()
    case["rounds"][200]["estimates"][0] += 1e-6
    with pytest.raises(AssertionError, match="differs in round 200"):
        replay("auto_replay", [case])
