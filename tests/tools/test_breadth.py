"""A run of everything leaves cells to nightly, which misses none; a run that names files leaves nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.breadth import SHARES, leave_out

ROOT = Path(__file__).resolve().parents[2]
FILE = "tests/lossless/test_architectures.py"
NAMES = [
    *(f"tests/a.py::test_x[{at}]" for at in range(5)),
    "tests/a.py::test_y",
    *(f"tests/b.py::test_z[{at}]" for at in range(3)),
]


def test_one_cell_of_so_many_runs() -> None:
    left = leave_out(NAMES, {"tests/a.py": 2, "tests": 3})
    assert [name for name in NAMES if name not in left] == [
        "tests/a.py::test_x[0]", "tests/a.py::test_x[2]", "tests/a.py::test_x[4]",
        "tests/a.py::test_y",
        "tests/b.py::test_z[0]",
    ]  # fmt: skip


def test_a_test_has_its_own_share() -> None:
    assert leave_out(NAMES, {"tests/a.py": 2, "tests/a.py::test_x": 1}) == set()
    assert leave_out(NAMES, {"tests/a.py::test_x": 0}) == set(NAMES[:5])


@pytest.mark.parametrize("name", SHARES)
def test_what_is_listed_exists(name: str) -> None:
    file, _, test = name.partition("::")
    assert (ROOT / file).exists()
    assert not test or f"def {test}(" in (ROOT / file).read_text("utf-8")


@pytest.mark.parametrize(
    "arguments, whole",
    [([FILE], True), (["-o", f"testpaths={FILE}"], False), (["-o", f"testpaths={FILE}", "--whole"], True)],
)
def test_a_run_of_everything_leaves_cells_out(arguments: list[str], whole: bool) -> None:
    command = [sys.executable, "-m", "pytest", "-n0", "--collect-only", "-q", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stdout
    cells = int(ran.stdout.partition(": ")[2].split()[0])
    assert cells > 100 if whole else 20 < cells < 60
