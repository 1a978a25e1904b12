"""Files of CTranslate2 (model.bin): variables by name, with their types, shapes and places, and matrices of them.

Layout, binary versions 5 and 6, as CTranslate2's ``specs/model_spec.py`` writes it, all numbers little-endian: version
u32, name of the specification, its revision u32; a count u32, and for each variable its name, rank u8, lengths u32
each, type u8, bytes u32 and values; a count u32, and for each alias its name and that of the variable.  A name is
u16 bytes long, the last of which is 0.

Weights may be int8 with a scale for each row or int16 with one scale; a level is the value *times* its scale.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.source.stored import TRUNCATED, Plain, span

FILE = "model.bin"
VERSIONS = (5, 6)
TYPES = ("F32", "I8", "I16", "I32", "F16", "BF16")  # by number, as safetensors names them
SIZES = {"F32": 4, "I8": 1, "I16": 2, "I32": 4, "F16": 2, "BF16": 2}  # bytes of a value
FLOATS = ("F32", "F16", "BF16")
LEVELS = ("I8", "I16")
_LONGEST_NAME = 256  # of a specification


@dataclass(frozen=True)
class Ct2File:
    """Contents of a model.bin."""

    spec: str  # name of the specification, such as ``WhisperSpec``
    revision: int  # of the specification
    variables: Mapping[str, Plain]  # by name, aliases too
    aliases: Mapping[str, str]  # names that stand for another variable


def spec_of(folder: Path) -> str | None:
    """Name the specification of a folder's model.bin; None = there is none, or it is something else, as a pickle is."""
    try:
        with (folder / FILE).open("rb") as stream:
            head = stream.read(6 + _LONGEST_NAME)
        version, length = struct.unpack_from("<IH", head)
    except (OSError, struct.error):
        return None
    name = head[6 : 6 + length]
    if version > 255 or not 1 < length <= _LONGEST_NAME or name[-1:] != b"\0" or not name[:-1].isalnum():
        return None
    return name[:-1].decode("ascii")


def read_ct2(file: Path) -> Ct2File:
    """Read where the variables of a model.bin are.

    Raises:
        ExportError: the file is damaged, or of a version or with a type that is not known.
    """
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Reader(file, content).read()
    except (OSError, ValueError, struct.error, UnicodeDecodeError, OverflowError) as error:
        raise ExportError(f"{file}: not a readable file of CTranslate2: {error}", TRUNCATED) from error


class _Reader:
    """Reads values one after another."""

    def __init__(self, file: Path, content: mmap.mmap) -> None:
        self.file, self.content, self.at = file, content, 0

    def read(self) -> Ct2File:
        version = self.number("I")
        if version not in VERSIONS:
            raise UnsupportedModel(
                f"{self.file}: a CTranslate2 file of version {version}; expected {' or '.join(map(str, VERSIONS))}",
                "convert the model again with a current ctranslate2, or export what it was converted from",
            )
        spec, revision = self.text(), self.number("I")
        variables: dict[str, Plain] = {}
        for _ in range(self.number("I")):
            name, variable = self.variable()
            if name in variables:
                raise ValueError(f"two variables are called {name}")
            variables[name] = variable
        aliases: dict[str, str] = {}
        for _ in range(self.number("I")):
            alias, name = self.text(), self.text()
            if name not in variables:
                raise ValueError(f"{alias} stands for {name}, which is not there")
            aliases[alias] = name
        return Ct2File(spec, revision, variables | {alias: variables[name] for alias, name in aliases.items()}, aliases)

    def variable(self) -> tuple[str, Plain]:
        name = self.text()
        shape = tuple(self.number("I") for _ in range(self.number("B")))
        kind, size = self.number("B"), self.number("I")
        if kind >= len(TYPES):
            raise UnsupportedModel(
                f"{self.file}: {name} is of type {kind}, which is not known; known: {', '.join(TYPES)}",
                "convert the model again as float16 or int8, or export what it was converted from",
            )
        dtype, start = TYPES[kind], self.at
        if size != (wanted := prod(shape) * SIZES[dtype]):
            raise ValueError(f"{name} of shape {list(shape)} has {size} bytes, expected {wanted}")
        self.skip(size)
        return name, Plain(self.file, name, dtype, shape, start)

    def number(self, kind: str) -> Any:
        (value,) = struct.unpack_from(f"<{kind}", self.content, self.at)
        self.at += struct.calcsize(kind)
        return value

    def text(self) -> str:
        length, start = self.number("H"), self.at
        self.skip(length)
        return self.content[start : start + length].rstrip(b"\0").decode("utf-8")

    def skip(self, size: int) -> None:
        if size > len(self.content) - self.at:
            raise ValueError("it ends in the middle of a value")
        self.at += size


