"""A program in a terminal, which types and reads as a person does."""

from __future__ import annotations

import codecs
import os
import re
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 200  # seconds
UNSET = ("FORCE_COLOR", "NO_COLOR", "INPUTRC")


class Terminal:
    """``python ARGUMENTS`` with a pseudo-terminal as its own.

    Args:
        arguments: of Python.
        cwd: where.
        stdout: a file for its stdout; None = the terminal.
        kind: what the terminal calls itself.

    Attributes:
        shown: all that the terminal has shown, without escape sequences.
        raw: the same with them.
        escapes: how many of those came.
    """

    def __init__(self, arguments: Sequence[object], cwd: Path, stdout: Path | None = None, kind: str = "xterm") -> None:
        import fcntl
        import pty
        import termios

        self.shown, self.raw, self.escapes = "", "", 0
        self._seen = 0
        self._left = b""
        self._half, self._decoder = "", codecs.getincrementaldecoder("utf-8")("replace")
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))

        def own() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C is a signal
            signal.signal(signal.SIGINT, signal.default_int_handler)

        environment = {name: value for name, value in os.environ.items() if name not in UNSET}
        environment |= {"PYTHONPATH": str(ROOT), "PYTHONUTF8": "1", "LC_ALL": "C.UTF-8", "TERM": kind}
        environment["PROMPT_TOOLKIT_NO_CPR"] = "1"  # no terminal here reports the cursor's position
        output = slave if stdout is None else os.open(stdout, os.O_WRONLY | os.O_CREAT)
        self._process = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            cwd=cwd, env=environment, stdin=slave, stdout=output, stderr=slave, start_new_session=True, preexec_fn=own,
        )  # fmt: skip
        for file in {slave, output}:
            os.close(file)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._master)

    def type(self, text: str) -> None:
        """Press keys, while what is shown is read."""
        self._left += text.encode()

    def interrupt(self, answer: str) -> None:
        """Press Ctrl-C while a line is typed, until a text is shown.

        Python's reader misses a signal that comes just before it begins to wait; then the next one counts for both.
        """
        deadline = time.monotonic() + PATIENCE
        while answer not in self.shown[self._seen :]:
            assert time.monotonic() < deadline, f"no {answer!r} in {self.shown[self._seen :]!r}"
            self.type("\x03")
            pressed = time.monotonic()
            while time.monotonic() < pressed + PATIENCE / 20 and answer not in self.shown[self._seen :]:
                assert self._go_on(), f"ended without {answer!r}: {self.shown[self._seen :]!r}"
        self.wait_for(answer)

    def wait_for(self, text: str) -> str:
        """Wait until a text is shown after the previous one; return the output up to it."""
        deadline = time.monotonic() + PATIENCE
        while (at := self.shown.find(text, self._seen)) < 0:
            assert time.monotonic() < deadline, f"no {text!r} in {self.shown[self._seen :]!r}"
            assert self._go_on(), f"ended without {text!r}: {self.shown[self._seen :]!r}"
        found, self._seen = self.shown[self._seen : at], at + len(text)
        return found

    def end(self) -> int:
        """Wait for the program's end; returns its exit code."""
        while self._go_on():
            pass
        return self._process.wait(PATIENCE)

    def _go_on(self) -> bool:
        """Pass on keys and what is shown; False = the program has gone."""
        wanted = [self._master] if self._left else []
        reads, writes, _ = select.select([self._master], wanted, [], 1)
        if writes:
            self._left = self._left[os.write(self._master, self._left[:512]) :]
        if reads:
            try:
                piece = os.read(self._master, 65536)
            except OSError:  # Linux raises this once the other end is closed
                return False
            if not piece:
                return False
            self._half += self._decoder.decode(piece)
            whole, escape = re.fullmatch(r"(.*?)(\x1b(?:\[[?0-9;]*)?)?", self._half, re.DOTALL).groups()  # type: ignore[union-attr]
            self._half = escape or ""
            # without the escapes of bracketed paste and of the editor
            self.escapes += whole.count("\x1b")
            self.raw += whole
            self.shown += re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]|\r", "", whole)
        return self._process.poll() is None or bool(reads)
