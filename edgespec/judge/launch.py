"""Start a server by a command, wait until it answers, and stop it."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO

from edgespec.judge.client import Http, ServerError

START_SECONDS, STOP_SECONDS = 600.0, 20.0
LAST = 600  # characters of a log that are shown


@contextmanager
def running(command: str, waiting: Callable[[float], None] | None = None) -> Iterator[str]:
    """Run a command that starts a server -> its URL, once it lists its models; it is stopped at the end.

    Args:
        command: as a shell would take it; ``{port}`` stands for a free port.
        waiting: is called with the seconds waited so far.

    Raises:
        ServerError: the program is not there, ended, or does not listen in time.
    """
    if "{port}" not in command:
        raise ServerError(f"{command!r}: expected {{port}} where the port belongs", "such as `--port {port}`")
    port = _free_port()
    try:
        words = [word.replace("{port}", str(port)) for word in shlex.split(command)]
    except ValueError as error:
        raise ServerError(f"{command!r}: not a command: {error}", "quote it as for a shell") from None
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=sys.platform != "win32",
            )  # fmt: skip
        except (OSError, ValueError) as error:
            told = error.strerror if isinstance(error, OSError) else None
            raise ServerError(f"{words[0]}: cannot be started: {told or error}") from None
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(process, url, log, waiting)
            yield url
        except ServerError as error:
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
                raise ServerError(
                    f"the server ended with {process.returncode}: {_tail(log)}", "run its command in a terminal"
                ) from error
            raise
        finally:
            _stop(process)


def _wait(process: subprocess.Popen[bytes], url: str, log: IO[bytes], waiting: Callable[[float], None] | None) -> None:
    send, start = Http(url, ""), time.monotonic()
    while (waited := time.monotonic() - start) < START_SECONDS:
        if process.poll() is not None:
            raise ServerError("it ended")  # the caller has the details
        with suppress(ServerError):
            status = send("GET", "/v1/models", None)[0]
            send.close()
            if status < 500:  # 503 = it loads the model
                return
        if waiting:
            waiting(waited)
        time.sleep(0.25)
    raise ServerError(f"the server does not listen after {START_SECONDS:.0f} s: {_tail(log)}")


def _tail(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read()[-LAST:].decode("utf-8", "replace").strip()


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stop the process and what it started."""
    for how in ("SIGTERM", "SIGKILL"):
        if process.poll() is not None:
            return
        with suppress(OSError):
            if sys.platform == "win32":
                process.terminate()
            else:
                os.killpg(process.pid, getattr(signal, how))
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
