"""Runs what may end badly in a forked child under limits, and says how it ended."""

from __future__ import annotations

import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from edgespec.runtimes.files.manifest import MANIFEST
from edgespec.runtimes.files.operators import WantedOperators

CPU_SECONDS, WALL_SECONDS, MOST_BYTES = 20, 300, 2 << 30
CLASSES = ("ran", "clean", "traceback", "hang", "memory", "crash")
BAD = CLASSES[2:]


@dataclass(frozen=True)
class Verdict:
    """How a case ended: one of ``CLASSES``, and the error or where it came from."""

    kind: str
    detail: str = ""


def judge(run: Callable[[], None]) -> Verdict:
    """Call ``run`` in a child: processor time counts, so that a busy machine makes no hangs."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reading)
            os.setsid()  # what it starts goes with it
            _in_child(run, writing)
        finally:  # always: a second copy of the caller must not continue
            os._exit(1)
    os.close(writing)
    said, end = b"", time.monotonic() + WALL_SECONDS
    while time.monotonic() < end and select.select([reading], [], [], max(0.0, end - time.monotonic()))[0]:
        piece = os.read(reading, 1 << 16)
        if not piece:
            break
        said += piece
    late = time.monotonic() >= end
    os.close(reading)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    _, status, used = os.wait4(child, 0)
    if used.ru_maxrss * 1024 > MOST_BYTES:
        return Verdict("memory", f"{used.ru_maxrss >> 10} MiB; {said.decode()[:300]}")
    if said:
        found = json.loads(said)
        return Verdict(found["kind"], found["detail"])
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if late or number == signal.SIGXCPU:
        return Verdict("hang", f"{used.ru_utime + used.ru_stime:.0f} s of processor time")
    return Verdict("crash", f"signal {number}" if number else f"status {os.waitstatus_to_exitcode(status)}")


def _in_child(run: Callable[[], None], writing: int) -> None:
    from edgespec.errors import EdgespecError

    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
    resource.setrlimit(resource.RLIMIT_AS, (3 * MOST_BYTES, 3 * MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    quiet = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(quiet, number)
    found = Verdict("ran")
    try:
        run()
    except EdgespecError as error:
        found = Verdict("clean", f"{type(error).__name__}: {error.message}"[:300])
    except MemoryError:
        found = Verdict("memory", "MemoryError")
    except BaseException as error:
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if "edgespec" in frame.filename]
        where = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in own[-3:]]
        found = Verdict("traceback", f"{type(error).__name__} {' '.join(where)}: {error}"[:300])
    os.write(writing, json.dumps({"kind": found.kind, "detail": found.detail}).encode())


def use_bundle(folder: Path) -> None:
    """Load, write a few tokens by two methods with either kind of operators, render a conversation, show it."""
    from edgespec.cli.app import cli
    from edgespec.engine.loading import load
    from edgespec.errors import EdgespecError

    native = (folder / "model.native.onnx").exists()
    kinds: tuple[WantedOperators, ...] = ("native", "stock") if native else ("stock",)
    turn = crc32((folder / MANIFEST).read_bytes()) if (folder / MANIFEST).is_file() else 0  # others at every mutant
    refused: EdgespecError | None = None
    try:
        for operators in kinds:
            engine = load(folder, threads=1, operators=operators)
            for at in (turn, turn + 1):
                engine.generate("KING", method=engine.methods[at % len(engine.methods)], max_new_tokens=4)
        if engine.codec.templates:
            engine.chat([{"role": "user", "content": "a" * 50}], max_new_tokens=2)
    except EdgespecError as error:
        refused = error
    cli.main(["info", str(folder)], standalone_mode=False)
    if refused is not None:
        raise refused


def use_source(folder: Path) -> None:
    """Export a source with all that its folder holds."""
    from edgespec.export.options import ExportOptions
    from edgespec.export.pipeline import export_model

    gguf, draft = folder / "model.gguf", folder / "draft"
    heads = sorted(str(path) for path in folder.glob("heads-*"))
    methods = tuple(name.rpartition("-")[2] for name in heads) + (("speculative",) if draft.exists() else ())
    options = ExportOptions(
        model=str(gguf if gguf.exists() else folder),
        output=folder.with_suffix(".bundle"),
        methods=methods,
        heads=heads,
        draft=str(draft) if draft.exists() else None,
        threads=1,
    )
    export_model(options, golden=False)


USES: dict[str, Callable[[Path], None]] = {"bundle": use_bundle, "source": use_source}


def verdict_of(kind: str, folder: Path) -> Verdict:
    """Use a bundle or a source and report how that ends; remove the files that it leaves next to the folder."""
    sys.stdout.flush()
    temporary = folder.with_suffix(".tmp")
    temporary.mkdir()

    def run() -> None:
        tempfile.tempdir = os.environ["TMPDIR"] = str(temporary)
        USES[kind](folder)

    try:
        return judge(run)
    finally:
        for path in (temporary, folder.with_suffix(".bundle")):
            shutil.rmtree(path, ignore_errors=True)
