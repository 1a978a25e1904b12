"""Calibration: what is measured, how often, in what time; the clock is a fake, no test asserts a time."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgespec.runtimes.devices.driver_check as opening
import edgespec.runtimes.opening as models
from edgespec.decoding.settings import DraftOptions
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.formulas.cost import LEAST, MOST
from edgespec.planning import profiles as quiet
from edgespec.planning.budget import Available
from edgespec.planning.profiles import Profile, find_profile, manifest_hash, prompts_digest, save_profile
from edgespec.planning.speed import speed_of
from edgespec.planning.traffic import kv_token_bytes, read_bytes
from edgespec.reports.calibrate import FEWEST_NEW, KV_SHARE, LEARN, ROWS, SHARES, Calibrator, calibrate
from edgespec.runtimes.devices import webgpu as devices
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.manifest import GoldenVector
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.options import LoadOptions, RunOptions
from edgespec.runtimes.slots.slot import Slot
from tests.conftest import DRAFT, HEAD_METHODS, TARGET, THREADS, fixed_skip_set, use_operators
from tests.reports.test_bench import Ticks
from tests.support.device import HostModel

calibrating = importlib.import_module("edgespec.reports.calibrate")
OWN = ((1, 2, 3), (4, 5, 6, 7), (8, 9))
METHODS = ["ngram", "speculative", "self-spec", "swift", *HEAD_METHODS]
STEPS = {"speculative", "self-spec", "swift", "medusa", "blockwise", "paradecode"}


@pytest.fixture(params=["native", "stock"])
def operators(request: pytest.FixtureRequest) -> Any:
    return use_operators(request)


@pytest.fixture
def opened(bundles: Callable[..., Path]) -> Bundle:
    """Make a bundle with every method, in the native layout."""
    return Bundle.open(bundles("native"), check=False)


def short(seconds: float = 0.3, prompts: Any = OWN, context: int | None = 200, **load: Any) -> dict[str, Any]:
    """Return options of a short calibration; these bundles include no prompts."""
    options = LoadOptions(threads=THREADS, context=context, **load)
    return {"options": options, "seconds": seconds, "prompts": prompts}


# -- a bundle, with native and stock operators -------------------------------------------------------------------------


def test_everything_is_measured(opened: Bundle, operators: Any) -> None:
    stages: list[str] = []
    made = calibrate(
        opened, **short(operators=operators), process=12345, progress=lambda stage, *_: stages.append(stage)
    )
    assert list(dict.fromkeys(stages)) == list(SHARES)
    assert Profile.model_validate_json(made.model_dump_json()) == made
    assert (made.operators, made.threads, made.context, made.process_bytes) == (operators, THREADS, 200, 12345)
    assert made.attention == ("f32" if operators == "stock" else "f16")
    assert made.bundle == manifest_hash(opened.manifest)
    assert made.weight_bytes == read_bytes(opened.manifest.target, operators)
    assert set(made.passes) == {64, 182}
    assert all(tuple(times) == ROWS and min(times.values()) > 0 for times in made.passes.values())
    assert set(made.plain) == set(made.passes)
    assert set(made.drafts) == STEPS
    assert all(set(times) == {64, 182} for times in made.drafts.values())
    assert set(made.prefill) == {64}
    assert made.rows_exact
    assert set(made.trials) == {"ar", *METHODS}
    for name, found in made.trials.items():
        assert found.tokens >= found.rounds >= 1
        assert sum(found.rows.values()) == found.rounds
        assert sum((rows - 1) * count for rows, count in found.rows.items()) == found.drafted
        assert sum(found.accepted_at) <= found.accepted or name == "medusa"
        assert found.round_ms > 0
    assert made.trials["ar"].speedup == pytest.approx(1)
    assert made.prompts == prompts_digest(OWN)
    assert not made.notes


def test_a_drafter_has_two_costs(tmp_path: Path, native: None) -> None:
    """The first step of a round has its own cost, in the manifest, in the profile, and where control starts."""
    manifest = export_model(
        ExportOptions("builtin:shakespeare", tmp_path / "bundle", ["eagle"], threads=1), golden=False
    )
    assert (manifest.methods["eagle"].first_cost or 0) > 0
    made = calibrate(Bundle.open(tmp_path / "bundle"), **short(0.1), trials=False)
    assert set(made.first_drafts) == {"eagle"}
    assert set(made.first_drafts["eagle"]) == set(made.drafts["eagle"]) == {64, 182}
    assert min(made.first_drafts["eagle"].values()) > 0
    with load(tmp_path / "bundle", threads=1) as engine:
        session = engine.sessions.take([])
        session.policy(engine.choose("eagle"), None, True, True, DraftOptions())
        assert set(session._experience.times) >= {
            "verify",
            "eagle",
            "eagle, first",
        }  # both steps were timed here and now
        assert not session._open_draft("drafter").tokens
        engine.sessions.drop(session)


def test_what_was_measured_predicts(opened: Bundle, operators: Any) -> None:
    made = calibrate(opened, **short(operators=operators))
    for method, found in made.trials.items():
        if method != "ar":
            use = RunOptions(method, operators, 200, threads=THREADS)
            speed = speed_of(opened.manifest, use, made)
            assert speed.basis == "calibrated"
            assert speed.speedup == pytest.approx(found.speedup)


def test_prompts_are_the_bundles_or_ones_own(opened: Bundle) -> None:
    golden = [GoldenVector(prompt=list(prompt), method="ar", tokens=[1]) for prompt in OWN]
    known = Bundle(opened.path, opened.manifest.model_copy(update={"golden": golden}))
    made, own, none = (
        calibrate(bundle, **short(0.1, prompts)) for bundle, prompts in ((known, ()), (known, OWN), (opened, ()))
    )
    assert made.trials
    assert own.trials
    assert (made.prompts, own.prompts) == ("", prompts_digest(OWN))
    assert own.prompts != prompts_digest(OWN[:1])
    assert none.trials == {}
    assert any("no prompts" in note for note in none.notes)
    assert calibrate(opened, **short(0.1), trials=False).trials == {}


def test_a_method_that_fails_costs_only_itself(opened: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgespec.drafters.heads import Medusa

    def broken(self: object, *_: object) -> None:
        raise RuntimeError("no heads today")

    monkeypatch.setattr(Medusa, "begin", broken)
    made = calibrate(opened, **short())
    assert "medusa" not in made.trials
    assert "ngram" in made.trials
    assert any("medusa failed" in note and "no heads today" in note for note in made.notes)


# -- limits ------------------------------------------------------------------------------------------------------------


def test_passes_follow_the_clock(opened: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    def count(seconds: float) -> int:
        ran: Counter[int] = Counter()

        def counted(slot: Slot, rows: int) -> Callable[[], object]:
            return lambda: ran.update([rows])

        monkeypatch.setattr(calibrating, "pass_over", counted)
        made = Calibrator(opened, **short(seconds=seconds), clock=Ticks(0.01))
        made.begun = 0.0
        made._passes(open_slot(made.engine.model), [10])
        assert len(set(ran.values())) == 1  # each size as often as the others
        return ran[1]

    assert count(0.0) == 1 + LEAST
    assert count(1e9) == 1 + MOST
    # a turn of 6 sizes takes 0.13 by this clock; a third of the limit is for passes
    assert 1 + LEAST < count(2.5) < 1 + MOST


@pytest.mark.parametrize(("step", "depths"), [(1e-9, [5, 10, 20, 30]), (0.001, [5, 10, 20]), (1.0, [5, 10])])
def test_the_deepest_passes_are_left_out_when_time_is_up(
    opened: Bundle, monkeypatch: pytest.MonkeyPatch, step: float, depths: list[int]
) -> None:
    monkeypatch.setattr(calibrating, "pass_over", lambda slot, rows: lambda: None)
    # by the second of these clocks a depth's fewest turns take .05, and .11 are for all of them
    made = Calibrator(opened, **short(seconds=0.3), clock=Ticks(step))
    made.begun = 0.0
    made._passes(open_slot(made.engine.model), [5, 10, 20, 30])
    assert list(made.passes) == list(made.one_row) == depths
    assert bool(made.notes) == (len(depths) < 4)
    assert all(f"beyond depth {depths[-1]}" in note for note in made.notes)


def test_a_busy_machine_is_tried_again_and_the_steadiest_try_counts(
    opened: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quiet, "BUSY", 1.5)
    now = [0.0]

    def passes(*tries: float) -> list[float]:
        """Return milliseconds of one row, their spread, and the turns.

        ``tries``: seconds of every second turn of each try.
        """
        turns: Counter[int] = Counter()

        def over(slot: Slot, rows: int) -> Callable[[], object]:
            def run() -> None:
                at, turn = divmod(turns[rows], 1 + LEAST)
                now[0] += tries[at] if turn % 2 else 1.0
                turns[rows] += 1

            return run

        monkeypatch.setattr(calibrating, "pass_over", over)
        made = Calibrator(opened, **short(seconds=0.0), clock=lambda: now[0])
        made.begun = now[0]
        made._passes(open_slot(made.engine.model), [10])
        return [made.passes[10][1], made.spread, turns[1]]

    # of the turns of a try that are timed two are slow and one is not
    assert passes(1.0) == [1000.0, 1.0, 1 + LEAST]
    assert passes(4.0, 1.0) == [1000.0, 1.0, 2 * (1 + LEAST)]
    assert passes(9.0, 4.0, 7.0) == pytest.approx([4000.0, 4 / 2.5, 3 * (1 + LEAST)])


def test_later_parts_have_what_is_left(opened: Bundle) -> None:
    now = [0.0]
    made = Calibrator(opened, **short(seconds=10.0), clock=lambda: now[0])
    made.begun = 0.0
    assert made._seconds("passes") == pytest.approx(10 * SHARES["passes"])
    assert made._seconds("trials") == pytest.approx(10)
    now[0] = 6.0
    assert made._seconds("trials") == pytest.approx(4)
    assert made._seconds("drafts") == pytest.approx(4 * SHARES["drafts"] / (SHARES["drafts"] + SHARES["trials"]))
    now[0] = 60.0
    assert made._seconds("trials") == 0


@pytest.mark.parametrize(("step", "timed"), [(100.0, 1), (1e-9, 4)])
def test_trials_end_in_time(opened: Bundle, step: float, timed: int) -> None:
    told: list[int] = []
    parts = {name: opened.manifest.methods[name] for name in ("ar", "ngram")}
    known = Bundle(opened.path, opened.manifest.model_copy(update={"methods": parts}))
    made = Calibrator(known, **short(10.0), progress=lambda _, done, *__: told.append(done), clock=Ticks(step))
    made.begun = 0.0
    found = made._trials(1e9)
    assert not made.notes
    assert max(told) == LEARN + timed - 1
    assert found["ar"].tokens == timed * FEWEST_NEW


def test_depths_end_where_memory_does(opened: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Calibrator(opened, **short(context=None), clock=Ticks(0.0))
    context = opened.manifest.target.facts.context
    assert made._depths() == [64, 512, context - 18]
    assert not made.notes
    token = kv_token_bytes(opened.manifest.target, "native")
    for free, depths in ((100, [64, 100]), (80, [64]), (7, [7]), (0, [1])):  # tokens whose keys may be held
        known = Available(1 << 30, int(free * token / KV_SHARE), "the machine")
        monkeypatch.setattr(calibrating, "available_memory", lambda known=known: known)
        assert made._depths() == depths
    assert "memory" in made.notes[0]


def test_a_tiny_context(opened: Bundle) -> None:
    made = calibrate(opened, **short(context=20))
    assert set(made.passes) == {2}
    assert list(made.prefill) == [0]
    tiny = calibrate(opened, **short(context=8))
    assert max(tiny.passes[1]) == 5  # rows that fit


# -- slots -------------------------------------------------------------------------------------------------------------


def test_a_stand_in_is_a_slot_at_a_depth(opened: Bundle, operators: Any) -> None:
    engine = Engine(opened, LoadOptions(threads=THREADS, operators=operators))
    slot = open_slot(engine.model, context=400)
    slot.stand_in(300)
    assert len(slot.tokens) == 300
    assert slot.capacity >= 300
    assert np.isfinite(slot.forward(np.zeros(3, np.int64)).logits).all()
    kept = slot.snapshot()
    assert all(not array.any() for array in kept.values())
    # what is prefilled afterwards is as on a new slot
    slot.follow([])
    slot.prefill([5, 6, 7])
    fresh = open_slot(engine.model, context=400)
    fresh.prefill([5, 6, 7])
    token = np.array([8], np.int64)
    np.testing.assert_array_equal(slot.forward(token).logits.copy(), fresh.forward(token).logits)


# -- a device ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device webgpu is the host."""
    monkeypatch.setattr(opening, "try_apart", opening.try_here)
    monkeypatch.setattr(opening, "DeviceModel", HostModel)
    monkeypatch.setattr(models, "DeviceModel", HostModel)


