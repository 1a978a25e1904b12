"""Run the command line, in this process or in a new one."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest
from click.testing import CliRunner

from edgespec.cli.app import cli, main
from tests.conftest import DRAFT, TARGET, THREADS, fixed_skip_set
from tests.support import hf

ROOT = Path(__file__).resolve().parents[2]
LONG = 10**6  # more tokens, or trials, than anyone waits for


@dataclass(frozen=True)
class Outcome:
    """Output and exit code of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one JSON object on stdout."""
        assert self.code == 0, self.err
        assert self.out.count("\n") == 1
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value

    def failed(self, code: int) -> dict[str, Any]:
        """Return the ``error`` of a failed command with ``--json``; stderr has the same message."""
        assert self.code == code, (self.out, self.err)
        assert "Traceback" not in self.err
        assert self.out.count("\n") == 1
        found = json.loads(self.out)
        assert list(found) == ["error"]
        error: dict[str, Any] = found["error"]
        assert list(error) == ["type", "message", "hint"]
        assert error["message"] in self.err
        assert error["hint"] is None or f"hint: {error['hint']}" in self.err
        return error

    def refused(self, code: int, *parts: str) -> None:
        """Return the command ended with a message that has all of these parts, and nothing else on stdout."""
        assert self.code == code, (self.out, self.err)
        if self.out:  # of --json
            self.failed(code)
        assert "Traceback" not in self.err
        if code == 1:
            assert "error: " in self.err
        for part in parts:
            assert part in self.err


Command = Callable[..., Outcome]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """``edgespec ARGUMENTS`` in this process, as a shell would see it; ``stdin`` is what is piped into it."""

    def run(*arguments: object, stdin: str | bytes | None = "") -> Outcome:
        monkeypatch.setattr(sys, "argv", ["edgespec", *map(str, arguments)])
        content = stdin.encode("utf-8") if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", None if content is None else io.TextIOWrapper(io.BytesIO(content), "utf-8"))
        capsys.readouterr()
        code: object = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code
        assert isinstance(code, int)
        return Outcome(code, *capsys.readouterr())

    return run


def start(
    arguments: Iterable[object],
    cwd: Path,
    stdout: IO[str] | None = None,
    program: tuple[str, str] = ("-m", "edgespec"),
    **changes: str,
) -> subprocess.Popen[str]:
    """Start ``python -m edgespec ARGUMENTS`` in a new process; ``changes`` are environment variables."""
    environment = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "NO_COLOR")}
    return subprocess.Popen(
        [sys.executable, *program, *map(str, arguments)],
        cwd=cwd,
        env={**environment, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", **changes},
        stdin=subprocess.DEVNULL,
        stdout=stdout or subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        # a runner in the background may have Ctrl-C ignored, which children inherit
        preexec_fn=None if sys.platform == "win32" else partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


def process(*arguments: object, cwd: Path, **changes: str) -> Outcome:
    """Return what ``start`` gives once it has ended."""
    running = start(arguments, cwd, None, ("-m", "edgespec"), **changes)
    out, err = running.communicate(timeout=300)
    return Outcome(running.returncode, out, err)


def export(output: Path, model: str, *arguments: object) -> Path:
    """Make a bundle made by the command line, golden vectors included; in int4 unless a format is given."""
    form = () if "--format" in arguments else ("--format", "int4")
    result = CliRunner().invoke(
        cli, ["export", model, "-o", str(output), "--threads", str(THREADS), *map(str, (*form, *arguments))]
    )
    assert result.exit_code == 0, result.output
    return output


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a bundle with every method and golden vectors; the skip set is given, so nothing depends on a clock."""
    folder = tmp_path_factory.mktemp("demo")
    methods = ("--method", "self-spec", "--method", "speculative", "--draft", DRAFT)
    return export(folder / "demo", TARGET, *methods, "--skip-set", fixed_skip_set(folder, TARGET))


@pytest.fixture(scope="session")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a bundle with a chat template, whose name is full of what shells, tables and plots would interpret."""
    folder = tmp_path_factory.mktemp("chat")
    source = hf.write_checkpoint(
        folder / "[red]a $b$ :+1:", hf.CONFIGS["llama_tied_gqa"], 3, chat_template=hf.CHAT_TEMPLATE
    )
    return export(folder / "chat $b$", str(source))
