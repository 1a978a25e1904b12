"""Commands that are killed, or lose their disk, at random moments: nothing half-written, and the next try works.

A command runs in a fork of this process, which has loaded what it needs; where this is root, the fork may not pass
over permissions.  Disks that fill up or become read-only are small ones in memory; where none can be mounted, a limit
of the size of files takes the place of the full one, and the read-only one is left out.
"""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from edgespec.cli.app import main
from edgespec.runtimes.files.cache import cache_folder
from tests.stress.jobs import JOBS, Job, prepare

SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "Ctrl-C": signal.SIGINT}
CODES = {"SIGKILL": (0, -9), "SIGTERM": (0, 143, -15), "Ctrl-C": (0, 130)}
EVENTS = (*SIGNALS, "ENOSPC", "EACCES", "read-only", "two at once")
PASS_OVER = (1, 2, 3)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER
DISK, SMALLEST = 64 << 20, 4096
WAIT = 300.0  # seconds until a command counts as hanging


@dataclass
class Tally:
    """How moments of one kind ended.

    Attributes:
        ended: how often by exit code; 0 = the command had finished, or continued without the lost part.
        wrong: what should not be.
        left: parts that a killed process left, which the next one removed.
    """

    ended: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    left: int = 0

    def report(self) -> dict[str, Any]:
        return {"ended": {str(code): n for code, n in sorted(self.ended.items())}, "left": self.left} | (
            {"wrong": self.wrong} if self.wrong else {}
        )


class Child:
    """``edgespec ARGUMENTS`` in a fork."""

    def __init__(self, work: Path, arguments: list[str], most_bytes: int | None = None, log: str = "log") -> None:
        self.log = work.parent / f"{work.name}.{log}"
        sys.stdout.flush()
        self.id = os.fork()
        if not self.id:
            try:
                _run(work, arguments, most_bytes, self.log)
            except KeyboardInterrupt:  # before the command began
                os._exit(130)
            finally:
                os._exit(99)
        self.code: int | None = None

    def poll(self) -> bool:
        """Whether it has ended."""
        if self.code is None:
            found, status = os.waitpid(self.id, os.WNOHANG)
            if found:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None

    def wait(self) -> int:
        """Its exit code; one that hangs is killed.

        Raises:
            TimeoutError: it hung.
        """
        end = time.monotonic() + WAIT
        while not self.poll():
            if time.monotonic() > end:
                os.kill(self.id, signal.SIGKILL)
                os.waitpid(self.id, 0)
                raise TimeoutError(f"hung: {self.said()[-300:]}")
            time.sleep(0.002)
        assert self.code is not None
        return self.code

    def send(self, number: int) -> None:
        if not self.poll():
            os.kill(self.id, number)

    def said(self) -> str:
        return self.log.read_text("utf-8", "replace") if self.log.exists() else ""


def _run(work: Path, arguments: list[str], most_bytes: int | None, log: Path) -> None:
    """In the child: what a shell would start."""
    os.setsid()
    for number, name in enumerate((Path(os.devnull), log, log)):
        flags = os.O_RDONLY if not number else os.O_WRONLY | os.O_CREAT | os.O_APPEND
        os.dup2(os.open(name, flags, 0o666), number)
    if most_bytes is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # one in the background may have it ignored
    os.environ.update(EDGESPEC_CACHE=str(work / "cache"), HOME=str(work), TMPDIR=str(work / "tmp"))
    sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))  # noqa: SIM115
    sys.argv = ["edgespec", *arguments]
    _obey_permissions()
    code: Any = 0
    try:
        main()
    except SystemExit as ended:
        code = ended.code
    except KeyboardInterrupt:  # before the command began or after it
        code = 130
    except BaseException:
        traceback.print_exc()
        code = 98
    with suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 97)


def _obey_permissions() -> None:
    """Without the capabilities to pass over permissions, for this process and what it starts; nothing for others."""
    if os.getuid():
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, data) == 0
    for capability in PASS_OVER:
        assert libc.prctl(24, capability, 0, 0, 0) == 0  # PR_CAPBSET_DROP
        for at in range(3):
            data[at] &= ~(1 << capability)
    assert libc.capset(header, data) == 0


class Place:
    """A folder for commands to work in; on a separate small disk if one can be mounted."""

    def __init__(self, folder: Path) -> None:
        self.work, self.source = folder / "work", folder / "source"
        self.work.mkdir()
        self.source.mkdir()
        prepare(self.source)
        shutil.copytree(cache_folder() / "tokenizers", self.source / "tokenizers")  # tried once is enough
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(self.work)]
        self.mounted = os.getuid() == 0 and subprocess.run(mount, capture_output=True, check=False).returncode == 0

    def clean(self) -> None:
        """As before the first command."""
        for path in self.work.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for name in ("out", "cache", "tmp"):
            (self.work / name).mkdir()
        shutil.copytree(self.source / "bundle", self.work / "bundle")
        shutil.copy2(self.source / "texts.txt", self.work)
        shutil.copytree(self.source / "tokenizers", self.work / "cache" / "tokenizers")

    def remount(self, how: str) -> bool:
        """ "ro" or "rw"; False = a file is being written."""
        return not subprocess.run(
            ["mount", "-o", f"remount,{how}", str(self.work)], capture_output=True, check=False
        ).returncode

    def deny(self, mode: int) -> None:
        for name in ("out", "cache", "tmp"):
            for path in ((self.work / name), *(self.work / name).rglob("*")):
                with suppress(OSError):
                    if path.is_dir():
                        path.chmod(mode)

    @contextmanager
    def room(self, left: int) -> Iterator[None]:
        """Make a disk with ``left`` free bytes."""
        filler = self.work / "filler"
        stat = os.statvfs(self.work)
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(SMALLEST, stat.f_bavail * stat.f_frsize - left))
        try:
            yield
        finally:
            filler.unlink()

    def parts(self) -> list[Path]:
        """Hidden files and folders that are being written, or were when a process ended."""
        return [path for path in self.work.rglob("*") if ".part-" in path.name]

    def close(self) -> None:
        if self.mounted:
            self.remount("rw")
            subprocess.run(["umount", "-l", str(self.work)], check=True)


