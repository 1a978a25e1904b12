"""What speed is predicted from: lines through measured points, bytes that passes read, and what guessing gains."""

from __future__ import annotations

import random
from statistics import mean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.control.adaptive import Adaptive
from edgespec.decoding.drafter import Drafter
from edgespec.decoding.proposal import Proposal, Verdict
from edgespec.decoding.target import Pass
from edgespec.formulas.tree import best_tree
from edgespec.planning.costs import CURVES, PassTimes, line, rising
from edgespec.planning.prediction import Curve, Guessing, best_gain
from edgespec.planning.traffic import (
    attention_bytes,
    exit_share,
    kept_share,
    kv_token_bytes,
    layer_weights,
    look_bytes,
    read_bytes,
)
from edgespec.runtimes.files.formats import Format
from edgespec.runtimes.files.manifest import HeadGroup, Operators, SkipSetPart
from tests.support.planning import FACTS, part, passes
from tests.support.toy import FixedCosts

# -- lines -------------------------------------------------------------------------------------------------------------


def test_lines_between_and_beyond_points() -> None:
    points = [(1.0, 10.0), (3.0, 14.0), (5.0, 15.0)]
    assert [line(points, at) for at in (1, 2, 3, 4, 5, 9)] == [10, 12, 14, 14.5, 15, 17]
    assert line(points, 0) == 8.0
    assert line(points, -10) == 5.0  # never below half of what was measured
    assert line([(2.0, 7.0)], 100) == 7.0
    assert line([(1.0, 5.0), (2.0, 4.0)], 3) == 4.0  # a falling end is noise


def test_dips_are_noise() -> None:
    assert rising({3: 4.0, 1: 5.0, 5: 6.0}) == [(1, 5.0), (3, 5.0), (5, 6.0)]
    dipping = PassTimes({0: {1: 10.0, 2: 12.0}, 100: {1: 9.0, 2: 13.0}})
    assert dipping.ms(1, 100) == 10.0


def test_passes_split_into_weights_and_attention() -> None:
    times = PassTimes(passes(10, 1, 0.001))
    assert times.ms(1, 0) == 10
    assert times.ms(3, 1000) == 15
    assert times.ms(4, 1000) == 17
    assert times.split(3) == pytest.approx((12, 0.003))
    assert PassTimes({64: {1: 10.0}}).split(1) == (10.0, 0.0)
    assert PassTimes({0: {1: 10.0}, 50: {1: 8.0}}).split(1)[1] == 0.0


# -- bytes -------------------------------------------------------------------------------------------------------------


def test_bytes_that_a_pass_reads() -> None:
    int4, fp32 = part("int4", "w"), part("fp32", "w")
    head = FACTS.vocab * FACTS.hidden
    assert layer_weights(FACTS) == FACTS.parameters - head  # the embedding is the head
    assert read_bytes(int4, "native") == round(FACTS.parameters * 18 / 32)
    assert read_bytes(int4, "stock") == round(FACTS.parameters * 20 / 32)
    assert read_bytes(fp32, "native") == 4 * FACTS.parameters
    mixed = int4.model_copy(update={"head_format": "int8"})
    assert read_bytes(mixed, "native") == round((FACTS.parameters - head) * 18 / 32 + head * 34 / 32)
    untied = part("fp32", "w", FACTS.model_copy(update={"tied": False}))
    assert read_bytes(untied, "native") == 4 * (FACTS.parameters - head)
    assert kv_token_bytes(int4, "stock") == FACTS.kv_bytes_per_token
    assert kv_token_bytes(int4, "native") == FACTS.kv_bytes_per_token // 2
    assert kv_token_bytes(int4, "native", "int8") == 24 * 2 * 2 * (64 + 4)


def test_bytes_that_drafts_read() -> None:
    target = part("fp32", "w")
    layers, per_layer = FACTS.layers, layer_weights(FACTS) / FACTS.layers
    nothing = SkipSetPart(attention=list(range(layers)), mlp=list(range(layers)))
    weights, kv = kept_share(target, nothing, "native")
    assert weights == pytest.approx(FACTS.vocab * FACTS.hidden / FACTS.parameters)
    assert kv == 0
    assert kept_share(target, SkipSetPart(), "native") == (1, 1)
    one = kept_share(target, SkipSetPart(attention=[0], mlp=[0]), "native")[0]
    assert one == pytest.approx(1 - per_layer / FACTS.parameters)
    medusa = HeadGroup(name="m", kind="medusa", count=4)
    assert look_bytes(target, medusa, "native") == 4 * (4 * 896**2 + FACTS.vocab * 896)
    own = HeadGroup(name="m", kind="medusa", count=4, own=True)
    assert look_bytes(target, own, "native") == 4 * (4 * 896**2 + 4 * FACTS.vocab * 896)
    share = (12 * per_layer + 896**2 + FACTS.vocab * 896) / FACTS.parameters
    assert exit_share(target, 12, "native") == pytest.approx(share)


