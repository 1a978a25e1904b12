"""A command's surroundings: outputs that are closed, folders that are loops, names that do not exist."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Command

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell and symbolic links")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(
    "arguments, code",
    [("run {demo} --prompt x --max-new-tokens 2 --threads 1", 0), ("bench nothing-there", 1), ("run --nonsense", 2)],
)
def test_outputs_may_be_closed(demo: Path, tmp_path: Path, arguments: str, code: int, closed: str) -> None:
    """The exit code is the same, nothing is a traceback, and no file of the command takes the output's place."""
    program = f"exec {sys.executable} -m edgespec {arguments.format(demo=demo)} {closed}"
    ran = subprocess.run(["sh", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == code
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("name", ["loop", "loop/within"])
@pytest.mark.parametrize(
    "arguments",
    [
        ("export", "builtin:shakespeare-draft", "-o"),
        ("train", "medusa", "builtin:shakespeare", "-o"),
        ("run",),
        ("info",),
        ("verify",),
        ("bench",),
        ("plan",),
    ],
)
def test_a_loop_of_links_is_no_defect(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    more = ("--prompt", "x") if arguments == ("run",) else ()
    result = command(*arguments, name, *more)
    assert result.code in (1, 2)
    assert "loop" in result.err
    assert [path.name for path in tmp_path.iterdir()] == ["loop"]


def test_a_name_that_is_nothing_is_what_is_wrong(command: Command, demo: Path) -> None:
    """This comes before the error of a missing prompt; an existing bundle gets that one."""
    misspelled = demo.with_name(f"{demo.name}x")
    for given in ((), ("--json",), ("--chat",)):
        command("run", misspelled, *given).refused(1, f"{misspelled}: no such bundle or model", f"did you mean {demo}?")
    command("run", demo).refused(2, "give --prompt TEXT")


def test_a_file_that_cannot_be_trained_on_is_named_before_a_package(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    command("train", "eagle", tmp_path / "x.gguf", "-o", tmp_path / "out").refused(1, "x.gguf", "a GGUF file cannot be")
    command("train", "eagle", "builtin:shakespeare", "-o", tmp_path / "out").refused(1, "needs torch")
