"""Lines typed at a terminal: whole, edited, in any script.

A terminal's own line mode keeps 4,095 bytes of a line and drops the rest without a word.  GNU readline, or libedit,
reads keys instead and takes lines of any length; Python's ``input`` uses it once the module is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from edgespec.errors import InvalidRequest

LINE = 4095  # bytes of a line in Linux's own line mode (N_TTY_BUF_SIZE - 1)


def at_terminal() -> bool:
    """Whether somebody types here."""
    return sys.stdin is not None and sys.stdin.isatty()


@contextmanager
def typing() -> Iterator[None]:
    """While this lasts, keys that nobody has asked for yet wait for the next ``read_line``, however many they are."""
    if not _edited():
        yield
        return
    import termios

    file = sys.stdin.fileno()
    before, now = termios.tcgetattr(file), termios.tcgetattr(file)
    now[3] &= ~termios.ICANON  # not ECHO: readline shows no keys where it finds that off
    termios.tcsetattr(file, termios.TCSANOW, now)
    try:
        yield
    finally:
        termios.tcsetattr(file, termios.TCSANOW, before)


def read_line(prompt: str) -> str:
    """Ask at the terminal, wherever stdout goes, and read a line; lines that are pasted together are one text.

    Raises:
        EOFError: Ctrl-D.
        InvalidRequest: the terminal may have cut the line, or its bytes are no text.
        KeyboardInterrupt: Ctrl-C.
    """
    edited = _edited()
    try:
        with _stdout_at_the_terminal():
            line = input(prompt)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"that line is no {error.encoding} text: {error.reason}") from error
    if not edited and sys.platform == "linux" and len(line.encode("utf-8", "surrogateescape")) >= LINE:
        raise InvalidRequest(
            f"a terminal without an editor of lines keeps {LINE} bytes of a line, and that one may have been cut",
            "pipe the text in, or use a Python that was built with readline",
        )
    return line


def _edited() -> bool:
    """Whether ``input`` reads keys and edits the line itself."""
    try:
        import readline
        import termios
    except ImportError:  # Windows, whose console cuts nothing, or a Python without either
        return False
    if "libedit" not in (readline.__doc__ or ""):
        readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off
    return bool(termios) and os.isatty(0) and sys.stdin.fileno() == 0


@contextmanager
def _stdout_at_the_terminal() -> Iterator[None]:
    """Lend ``input`` the terminal where stdout is a file or a pipe: it edits no line otherwise."""
    name = None
    with suppress(OSError, AttributeError):
        name = None if sys.stdout.isatty() else os.ttyname(0)
    if name is None:
        yield
        return
    sys.stdout.flush()
    kept, terminal = os.dup(1), os.open(name, os.O_WRONLY)
    os.dup2(terminal, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(terminal)