def test_attention_reads_once_or_multiplies_for_each_row() -> None:
    kv, multiplies = kv_token_bytes(part("int4", "w"), "native"), 2 * 24 * 14 * 64
    assert attention_bytes(FACTS, kv, 1, "native", "f16") == kv > 0.23 * multiplies
    assert attention_bytes(FACTS, kv, 4, "native", "f16") == pytest.approx(4 * multiplies * 0.23)  # seven queries a key
    assert attention_bytes(FACTS, kv, 4, "native", "int8") == pytest.approx(4 * multiplies * 0.1)
    assert attention_bytes(FACTS, kv, 1, "stock", "f32") == pytest.approx(multiplies * 2.2)
    few = FACTS.model_copy(update={"heads": 2, "kv_heads": 2})
    assert attention_bytes(few, kv, 1, "native", "int8") == attention_bytes(few, kv, 4, "native", "int8") == kv


# -- gains -------------------------------------------------------------------------------------------------------------


def test_a_tree_is_the_best_one() -> None:
    ranks = [[0.6, 0.2, 0.1], [0.4, 0.2]]

    def v(rows: float) -> float:
        return 1 + 0.05 * (rows - 1)

    paths, gain = best_tree(ranks, v, 0.1, 16)
    found = best_gain(Guessing([0.6], 16, ranks, at_once=True), 0.1, v)
    assert found.speedup == pytest.approx(gain, rel=1e-3)
    assert found.gamma == len(paths)
    limited = best_gain(Guessing([0.6], 2, ranks, at_once=True), 0.1, v)
    assert limited.gamma == 2
    assert limited.speedup == pytest.approx((1 + 0.6 + 0.24) / (v(3) + 0.1), rel=1e-3)


def test_a_rounds_first_step_may_take_longer() -> None:
    found = best_gain(Guessing([0.9], 3), 0.1, lambda rows: 1.0, first=0.4)
    assert found.gamma == 3
    assert found.speedup == pytest.approx((1 + 0.9 + 0.9**2 + 0.9**3) / (0.4 + 0.1 + 0.1 + 1))
    at_once = best_gain(Guessing([0.9], 3, at_once=True), 0.1, lambda rows: 1.0, first=0.4)
    assert at_once.speedup == pytest.approx((1 + 0.9 + 0.9**2 + 0.9**3) / 1.4)


def test_heads_cost_the_same_however_many_guesses() -> None:
    found = best_gain(Guessing([0.9], 3, at_once=True), 0.5, lambda rows: 1.0)
    assert found.speedup == pytest.approx((1 + 0.9 + 0.81 + 0.729) / 1.5)


def test_drafters_that_stop_by_themselves() -> None:
    found = best_gain(Guessing([0.5], 8, fixed=(1.5, 1.9)), 0.0, lambda rows: 1 + 0.2 * (rows - 1))
    assert found.speedup == pytest.approx(1.9 / 1.3)
    assert found.tokens == 1.9


def test_sequences_share_a_pass_and_draft_in_turn() -> None:
    def v(rows: float) -> float:
        return 1 + 0.1 * (rows - 1)

    found = best_gain(Guessing([0.99], 1), 0.1, v, width=4)
    assert found.speedup == pytest.approx(1.99 / (4 * 0.1 / v(4) + v(8) / v(4)))
    # where rows are all that costs, guesses of many sequences do not pay
    assert best_gain(Guessing([0.5], 4), 0.1, lambda rows: rows, width=8).gamma == 0


class Dice(Drafter):
    """A drafter whose guesses are right with the same chance each."""

    name = "dice"

    def __init__(self, at_once: bool) -> None:
        self.steps_at_once = at_once

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        return Proposal(np.zeros(budget, np.int64))


def played(rate: float, c: float, v: Curve, most: int, at_once: bool, seed: int) -> float:
    """Speed of control over plain decoding on dice, after some texts to learn from; by the costs, no clock."""
    dice, points = random.Random(seed), {n: v(n) for n in range(1, most + 2)}
    control = Adaptive(Dice(at_once), FixedCosts(points, c), most, prior=rate)
    time, tokens, output = 0.0, 0, Pass(np.zeros((1, 1), np.float32))
    for turn in range(300 + 1500):
        if turn == 300:
            time, tokens = 0.0, 0
        proposal, right = control.propose([0], most), 0
        while right < len(proposal) and dice.random() < rate:
            right += 1
        control.observe(proposal, Verdict(tuple(range(right)), 0), output)
        steps = min(1, len(proposal)) if at_once else len(proposal)
        time, tokens = time + steps * c + v(1 + len(proposal)), tokens + 1 + right
    return tokens / time


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("form", ["int4", "fp32"])
@pytest.mark.parametrize("operators", ["native", "stock"])
def test_control_makes_of_a_method_what_is_predicted(operators: Operators, form: Format, at_once: bool) -> None:
    points = rising(CURVES[operators][form])
    for c in (0.03, 0.1, 0.5, 0.9):
        for rate in (0.0, 0.3, 0.5, 0.7, 0.9):
            expected = best_gain(Guessing([rate], 5, at_once=at_once), c, lambda rows: line(points, rows)).speedup
            got = mean(played(rate, c, lambda rows: line(points, rows), 5, at_once, seed) for seed in range(3))
            assert got == pytest.approx(expected, rel=0.15), (c, rate)


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=5),
    st.floats(0, 2),
    st.floats(0, 1),
    st.integers(1, 8),
    st.integers(1, 12),
)
def test_never_worse_than_plain(rates: list[float], c: float, row: float, width: int, most: int) -> None:
    def v(rows: float) -> float:
        return 1 + row * (rows - 1)

    found = best_gain(Guessing(rates, most), c, v, width)
    assert found.speedup >= 1
    assert 1 <= found.tokens <= 1 + most
    assert found.gamma <= most
