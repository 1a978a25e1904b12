"""Session files: the KV cache of a text, so that another process need not compute it again.

The file, little endian:

    64 bytes     magic "EDGESESS", version, bytes of the header (2 x uint32), SHA-256 of all that follows, and the first
                 16 bytes of the seal of these 48 (``sealed``); zeros if its contents are unverified
    header       JSON, UTF-8, filled up with spaces to a multiple of 64 bytes: ``SessionHeader``
    parts        bytes of the target's slot, and of the draft's, in the order and the layout of the slot itself, and
                 pixels of pictures, or float32 samples of recordings

A slot's bytes mean something only to the same weights, graph and format of keys: ``SavedSlot.origin`` names them.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from edgespec.errors import SessionError
from edgespec.runtimes.files.bounds import Width
from edgespec.runtimes.files.json_file import MOST_BYTES, parse_json, validated
from edgespec.runtimes.files.sealed import is_sealed, seal_of
from edgespec.runtimes.files.staged import staged

MAGIC, OLDEST, VERSION = b"EDGESESS", 1, 2
LINE = 64  # bytes: of the beginning, and padding of the header
_BEGIN = struct.Struct("<8sII32s")
_PURPOSE = "session"
_LATER = ("pictures", "recordings")  # left out where there are none: earlier versions know no such field
_AGAIN = "delete it, and it is written again"

Arrays = list[NDArray[Any]]


class SavedSlot(BaseModel):
    """A slot in a session file."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    origin: dict[str, str]  # identity of its bytes, by name
    tokens: list[Annotated[int, Field(ge=0, lt=1 << 63)]]  # ids, [n]
    high_water_mark: int = Field(ge=0, le=1 << 31)  # tokens ever written, with rejected guesses; at least n
    nbytes: int = Field(ge=0, le=1 << 40)  # of the slot


class SessionHeader(BaseModel):
    """Header of a session file.

    ``messages``: of the conversation, if it was one; ``pictures``: height and width of those of its parts of type
    image, in order; ``recordings``: samples of those of type audio.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    target: SavedSlot
    draft: SavedSlot | None = None
    messages: list[dict[str, Any]] = Field(default_factory=list)
    pictures: list[tuple[Width, Width]] = Field(default_factory=list)
    recordings: list[Annotated[int, Field(ge=1, le=1 << 36)]] = Field(default_factory=list)


@dataclass(frozen=True)
class SavedSession:
    """An opened session file."""

    file: Path  # where it is
    header: SessionHeader
    target: NDArray[np.uint8]  # uint8 [nbytes], mapped
    draft: NDArray[np.uint8]  # the same of the draft; empty where there is none
    held: Arrays  # by the conversation: pictures, uint8 [h, w, 3] each, or recordings, float32 [n]
    sealed: bool  # computed by this user's edgespec, with a checked bundle


def write_session(file: Path, header: SessionHeader, arrays: Iterable[NDArray[Any]], vouched: bool = True) -> None:
    """Write a session file atomically; only its owner may read it.

    Args:
        file: an existing one is replaced.
        header: its header.
        arrays: of the target's slot, of the draft's, and pictures or recordings, as many bytes as the header says.
        vouched: they were computed here, with a bundle that was checked: the file gets a seal.

    Raises:
        SessionError: it cannot be written.
    """
    text = header.model_dump_json(exclude={name for name in _LATER if not getattr(header, name)}).encode()
    text += b" " * (-len(text) % LINE)
    if len(text) > MOST_BYTES:
        raise SessionError(f"{file}: a conversation of {len(text)} bytes: expected at most {MOST_BYTES}")
    try:
        with staged(file, private=True) as part, part.open("r+b") as out:
            out.seek(LINE)
            digest = hashlib.sha256(text)
            out.write(text)
            for array in arrays:
                piece = np.ascontiguousarray(array).view(np.uint8).data
                digest.update(piece)
                out.write(piece)
            out.seek(0)
            begin = _BEGIN.pack(MAGIC, VERSION, len(text), digest.digest())
            seal = seal_of(_PURPOSE, begin) if vouched else None
            out.write((begin + (seal or b"")[: LINE - len(begin)]).ljust(LINE, b"\0"))
    except OSError as error:
        raise SessionError(f"{file}: cannot be written: {error.strerror or error}") from error


def read_session(file: Path) -> SavedSession:
    """Open a session file; its slots are mapped, not read.

    Raises:
        SessionError: it is none, or damaged, or newer than this version.
    """
    try:
        if not file.is_file():
            raise SessionError(f"{file}: expected a session file, and there is none")
        mapped = np.memmap(file, np.uint8, "r") if file.stat().st_size >= LINE else np.zeros(0, np.uint8)
    except OSError as error:
        raise SessionError(f"{file}: cannot be read: {error.strerror or error}") from error
    if bytes(mapped[:8]) != MAGIC:
        raise SessionError(f"{file}: is no session file", "name another one")
    begin, seal = mapped[: _BEGIN.size].tobytes(), mapped[_BEGIN.size : LINE].tobytes()
    _, version, size, digest = _BEGIN.unpack(begin)
    if not OLDEST <= version <= VERSION:
        raise SessionError(f"{file}: version {version} of session files: expected {OLDEST} to {VERSION}", _AGAIN)
    if size > min(MOST_BYTES, len(mapped) - LINE) or hashlib.sha256(mapped[LINE:].data).digest() != digest:
        raise SessionError(f"{file}: damaged: its SHA-256 is another one", _AGAIN)
    try:
        data = parse_json(mapped[LINE : LINE + size].tobytes())
    except ValueError as error:
        raise SessionError(f"{file}: not readable as JSON: {error}", _AGAIN) from error
    header = validated(SessionHeader, _migrated(data) if version < VERSION else data, file, SessionError, _AGAIN)
    body = mapped[LINE + size :]
    own, others = header.target.nbytes, header.draft.nbytes if header.draft else 0
    sizes = [3 * height * width for height, width in header.pictures] + [4 * count for count in header.recordings]
    ends = np.cumsum([own, others, *sizes])
    if len(body) != ends[-1]:
        raise SessionError(f"{file}: expected {ends[-1]} bytes of slots and what was shown, got {len(body)}", _AGAIN)
    target, draft, *held = np.split(body, ends[:-1])
    shapes, count = [(*size, 3) for size in header.pictures], len(header.pictures)
    pictures = [one.reshape(shape) for one, shape in zip(held, shapes, strict=False)]
    heard = [np.frombuffer(one.tobytes(), "<f4") for one in held[count:]]
    return SavedSession(file, header, target, draft, pictures + heard, is_sealed(_PURPOSE, begin, seal))


def _migrated(data: Any) -> Any:
    """Convert a header of version 1, whose slots have ``furthest`` for ``high_water_mark``."""
    if not isinstance(data, dict):
        return data
    found = dict(data)
    for name in ("target", "draft"):
        slot = data.get(name)
        if isinstance(slot, dict) and "high_water_mark" not in slot:
            found[name] = {"high_water_mark" if key == "furthest" else key: value for key, value in slot.items()}
    return found


def slot_bytes(arrays: Arrays) -> int:
    """Bytes of a slot's arrays."""
    return sum(array.nbytes for array in arrays)


def fill(arrays: Arrays, saved: NDArray[np.uint8]) -> None:  # [nbytes]
    """Copy saved bytes into a slot's arrays of the same size."""
    at = 0
    for array in arrays:
        array[...] = saved[at : at + array.nbytes].view(array.dtype).reshape(array.shape)
        at += array.nbytes
