"""Earlier failures, and a short run of mutants, each in a limited process: clear errors are the worst result."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SEED, COUNT = 20, 12


@pytest.mark.usefixtures("native")
@pytest.mark.skipif(sys.platform != "linux", reason="the judge counts processor time and memory as Linux does")
def test_mutants_of_bundles_and_sources() -> None:
    command = [sys.executable, "-m", "tests.fuzz", "--cases", "--seed", str(SEED), "--count", str(COUNT)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    kept = json.loads(next(line for line in lines if line.startswith('{"cases"')))
    assert (kept["wrong"], kept["cases"] > 50) == ([], True)
    report = json.loads(next(line for line in lines if line.startswith('{"bundle"')))
    assert sum(count for kind in report.values() for count in kind.values()) == COUNT
    assert all(kind["ran"] + kind["clean"] == sum(kind.values()) for kind in report.values())
