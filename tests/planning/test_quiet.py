"""Figures of a busy machine are marked."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from edgespec.planning import profiles as quiet
from edgespec.planning.profiles import Watch, busy_words, export_busy


@pytest.fixture(autouse=True)
def bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of users; tests lift them."""
    monkeypatch.setattr(quiet, "BUSY", 1.5)
    monkeypatch.setattr(quiet, "OTHERS", 0.2)


def test_words() -> None:
    assert busy_words(1.49, 0.19) == ""
    assert busy_words(1.0, None) == ""  # a system that does not tell
    assert busy_words(1.5, 0.2) == (
        "the machine was busy: timings varied 1.5x (interquartile), and other programs took 20% of the processors"
    )
    assert export_busy({}) == ""  # bundles of older versions
    assert "2.0x" in export_busy({"spread": 2.0})


@pytest.mark.skipif(not Path("/proc/stat").is_file(), reason="reads /proc/stat")
def test_a_child_is_its_own_work_and_a_stranger_is_not() -> None:
    """Processor time of child processes of this one counts as its own; time of any other process does not."""
    work = "import time\nend = time.process_time() + 1\nwhile time.process_time() < end: pass"
    watch, begun = Watch(), time.perf_counter()
    stranger = subprocess.Popen([sys.executable, "-c", work])  # not waited for: not yet counted as a child's
    time.sleep(0.5)
    alone = watch.others()
    while time.perf_counter() - begun < 3 and stranger.poll() is None:
        time.sleep(0.05)
    stranger.wait(60)
    assert alone is not None
    assert alone > 0
    assert (last := watch.others()) is not None
    assert 0 <= last <= 1