def disturb(
    place: Place, names: list[str], events: list[str], moments: int, seed: int, say: Callable[[str], None]
) -> dict[tuple[str, str], Tally]:
    """Disturb every command with every event, at ``moments`` random moments."""
    found: dict[tuple[str, str], Tally] = {}
    for name in names:
        job = JOBS[name]
        place.clean()
        start = time.monotonic()
        code, before = (child := Child(place.work, job.arguments(place.work))).wait(), _bytes(place.work)
        whole = time.monotonic() - start
        if code or not job.made(place.work):
            raise RuntimeError(f"{name}: ended with {code} by itself: {child.said()[-2000:]}")
        needs = before - _bytes(place.source)
        for event in events:
            if event == "read-only" and not place.mounted:
                continue
            tally = found[name, event] = Tally()
            for moment in range(moments):
                rng = Random(f"{seed} {name} {event} {moment}")
                place.clean()
                old = event != "two at once" and rng.random() < 0.3
                if old and (code := Child(place.work, job.arguments(place.work)).wait()):
                    tally.wrong.append(f"before: {code}")
                try:
                    tally.ended[_one(place, job, event, rng, whole, needs, tally)] += 1
                except (AssertionError, TimeoutError) as error:
                    tally.wrong.append(f"moment {moment}: {error}")
            say(f"{name}, {event}: {tally.report()}")
    return found


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _one(place: Place, job: Job, event: str, rng: Random, whole: float, needs: int, tally: Tally) -> int:
    """One disturbance -> the exit code; then look, and try again undisturbed.

    Raises:
        AssertionError: something is not as it should be.
    """
    work, arguments, share = place.work, job.arguments(place.work), rng.random()
    for log in work.parent.glob("*.log"):
        log.unlink()
    if event == "ENOSPC" and place.mounted:
        with place.room(int(share * needs * 1.05)):
            child = Child(work, arguments)
            code = child.wait()
    else:
        child = Child(work, arguments, int(share * needs) if event == "ENOSPC" else None)
        other = Child(work, arguments, log="other.log") if event == "two at once" else None
        time.sleep(share * whole * (0 if event == "ENOSPC" else 1.05))
        if event in SIGNALS:
            child.send(SIGNALS[event])
        elif event == "EACCES":
            place.deny(0o555)
        elif event == "read-only":
            while not place.remount("ro") and not child.poll():
                time.sleep(0.001)
        elif other is not None:
            child.send(signal.SIGKILL)
            done = other.wait()
            refused = job.alone and "another process" in other.said()
            _require(done == refused, f"the other ended with {other.code}: {other.said()[-800:]}")
        code = child.wait()
        if event == "read-only":
            _require(place.remount("rw"), "cannot be written any more")
        place.deny(0o755)
    said = child.said()
    together = (0, 1, -9) if job.alone else (0, -9)
    _require(
        code in CODES.get(event, together if event == "two at once" else (0, 1)), f"ended with {code}: {said[-800:]}"
    )
    _require("Traceback" not in said and "Exception ignored" not in said, f"ended with {code}: {said[-1500:]}")
    parts = place.parts()
    if event in ("SIGKILL", "two at once"):
        tally.left += len(parts)
        for part in parts:
            os.utime(part, (1, 1))  # as if some time had passed
    else:
        _require(event in ("EACCES", "read-only") or not parts, f"left {[path.name for path in parts]}")
        for part in parts:  # what cannot be written cannot be cleared away either
            os.utime(part, (1, 1))
        tally.left += len(parts)
    _require_whole(place, job, "after it")
    again = Child(work, arguments, log="again.log")
    _require(again.wait() == 0, f"again: {again.code}: {again.said()[-1500:]}")
    _require(job.made(work), f"again: nothing was made: {again.said()[-800:]}")
    _require_whole(place, job, "again")
    _require(not place.parts(), f"again: left {[path.name for path in place.parts()]}")
    return code


def _require_whole(place: Place, job: Job, when: str) -> None:
    """Check in a separate process, which may crash."""
    log = place.work.parent / "look.log"
    child = os.fork()
    if not child:
        with suppress(BaseException):
            os.environ["EDGESPEC_CACHE"] = str(place.work / "cache")
            try:
                job.look(place.work)
                os._exit(0)
            except BaseException:
                log.write_text(traceback.format_exc(), "utf-8")
        os._exit(1)
    _, status = os.waitpid(child, 0)
    _require(status == 0, f"{when}: not whole ({status}): {log.read_text('utf-8')[-800:] if log.exists() else ''}")


def _require(holds: bool, text: str) -> None:
    if not holds:
        raise AssertionError(text)
