"""What the planner knows of mixtures of experts, beside every way in which rows can choose."""

from __future__ import annotations

import json
from collections import Counter
from itertools import combinations, product
from pathlib import Path
from statistics import mean

import pytest

from benchmarks.shapes import SHAPES
from edgespec.export.planned import planned_bundle
from edgespec.planning.costs import CURVES, line, rising
from edgespec.planning.traffic import read_bytes, verify_curve
from edgespec.runtimes.files.facts import ExpertFacts
from edgespec.runtimes.files.manifest import ModelPart


def planned(folder: Path, **changes: object) -> ModelPart:
    (folder / "config.json").write_text(json.dumps({**SHAPES["granite-3.1-1b-a400m"], **changes}), "utf-8")
    return planned_bundle(folder).target


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


def test_a_measured_mixture_is_as_dear_as_predicted(tmp_path: Path) -> None:
    """Passes of 1, 4 and 8 rows at depth 200 (docs/project/measurements.md): 11.0, 23.3 and 32.6 ms."""
    part, curve = planned(tmp_path), rising(CURVES["native"]["int4"])
    for rows, measured in ((4, 2.12), (8, 2.97)):
        found = verify_curve(part, rows, "native", lambda n: line(curve, n))
        assert found == pytest.approx(measured, rel=0.12)
        assert found > 1.5 * line(curve, rows)


def test_without_experts_the_curve_is_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["granite-4.0-350m"]), "utf-8")
    assert verify_curve(planned_bundle(tmp_path).target, 7, "native", lambda n: n * n) == 49
