"""What only a process of its own shows: exit codes, pipes, encodings, Ctrl-C."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import LONG, process, start
from tests.conftest import TARGET

posix = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")


def test_a_good_run_and_three_kinds_of_failure(demo: Path, tmp_path: Path) -> None:
    good = process("run", demo, "--prompt", "ROMEO:", "--max-new-tokens", 4, cwd=tmp_path)
    assert good.code == 0
    assert good.out.strip()
    assert re.search(r"4 tokens at [0-9.]+ a second", good.err)
    process("run", demo, "--prompt", "", cwd=tmp_path).refused(1, "error: the prompt is empty\nhint: ")
    process("run", demo, cwd=tmp_path).refused(2, "Usage: ", "give --prompt TEXT, --chat, or both")
    process("export", "builtin:nope", cwd=tmp_path).refused(1, "error: no embedded model 'nope'\nhint: ")
    hub = process("export", "some/model", cwd=tmp_path, HF_HUB_OFFLINE="1")
    hub.refused(1, "error: some/model: no local folder of that name, and the hub", "\nhint: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [("run", "--prompt", "ROMEO:", "--max-new-tokens", 900), ("info",)])
def test_a_reader_that_goes_away(demo: Path, tmp_path: Path, arguments: tuple[object, ...]) -> None:
    running = start([arguments[0], demo, *arguments[1:]], tmp_path)
    assert running.stdout is not None
    assert running.stderr is not None
    running.stdout.close()
    err = running.stderr.read()
    running.stderr.close()
    assert running.wait(300) in (0, 1)
    assert err == ""


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_any_encoding_of_the_output(demo: Path, tmp_path: Path, encoding: str) -> None:
    # the grammar makes it write what some encodings have no room for
    wanted = ("run", demo, "--prompt", "\u2603 caf\u00e9", "--regex", " caf\u00e9\u2603")
    environment = {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    shown = process(*wanted, cwd=tmp_path, **environment)
    assert (shown.code, "Traceback" in shown.err) == (0, False)
    assert " caf" in shown.out
    made = process(*wanted, "--json", cwd=tmp_path, **environment)
    assert json.loads(made.out)["prompt"] == "\u2603 caf\u00e9"


INTERRUPTED = """
import io, signal, sys
from edgespec.__main__ import main

class Stderr(io.TextIOWrapper):
    def write(self, text):
        written = super().write(text)
        if text.startswith(f"{stage}: "):
            signal.raise_signal(signal.SIGINT)
        return written

stage, *sys.argv[1:] = sys.argv[1:]
sys.stderr = Stderr(sys.stderr.buffer, "utf-8", line_buffering=True)
main()
"""
"""A command that gets Ctrl-C when a stage begins, however fast or slow the machine is."""


@posix
@pytest.mark.parametrize("stage, kept", [("weights", False), ("parity", False), ("skip set", True)])
def test_ctrl_c_during_an_export(tmp_path: Path, stage: str, kept: bool) -> None:
    wanted = ["export", TARGET, "--method", "self-spec", "--trials", LONG, "-o", "demo"]
    running = start([stage, *wanted], tmp_path, program=("-c", INTERRUPTED))
    out, err = running.communicate(timeout=300)
    assert (running.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "stopped"
    assert "Traceback" not in err
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ([".demo.search"] if kept else [])
    if kept:  # the next try goes on from there, and cleans up
        assert [path.suffix for path in (tmp_path / ".demo.search").iterdir()] == [".journal"]
        wanted[wanted.index(LONG)] = 1
        assert process(*wanted, cwd=tmp_path).code == 0
        assert [path.name for path in tmp_path.iterdir()] == ["demo"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk(demo: Path, tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        for arguments in (["run", demo, "--prompt", "x", "--max-new-tokens", 4], ["info", demo, "--json"]):
            running = start(arguments, tmp_path, stdout=full)
            _, err = running.communicate(timeout=300)
            assert running.returncode == 1
            assert err.startswith("error: ")
            assert "Traceback" not in err


TERMINATED = INTERRUPTED.replace("SIGINT", "SIGTERM")


@posix
def test_sigterm_during_an_export(tmp_path: Path) -> None:
    wanted = ["export", TARGET, "-o", "demo", "--quantizer", "rtn"]
    running = start(["weights", *wanted], tmp_path, program=("-c", TERMINATED))
    out, err = running.communicate(timeout=300)
    assert (running.returncode, out) == (143, "")
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


WRITING = """
import signal, sys
import click
from edgespec.__main__ import main

def echo(*arguments, **how):
    written = original(*arguments, **how)
    echo.calls += 1
    if echo.calls == 5:
        signal.raise_signal(signal.SIGTERM)
    return written

original, echo.calls, click.echo = click.echo, 0, echo
main()
"""
"""A command that gets SIGTERM when it has written something."""


@posix
def test_sigterm_while_a_text_is_written(demo: Path, tmp_path: Path) -> None:
    wanted = ["run", demo, "--prompt", "ROMEO:", "--method", "ar", "--max-new-tokens", 60]
    running = start(wanted, tmp_path, program=("-c", WRITING))
    out, err = running.communicate(timeout=300)
    assert running.returncode == 143
    assert out
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []
