"""Checkpoints of gpt-oss in MXFP4: 4-bit floats (E2M1) in groups of 32 inputs with a power of two as scale (E8M0).

Layout (https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf, and transformers'
integrations/mxfp4.py): the matrices [n, k] of all experts are ``NAME_blocks`` uint8 [experts, n, k / 32, 16], of each
byte the lower half first, and ``NAME_scales`` uint8 [experts, n, k / 32], exponents plus 127.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.source.stored import UNQUANTIZED, FileRows, Plain, Stored, span

BLOCKS, SCALES = "_blocks", "_scales"
GROUP = 32
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
LEVELS = np.concatenate([VALUES, -VALUES])  # of the sixteen codes


@dataclass(frozen=True)
class MxMatrices:
    """Matrices of all experts below each other, [experts * n, k]."""

    codes: Plain  # uint8 [experts, n, k / 32, 16]
    exponents: Plain  # uint8 [experts, n, k / 32]

    @property
    def file(self) -> Path:
        return self.codes.file

    @property
    def shape(self) -> tuple[int, ...]:
        experts, n, groups, _ = self.codes.shape
        return experts * n, groups * GROUP

    def read(self, rows: slice, columns: slice | None) -> NDArray[np.float32]:
        codes, exponents = self._parts(rows)
        values = np.stack([LEVELS[codes & 15], LEVELS[codes >> 4]], -1).reshape(*exponents.shape, GROUP)
        found = np.ldexp(values, exponents.astype(np.int32)[..., None] - 127).reshape(len(codes), -1)
        return found if columns is None else found[:, columns]

    def blocks(self) -> FileRows:
        """Return its rows as GGUF has them: an exponent, then codes i and i + 16 of a group in a byte."""
        return FileRows("MXFP4", self._blocks)

    def _blocks(self, rows: slice | NDArray[np.int64]) -> NDArray[np.uint8]:  # [rows, bytes]
        codes, exponents = self._parts(rows)
        each = np.stack([codes & np.uint8(15), codes >> np.uint8(4)], -1).reshape(*exponents.shape, 2, GROUP // 2)
        found = np.empty((*exponents.shape, 1 + GROUP // 2), np.uint8)
        found[..., 0] = exponents
        found[..., 1:] = each[..., 0, :] | each[..., 1, :] << np.uint8(4)
        return found.reshape(len(codes), -1)

    def _parts(self, rows: slice | NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Read codes [r, groups, 16] and exponents [r, groups] of rows, expert by expert."""
        n = self.codes.shape[1]
        wanted = np.arange(*span(rows, self.shape[0])) if isinstance(rows, slice) else rows
        if not len(wanted):
            return np.zeros((0, *self.codes.shape[2:]), np.uint8), np.zeros((0, *self.exponents.shape[2:]), np.uint8)
        first, last = int(wanted.min()) // n, int(wanted.max()) // n + 1
        own = wanted - first * n
        return tuple(part.raw(slice(first, last)).reshape(-1, *part.shape[2:])[own]
                     for part in (self.codes, self.exponents))  # type: ignore[return-value]  # fmt: skip


def mxfp4(stored: Mapping[str, Plain], settings: Mapping[str, Any]) -> dict[str, Stored]:
    """Return the tensors of a checkpoint in MXFP4; ``NAME_blocks`` are the matrices of all experts."""
    found: dict[str, Stored] = {name: tensor for name, tensor in stored.items() if not name.endswith(SCALES)}
    for name in [name for name in found if name.endswith(BLOCKS)]:
        codes, exponents = stored[name], stored.get(name.removesuffix(BLOCKS) + SCALES)
        if exponents is None:
            raise ExportError(f"tensor {name.removesuffix(BLOCKS)}{SCALES} is missing from the checkpoint",
                              "download it again")  # fmt: skip
        shape = codes.shape
        if {codes.dtype, exponents.dtype} != {"U8"} or len(shape) != 4 or shape[3] != GROUP // 2:
            raise UnsupportedModel(
                f"{codes.file}: {name} is {codes.dtype} of shape {list(shape)}; expected uint8 [experts, n, k / "
                f"{GROUP}, {GROUP // 2}]",
                UNQUANTIZED,
            )
        if exponents.shape != shape[:3]:
            raise ExportError(
                f"{codes.file}: {exponents.name} has shape {list(exponents.shape)}, expected {list(shape[:3])}",
                "quantization_config and the weights do not belong together",
            )
        found[name] = MxMatrices(codes, exponents)
    return found
