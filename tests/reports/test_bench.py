"""Measurements of methods and passes, the advice that rests on them, and how they are timed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.decoding.settings import Settings
from edgespec.decoding.stats import RoundTime, Stats
from edgespec.engine.engine import Engine
from edgespec.engine.inputs import Prompt
from edgespec.engine.result import Result
from edgespec.errors import InvalidRequest
from edgespec.formulas.cost import LEAST, MOST, medians, spread, time_turns
from edgespec.reports.advice import advise, label
from edgespec.reports.bench import BASELINE, MethodFigures, bench_all, bootstrap, check_output
from edgespec.reports.calibrate import FEWEST_NEW, NEW, _length, make_trials, mean_round, pass_times
from edgespec.reports.measuring import profile_passes
from edgespec.reports.pages import plot
from edgespec.runtimes.ort.native_library import PARTS, RooflineLimits
from tests.conftest import PROMPTS

Get = Callable[..., Engine]


RATIOS = st.lists(st.floats(0.125, 8), min_size=1, max_size=12)
SLOW = settings(max_examples=20, deadline=None)


@SLOW
@given(values=RATIOS, factor=st.sampled_from([0.25, 2.0, 16.0]))
def test_an_interval_lies_among_the_values_and_scales_with_them(values: list[float], factor: float) -> None:
    low, high = bootstrap(values)
    inner = bootstrap(values, share=0.5)
    assert min(values) <= low <= inner[0] <= inner[1] <= high <= max(values)
    assert (low, high) == bootstrap(values)  # the same every time
    assert bootstrap([factor * value for value in values]) == (factor * low, factor * high)
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
        "unverified": [],
        "same_text": 1,
        "runs": 2,
        "extra_bytes": 7,
        "reason": "after 7",
        "bundle": "",
        "format": "",
        "weight_bytes": 0,
        "batch_tokens_per_second": None,
    }
    nothing = MethodFigures("ar", [1.0], [1.0], [result(0, 0, 0, 0)]).as_dict()
    assert (nothing["tokens_per_round"], nothing["acceptance_rate"]) == (0, 0)


def test_methods_take_turns(engine: Get) -> None:
    seen: list[tuple[int, int, str]] = []
    wanted = Settings(max_new_tokens=12, ignore_eos=True)
    prompts: list[Prompt] = [PROMPTS[0], engine().codec.encode(PROMPTS[1])]
    found = bench_all([(engine(), ["ngram", "self-spec"])], prompts, wanted, 2, progress=lambda *at: seen.append(at))
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
    plot([one.as_dict() for one in found], tmp_path / "speed.png", r"$\bad{$ title")
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_that_cannot_be_written_is_refused_early(tmp_path: Path) -> None:
    check_output(tmp_path / "x.png", ".png")
    for name in ("x.svg", "x", "none/x.png"):
        with pytest.raises(InvalidRequest):
            check_output(tmp_path / name, ".png")


class Ticks:
    """A clock that advances by ``step`` seconds whenever it is read."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


@pytest.mark.parametrize(
    ("step", "seconds", "turns"), [(1.0, 0.0, LEAST), (0.001, 1e9, MOST), (1.0, 25.0, 6), (1.0, 1e9, MOST)]
)
def test_how_often_is_what_time_allows(step: float, seconds: float, turns: int) -> None:
    ran: Counter[str] = Counter()
    # a turn reads the clock once for the limit (from the fourth on) and twice for each of two timed runs
    runs = {name: lambda name=name: ran.update([name]) for name in ("a", "b")}
    times = time_turns(runs, seconds, Ticks(step))
    assert medians(times) == {"a": pytest.approx(1000 * step), "b": pytest.approx(1000 * step)}
    assert ran == {"a": 1 + turns, "b": 1 + turns}


def test_runs_take_turns_and_are_prepared() -> None:
    order: list[str] = []
    runs = {name: lambda name=name: order.append(name) for name in ("a", "b")}
    time_turns(runs, 0.0, Ticks(1.0), prepare=lambda name: order.append(f"for {name}"), least=2)
    assert order == ["for a", "a", "for b", "b"] * 3
    order.clear()
    time_turns(runs, 0.0, Ticks(1.0), least=1, warm=0)
    assert order == ["a", "b"]


