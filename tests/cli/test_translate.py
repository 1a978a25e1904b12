"""Files that an encoder-decoder reads line by line."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.engine.loading import load
from tests.cli.conftest import Command
from tests.conftest import THREADS

LINES = ["what say you to that my lord", "", "i am not mad sir", "come hither boy tell me thy name"]


@pytest.fixture
def restore(native: None, command: Command, tmp_path: Path) -> Path:
    folder = tmp_path / "restore"
    made = command("export", "builtin:restore", "--quick", "--threads", THREADS, "-o", folder)
    assert made.code == 0, made.err
    return folder


def test_a_line_of_the_output_is_that_of_the_input(command: Command, restore: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("\n".join(LINES) + "\n", "utf-8")
    asked = ("run", restore, "--threads", THREADS, "--batch", 2, "--input", source, "--output")
    made = command(*asked, output, "--json")
    assert made.code == 0, made.err
    with load(restore, threads=THREADS) as engine:
        wanted = [engine.generate(line).text.strip() if line else "" for line in LINES]
    assert output.read_text("utf-8").splitlines() == wanted
    assert {name: made.json[name] for name in ("lines", "parts", "cut")} == {"lines": 4, "parts": 3, "cut": 0}
    again, nowhere = command(*asked, output), command(*asked, tmp_path / "missing" / "out.txt")
    assert (again.code, nowhere.code) == (1, 1)
    assert "is there already" in again.err
    assert "cannot be written" in nowhere.err
    assert output.read_text("utf-8").splitlines() == wanted
