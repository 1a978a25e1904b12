"""Run the code in untrusted files in a separate process under limits, first or only there.

Chat templates are programs: jinja's sandbox keeps them from files and modules, but limits neither time nor memory.  So
``render_sandboxed`` sends them to a child process, which starts with the first conversation and lives as long as this
process.  A tokenizer's patterns and replacements have no limit either: ``try_tokenizer`` opens it and encodes texts
that reveal such problems, once for each file.  This file is also the child's program: it imports nothing of edgespec.
"""

from __future__ import annotations

import atexit
import json
import marshal
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

RENDER_SECONDS = 5  # of processor time for one conversation
TOKENIZER_SECONDS = 4, 16  # for a small tokenizer, with one more a MiB, and for the largest
WAIT = 120  # seconds of the clock, where processor time is not limited
MEMORY, OUTPUT = 3 << 29, 1 << 24  # bytes that the process may have; characters of a conversation
_PARTS = ("a", " ", "1", "\n", "aB ", "x.", "\u4e00")
PROBES = tuple(part * (2048 // len(part)) + end for part in _PARTS for end in ("", "!b"))
_MOST_TOKENS = 1 << 15  # of a probe, which has about 2,000 characters
_START = "import sys, runpy; sys.path[:] = sys.argv[2:]; runpy.run_path(sys.argv[1], run_name='__main__')"
_ONE_THREAD = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "1"}


class SandboxError(Exception):
    """The child's task failed, rejected its input, or exceeded its limits."""


def render_sandboxed(template: str, values: Mapping[str, Any]) -> str:
    """Render plain data by a ``template`` of jinja in another process and return its text.

    Raises:
        SandboxError: see the class.
    """
    if not _possible():
        return _render(template, values)
    with _lock:
        return _running().ask(("render", template, dict(values)), RENDER_SECONDS)


def try_tokenizer(path: str) -> None:
    """Open a tokenizer.json and encode the probes, in another process.

    Raises:
        SandboxError: see the class.
    """
    if _possible():
        process = _Process()
        try:
            few, most = TOKENIZER_SECONDS
            process.ask(("tokenizer", path), min(most, few + (Path(path).stat().st_size >> 20)))
        finally:
            process.close()


def _possible() -> bool:
    """Whether a child process can run: not if Python is embedded in another program."""
    return bool(sys.executable) and not getattr(sys, "frozen", False)


class _Process:
    """The child process: it reads requests and writes texts, each with its length first."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        command = [sys.executable, "-c", _START, __file__, *sys.path]
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | _ONE_THREAD,
            start_new_session=True,  # Ctrl-C at a terminal stops only the parent
        )

    @property
    def alive(self) -> bool:
        return self.owner == os.getpid() and self._child.poll() is None

    def ask(self, request: tuple[Any, ...], seconds: int) -> str:
        stdin, stdout = self._child.stdin, self._child.stdout
        assert stdin is not None
        assert stdout is not None
        timer = threading.Timer(WAIT, self._child.kill)
        timer.daemon = True
        timer.start()
        try:
            _write(stdin, marshal.dumps((seconds, *request)))
            answer = _read(stdout)
        except OSError:
            answer = None
        finally:
            timer.cancel()
        if answer is None:
            self.close()
            raise SandboxError(f"it needs more than {seconds} s of processor time or {MEMORY >> 20} MiB")
        found = json.loads(answer)
        if "error" in found:
            raise SandboxError(found["error"])
        return str(found["text"])

    def close(self) -> None:
        """Kill the child, unless it belongs to the process that this one was forked from."""
        if self.owner == os.getpid():
            self._child.kill()
            self._child.wait()
        self._child.returncode = self._child.returncode or 0
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


_lock = threading.Lock()
_process: _Process | None = None


def _running() -> _Process:
    global _process
    if _process is None or not _process.alive:
        if _process is not None:
            _process.close()
        else:
            atexit.register(_end)
        _process = _Process()
    return _process


def _end() -> None:
    if _process is not None:
        _process.close()


def _write(stream: IO[bytes], data: bytes) -> None:
    stream.write(len(data).to_bytes(8, "little") + data)
    stream.flush()


def _read(stream: IO[bytes]) -> bytes | None:
    """Read a message from ``stream``; None at the end."""
    head = stream.read(8)
    size = int.from_bytes(head, "little")
    data = stream.read(size) if len(head) == 8 and size <= 16 * OUTPUT else b""
    return data if data and len(data) == size else None


def _serve() -> None:
    """Answer requests in the child until the parent closes its pipe."""
    stdin, stdout = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    while (asked := _read(stdin)) is not None:
        seconds, kind, *given = marshal.loads(asked)
        limit_request(seconds, MEMORY)
        try:
            answer = {"text": _render(*given) if kind == "render" else _probe(*given)}
        except SandboxError as error:
            answer = {"error": str(error)[:2000]}
        _write(stdout, json.dumps(answer).encode())


def _render(template: str, values: Mapping[str, Any]) -> str:
    try:
        text = str(_compiled(template).render(values))
    except MemoryError:
        raise SandboxError(f"it needs more than {MEMORY >> 20} MiB") from None
    except Exception as error:  # a template is a program: it may fail in any way
        raise SandboxError(str(error) or type(error).__name__) from error
    if len(text) > OUTPUT:
        raise SandboxError(f"it writes {len(text)} characters, expected at most {OUTPUT}")
    return text


def _probe(path: str) -> str:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(path)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        for text in PROBES:
            tokens = tokenizer.encode(text).ids
            if len(tokens) > _MOST_TOKENS:
                raise SandboxError(f"it makes {len(tokens)} tokens of {len(text)} characters")
            tokenizer.decode(tokens)
    except SandboxError:
        raise
    except BaseException as error:  # panics do not derive from Exception
        raise SandboxError(str(error) or type(error).__name__) from error
    return ""


def limit_request(seconds: int, memory: int) -> None:
    """Limit the resources of one request of this process; past the time limit the process is killed.

    Args:
        seconds: of processor time from now on.
        memory: bytes of address space.
    """
    try:
        import resource
    except ImportError:  # Windows
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    limits = (
        (resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CORE, 0),
    )
    for kind, most in limits:
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


@lru_cache(maxsize=16)
def _compiled(template: str) -> Any:
    """Compile ``template`` with transformers' extensions for templates."""
    from datetime import datetime

    from jinja2 import TemplateError as Refused
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """``{% generation %}`` marks the model's output for training; the text is its body."""

        tags = {"generation"}  # noqa: RUF012  as jinja declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    class Dict:
        """``dict`` without its attributes."""

        def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
            return dict(*args, **kwargs)

        def fromkeys(self, *args: Any) -> dict[Any, Any]:
            return dict.fromkeys(*args)

    class Names(Namespace):
        """``namespace`` that rejects Python's own names."""

        def __setitem__(self, name: str, value: Any) -> None:
            if str(name).startswith("_"):
                raise SecurityError(f"a template must not set {name!r}")
            super().__setitem__(name, value)

    def namespace(*args: Any, **kwargs: Any) -> Names:
        made = Names()
        for name, value in dict(*args, **kwargs).items():
            made[name] = value
        return made

    def refuse(message: str) -> None:
        raise Refused(message)

    def as_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = as_json  # jinja's own escapes for HTML
    environment.globals.update(
        raise_exception=refuse,
        strftime_now=lambda form: datetime.now().strftime(form),
        dict=Dict(),
        namespace=namespace,
    )
    return environment.from_string(template)


if __name__ == "__main__":
    _serve()
