"""Failed tests get a second run, one by one, and only failed tests do; in CI skipped ones get none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.required import unexpected

TOOL = Path(__file__).resolve().parents[2] / "tools" / "retest.py"

TESTS = {
    "sound": "def test_sound():\n    pass\n",
    "wrong": "def test_wrong():\n    assert False\n",
    # fails, or ends its process, the first time only
    "shaky": """
        from pathlib import Path
        def test_shaky():
            seen = Path("seen")
            first = not seen.exists()
            seen.touch()
            assert not first
    """,
    "crashing": """
        import os
        from pathlib import Path
        def test_crashing():
            first = not Path("crashed").exists()
            Path("crashed").touch()
            if first:
                os._exit(7)
    """,
    "broken": "import nothing_of_this_name\n",
}


@pytest.mark.parametrize(
    "names, code, said",
    [
        (
            ["sound", "shaky", "crashing"],
            0,
            [
                "passed only alone: test_crashing.py::test_crashing",
                "passed only alone: test_shaky.py::test_shaky",
                "2 passed only alone, 0 failed twice",
            ],
        ),
        (["shaky", "wrong"], 1, ["failed twice: test_wrong.py::test_wrong", "1 passed only alone, 1 failed twice"]),
        (["sound", "broken"], 1, []),
    ],
)
def test_a_second_chance(tmp_path: Path, names: list[str], code: int, said: list[str]) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -n1\n", "utf-8")
    for name in names:
        text = TESTS[name]
        lines = text.strip("\n").split("\n")
        indent = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
        (tmp_path / f"test_{name}.py").write_text("\n".join(line[indent:] for line in lines), "utf-8")
    ran = subprocess.run([sys.executable, str(TOOL)], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert ran.returncode == code, ran.stdout + ran.stderr
    assert [line for line in said if line not in ran.stdout.splitlines()] == []
    assert bool(said) == ("again, alone" in ran.stdout)


def test_a_run_says_what_it_should_not_have_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    skips = {"this kernel has no huge pages": 1, "no strace to see system calls with": 3, "no C++ compiler": 9}
    for name, found in (("", []), ("run", [*skips][1:]), ("nightly", [*skips][1:]), ("without_compiler", [])):
        monkeypatch.setenv("EDGESPEC_CI", name)
        assert unexpected(skips) == found
