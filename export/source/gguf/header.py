"""The header of a GGUF file: metadata, and where each tensor is.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3. The package gguf reads it too, but
makes an array of every token and merge, of which there are hundreds of thousands.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.source.tensors.stored import TRUNCATED

NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
VERSIONS = (2, 3)
ALIGNMENT = 32  # of tensors, unless general.alignment says otherwise


@dataclass(frozen=True)
class Entry:
    """Where a tensor is.

    Attributes:
        name: of the tensor.
        kind: number of its ggml type.
        shape: rows first.
        offset: of its first byte in the file.
    """

    name: str
    kind: int
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Header:
    """What a GGUF file says before its data.

    Attributes:
        metadata: by key; arrays are lists.
        entries: the tensors by name.
    """

    metadata: dict[str, Any]
    entries: dict[str, Entry]


def read_gguf_header(file: Path) -> Header:
    """Read the header of a file.

    Raises:
        ExportError: no GGUF file, or a damaged one. UnsupportedModel: another version or byte order.
    """
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Reader(file, content).header()
    except (OSError, ValueError, struct.error, UnicodeDecodeError, OverflowError, MemoryError) as error:
        raise ExportError(f"{file}: not a readable GGUF file: {error}", TRUNCATED) from error


class _Reader:
    """Reads values one after another."""

    def __init__(self, file: Path, content: mmap.mmap) -> None:
        self.file, self.content, self.at = file, content, 0

    def header(self) -> Header:
        if self.content[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        self.at = 4
        version = self.number("I")
        if version not in VERSIONS:
            swapped = int.from_bytes(struct.pack("<I", version), "big") in VERSIONS
            what = "the other byte order" if swapped else f"version {version}"
            raise UnsupportedModel(f"{self.file}: a GGUF file of {what} is not supported", "convert the model again")
        tensors, values = self.number("Q"), self.number("Q")
        metadata = {}
        for _ in range(values):
            key = self.string()
            metadata[key] = self.value(self.number("I"))
        found = [self.entry() for _ in range(tensors)]
        aligned = metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(aligned, int) or aligned <= 0:
            raise ValueError(f"general.alignment is {aligned!r}")
        start = -(-self.at // aligned) * aligned
        entries = {e.name: Entry(e.name, e.kind, e.shape, start + e.offset) for e in found}
        if len(entries) != len(found):
            raise ValueError("two tensors have the same name")
        return Header(metadata, entries)

    def entry(self) -> Entry:
        name = self.string()
        lengths = [self.number("Q") for _ in range(self.number("I"))]
        return Entry(name, self.number("I"), tuple(reversed(lengths)), self.number("Q"))

    def number(self, kind: str) -> Any:
        (value,) = struct.unpack_from(f"<{kind}", self.content, self.at)
        self.at += struct.calcsize(kind)
        return value

    def string(self) -> str:
        length = self.number("Q")
        if length > len(self.content) - self.at:
            raise ValueError(f"a string of {length} bytes goes beyond its end")
        self.at += length
        return self.content[self.at - length : self.at].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind in NUMBERS:
            return self.number(NUMBERS[kind])
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            raise ValueError(f"a value of type {kind}")
        its, count = self.number("I"), self.number("Q")
        if its in NUMBERS:
            dtype = np.dtype(NUMBERS[its]).newbyteorder("<")
            if count > (len(self.content) - self.at) // dtype.itemsize:
                raise ValueError(f"an array of {count} values goes beyond its end")
            values = np.frombuffer(self.content[self.at : self.at + count * dtype.itemsize], dtype).tolist()
            self.at += count * dtype.itemsize
            return values
        if its == STRING:
            return [self.string() for _ in range(count)]
        raise ValueError(f"an array of type {its}")
