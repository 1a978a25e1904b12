"""Records that decide which code runs or which result is called exact, sealed with the user's key.

A seal is an HMAC-SHA256 (RFC 2104) of the record's purpose and its contents.  The key is in a file that only
the user may read, ``EDGESPEC_KEY``, else ``edgespec/key`` in the user's data folder: clearing the cache leaves it.
A program that can read that file can seal.  Without one nothing is sealed, and no record is trusted.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import stat
from pathlib import Path
from typing import Any

from edgespec.runtimes.files.json_file import parse_json, read_regular
from edgespec.runtimes.files.staged import write_staged

KEY_BYTES = 32
MOST_BYTES = 4 << 20  # of a record
_SEAL = "seal"


def key_file() -> Path | None:
    """Return the path of the user's key, existing or not; None = this user has no folder."""
    if chosen := os.environ.get("EDGESPEC_KEY"):
        return Path(chosen)
    base = os.environ.get("XDG_DATA_HOME") or os.environ.get("LOCALAPPDATA")
    try:
        return (Path(base) if base else Path.home() / ".local" / "share") / "edgespec" / "key"
    except RuntimeError:  # no home
        return None


def user_key() -> bytes | None:
    """Read this user's key, made on first use; None = there can be none, or other users can access the file."""
    path = key_file()
    if path is None:
        return None
    try:
        if not path.exists():
            _make(path)
        mine = os.name != "posix" or _is_private(path)
        key = read_regular(path, KEY_BYTES)
    except (OSError, ValueError):
        return None
    return key if mine and len(key) == KEY_BYTES else None


def seal_of(purpose: str, data: bytes) -> bytes | None:
    """Compute the seal of ``data`` for ``purpose``, 32 bytes; None = no key."""
    key = user_key()
    return None if key is None else hmac.digest(key, purpose.encode() + b"\0" + data, hashlib.sha256)


def is_sealed(purpose: str, data: bytes, seal: bytes) -> bool:
    """Whether ``seal``, perhaps cut to 16 bytes or more, was made here for these bytes."""
    own = seal_of(purpose, data)
    return own is not None and len(seal) >= 16 and hmac.compare_digest(own[: len(seal)], seal)


def write_sealed(path: Path, purpose: str, value: dict[str, Any]) -> None:
    """Write a record that is trusted only for this ``purpose``; without a key its seal is empty.

    Raises:
        OSError: it cannot be written.
    """
    seal = seal_of(purpose, _canonical(value))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_staged(path, json.dumps({**value, _SEAL: seal.hex() if seal else ""}))


def read_sealed(path: Path, purpose: str) -> dict[str, Any]:
    """Read the record at ``path`` that this user's edgespec wrote for ``purpose``.

    Raises:
        OSError: it is not there, or no regular file.
        ValueError: it is not a record, or its seal is not this user's.
    """
    found = parse_json(read_regular(path, MOST_BYTES))
    if not isinstance(found, dict):
        raise ValueError("expected a JSON object")
    given = str(found.pop(_SEAL, "")).encode()
    own = seal_of(purpose, _canonical(found))
    if own is None or not hmac.compare_digest(own.hex().encode(), given):
        raise ValueError("it does not have the seal of this user's key")
    return found


def _canonical(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _is_private(path: Path) -> bool:
    found = path.stat()
    return stat.S_ISREG(found.st_mode) and not found.st_mode & 0o077 and found.st_uid == os.geteuid()


def _make(path: Path) -> None:
    """Make the key; if several processes do so at once, all use the first one's.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = path.with_name(f".{path.name}.part-{secrets.token_hex(6)}")
    handle = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0), 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(part, path)
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            part.rename(path)
    finally:
        part.unlink(missing_ok=True)
