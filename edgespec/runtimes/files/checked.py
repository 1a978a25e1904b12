"""Compare files with their SHA-256 before use, and store the digests while the files do not change.

A digest is computed again when device, inode, size or time of change of its file differ from the stored ones.  Only
the kernel sets times of change (``st_ctime``), so a changed file of equal size and modification time is detected.
They are trusted only

* on Linux and on file systems whose kernel code keeps them, writes through mappings included; elsewhere (Windows,
  macOS, tmpfs, network and FUSE file systems) each load takes all digests;
* where the file was not changed in the second before its digest was taken: two changes within a tick of the kernel's
  clock leave one time (the same holds for git's index);
* after its dirty pages were written back, because a page that is dirty already is written without a new time.

Digests are stored in the user's cache, one sealed record per folder (``sealed``).
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from edgespec.errors import BundleError
from edgespec.runtimes.files.cache import cache_folder
from edgespec.runtimes.files.json_file import open_regular
from edgespec.runtimes.files.sealed import read_sealed, write_sealed

QUIET = 1.0  # seconds before the digest without a change of the file
MOST_RECORDS = 256  # of folders, that are kept
LARGE = 64 << 20  # bytes of a file whose digest takes long
# statfs(2): ext2 to ext4, xfs, btrfs, f2fs, overlayfs
_KEEPS_TIMES = frozenset({0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x794C7630})
_PIECE = 1 << 20


class FileStat(NamedTuple):
    """The status that identifies a file's contents without reading them."""

    device: int
    inode: int
    size: int
    changed: int  # ns

    @classmethod
    def of(cls, found: os.stat_result) -> FileStat:
        """Return the fields of a file's status."""
        changed = found.st_ctime_ns if _POSIX else max(found.st_ctime_ns, found.st_mtime_ns)
        return cls(found.st_dev, found.st_ino, found.st_size, changed)


_POSIX = os.name == "posix"  # elsewhere st_ctime is when a file was made


class DigestRecord(NamedTuple):
    """A digest, the file's state then, and whether it may be relied on later."""

    sha256: str
    stamp: FileStat
    lasting: bool


def take_digest(path: Path, from_disk: bool = False) -> DigestRecord:
    """Read a file for its SHA-256.

    ``from_disk``: past the system's page cache, where it can: what the disk holds, which the cache may hide.

    Raises:
        BundleError: it cannot be read, or was changed during the read.
    """
    digest, buffer = hashlib.sha256(), memoryview(mmap.mmap(-1, _PIECE))  # whole pages, as direct reads need
    try:
        with open_regular(path) as file:
            handle = file.fileno()
            lasting = _keeps_times(handle) and _written_back(handle)
            if from_disk:
                _read_directly(handle)
            before, now = FileStat.of(os.fstat(handle)), time.time_ns()
            left = before.size  # no read begins at the end: a direct one would have to begin at a whole page
            while left > 0 and (count := file.raw.readinto(buffer) or 0):
                digest.update(buffer[:count])
                left -= count
            after = FileStat.of(os.fstat(handle))
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror or error}", "copy it again") from error
    if after != before:
        raise BundleError(f"{path}: was changed while it was read", "try again when no program writes there")
    return DigestRecord(digest.hexdigest(), before, lasting and before.changed < now - int(QUIET * 1e9))


def _read_directly(handle: int) -> None:
    """Let an open file be read past the page cache, or without the pages that it has now."""
    direct = getattr(os, "O_DIRECT", 0)
    with suppress(OSError):
        if direct and sys.platform == "linux":
            import fcntl

            fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) | direct)
            return
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


def _after_rest(path: Path) -> DigestRecord:
    """Take the digest of a file that was just written, when it has been quiet for long enough to rely on that later."""
    with suppress(OSError):  # which the next line reports
        with open_regular(path) as file:
            _written_back(file.fileno())
        time.sleep(min(QUIET, max(0.0, QUIET + 0.01 - (time.time() - path.stat().st_ctime))))
    return take_digest(path)


def _keeps_times(handle: int) -> bool:
    """Whether the kernel keeps the time of change of this file, so that no other program can set it."""
    if sys.platform != "linux":
        return False
    found = (ctypes.c_long * 64)()
    return ctypes.CDLL(None).fstatfs(handle, found) == 0 and found[0] & 0xFFFFFFFF in _KEEPS_TIMES


def _written_back(handle: int) -> bool:
    try:
        os.fsync(handle)
    except OSError:
        return False
    return True


