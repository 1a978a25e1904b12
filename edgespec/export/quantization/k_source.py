"""A checkpoint whose matrices are stored in 4 bits with their own scales, the important ones in 6: ``int4-k``.

Which matrix gets how many bits follows from its place, as in llama.cpp's Q4_K_M (src/llama-quant.cpp): 6 for the LM
head, and for values and the MLP's last matrix in half of the layers.  Rows that are no multiples of 256 get Q4_1 and
Q8_0 instead, and those that are none of 32 become int8.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from copy import copy
from typing import IO

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportError
from edgespec.export.architectures.base import Architecture
from edgespec.export.quantization.k_blocks import K_BLOCKS, KBlocks, quantize_k
from edgespec.export.quantization.levels import BLOCKS, Array, Blocks, Bytes, squared_error
from edgespec.export.source.derived import ExtendedCheckpoint, Overlay
from edgespec.export.source.source import Checkpoint
from edgespec.export.source.stored import FileRows
from edgespec.runtimes.files.formats import MIXED

Rows = slice | NDArray[np.int64]
FINE = (".v_proj.weight", ".down_proj.weight", ".experts.down.weight")  # have 6 bits in half of the layers
LAYERS, EXPERTS = ".layers.", ".experts."


class KRows:
    """Rows of matrices that were quantized with their inputs, in a temporary file.

    Attributes:
        errors: sum of squared errors, and of squares, of the matrices that were quantized.
    """

    def __init__(self, file: IO[bytes] | None) -> None:
        self._file = file
        self._where: dict[str, list[tuple[int, int, int]]] = {}  # offset, rows, bytes of a row of each piece
        self.errors: dict[str, tuple[float, float]] = {}

    def add(self, name: str, rows: Bytes) -> None:
        """Keep the next rows of a matrix, [r, bytes]."""
        assert self._file is not None
        offset = self._file.seek(0, 2)
        self._file.write(np.ascontiguousarray(rows).data)
        self._where.setdefault(name, []).append((offset, *rows.shape))

    def note(self, name: str, exact: Array, made: Array) -> None:
        """Add the error of some rows to that of their matrix, [r, k] both."""
        error, norm = squared_error(exact, made)
        before = self.errors.get(name, (0.0, 0.0))
        self.errors[name] = before[0] + error, before[1] + norm

    def holds(self, name: str) -> bool:
        return name in self._where

    def read(self, name: str, rows: Rows) -> Bytes:
        """Read some rows of a matrix."""
        assert self._file is not None
        pieces = self._where[name]
        ends = np.cumsum([count for _, count, _ in pieces])
        wanted = np.arange(*rows.indices(int(ends[-1]))) if isinstance(rows, slice) else rows
        out = np.empty((len(wanted), pieces[0][2]), np.uint8)
        self._file.flush()
        for (offset, count, width), end in zip(pieces, ends, strict=True):
            here = np.flatnonzero((wanted >= end - count) & (wanted < end))
            if len(here):
                own = wanted[here] - (end - count)
                first, last = int(own.min()), int(own.max()) + 1
                data = os.pread(self._file.fileno(), (last - first) * width, offset + first * width)
                out[here] = np.frombuffer(data, np.uint8).reshape(-1, width)[own - first]
        return out


class KSource(Overlay):
    """A checkpoint whose matrices are blocks as GGUF files have them; as floats they read as before.

    Attributes:
        rows: those that were quantized earlier; others are quantized when they are asked for.
    """

    def __init__(self, base: Checkpoint, forms: dict[str, KBlocks]) -> None:
        super().__init__(base, {})
        self._forms, self.rows = forms, KRows(None)

    def blocks(self, name: str) -> FileRows | None:
        if (form := self._forms.get(name)) is None:
            return None
        return FileRows(form.kind.upper(), self._reader(name, form))

    def _reader(self, name: str, form: KBlocks) -> Callable[[Rows], Bytes]:
        def read(rows: Rows) -> Bytes:
            if self.rows.holds(name):
                return self.rows.read(name, rows)
            if isinstance(rows, slice):
                exact = self.base.read(name, rows)
            elif not len(rows):
                return np.empty((0, self.base.shape(name)[1] // form.block * form.bytes), np.uint8)
            else:
                first = int(rows.min())
                exact = self.base.read(name, slice(first, int(rows.max()) + 1))[rows - first]
            made, values = quantize_k(exact, form)
            self.rows.note(name, exact, values)
            return made

        return read


def with_k_blocks(arch: Architecture) -> tuple[Architecture, KSource]:
    """Return the model with its matrices in such blocks, and their source.

    Raises:
        ExportError: it is no decoder.
    """
    if arch.encoder is not None:
        raise ExportError(f"--format {MIXED} is for decoders", "choose int4 or int8")
    forms = {name: form for name in arch.tensors if isinstance(form := k_form(arch, name), KBlocks)}
    found, base = copy(arch), arch.source
    added = base.extra if isinstance(base, ExtendedCheckpoint) else None
    source = KSource(base.base if isinstance(base, ExtendedCheckpoint) else base, forms)
    found.source = source if added is None else ExtendedCheckpoint(source, added)
    return found, source


def k_form(arch: Architecture, name: str) -> KBlocks | Blocks:
    """Return how a matrix is stored."""
    shape = arch.tensors.get(name, ())
    if len(shape) != 2 or shape[1] % 32:
        return BLOCKS["int8"]
    fine = has_six_bits(arch, name)
    if shape[1] % 256 and EXPERTS in name:  # Q4_1 as gate and up: none of a mixture's matrices is in two planes
        fine = False
    if shape[1] % 256:
        return K_BLOCKS["q8_0" if fine else "q4_1"]
    return K_BLOCKS["q6_k" if fine else "q4_k"]


def has_six_bits(arch: Architecture, name: str) -> bool:
    """Whether a matrix is one of the important ones."""
    if name == arch.head.weight:
        return True
    if not name.endswith(FINE) or LAYERS not in name:
        return False
    layer, layers = int(name.split(LAYERS)[1].split(".")[0]), arch.facts.layers
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
