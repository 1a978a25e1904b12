"""AWQ checkpoints (https://arxiv.org/abs/2306.00978) in the "gemm" layout of AutoAWQ, 4 bits.

A matrix [n, k] is ``qweight`` int32 [k, n / 8] and ``qzeros`` int32 [groups, n / 8], both packed along the outputs,
eight levels a word in the order 0 2 4 6 1 3 5 7 from the lowest bits on; ``scales`` [groups, n].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.source.quantized.gptq import expect_shape, packed_part
from edgespec.export.source.quantized.packing import dequantize, unpack
from edgespec.export.source.tensors.stored import Plain, Stored, span

MANY = 8  # levels in a word
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where level i of a word is: the inverse of 0 2 4 6 1 3 5 7


@dataclass(frozen=True)
class AwqMatrix:
    """One matrix; see the module."""

    qweight: Plain
    qzeros: Plain
    scales: Plain
    group_size: int

    @property
    def file(self) -> Path:
        """See Stored."""
        return self.qweight.file

    @property
    def shape(self) -> tuple[int, ...]:
        """[n, k]."""
        return self.qweight.shape[1] * MANY, self.qweight.shape[0]

    def read(self, rows: slice, columns: slice | None) -> NDArray[np.float32]:
        """See Stored."""
        n, k = self.shape
        top, bottom = span(rows, n)
        left, right = span(columns, k)
        words = slice(top // MANY, -(-bottom // MANY))

        def levels(part: Plain, which: slice) -> NDArray[np.uint8]:  # [outputs, inputs or groups]
            return unpack(part.raw(which, words), 4, PLACES)[:, top % MANY :][:, : bottom - top].T

        zeros = levels(self.qzeros, slice(None)).astype(np.float32)
        scales = self.scales.raw(slice(None), slice(top, bottom)).astype(np.float32)
        group = np.arange(left, right) // self.group_size
        return dequantize(levels(self.qweight, slice(left, right)), zeros, scales.T, group)


def awq(stored: Mapping[str, Plain], settings: Mapping[str, Any]) -> dict[str, Stored]:
    """The tensors of an AWQ checkpoint, ``settings`` being its quantization_config."""
    version = str(settings.get("version", settings.get("format", "gemm"))).lower()
    bits = settings.get("bits", settings.get("w_bit", 4))
    if version != "gemm" or bits != 4:
        raise UnsupportedModel(
            f"AWQ version {version!r} of {bits} bits is not supported; supported: gemm, 4 bits",
            "export from the unquantized checkpoint",
        )
    if any(name.endswith(".act.scales") for name in stored):
        raise UnsupportedModel(
            "AWQ with scaled activations (act.scales) is not supported", "export from the unquantized checkpoint"
        )
    group_size = settings.get("group_size", settings.get("q_group_size", 128))
    found: dict[str, Stored] = dict(stored)
    for name in [name for name in stored if name.endswith(".qweight")]:
        module = name.removesuffix(".qweight")
        found[f"{module}.weight"] = _matrix(stored, module, group_size)
        for part in ("qweight", "qzeros", "scales"):
            found.pop(f"{module}.{part}", None)
    return found


def _matrix(stored: Mapping[str, Plain], module: str, group_size: Any) -> AwqMatrix:
    qweight, qzeros, scales = (packed_part(stored, f"{module}.{part}") for part in ("qweight", "qzeros", "scales"))
    k, words = qweight.shape
    size = k if group_size == -1 else group_size
    if not isinstance(size, int) or size <= 0:
        raise ExportError(f"quantization_config: expected a positive group_size or -1, got {group_size!r}")
    groups = -(-k // size)
    expect_shape(scales, (groups, words * MANY), f"group_size {size}")
    expect_shape(qzeros, (groups, words), f"group_size {size}")
    return AwqMatrix(qweight, qzeros, scales, size)
