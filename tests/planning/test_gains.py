"""What guessing gains, where heads are cut, what experts cost."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.shapes import SHAPES
from edgespec.control.adaptive import Control
from edgespec.decoding.drafter import Drafter
from edgespec.decoding.proposal import Proposal
from edgespec.export.bundle.model_part import open_described
from edgespec.export.emitted import EmittedModel
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import Exporter
from edgespec.formulas.cost import CostModel, rising
from edgespec.formulas.tree import best_tree
from edgespec.planning.costs import PassTimes, curve_of, line
from edgespec.planning.cut import TYPICAL, fastest_size, first_ids, typical_share
from edgespec.planning.prediction import Curve, DraftProfile, best_gain
from edgespec.planning.traffic import (
    attention_bytes,
    early_exit_cost_ratio,
    head_pass_bytes,
    kept_share,
    kv_token_bytes,
    layer_weights,
    read_bytes,
    verify_curve,
)
from edgespec.runtimes.files.facts import ExpertFacts
from edgespec.runtimes.files.formats import Format
from edgespec.runtimes.files.manifest import DrafterKind, HeadGroup, ModelFacts, ModelPart, Operators, SkipSetPart
from tests.conftest import write_large
from tests.support import hf
from tests.support.planned import plan_of
from tests.support.planning import FACTS, part, passes
from tests.support.rounds import Rounds
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
    assert head_pass_bytes(target, medusa, "native") == 4 * (4 * 896**2 + FACTS.vocab * 896)
    own = HeadGroup(name="m", kind="medusa", count=4, own=True)
    assert head_pass_bytes(target, own, "native") == 4 * (4 * 896**2 + 4 * FACTS.vocab * 896)
    share = (12 * per_layer + 896**2 + FACTS.vocab * 896) / FACTS.parameters
    assert early_exit_cost_ratio(target, 12, "native") == pytest.approx(share)


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
    found = best_gain(DraftProfile([0.6], 16, ranks, at_once=True), 0.1, v)
    assert found.speedup == pytest.approx(gain, rel=1e-3)
    assert found.gamma == len(paths)
    limited = best_gain(DraftProfile([0.6], 2, ranks, at_once=True), 0.1, v)
    assert limited.gamma == 2
    assert limited.speedup == pytest.approx((1 + 0.6 + 0.24) / (v(3) + 0.1), rel=1e-3)


@pytest.mark.parametrize(
    ("guessing", "c", "row", "how", "speedup", "gamma"),
    [
        (DraftProfile([0.9], 3), 0.1, 0.0, {"first": 0.4}, 3.439 / 1.6, 3),  # a round's first step takes longer
        (DraftProfile([0.9], 3, at_once=True), 0.1, 0.0, {"first": 0.4}, 3.439 / 1.4, 3),
        (DraftProfile([0.9], 3, at_once=True), 0.5, 0.0, {}, 3.439 / 1.5, 3),  # heads cost the same for any number
        (DraftProfile([0.5], 8, fixed=(1.5, 1.9)), 0.0, 0.2, {}, 1.9 / 1.3, 2),  # a drafter that stops by itself
        # sequences share a pass and draft in turn
        (DraftProfile([0.99], 1), 0.1, 0.1, {"width": 4}, 1.99 / (4 * 0.1 / 1.3 + 1.7 / 1.3), 1),
        # where rows are all that costs, guesses of many sequences do not help
        (DraftProfile([0.5], 4), 0.1, 1.0, {"width": 8}, 1.0, 0),
    ],
)
def test_gains_counted_by_hand(
    guessing: DraftProfile, c: float, row: float, how: dict[str, Any], speedup: float, gamma: int
) -> None:
    """``row``: what each row but the first adds to a pass."""
    found = best_gain(guessing, c, lambda rows: 1 + row * (rows - 1), **how)
    assert found.speedup == pytest.approx(speedup)
    assert found.gamma == gamma
    assert found.tokens == (
        1.9 if guessing.fixed else pytest.approx(sum(guessing.rates[0] ** n for n in range(gamma + 1)))
    )


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
    driven = Rounds(Control(Dice(at_once), FixedCosts(points, c), most, prior=rate))
    time, tokens = 0.0, 0
    for turn in range(300 + 1500):
        if turn == 300:
            time, tokens = 0.0, 0
        proposal, right = driven.propose([0], most), 0
        while right < len(proposal) and dice.random() < rate:
            right += 1
        driven.learn(proposal, range(right))
        steps = min(1, len(proposal)) if at_once else len(proposal)
        time, tokens = time + steps * c + v(1 + len(proposal)), tokens + 1 + right
    return tokens / time


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("form", ["int4", "fp32"])
@pytest.mark.parametrize("operators", ["native", "stock"])
def test_control_makes_of_a_method_what_is_predicted(operators: Operators, form: Format, at_once: bool) -> None:
    points = curve_of(form, operators)
    for c in (0.03, 0.1, 0.5, 0.9):
        for rate in (0.0, 0.3, 0.5, 0.7, 0.9):
            expected = best_gain(DraftProfile([rate], 5, at_once=at_once), c, lambda rows: line(points, rows)).speedup
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

    found = best_gain(DraftProfile(rates, most), c, v, width)
    assert found.speedup >= 1
    assert 1 <= found.tokens <= 1 + most
    assert found.gamma <= most


SHAPE: dict[str, Any] = {"model_type": "llama", "vocab_size": 16384, "hidden_size": 128, "intermediate_size": 256,
         "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32,
         "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, "hidden_act": "silu",
         "max_position_embeddings": 512}  # fmt: skip
DRAFT = SHAPE | {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Make a target and a draft whose LM head is most of it."""
    folder = tmp_path_factory.mktemp("pair")
    for name, config in (("target", SHAPE), ("draft", DRAFT)):
        write_large(folder / name, config)
        hf.write_tokenizer(folder / name, config)
    return folder / "target", folder / "draft"


