"""The index of a weight file (``model.weights.json``): where each tensor lies in either layout.

Every offset and size in it is checked before a byte is read or written by it.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from edgespec.errors import BundleError
from edgespec.runtimes.files.bounds import Vocab, Width
from edgespec.runtimes.files.formats import Kind
from edgespec.runtimes.files.json_file import read_json, validated
from edgespec.runtimes.files.manifest import Layout
from edgespec.runtimes.files.packing import Packed

AGAIN = "copy the bundle or export it again"
_MOST_GROWTH = 16  # a layout over the other: float32 scales and padding, nothing more
_SLACK = 1 << 24
Place = Annotated[int, Field(ge=0, le=1 << 50)]


class Entry(NamedTuple):
    """A tensor in a weight file: its first byte, its bytes, its numpy type and its shape."""

    offset: Place
    length: Place
    dtype: Literal["<f4", "<f2", "|u1", "|i1", "<i4", "<i8", "|b1"]
    dims: Annotated[list[Place], Field(max_length=8)]


class Matrix(BaseModel):
    """What ``Packed`` is made of."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Kind
    n: Vocab
    k: Vocab
    head_dim: int = Field(default=0, ge=0, le=1 << 20)
    parts: list[tuple[str, Width | Vocab]] = Field(default_factory=list, max_length=1 << 12)

    @model_validator(mode="after")
    def _fits(self) -> Matrix:
        if sum(rows for _, rows in self.parts) != self.n:
            raise ValueError(f"the parts have not {self.n} rows together")
        if self.head_dim and self.n % self.head_dim:
            raise ValueError(f"{self.n} rows are no heads of {self.head_dim}")
        return self

    @property
    def packed(self) -> Packed:
        """The same, as packing takes it."""
        return Packed(self.kind, self.n, self.k, self.head_dim, tuple(self.parts))


class WeightsIndex(BaseModel):
    """The whole index."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    matrices: dict[str, Matrix]
    stock: dict[str, Entry]
    native: dict[str, Entry]

    @model_validator(mode="after")
    def _fits(self) -> WeightsIndex:
        for name, entry in (*self.stock.items(), *self.native.items()):
            if prod(entry.dims) * np.dtype(entry.dtype).itemsize != entry.length:
                raise ValueError(f"{name}: {entry.length} bytes are no {entry.dtype} {entry.dims}")
        for name, matrix in self.matrices.items():
            packed = matrix.packed
            self._expect("native", f"{name}.packed", (packed.nbytes,), "|u1")
            if packed.low_nbytes:
                self._expect("native", f"{name}.low", (packed.low_nbytes,), "|u1")
            if packed.kind == "f32":
                for part, rows in packed.parts:
                    self._expect("stock", part, (packed.k, rows), "<f4")
            elif packed.kind == "c8":
                self._expect("stock", f"{name}.levels", (packed.k, packed.n), "|i1")
                self._expect("stock", f"{name}.scales", (packed.n,), "<f4")
            else:
                shape = packed.form.stock_shape(packed.n, packed.k)
                self._expect("stock", f"{name}.levels", shape, "|u1")
                self._expect("stock", f"{name}.scales", shape[:2], "<f4")
        return self

    def _expect(self, layout: Layout, name: str, dims: tuple[int, ...], dtype: str) -> None:
        found = self.entries(layout).get(name)
        if found is None or (tuple(found.dims), found.dtype) != (dims, dtype):
            raise ValueError(f"{layout} {name}: expected {dtype} {list(dims)}, got {found and list(found[2:])}")

    def entries(self, layout: Layout) -> dict[str, Entry]:
        """Return the tensors of one ``layout`` by name."""
        return self.native if layout == "native" else self.stock


def read_index(path: Path, layout: Layout, size: int) -> WeightsIndex:
    """Read an index.

    Args:
        path: the file.
        layout: that of the weight file.
        size: of the weight file, in bytes.

    Raises:
        BundleError: no index; or an entry beyond the file, or of a size that no such file can have.
    """
    index = validated(WeightsIndex, read_json(path, BundleError, AGAIN), path, BundleError, AGAIN)
    for kind in ("stock", "native"):
        most = size if kind == layout else _MOST_GROWTH * size + _SLACK
        for name, entry in index.entries(kind).items():
            if entry.offset + entry.length > most:
                raise BundleError(
                    f"{path}: {kind} {name} ends at byte {entry.offset + entry.length}, expected at most {most}", AGAIN
                )
    return index
