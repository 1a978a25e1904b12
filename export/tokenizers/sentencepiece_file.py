"""Reading a sentencepiece model (tokenizer.model): the few fields of its protocol buffer that decide about text.

Field numbers: sentencepiece_model.proto of google/sentencepiece; wire format: protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from edgespec.errors import ExportError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # kinds of pieces
UNIGRAM, BPE = 1, 2  # kinds of models; 3 and 4 are words and characters


@dataclass(frozen=True)
class Piece:
    """A token: its text with U+2581 for spaces, its score, and its kind."""

    text: str
    score: float
    kind: int


@dataclass
class SentencePieceModel:
    """What a tokenizer.model says.

    Attributes:
        pieces: [V] the tokens by id.
        kind: UNIGRAM or BPE.
        byte_fallback: characters without a piece are written as bytes.
        unk, bos, eos: ids; -1 = none.
        charsmap: the precompiled normalisation; empty = none.
        dummy_prefix: a space is put before the text.
        trim: spaces at both ends are dropped, several in a row are one.
        suffix: spaces end words rather than begin them.
        escape: spaces are written U+2581.
        denormalizes: decoded text is rewritten by a map of its own.
    """

    pieces: list[Piece] = field(default_factory=list)
    kind: int = UNIGRAM
    byte_fallback: bool = False
    unk: int = 0
    bos: int = 1
    eos: int = 2
    charsmap: bytes = b""
    dummy_prefix: bool = True
    trim: bool = True
    suffix: bool = False
    escape: bool = True
    denormalizes: bool = False


def read_sentencepiece(file: Path) -> SentencePieceModel:
    """Read a tokenizer.model.

    Raises:
        ExportError: not such a file, or cut short.
    """
    try:
        model = _parse(file.read_bytes())
    except (ValueError, IndexError, struct.error, UnicodeDecodeError) as error:
        raise ExportError(
            f"{file}: expected a sentencepiece model, got something else: {error}", "download it again"
        ) from error
    if not model.pieces:
        raise ExportError(f"{file}: expected a sentencepiece model, got one without pieces", "download it again")
    if not 0 <= model.unk < len(model.pieces):
        raise ExportError(f"{file}: names token {model.unk} as unknown, but has {len(model.pieces)} pieces")
    return model


def _parse(data: bytes) -> SentencePieceModel:
    model = SentencePieceModel()
    for number, value in _fields(data):
        if number == 1:
            model.pieces.append(_piece(_bytes(value)))
        elif number == 2:
            _trainer(model, _bytes(value))
        elif number == 3:
            _normalizer(model, _bytes(value))
        elif number == 5:
            model.denormalizes = any(name == 2 and text for name, text in _fields(_bytes(value)))
    return model


def _piece(data: bytes) -> Piece:
    text, score, kind = "", 0.0, NORMAL
    for number, value in _fields(data):
        if number == 1:
            text = _bytes(value).decode("utf-8")
        elif number == 2:
            (score,) = struct.unpack("<f", _bytes(value))
        elif number == 3:
            kind = _int(value)
    return Piece(text, score, kind)


def _trainer(model: SentencePieceModel, data: bytes) -> None:
    for number, value in _fields(data):
        if number == 3:
            model.kind = _int(value)
        elif number == 24:
            model.suffix = bool(_int(value))
        elif number == 35:
            model.byte_fallback = bool(_int(value))
        elif number == 40:
            model.unk = _int(value)
        elif number == 41:
            model.bos = _int(value)
        elif number == 42:
            model.eos = _int(value)


def _normalizer(model: SentencePieceModel, data: bytes) -> None:
    for number, value in _fields(data):
        if number == 2:
            model.charsmap = _bytes(value)
        elif number == 3:
            model.dummy_prefix = bool(_int(value))
        elif number == 4:
            model.trim = bool(_int(value))
        elif number == 5:
            model.escape = bool(_int(value))


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of a message; numbers as int, everything else as bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        value: int | bytes
        if wire == 0:
            value, at = _varint(data, at)
        else:
            size = {1: 8, 5: 4}.get(wire)
            if wire == 2:
                size, at = _varint(data, at)
            if size is None or number == 0:
                raise ValueError(f"field {number} of unknown wire type {wire}")
            value, at = data[at : at + size], at + size
            if at > len(data):
                raise ValueError("it ends in the middle of a field")
        yield number, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, the lowest first -> (number, where it ends)."""
    found = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError("it ends in the middle of a number")
        found |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not data[at - 1] & 0x80:
            return found, at


def _int(value: int | bytes) -> int:
    """An int32 field: negative ones are written as 64 bits."""
    if isinstance(value, bytes):
        raise ValueError("expected a number, got bytes")
    return value - (1 << 64) if value >= 1 << 63 else value


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("expected bytes, got a number")
    return value