def test_times_of_each_turn_and_how_they_differ() -> None:
    now, slow = [0.0], iter([0, 0, 1, 2, 3, 4])
    times = time_turns({"a": lambda: now.__setitem__(0, now[0] + 1 + next(slow))}, 0, lambda: now[0], least=5)
    assert times == {"a": [1000.0, 2000.0, 3000.0, 4000.0, 5000.0]}
    assert medians(times) == {"a": 3000.0}
    assert spread(times["a"]) == 2  # 4 s over 2 s
    assert spread([7.0]) == spread([7.0] * 9) == 1


@pytest.mark.parametrize(
    ("seconds", "step_ms", "room", "tokens"),
    [
        (8.0, 10.0, 1000, 40),  # four texts, five runs each, 10 ms a token
        (7.5, 1.0, 1000, NEW),
        (7.5, 500.0, 1000, FEWEST_NEW),
        (7.5, 1.0, 10, 9),
        (7.5, 1.0, 1, 1),
    ],
)
def test_texts_are_as_long_as_time_allows(seconds: float, step_ms: float, room: int, tokens: int) -> None:
    assert _length(seconds, step_ms, 5, room) == tokens


def text(rounds: Sequence[tuple[int, float, float]], tokens: int = 0, other: float = 0.0) -> Result:
    """Make a text of rounds of (rows, drafts, pass) with their other time, in milliseconds."""
    made = result(tokens, len(rounds), 0, 0)
    made.stats.other_ms = other * len(rounds)
    made.stats.recent.extend(RoundTime(draft, ms, rows, drafted=rows - 1) for rows, draft, ms in rounds)
    return made


def test_a_mean_round_is_made_of_medians() -> None:
    texts = [
        text([(1, 0, 10), (3, 1, 20)], 4, 0.5),
        text([(1, 0, 11), (3, 3, 30)], 4, 0.7),
        text([(1, 0, 900)], 2, 9.0),
    ]
    found = mean_round(texts, pass_times(texts))
    assert found == pytest.approx(((3 * 0 + 2 * 2) / 5, (3 * 11 + 2 * 25) / 5, 0.7))


def test_passes_over_the_same_graph_are_timed_together() -> None:
    plain, slow = text([(1, 0, 10)] * 3, 3), text([(1, 1, 12)] * 2, 2)  # one in a slow moment
    drafting, exits = text([(1, 1, 11)] * 4 + [(2, 2, 15)] * 4, 12), text([(1, 5, 6)] * 2, 2)
    texts = {"ar": [plain], "ngram": [slow], "speculative": [drafting], "paradecode": [exits]}
    found, apart = make_trials(texts, apart=False), make_trials(texts, apart=True)
    assert found["ar"].speedup == pytest.approx(1)
    assert found["ngram"].verify_ms == found["ar"].verify_ms == 11.0
    assert found["ngram"].speedup == pytest.approx(11 / 12)  # its drafter cost 1 ms, its passes what all do
    assert found["speculative"].speedup == pytest.approx(1.5 * 11 / (1.5 + 13))
    assert found["speculative"].rows == {1: 4, 2: 4}
    assert found["paradecode"].speedup == pytest.approx(11 / 11)  # layers had run before
    assert apart["ar"].verify_ms == 10.0  # a separate graph
    assert apart["ngram"].verify_ms == 11.0


