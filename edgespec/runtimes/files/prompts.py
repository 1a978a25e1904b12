"""Prompts that were read, on the disk: what passes left of their tokens, in blocks that the next process finds.

A folder holds what belongs to one way of running one model, and to one owner.  Its ``root``, a seal with the user's key
(``sealed``), names and seals everything in it: without the key it is impossible to find or to add a text.

    HASH-STOP.keys        of the last 256 of STOP tokens
    PARENT-STOP-HASH.end  of the tokens after the last whole block, and the states after STOP tokens
    DIGEST.rows           of an image (``engine.images``): the rows that a tower has made, as states

HASH is an HMAC-SHA256 over the tokens of its file, keyed with that of the tokens before (PARENT): texts with a common
beginning share its files.  A file, little endian:

    64 bytes   magic "EDGEPRMT", version, 0 (2 x uint32), bytes of keys and values, bytes of states (2 x uint64), and an
               HMAC-SHA256 of the name, of these 32 bytes and of the SHA-256 of what follows
    keys and values, states: in the order and the layout of the slot

A file is there whole or not at all (``staged``), and nothing of it is used before its seal was compared.  Of files that
were used at the same time those that end furthest are removed first: what is left of a text is its beginning.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import shutil
import stat
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.runtimes.files.cache import BLOCK, ORIGIN, PROMPTS, cache_folder, describe, is_gone, stop_of
from edgespec.runtimes.files.json_file import open_regular
from edgespec.runtimes.files.sealed import seal_of
from edgespec.runtimes.files.staged import remove_stale, staged

LINE = 64  # bytes of a file's beginning
KINDS = ".keys", ".end", ".rows"
_BEGIN = struct.Struct("<8sIIQQ")
_MAGIC, _VERSION = b"EDGEPRMT", 1
_HEX = 32  # digits of a hash in a name
_MOST_PART = 9  # of ten: what a trim leaves of the limit
Bytes = NDArray[np.uint8]


class Damaged(Exception):
    """A file that is not what its name and its seal say."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path = path


@dataclass(frozen=True)
class Prefix:
    """The longest beginning of a text that a folder has."""

    length: int  # tokens
    blocks: list[Path]  # files of whole blocks, the first ones of the text
    end: Path | None  # the file of the rest, and of the states; None = none exists or is needed
    chain: list[bytes]  # hashes after 0, 256, 512 ... tokens of the text, further than the files reach

    def pieces(self) -> list[tuple[Path, int, int]]:
        """List files with their range of tokens: path, start, stop."""
        found = [(path, at * BLOCK, (at + 1) * BLOCK) for at, path in enumerate(self.blocks)]
        return found if self.end is None else [*found, (self.end, len(self.blocks) * BLOCK, self.length)]


