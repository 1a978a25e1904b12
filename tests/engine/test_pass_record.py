"""What a process finds of a bundle's passes is known to the next one, for a day or for good."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from edgespec.engine.loading import load
from edgespec.engine.pass_record import LASTS
from edgespec.formulas.cost import time_turns
from edgespec.runtimes.slots.cpu import rows_exact
from tests.support.requests import PROMPT


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note what is timed and proven, in a cache of this test's own."""
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))
    done: list[str] = []

    def timed(runs: Mapping[int, Callable[[], object]], *rest: Any, **how: Any) -> dict[int, list[float]]:
        done.append("timed")
        return time_turns(runs, *rest, **how)

    def proven(slot: Any) -> bool:
        done.append("proven")
        return rows_exact(slot)

    monkeypatch.setattr("edgespec.engine.sessions.time_turns", timed)
    monkeypatch.setattr("edgespec.engine.loaded.rows_exact", proven)
    return done


@pytest.fixture
def ask(bundles: Callable[..., Path], work: list[str]) -> Callable[..., list[str]]:
    """Return a function that asks a new engine, and returns what it timed and proved."""

    def asked(**options: Any) -> list[str]:
        work.clear()
        with load(bundles("native", "int8"), **{"threads": 1, "operators": "native", **options}) as engine:
            result = engine.generate(PROMPT, max_new_tokens=12, ignore_eos=True)
            assert result.exact
        return list(work)

    return asked


def record(tmp_path: Path) -> Path:
    (file,) = (tmp_path / "cache" / "passes").iterdir()
    return file


def test_the_next_engine_begins_at_once(ask: Callable[..., list[str]]) -> None:
    first = ask()
    assert "timed" in first
    assert first.count("proven") == 1
    assert ask() == []


def test_another_way_to_run_is_measured_anew(ask: Callable[..., list[str]]) -> None:
    first = ask()
    assert ask(threads=2) == first
    assert ask(attention="f32") == first


def test_times_are_of_a_day_and_a_proof_is_of_the_program(
    ask: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = [what for what in ask() if what == "timed"]
    later = time.time() + LASTS + 1
    monkeypatch.setattr("edgespec.engine.pass_record.time.time", lambda: later)
    assert ask() == timed


@pytest.mark.parametrize(
    "content", ["", "[]", '{"exact": true}', '{"exact": true, "measured": 0, "times": 7, "seal": ""}']
)
def test_a_record_of_somebody_else_is_not_believed(ask: Callable[..., list[str]], tmp_path: Path, content: str) -> None:
    first = ask()
    record(tmp_path).write_text(content, "utf-8")
    assert ask() == first


def test_a_changed_record_is_not_believed(ask: Callable[..., list[str]], tmp_path: Path) -> None:
    first, file = ask(), record(tmp_path)
    found = json.loads(file.read_text("utf-8"))
    found["times"]["verify"]["1"] *= 2
    file.write_text(json.dumps(found), "utf-8")
    assert ask() == first


def test_rows_that_differ_are_proven_again(
    ask: Callable[..., list[str]], bundles: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("edgespec.engine.loaded.rows_exact", lambda slot: False)
        with load(bundles("native", "int8"), threads=1, operators="native") as engine:
            assert not engine.rows_exact()
    assert "proven" in ask()


def test_without_a_cache_nothing_is_lost(
    ask: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("EDGESPEC_CACHE", str(blocked))
    assert ask() == ask() != []
