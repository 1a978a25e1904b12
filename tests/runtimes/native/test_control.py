"""Control of the C interface decides as Python's does, round by round, on scripted drafters and times."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from edgespec.control.adaptive import Control
from edgespec.decoding.drafter import Drafter
from edgespec.decoding.proposal import EMPTY, Proposal
from edgespec.decoding.stats import RoundTime, Stats
from edgespec.drafters.ngram import NGram
from edgespec.formulas.cost import CostModel
from tests.support.selftest import SANITIZED, compiled, host_compiler, linked

pytestmark = pytest.mark.usefixtures("native")
ROUNDS, TEXTS = 260, 3
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


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[dict[str, Any]]], str]:
    folder, compiler = tmp_path_factory.mktemp("control"), host_compiler()
    assert compiler, "no C++ compiler"
    objects = compiled(folder / "objects", compiler, ("mapping", "json", "cost", "control", "control_replay"), (),
                       SANITIZED)  # fmt: skip
    program = linked(folder / "program", compiler, objects, SANITIZED)

    def run(cases: list[dict[str, Any]]) -> str:
        (folder / "cases.json").write_text(json.dumps(cases), "utf-8")
        return program.run(str(folder / "cases.json"))

    return run


def test_decisions_are_those_of_python(replay: Callable[[list[dict[str, Any]]], str]) -> None:
    cases = [recorded(seed) for seed in range(30)]
    lengths = {one["length"] for case in cases for one in case["rounds"]}
    assert {0, 1, 2, 4} <= lengths
    assert replay(cases) == "0 of 30 differ\n"


def test_another_decision_is_noticed(replay: Callable[[list[dict[str, Any]]], str]) -> None:
    case = recorded(1)
    case["rounds"][200]["length"] += 1
    with pytest.raises(AssertionError, match="differs in round 200"):
        replay([case])
