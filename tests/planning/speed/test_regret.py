"""The benchmark of predictions: errors, the regret of following them, prompts of a model's own, and one small run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.prediction import Row, best_predicted, compare, own_prompts, regret, summary, table
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.reports.calibrate import calibrate
from edgespec.runtimes.options import LoadOptions
from tests.conftest import THREADS


def row(method: str, predicted: float, measured: float, bundle: str = "a") -> Row:
    return Row(bundle, method, {"calibrated": predicted, "exported": 1.0}, measured, measured, measured, 1.0)


ROWS = [row("ngram", 1.2, 1.1), row("speculative", 1.5, 1.4), row("medusa", 1.3, 1.6)]


def test_regret_is_what_the_pick_is_slower_than_the_fastest() -> None:
    assert regret(ROWS) == {"a": pytest.approx(1 - 1.4 / 1.6)}
    assert regret(ROWS, lambda rows: "medusa") == {"a": 0.0}
    assert regret(ROWS, lambda rows: "ar") == {"a": pytest.approx(1 - 1 / 1.6)}
    slower = [row("ngram", 1.02, 0.9, "b"), row("medusa", 0.9, 0.8, "b")]
    assert best_predicted(slower) == "ar"  # nothing is clearly faster
    assert regret([*ROWS, *slower])["b"] == 0.0


def test_errors_by_basis() -> None:
    found = summary(ROWS)
    assert list(found) == ["calibrated", "exported"]
    errors = [1.2 / 1.1 - 1, 1.5 / 1.4 - 1, 1 - 1.3 / 1.6]
    assert found["calibrated"]["mean_error"] == pytest.approx(sum(errors) / 3, abs=1e-3)
    assert found["calibrated"]["largest_error"] == pytest.approx(errors[2], abs=1e-3)
    assert found["calibrated"]["within_15_percent"] == "2/3"
    assert found["exported"]["mean_regret"] == pytest.approx(1 - 1 / 1.6, abs=1e-3)
    lines = table(ROWS).splitlines()
    assert len(lines) == 5
    assert lines[2].startswith("| a | `ngram` | 1.10 ")
    assert lines[2].endswith("| 1.20 | 1.00 | +9% |")


@pytest.fixture
def engine(bundles: Callable[..., Path], native: None) -> Engine:
    return load(bundles("native"), threads=THREADS, budget="off")


def test_prompts_of_a_models_own_are_the_same_in_every_run(engine: Engine) -> None:
    drawn = own_prompts(engine, 4, seed=1, draw=24)
    assert drawn == own_prompts(engine, 4, seed=1, draw=24)
    assert [len(prompt) for prompt in drawn] == [9, 17, 25, 9]
    assert len({tuple(prompt[1:]) for prompt in drawn}) == 4
    assert own_prompts(engine, 2, seed=3, draw=24)[0][1:9] == drawn[2][1:9]  # a text is its seed's


def test_a_small_run(engine: Engine) -> None:
    prompts = [[1, 2, 3], [4, 5, 6]]
    options = LoadOptions(threads=THREADS, context=200)
    profile = calibrate(engine.bundle, options, seconds=0.2, prompts=((7, 8, 9), (5, 6)))
    (found,) = compare(engine, profile, prompts, new=8, repeats=1, other=profile, methods=["ngram"])
    assert found.method == "ngram"
    assert set(found.predicted) == {"calibrated", "formula", "exported", "scaled"}
    assert all(0 < speed < float("inf") for speed in found.predicted.values())
    assert found.low <= found.measured <= found.high
    assert found.tokens_per_round >= 1
