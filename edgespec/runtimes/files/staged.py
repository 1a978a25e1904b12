"""Write a file or a folder atomically, even if the process is killed.

The new file has a hidden name next to its target, ``.NAME.part-*``, and is locked; it takes its name when all of it is
on the disk.  What a killed process left is not locked any more: the next one that writes there removes it.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_YOUNG = 10.0  # seconds in which another process may not have locked its part yet


@contextmanager
def staged(target: Path, folder: bool = False, replace: bool = True, private: bool = False) -> Iterator[Path]:
    """Make a temporary sibling that becomes ``target`` at the end; any error, including Ctrl-C, removes it.

    Args:
        target: to be written; an existing one is replaced.
        folder: it is a folder.
        replace: an existing folder is replaced; else it stays, and the new one is dropped.
        private: readable only by its owner.

    Raises:
        OSError: it cannot be written.
    """
    with scratch(target, folder) as part:
        yield part
        if not private:  # as both are made
            part.chmod(0o755 if folder else 0o644)
        for path in part.rglob("*") if folder else (part,):
            if path.is_file():
                _sync(path)
        _take_name(part, target, replace)


@contextmanager
def scratch(target: Path, folder: bool = True) -> Iterator[Path]:
    """Make a hidden, locked sibling of ``target``, and remove it at the end if it still has that name.

    Raises:
        OSError: it cannot be made.
    """
    remove_stale(target)
    part, lock = target.with_name(f".{target.name}.part-{secrets.token_hex(6)}"), None
    try:  # from here on a signal may come between any two steps
        if folder:
            part.mkdir(0o700)
        else:
            os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        with suppress(OSError):  # a file system without locks
            lock = take_lock(part)
        yield part
    finally:
        try:
            _remove(part)
        except BaseException:  # a signal, now of all times
            _remove(part)
            raise
        finally:
            if lock is not None:
                os.close(lock)


def write_staged(target: Path, text: str) -> None:
    """``staged`` for a text.

    Raises:
        OSError: it cannot be written.
    """
    with staged(target) as part:
        part.write_text(text, "utf-8")


def remove_stale(target: Path) -> None:
    """Remove abandoned parts of ``target``."""
    for dots in (".", ".."):  # also a part's own part
        for part in target.parent.glob(f"{dots}{target.name}.part-*"):
            with suppress(OSError):
                if time.time() - part.stat().st_mtime < _YOUNG:
                    continue
                lock = take_lock(part)
                if lock is not None:
                    os.close(lock)
                    _remove(part)


def take_lock(path: Path) -> int | None:
    """Lock a file or a folder, until the descriptor is closed or the process ends; None = no locks (Windows).

    Without locks, ownership is unknown: stale parts stay.

    Raises:
        BlockingIOError: another process has it.
        OSError: this file system has none.
    """
    try:
        import fcntl
    except ImportError:
        return None
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle


def _sync(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _take_name(part: Path, target: Path, replace: bool) -> None:
    """Rename ``part`` to ``target``; a folder of that name is deleted only after that has worked.

    Where the system can exchange names there is a folder of that name at any moment.
    """
    if part.is_file():
        part.replace(target)
        return
    if not replace or not target.exists():
        try:
            part.rename(target)
        except OSError:
            if replace or not target.is_dir():
                raise
        return
    if _exchange(part, target):
        return
    old = part.with_name(f"{part.name}.old")
    target.rename(old)
    try:
        part.rename(target)
    except BaseException:
        old.rename(target)
        raise
    _remove(old)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two names in one step; False = the system, or the file system, does not support it."""
    import ctypes

    one, two, here, swap = os.fsencode(first), os.fsencode(second), -100, 2  # AT_FDCWD, RENAME_EXCHANGE or RENAME_SWAP
    try:
        system = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows
        return False
    if hasattr(system, "renameat2"):  # Linux
        return bool(system.renameat2(here, one, here, two, swap) == 0)
    return hasattr(system, "renamex_np") and bool(system.renamex_np(one, two, swap) == 0)  # macOS


def _remove(part: Path) -> None:
    if part.is_dir() and not part.is_symlink():
        shutil.rmtree(part, ignore_errors=True)
    else:
        part.unlink(missing_ok=True)
