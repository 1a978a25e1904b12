"""Processes of the tests share the cores: libraries must be configured before they start threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

TASKS = Path("/proc/self/task")


def test_a_product_on_all_threads() -> None:
    """Large enough for all threads that there are; how many is what the other test reads."""
    square = np.ones((512, 512), np.float32)
    assert (square @ square)[0, 0] == 512
    print("threads:", len(list(TASKS.iterdir())) if TASKS.is_dir() else 0)  # noqa: T201


@pytest.mark.skipif(not TASKS.is_dir(), reason="this system does not list a process's threads")
@pytest.mark.parametrize("wanted", [1, 2])
def test_linear_algebra_has_one_thread_unless_told_otherwise(wanted: int) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    if wanted > 1:
        environment["OPENBLAS_NUM_THREADS"] = str(wanted)
    options = ["-m", "pytest", "-n0", "--noconftest", "--timeout=0", "-s", "-k", "product_on_all_threads"]
    command = [sys.executable, *options, __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert f"threads: {min(wanted, os.cpu_count() or 1)}\n" in done.stdout, done.stdout + done.stderr