class PromptFolder:
    """A folder of prompts.

    Args:
        root: 32 bytes, of ``root_of``.

    Attributes:
        path: the folder, which need not be there.
    """

    def __init__(self, root: bytes) -> None:
        self._root = root
        self.path = cache_folder() / PROMPTS / root.hex()[:_HEX]

    def find(self, tokens: Sequence[int], stateful: bool) -> Prefix:
        """Find the longest beginning of a text.

        Args:
            tokens: of the text, as many as are wanted.
            stateful: whether reading continues only from stored states.
        """
        chain = self.chain(tokens)
        try:
            names = {entry.name for entry in os.scandir(self.path)}
        except OSError:
            return Prefix(0, [], None, chain)
        blocks = []
        for at in range(1, len(chain)):
            if (name := _block_name(chain[at], at * BLOCK)) not in names:
                break
            blocks.append(self.path / name)
        ends: dict[str, list[str]] = {}
        for name in names:
            if name.endswith(".end"):
                ends.setdefault(name[:_HEX], []).append(name)
        for count in range(len(blocks), -1 if stateful else len(blocks) - 1, -1):
            mine = ends.get(chain[count].hex()[:_HEX], [])
            for name in sorted(mine, key=stop_of, reverse=True):
                stop = stop_of(name)
                if count * BLOCK <= stop <= len(tokens) and name == self._end_name(chain, tokens, stop):
                    return Prefix(stop, blocks[:count], self.path / name, chain)
        return Prefix(0, [], None, chain) if stateful else Prefix(len(blocks) * BLOCK, blocks, None, chain)

    def chain(self, tokens: Sequence[int]) -> list[bytes]:
        """Hash the text after 0, 256, 512 ... tokens."""
        found = [self._root]
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            found.append(_next(found[-1], tokens[start : start + BLOCK]))
        return found

    def read(self, path: Path, buffer: Bytes, keys: int) -> Bytes:
        """Read ``keys`` bytes of keys and values into a buffer, and compare the file's seal -> the states.

        Raises:
            Damaged: it is another one than was written, or too short.
            OSError: it is not there any more, or cannot be read.
        """
        with open_regular(path) as file:
            begin = file.read(LINE)
            if len(begin) < LINE:
                raise Damaged(path, "too short")
            magic, version, _, size, more = _BEGIN.unpack_from(begin)
            if (magic, version, size) != (_MAGIC, _VERSION, keys):
                raise Damaged(path, "of another form")
            if os.fstat(file.fileno()).st_size != LINE + size + more:
                raise Damaged(path, "not as long as it says")
            states = np.empty(more, np.uint8)
            digest = hashlib.sha256()
            for part in (buffer[:keys], states):
                if file.readinto(part.data) < part.nbytes:
                    raise Damaged(path, "too short")
                digest.update(part.data)
        if not hmac.compare_digest(begin[_BEGIN.size :], self._seal(path.name, begin[: _BEGIN.size], digest.digest())):
            raise Damaged(path, "changed after it was written")
        return states

    def write(self, name: str, keys: Sequence[NDArray[Any]], states: Bytes) -> None:
        """Write keys and values, and perhaps states, into the file called ``name`` (``name_of``), unless it exists.

        Raises:
            OSError: it cannot be written.
        """
        path = self.path / name
        if path.exists():
            return
        begin = _BEGIN.pack(_MAGIC, _VERSION, 0, sum(array.nbytes for array in keys), states.nbytes)
        with staged(path, private=True) as part, part.open("r+b") as out:
            out.seek(LINE)
            digest = hashlib.sha256()
            for array in (*keys, states):
                piece = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
                digest.update(piece)
                out.write(piece)
            out.seek(0)
            out.write(begin + self._seal(name, begin, digest.digest()))

    def name_of(self, chain: Sequence[bytes], tokens: Sequence[int], stop: int, whole: bool) -> str:
        """Name the file of the whole block that ends at ``stop``, or of the end there."""
        return _block_name(chain[stop // BLOCK], stop) if whole else self._end_name(chain, tokens, stop)

    def make(self, weights: Path, facts: dict[str, str]) -> None:
        """Make the folder, which only its owner may enter, with a description for ``edgespec cache``.

        Raises:
            OSError: it cannot be made, or belongs to another user.
        """
        self.path.parent.mkdir(0o700, parents=True, exist_ok=True)
        self.path.mkdir(0o700, exist_ok=True)
        found = self.path.stat()
        if os.name == "posix" and (found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077):
            raise PermissionError(f"{self.path}: others may enter it")
        if not (self.path / ORIGIN).exists() or is_gone(self.path):
            describe(self.path, weights, facts, self.path.name)
            (self.path / ORIGIN).chmod(0o600)

    def _end_name(self, chain: Sequence[bytes], tokens: Sequence[int], stop: int) -> str:
        parent = chain[stop // BLOCK]
        own = _next(parent, tokens[stop // BLOCK * BLOCK : stop], b"end")
        return f"{parent.hex()[:_HEX]}-{stop}-{own.hex()[:_HEX]}.end"

    def _seal(self, name: str, begin: bytes, digest: bytes) -> bytes:
        return hmac.digest(self._root, name.encode() + b"\0" + begin + digest, "sha256")


def root_of(facts: dict[str, str], owner: str | None) -> bytes | None:
    """Compute the seal of a folder's facts: 32 bytes; None = this user has no key.

    Args:
        facts: all that the bytes of a slot depend on.
        owner: of the texts; None = shared.
    """
    text = "\0".join([f"{name} {value}" for name, value in sorted(facts.items())])
    return seal_of("prompts", f"{text}\0\0{'' if owner is None else f'of {owner}'}".encode())


def touch(paths: Iterable[Path]) -> None:
    """Mark these files as used now, all at the same time."""
    now = time.time_ns()
    for path in paths:
        with suppress(OSError):
            os.utime(path, ns=(now, now))


def trim(limit: int, room: int = 0) -> None:
    """Remove the least recently used texts, until ``room`` bytes more are within ``limit``, and abandoned parts."""
    files = sorted(_files())
    left = sum(size for _, size, _ in files) + room
    if left <= limit:
        return
    for _, size, path in files:
        if left <= limit * _MOST_PART // 10:
            break
        with suppress(OSError):
            path.unlink()
            left -= size
    for folder in _folders():
        if not any(path.suffix in KINDS for path in folder.iterdir()):
            shutil.rmtree(folder, ignore_errors=True)


def room_for(limit: int) -> int:
    """Return the maximum bytes of all prompts: ``limit``, or a tenth of the disk space available to them if less."""
    with suppress(OSError):
        folder = next(path for path in (cache_folder(), *cache_folder().absolute().parents) if path.exists())
        return min(limit, (shutil.disk_usage(folder).free + sum(size for _, size, _ in _files())) // 10)
    return 0


def _files() -> Iterator[tuple[tuple[bool, int, int], int, Path]]:
    """Return files that may be removed: removal order, bytes, path."""
    for folder in _folders():
        gone = is_gone(folder)
        with suppress(OSError):
            for entry in os.scandir(folder):
                if ".part-" in entry.name:
                    remove_stale(folder / entry.name.lstrip(".").split(".part-")[0])
                elif entry.name.endswith(KINDS):
                    with suppress(OSError):
                        found = entry.stat()
                        order = not gone, found.st_mtime_ns, -stop_of(entry.name)
                        yield order, found.st_size, Path(entry.path)


def _folders() -> list[Path]:
    try:
        return sorted(path for path in (cache_folder() / PROMPTS).iterdir() if path.is_dir() and path.name[0] != ".")
    except OSError:
        return []


def _block_name(own: bytes, stop: int) -> str:
    return f"{own.hex()[:_HEX]}-{stop}.keys"


def _next(parent: bytes, tokens: Sequence[int], what: bytes = b"") -> bytes:
    return hmac.digest(parent, what + np.asarray(tokens, "<i8").tobytes(), "sha256")