class Checked:
    """The files that an opened bundle runs, each with its digest.

    Args:
        wanted: whether files are to be compared; False = none are, and ``unverified`` reports it.

    Attributes:
        read: files whose digests were taken here, not remembered.
    """

    def __init__(self, wanted: bool = True) -> None:
        self.wanted = wanted
        self.read = 0
        self._files: dict[Path, DigestRecord] = {}
        self._reasons: list[str] = [] if wanted else ["the files were not compared with their SHA-256 (no check)"]
        self._records: dict[Path, _Record] = {}
        self._begun: dict[Path, Future[DigestRecord]] = {}

    def begin(self, path: Path) -> None:
        """Compute the digest of a file during other work, if it is large; ``digest`` waits for it."""
        if path.stat().st_size >= LARGE:
            pool = ThreadPoolExecutor(1)
            self._begun[path] = pool.submit(_after_rest, path)
            pool.shutdown(wait=False)

    def digest(self, path: Path) -> str:
        """Return a file's SHA-256 as hex digits, stored or computed now.

        Raises:
            BundleError: it cannot be read.
        """
        if path not in self._files:
            record = self._record(path.parent)
            found = record.find(path)
            if found is None:
                begun = self._begun.pop(path, None)
                found = take_digest(path) if begun is None else begun.result()
                self.read += 1
                record.add(path, found)
            self._files[path] = found
        return self._files[path].sha256

    def compare_disk(self, path: Path) -> None:
        """Read a file from the disk itself, and compare it with its digest.

        Raises:
            BundleError: the disk holds other bytes.
        """
        found, known = take_digest(path, from_disk=True), self.digest(path)
        if found.sha256 != known:
            raise self._altered(path, known, found.sha256)

    def note(self, reason: str) -> None:
        """Record that a running part was not checked."""
        if reason not in self._reasons:
            self._reasons.append(reason)

    def forget(self, path: Path) -> None:
        """Forget the files of a path that are no longer used."""
        self._files = {file: taken for file, taken in self._files.items() if path not in (file, *file.parents)}
        self._records.pop(path, None)

    def save(self) -> None:
        """Store digests for the next load; without a cache they are computed again."""
        for record in self._records.values():
            record.save()

    def unverified(self) -> list[str]:
        """Reasons why files are unverified, a sentence each; empty = all were checked and are unchanged."""
        for path, taken in self._files.items():
            try:
                same = FileStat.of(path.stat()) == taken.stamp
            except OSError:
                same = False
            if not same:
                self.note(f"{path.name} was changed, replaced or removed after it was checked")
        return list(self._reasons)

    def retake(self) -> tuple[int, int]:
        """Compute the digests of all files that run again -> files, bytes.

        Raises:
            BundleError: a file has changed since it was checked.
        """
        for path, known in self._files.items():
            found = take_digest(path)
            if found.sha256 != known.sha256:
                raise self._altered(path, known.sha256, found.sha256)
        return len(self._files), sum(taken.stamp.size for taken in self._files.values())

    def _altered(self, path: Path, expected: str, got: str) -> BundleError:
        self._record(path.parent).drop(path)
        self.save()
        return BundleError(
            f"{path}: altered, though its times say that it is not: expected SHA-256 {expected[:12]}..., "
            f"got {got[:12]}...",
            "copy or export the bundle again, and check the disk",
        )

    def _record(self, folder: Path) -> _Record:
        if folder not in self._records:
            self._records[folder] = _Record(folder)
        return self._records[folder]


class _Record:
    """Stored digests of the files of a folder."""

    def __init__(self, folder: Path, known: dict[str, DigestRecord] | None = None) -> None:
        name = os.path.realpath(folder)
        self._file = records() / f"{hashlib.sha256(os.fsencode(name)).hexdigest()[:32]}.json"
        self._purpose = f"digests of {name}"
        self._changed = known is not None
        self.known = known or {}
        if known is not None:
            return
        try:
            found = read_sealed(self._file, self._purpose)
            self.known = {
                str(name): DigestRecord(str(sha), FileStat(*map(int, stamp)), True)
                for name, (sha, *stamp) in found["files"].items()
            }
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            pass  # missing, damaged or another user's

    def find(self, path: Path) -> DigestRecord | None:
        """Return the remembered digest of the file at ``path``; None = none, or the file has changed since."""
        known = self.known.get(path.name)
        with suppress(OSError):
            if known is not None:
                with open_regular(path) as file:
                    if FileStat.of(os.fstat(file.fileno())) == known.stamp and _keeps_times(file.fileno()):
                        return known
        return None

    def add(self, path: Path, taken: DigestRecord) -> None:
        if taken.lasting:
            self.known[path.name] = taken
            self._changed = True
        else:
            self.drop(path)

    def drop(self, path: Path) -> None:
        self._changed |= self.known.pop(path.name, None) is not None

    def remove(self) -> None:
        with suppress(OSError):
            self._file.unlink(missing_ok=True)

    def save(self) -> None:
        if not self._changed:
            return
        self._changed = False
        with suppress(OSError):
            files = {name: [sha, *stamp] for name, (sha, stamp, _) in self.known.items()}
            write_sealed(self._file, self._purpose, {"files": files})
            others = sorted(records().glob("*.json"), key=lambda file: file.stat().st_mtime)
            for old in others[:-MOST_RECORDS]:
                old.unlink(missing_ok=True)


def move_digests(old: Path, new: Path) -> None:
    """Keep the digests of files in a folder that was renamed, so that its first load need not take them again."""
    for folder in (new, *(path for path in new.rglob("*") if path.is_dir())):
        before = _Record(old / folder.relative_to(new))
        if before.known:
            _Record(folder, before.known).save()
        before.remove()


def records() -> Path:
    """Return the folder of the records."""
    return cache_folder() / "digests"
