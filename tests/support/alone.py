"""Serialize the work of several processes of one test run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

if sys.platform != "win32":
    from fcntl import LOCK_EX, flock


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Wait until no other process holds the lock of this file; it ends with the process at the latest."""
    with path.open("w") as file:
        if sys.platform != "win32":
            flock(file, LOCK_EX)
        yield


def common(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the folder that all processes of a run have in common."""
    place = tmp_path_factory.getbasetemp()
    return place.parent if "PYTEST_XDIST_WORKER" in os.environ else place