@dataclass(frozen=True)
class Ct2Tensor:
    """Rows of a variable as a tensor of the model that it was converted from.

    Attributes:
        values: the variable.
        scale: of its levels, one for each row [n] or a single one []; None = it holds floats.
        first: row of the variable where the tensor begins.
        count: rows that are taken from the variable.
        before: rows of zeros in front of them.
        behind: rows of ``filled`` after them.
        filled: value of those rows.
        flat: whether it is a vector that the model has as a matrix of one row.
    """

    values: Plain
    scale: Plain | None
    first: int
    count: int
    before: int = 0
    behind: int = 0
    filled: float = 0.0
    flat: bool = False

    @property
    def file(self) -> Path:
        return self.values.file

    @property
    def shape(self) -> tuple[int, ...]:
        rows = self.before + self.count + self.behind
        return (1, rows) if self.flat else (rows, *self.values.shape[1:])

    def read(self, rows: slice, columns: slice | None) -> NDArray[np.float32]:
        if self.flat:
            whole = self._rows(slice(None), None)[None][rows]
            return whole if columns is None else whole[:, columns]
        return self._rows(rows, columns)

    def _rows(self, rows: slice, columns: slice | None) -> NDArray[np.float32]:
        start, stop = span(rows, self.before + self.count + self.behind)
        own = [min(max(at - self.before, 0), self.count) for at in (start, stop)]
        part = slice(self.first + own[0], self.first + own[1])
        values = self.values.raw(part, columns).astype(np.float32)
        if self.scale is not None:
            each = self.scale.raw(part) if self.scale.shape else self.scale.raw()
            values /= each.astype(np.float32).reshape(-1, *(1,) * (values.ndim - 1))
        above, below = max(0, self.before - start), max(0, stop - max(start, self.before + self.count))
        if not above and not below:
            return values
        around = ((min(above, stop - start), below), *((0, 0),) * (values.ndim - 1))
        padded = np.pad(values, around)
        if below and self.filled:
            padded[len(padded) - below :] = self.filled
        return padded


def tensor_of(held: Ct2File, name: str) -> Ct2Tensor:
    """Take a whole variable, with its scale where it has one.

    Raises:
        ExportError: it is not there, or of a type or with scales that do not go together.
    """
    values = held.variables.get(name)
    if values is None:
        file = next(iter(held.variables.values())).file if held.variables else FILE
        raise ExportError(f"{file}: the variable {name} is missing", TRUNCATED)
    rows = values.shape[0] if values.shape else 1
    real = held.aliases.get(name, name)  # scales have no alias
    scale = held.variables.get(f"{real}_scale") or held.variables.get(f"{name}_scale")
    if f"{real}_zero" in held.variables:
        raise UnsupportedModel(
            f"{values.file}: {name} is packed by AWQ in 4 bits, which is not supported",
            "export the AWQ checkpoint that it was converted from",
        )
    if values.dtype in FLOATS and scale is None:
        return Ct2Tensor(values, None, 0, rows)
    known = values.dtype in LEVELS and scale is not None and scale.dtype in FLOATS
    if known and scale is not None and scale.shape in ((), (1,), (rows,)):
        return Ct2Tensor(values, replace(scale, shape=()) if scale.shape == (1,) else scale, 0, rows)
    found = "no scale" if scale is None else f"a {scale.dtype} scale of shape {list(scale.shape)}"
    raise ExportError(f"{values.file}: {name} is {values.dtype} {list(values.shape)} with {found}", TRUNCATED)
