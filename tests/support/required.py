"""Allowed skips: a run that names its kind (``EDGESPEC_CI``) fails if it skips anything else."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping

import pytest

HERE = (
    "no telemetry outside of Windows",
    "needs trained models that are not part of the repository",
    "this version of transformers has no",
    "another version of transformers than the kept files are of",
    "there is a GPU",
    "this kernel has no huge pages",
    "less than 4 GiB to spare",
    "this file system",
    "for adapters without float16 shaders",
    "software Vulkan takes minutes",  # a draft in float16
)
"""Reasons that depend on the machine, the versions of packages, or data next to the repository."""
NOTHING_NATIVE = (
    r"no C\+\+ compiler",
    "no native operators here",
    "no javac",
    "no strace",
    "needs device webgpu",
    r"edgespec\[train\]",
    "needs transformers",
    "transformers is not installed",
    "needs onnxruntime-genai",
)
MAY_SKIP: Mapping[str, tuple[str, ...]] = {
    "run": HERE,
    "nightly": (*HERE, "no headers of bionic", "in the folder EDGESPEC_REAL_BUNDLES"),
    "transformers": (*HERE, r"edgespec\[train\]", "is installed: the export"),
    "without_compiler": (*HERE, *NOTHING_NATIVE),
    "avx2": (*HERE, *NOTHING_NATIVE),
}
"""By the name of a run: beginnings or parts of the reasons that it may skip tests for, as regular expressions."""


def need(*programs: str) -> None:
    """Skip the test where a program is missing; the last word says what for."""
    *names, purpose = programs
    if missing := [name for name in names if shutil.which(name) is None]:
        pytest.skip(f"no {' and no '.join(missing)} {purpose}")


def unexpected(reasons: Mapping[str, int]) -> list[str]:
    """List the reasons that this run may not skip tests for; none where ``EDGESPEC_CI`` names no run."""
    name = os.environ.get("EDGESPEC_CI", "")
    return [one for one in reasons if name and not any(re.search(may, one) for may in MAY_SKIP[name])]