@pytest.fixture(scope="module")
def facts(pair: tuple[Path, Path]) -> tuple[ModelFacts, ModelFacts]:
    target, draft = (open_described(path, None).facts for path in pair)
    return target, draft


def test_the_size_weighs_what_a_guess_costs_against_what_is_never_guessed(facts: tuple[ModelFacts, ModelFacts]) -> None:
    target, draft = facts
    assert fastest_size(target, draft, lambda size: 1.0) == min(TYPICAL)
    assert fastest_size(target, draft, lambda size: 0.97 if size >= 8192 else 0.5) == 8192
    assert fastest_size(target, draft, lambda size: 0.3) is None
    small = draft.model_copy(update={"vocab": 2 * min(TYPICAL) - 1})
    assert fastest_size(target, small, lambda size: 1.0) is None


@pytest.mark.parametrize("kind", ["mtp", "eagle", "assistant"])
def test_a_drafter_has_no_embedding(facts: tuple[ModelFacts, ModelFacts], kind: DrafterKind) -> None:
    """It is cut as a model with as many weights beside an embedding is."""
    target, draft = facts
    outside = draft.vocab * draft.hidden
    for layers in (outside // 4, outside, 4 * outside, 16 * outside):
        drafter = draft.model_copy(update={"tied": False, "parameters": layers + outside})
        model = draft.model_copy(update={"tied": False, "parameters": layers + 2 * outside})
        for share in (0.5, 0.8, 0.95):
            covered = {size: share + (1 - share) * i / len(TYPICAL) for i, size in enumerate(TYPICAL)}.__getitem__
            assert fastest_size(target, drafter, covered, kind) == fastest_size(target, model, covered)
    small, large = (draft.model_copy(update={"tied": False, "parameters": n * outside}) for n in (2, 100))
    assert fastest_size(target, small, lambda size: 0.95, kind) is not None
    assert fastest_size(target, large, lambda size: 0.95, kind) is None  # next to such layers no head is large


@pytest.mark.parametrize("layers", [10**6, 10**7, 3 * 10**7])
@pytest.mark.parametrize("kind", ["dflash", "mtp"])
def test_a_block_reads_its_layers_once_a_round(
    facts: tuple[ModelFacts, ModelFacts], kind: DrafterKind, layers: int
) -> None:
    """A chain reads them for each guess."""
    whole, head = 3 * 10**7, facts[1].vocab * facts[1].hidden
    target = facts[0].model_copy(update={"parameters": whole + facts[0].vocab * facts[0].hidden})
    drafter = facts[1].model_copy(update={"parameters": layers + head})
    v, step = CostModel().v, whole + facts[0].vocab * facts[0].hidden

    def best(rows: int, share: float) -> float:
        """Tokens of a round over its time, at the best number of guesses."""
        a, read = 0.7 * share, (layers + rows * drafter.hidden) / step
        found = []
        for guesses in range(1, 9):
            tokens = sum(a**i for i in range(guesses + 1))
            found.append(tokens / (v(guesses + 1) + read * (v(guesses + 1) if kind == "dflash" else guesses)))
        return max(found)

    gains = {rows: best(rows, 0.9) for rows in TYPICAL if 2 * rows <= drafter.vocab}
    wanted = min(gains) if gains[min(gains)] > 1.05 * best(drafter.vocab, 1.0) else None
    assert fastest_size(target, drafter, lambda size: 0.9, kind) == wanted


def test_first_ids_cover_a_text() -> None:
    assert first_ids([1, 5000, 4095, 4096])(4096) == 0.5


def test_a_draft_is_cut_where_that_is_faster(pair: tuple[Path, Path], tmp_path: Path) -> None:
    target, draft = map(str, pair)
    options = ExportOptions(target, tmp_path / "cut", ["speculative"], draft=draft, threads=1)
    made = Exporter(options).run()
    assert made.draft is not None
    assert made.draft.head_vocab is not None
    assert made.draft.head_vocab.size in TYPICAL
    assert any("--draft-vocab 0 lets it guess all" in note for note in made.provenance["notes"])
    assert typical_share(made.draft) == TYPICAL[made.draft.head_vocab.size]
    whole = Exporter(replace(options, draft_vocab=0)).draft
    assert isinstance(whole, EmittedModel)
    assert whole.tokens is None


def test_a_plan_cuts_it_too(pair: tuple[Path, Path]) -> None:
    target, draft = map(str, pair)
    planned = plan_of(target, methods=["speculative"], draft=draft)
    assert planned.draft is not None
    assert planned.draft.head_vocab is not None
    whole = plan_of(target, methods=["speculative"], draft=draft, draft_vocab=0)
    assert whole.draft is not None
    assert whole.draft.head_vocab is None


def planned(folder: Path, **changes: object) -> ModelPart:
    (folder / "config.json").write_text(json.dumps({**SHAPES["granite-3.1-1b-a400m"], **changes}), "utf-8")
    return plan_of(folder).target


def choices(count: int, chosen: int, rows: int) -> list[Counter[int]]:
    """Rows of each expert that has any, for every way in which so many rows can choose."""
    each = list(combinations(range(count), chosen))
    return [Counter(expert for row in rows for expert in row) for rows in product(each, repeat=rows)]


@pytest.mark.parametrize("count, chosen, rows", [(4, 2, 1), (4, 2, 3), (5, 1, 4), (3, 3, 2), (6, 4, 2)])
@pytest.mark.parametrize("always", [0, 2])
def test_the_number_of_distinct_experts_is_the_mean_over_all_choices(
    count: int, chosen: int, rows: int, always: int
) -> None:
    facts = ExpertFacts(count=count + always, chosen=chosen + always, inner=32, layers=[0], always=always)
    assert facts.distinct(rows) == pytest.approx(always + mean(map(len, choices(count, chosen, rows))))


def test_experts_are_read_by_rows_and_each_has_few_of_them(tmp_path: Path) -> None:
    """A curve that rises by a tenth a row, so that the mean over all choices is exact."""
    part, rows = planned(tmp_path, num_local_experts=4, num_experts_per_tok=2), 3
    one = 24 * 3 * 1024 * 512 * (0.5 + 2 / 32)  # bytes of an expert's matrices in all layers
    dense = 24 * 1024 * (2 * 1024 + 2 * 512) * (0.5 + 2 / 32) + 1024 * 49155 * (0.5 + 2 / 32)  # attention, LM head

    def v(n: float) -> float:
        return 1 + (n - 1) / 10

    passes = [sum(one * v(n) for n in found.values()) for found in choices(4, 2, rows)]
    expected = (dense * v(rows) + mean(passes)) / (dense + 2 * one)
    assert verify_curve(part, rows, "native", v) == pytest.approx(expected, rel=0.01)
    assert verify_curve(part, 1, "native", v) == pytest.approx(1)
    assert read_bytes(part, "native") == pytest.approx(dense + 2 * one, rel=0.01)


def test_a_measured_mixture_costs_what_is_predicted(tmp_path: Path) -> None:
    """Passes of 1, 4 and 8 rows at depth 200 (docs/dev/measurements.md): 11.0, 23.3 and 32.6 ms."""
    part, curve = planned(tmp_path), curve_of("int4", "native")
    for rows, measured in ((4, 2.12), (8, 2.97)):
        found = verify_curve(part, rows, "native", lambda n: line(curve, n))
        assert found == pytest.approx(measured, rel=0.12)
        assert found > 1.5 * line(curve, rows)


def test_without_experts_the_curve_is_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["granite-4.0-350m"]), "utf-8")
    assert verify_curve(plan_of(tmp_path).target, 7, "native", lambda n: n * n) == 49
