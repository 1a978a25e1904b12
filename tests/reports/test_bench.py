"""Intervals and figures of a benchmark."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.decoding.settings import Settings
from edgespec.decoding.stats import Stats
from edgespec.engine.engine import Engine, Prompt
from edgespec.engine.result import Result
from edgespec.errors import InvalidRequest
from edgespec.reports.bench import BASELINE, BenchEntry, MethodFigures, bench_all, bootstrap, check_plot, plot
from tests.conftest import PROMPTS

Get = Callable[..., Engine]


RATIOS = st.lists(st.floats(0.125, 8), min_size=1, max_size=12)
SLOW = settings(max_examples=20, deadline=None)


@SLOW
@given(values=RATIOS)
def test_an_interval_lies_among_the_values(values: list[float]) -> None:
    low, high = bootstrap(values)
    assert min(values) <= low <= high <= max(values)
    assert (low, high) == bootstrap(values)  # the same every time


@SLOW
@given(values=RATIOS, factor=st.sampled_from([0.25, 2.0, 16.0]))
def test_an_interval_scales_with_its_values(values: list[float], factor: float) -> None:
    low, high = bootstrap(values)
    assert bootstrap([factor * value for value in values]) == (factor * low, factor * high)


@SLOW
@given(values=RATIOS)
def test_a_smaller_share_is_inside_a_larger(values: list[float]) -> None:
    low, high = bootstrap(values)
    inner = bootstrap(values, share=0.5)
    assert low <= inner[0] <= inner[1] <= high


def test_equal_values_leave_no_doubt() -> None:
    assert bootstrap([1.5]) == bootstrap([1.5] * 9) == (1.5, 1.5)


def test_an_interval_covers_the_true_median_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(3)
    covered = 0
    for _ in range(60):
        low, high = bootstrap(np.exp(generator.normal(0, 0.2, 15)).tolist())
        covered += low <= 1 <= high
    assert covered >= 50


def result(tokens: int, rounds: int, drafted: int, accepted: int, *, exact: bool = True) -> Result:
    stats = Stats(tokens=tokens, rounds=rounds, drafted=drafted, accepted=accepted)
    return Result("", [], "length", stats, None, "ngram", f"after {rounds}", True, exact, [])


def test_figures_of_a_method() -> None:
    figures = MethodFigures(
        "ngram", [2.0, 4.0, 5.0], [1.5, 2.0, 1.0], [result(9, 3, 8, 6), result(11, 7, 8, 4, exact=False)], 1, 7
    )
    assert figures.as_dict() == {
        "method": "ngram",
        "tokens_per_second": 250.0,
        "speedup": 1.5,
        "speedup_low": bootstrap(figures.ratios)[0],
        "speedup_high": bootstrap(figures.ratios)[1],
        "pairs": 3,
        "tokens_per_round": 2.0,
        "acceptance_rate": 0.625,
        "lossless": True,
        "exact": False,
        "unproven": [],
        "same_text": 1,
        "runs": 2,
        "extra_bytes": 7,
        "reason": "after 7",
        "bundle": "",
        "format": "",
        "weight_bytes": 0,
        "batch_tokens_per_second": None,
    }


def test_figures_of_a_method_that_drafted_nothing() -> None:
    figures = MethodFigures("ar", [1.0], [1.0], [result(0, 0, 0, 0)]).as_dict()
    assert (figures["tokens_per_round"], figures["acceptance_rate"]) == (0, 0)


def test_methods_take_turns(engine: Get) -> None:
    seen: list[tuple[int, int, str]] = []
    wanted = Settings(max_new_tokens=12, ignore_eos=True)
    prompts: list[Prompt] = [PROMPTS[0], engine().codec.encode(PROMPTS[1])]
    found = bench_all(
        [BenchEntry(engine(), ["ngram", "self-spec"])], prompts, wanted, 2, progress=lambda *at: seen.append(at)
    )
    assert [figures.method for figures in found] == [BASELINE, "ngram", "self-spec"]
    assert [done for done, _, _ in seen] == list(range(1, 19))
    assert {of for _, of, _ in seen} == {18}
    turns = [tuple(name for _, _, name in seen[at : at + 3]) for at in range(0, 18, 3)]
    assert all(set(turn) == {BASELINE, "ngram", "self-spec"} for turn in turns)
    assert len(set(turns)) == 3  # who begins changes from round to round
    for figures in found:
        assert len(figures.ms_per_token) == len(figures.ratios) == len(figures.results) == 4  # the first is not timed
        assert all(ms > 0 for ms in figures.ms_per_token)
        assert figures.same_text == 4 or figures.method == BASELINE
    for plain, other in zip(found[0].ms_per_token, found[1].ms_per_token, strict=True):
        assert any(math.isclose(plain / other, ratio) for ratio in found[1].ratios)
    assert median(found[0].ratios) == 1


def test_a_plot(tmp_path: Path) -> None:
    found = [MethodFigures(name, [1.0], [ratio], [result(1, 1, 1, 1)]) for name, ratio in ((BASELINE, 1), ("x$y$", 2))]
    plot(found, tmp_path / "speed.png", r"$\bad{$ title")
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_that_cannot_be_written_is_refused_early(tmp_path: Path) -> None:
    check_plot(tmp_path / "x.png")
    for name in ("x.svg", "x", "none/x.png"):
        with pytest.raises(InvalidRequest):
            check_plot(tmp_path / name)