@pytest.mark.parametrize("operators", ["native"], indirect=True)
def test_parts_of_a_pass(engine: Callable[..., Engine]) -> None:
    target = engine()
    facts = target.bundle.manifest.target.facts
    found = profile_passes(target, rows=(1, 4), depth=50, turns=1)
    assert ([row["rows"] for row in found["passes"]], found["depth"]) == ([1, 4], 50)
    one, four = (row["parts"] for row in found["passes"])
    for row in found["passes"]:
        assert list(row["parts"]) == list(PARTS)
        assert sum(part["ms"] for part in row["parts"].values()) == pytest.approx(row["ms"] - row["python_ms"])
        assert row["least_ms"] > 0
        assert row["python_ms"] > 0
    assert found["passes"][0]["v"] == 1
    assert four["linear"]["gmac"] == pytest.approx(4 * one["linear"]["gmac"])
    assert four["linear"]["mb"] == one["linear"]["mb"]  # weights are read once
    assert one["head"]["gmac"] >= facts.vocab * facts.hidden / 1e9
    tokens = one["attention"]["gmac"] * 1e9 / (2 * facts.kv_layers * facts.heads * -(-facts.head_dim // 16) * 16)
    assert tokens == pytest.approx(51)
    target.generate("ROMEO:", max_new_tokens=4)  # is not counted: a profile begins with nothing
    again = profile_passes(target, rows=(2,), depth=50, turns=1)["passes"][0]["parts"]
    assert again["linear"]["gmac"] == pytest.approx(2 * one["linear"]["gmac"])


def test_stock_operators_are_refused(engine: Callable[..., Engine]) -> None:
    with pytest.raises(InvalidRequest, match="native operators"):
        profile_passes(engine())


def test_the_higher_roof_counts() -> None:
    roofs = RooflineLimits(bandwidth=10.0, dots=100.0)
    assert roofs.seconds(20, 100) == 2.0
    assert roofs.seconds(20, 400) == 4.0


def row(bundle: str, method: str, speed: float, **changes: Any) -> dict[str, Any]:
    made = {
        "bundle": bundle,
        "format": bundle,
        "method": method,
        "tokens_per_second": speed,
        "speedup": 1.0,
        "speedup_low": 1.0,
        "speedup_high": 1.0,
        "lossless": True,
        "extra_bytes": 0,
        "weight_bytes": {"int4": 50, "int8": 100}.get(bundle, 70),
        "batch_tokens_per_second": None,
    }
    return made | changes


PARITY = {"int4": {"top1_agreement": 0.9, "logit_rms_error": 0.3}, "int8": {"top1_agreement": 0.99}}
PLAIN4, PLAIN8 = row("int4", "plain", 100), row("int8", "plain", 60)
FAST4 = row("int4", "speculative", 150, speedup=1.5, speedup_low=1.3, extra_bytes=20)
FAST8 = row("int8", "speculative", 120, speedup=2.0, speedup_low=1.8, extra_bytes=20)
DOUBTFUL = row("int4", "ngram", 170, speedup=1.2, speedup_low=0.9)
FREE = row("int4", "self-spec", 110, speedup=1.1, speedup_low=1.05)
ROWS = [PLAIN4, FAST4, DOUBTFUL, FREE, PLAIN8, FAST8]


def test_four_situations() -> None:
    chat, batch, memory, quality = advise(ROWS, PARITY)
    assert (chat.format, chat.method, chat.faster_than_plain, len(chat.evidence)) == ("int4", "speculative", True, 6)
    assert (batch.format, batch.method, batch.measured) == ("int4", "ar", False)
    assert "derived, not measured" in batch.why
    assert batch.evidence == ["int4 plain", "int8 plain"]
    assert (memory.format, memory.method) == ("int4", "self-spec")
    assert memory.evidence == ["int4 plain", "int4 ngram", "int4 self-spec"]
    assert (quality.format, quality.method) == ("int8", "speculative")
    assert "top-1 agreement 99.0%" in quality.why


def test_it_says_when_nothing_pays() -> None:
    for item in advise([PLAIN4, DOUBTFUL], {}):
        assert (item.method, item.faster_than_plain) == ("ar", False)
    chat, _, memory, quality = advise([PLAIN4, DOUBTFUL], {})
    assert all("no method is surely faster" in item.why for item in (chat, memory, quality))
    assert "no bundle has parity figures" in quality.why
    assert not quality.measured


def test_batches_are_judged_by_their_own_figures() -> None:
    rows = [PLAIN4 | {"batch_tokens_per_second": 300.0}, FAST4 | {"batch_tokens_per_second": 250.0}]
    batch = advise(rows, {})[1]
    assert (batch.method, batch.measured) == ("ar", True)
    assert "no method is faster than plain decoding in a batch" in batch.why
    rows[1]["batch_tokens_per_second"] = 350.0
    batch = advise(rows, {})[1]
    assert (batch.method, batch.faster_than_plain) == ("speculative", True)
    assert "350.0, plain decoding 300.0" in batch.why


def test_lossy_rows_are_named_so_and_are_no_quality() -> None:
    lossy = FAST4 | {"lossless": False}
    chat, *_, quality = advise([PLAIN4, lossy, FREE], PARITY)
    assert "(lossy)" in chat.why
    assert quality.method == "self-spec"
    # a run under a lossy rule calls all its rows lossy, but plain decoding gives nothing away
    *_, quality = advise([PLAIN4 | {"lossless": False}, lossy], PARITY)
    assert (quality.method, "(lossy)" in quality.why) == ("ar", False)


def test_bundles_of_one_format_are_told_apart_by_folder() -> None:
    rows = [row("a/x", "plain", 1, format="int4"), row("b/y", "plain", 1, format="int4"), PLAIN8]
    assert [label(at, rows) for at in rows] == ["x plain", "y plain", "int8 plain"]
