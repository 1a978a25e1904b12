"""Programs that some tests need: skipped without them, but not in continuous integration."""

from __future__ import annotations

import os
import shutil

import pytest


def need(*programs: str) -> None:
    """Skip the test where a program is missing, or fail it in continuous integration; the last word says what for."""
    *names, purpose = programs
    missing = [name for name in names if shutil.which(name) is None]
    if missing and os.environ.get("EDGESPEC_CI"):
        pytest.fail(f"continuous integration must have {', '.join(missing)}")
    if missing:
        pytest.skip(f"no {' and no '.join(missing)} {purpose}")
