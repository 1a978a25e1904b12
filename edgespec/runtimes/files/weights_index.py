"""The index of a weight file (``model.weights.json``): where each tensor is in either layout.

Every offset and size in it is checked before a byte is read or written by it.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from edgespec.errors import BundleError
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


class WeightsIndex(BaseModel):
    """The whole index."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    matrices: dict[str, Packed]
    stock: dict[str, Entry]
    native: dict[str, Entry]

    @model_validator(mode="after")
    def _fits(self) -> WeightsIndex:
        for name, entry in (*self.stock.items(), *self.native.items()):
            if prod(entry.dims) * np.dtype(entry.dtype).itemsize != entry.length:
                raise ValueError(f"{name}: {entry.length} bytes are no {entry.dtype} {entry.dims}")
        for name, packed in self.matrices.items():
            if sum(rows for _, rows in packed.parts) != packed.n:
                raise ValueError(f"the parts have not {packed.n} rows together")
            if packed.head_dim and packed.n % packed.head_dim:
                raise ValueError(f"{packed.n} rows are no heads of {packed.head_dim}")
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
    """Read the index of a weight file of ``size`` bytes in that ``layout``.

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
