"""Commands that are killed, engines that live long: a short form of what ``python -m tests.stress`` does for hours."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.stress.life import Held, Life, live, open_and_close

ROOT = Path(__file__).resolve().parents[2]
linux = pytest.mark.skipif(sys.platform != "linux", reason="disks, signals and /proc are those of Linux")


def stress(*arguments: object, timeout: float) -> dict[str, Any]:
    """Return the report of ``python -m tests.stress``, in which nothing is wrong."""
    command = [sys.executable, "-m", "tests.stress", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=timeout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(report, dict)
    return report


@pytest.mark.usefixtures("native")
@linux
def test_killed_or_without_a_disk(tmp_path: Path) -> None:
    jobs = ("--job", "conversion", "--job", "ngram build")
    events = ("--event", "SIGKILL", "--event", "SIGTERM", "--event", "ENOSPC", "--event", "EACCES")
    report = stress("kills", "--moments", 1, *jobs, *events, timeout=600)
    assert len(report) == 8
    assert all(sum(one["ended"].values()) == 1 for one in report.values())


def test_a_life_is_judged_by_its_quarters() -> None:
    def life(*rss: int) -> Life:
        return Life([Held(0.0, one << 20, 0, 0, 0, 9, 1) for one in rss])

    flat, grown = life(9, 9, 200, 200, 201, 199, 201, 201), life(9, 9, 200, 200, 202, 203, 204, 204)
    assert flat.quarters("rss") == [9 << 20, 200 << 20, 200 << 20, 201 << 20]
    assert flat.growth("rss") == pytest.approx(1 / 200)
    assert flat.verdict().endswith("\nflat")
    assert "rss: quarters 9.0, 200.0, 202.5, 204.0 MiB; the last over the second +2.0%" in grown.verdict()
    assert grown.verdict().endswith("NOT flat: more than 1%")
    assert life(5, 6).verdict().endswith("\nflat")  # too short to be judged


@linux
def test_mixed_requests_write_what_plain_decoding_writes(bundles: Callable[..., Path]) -> None:
    life = live([bundles("stock")], seed=5, seconds=600, most=40, most_threads=1)
    assert life.wrong == []
    assert sum(life.requests.values()) == 40


@linux
def test_engines_opened_and_closed_keep_no_descriptor(bundles: Callable[..., Path]) -> None:
    life = open_and_close(bundles("stock"), 12, time.monotonic())
    assert life.wrong == []
    assert life.held[-1].descriptors == life.held[5].descriptors
    assert life.held[-1].threads == life.held[5].threads


@linux
@pytest.mark.stress
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("what", ["kills", "life", "engines"])
def test_in_full(what: str) -> None:
    report = stress(what, timeout=4 * 3600)
    for of in ("rss", "descriptors", "threads") if what != "kills" else ():
        assert report[f"growth_{of}"] < 0.01