@pytest.mark.usefixtures("on_host")
def test_a_device_is_measured_as_well(tmp_path: Path) -> None:
    options = ExportOptions(
        TARGET,
        tmp_path / "bundle",
        ["speculative", "self-spec", "swift", "medusa"],
        "fp32",
        draft=DRAFT,
        skip_set=fixed_skip_set(tmp_path, TARGET),
        threads=1,
        devices=("webgpu",),
    )
    export_model(options, golden=False)
    opened = Bundle.open(options.output, check=False)
    made = calibrate(opened, LoadOptions(threads=1, device="webgpu", context=300), seconds=0.1, prompts=OWN)
    assert (made.device, made.operators) == ("webgpu", "stock")
    assert made.machine.driver == devices.driver()
    assert set(made.trials) == {"ar", "ngram", "speculative", "self-spec", "medusa"}  # swift cannot run there
    assert max(made.passes) <= 300 - max(ROWS) - 1
    save_profile(made)
    assert find_profile(opened.manifest, LoadOptions(threads=1, device="webgpu")) == made
    assert find_profile(opened.manifest, LoadOptions(threads=1)) is None
    use = RunOptions("speculative", "stock", 300, threads=1, device="webgpu")
    assert speed_of(opened.manifest, use, made).basis == "calibrated"
    cpu = RunOptions("speculative", "stock", 300, threads=1)
    assert speed_of(opened.manifest, cpu, made).basis != "calibrated"
