"""llama.cpp's rounding of a model to Q4_K_M, by its own library: what ``benchmarks.quality --ggml`` compares with.

The library is ggml's libggml-base (PyPI's package pywhispercpp has one in it).  Which matrix gets which format is the
rule of llama.cpp's src/llama-quant.cpp for Q4_K_M of a dense model: Q6_K for the LM head, and for values and the MLP's
last matrix in half of the layers; Q4_K for the rest.  Super-blocks are 256 weights of a row: rows of another length get
Q8_0 and Q5_0 instead, or, to see what K-quants would do, are filled up with zeros.
"""

from __future__ import annotations

import ctypes
from copy import copy
from pathlib import Path
from typing import cast

import numpy as np

from edgespec.export.architectures import Architecture
from edgespec.export.measuring.mixer import block_matrices
from edgespec.export.measuring.variants import Rounded
from edgespec.export.quantization.levels import Array, Blocks
from edgespec.export.quantization.quantizer import QUANTIZERS
from edgespec.export.source.source import Checkpoint

SUPER = 256  # weights of a super-block
NUMBERS = {"q4_K": 12, "q6_K": 14, "q5_0": 6, "q8_0": 8}  # of ggml's types
BITS = {"q4_K": 4.5, "q6_K": 6.5625, "q5_0": 5.5, "q8_0": 8.5}  # of a weight, scales included
OTHER = {"q4_K": "q5_0", "q6_K": "q8_0"}  # for rows that do not fill super-blocks
FINE = ("v_proj.weight", "down_proj.weight")  # have Q6_K in half of the layers


class KQuants(Rounded):
    """A checkpoint whose matrices read as they come back from Q4_K_M.

    Args:
        arch: of a dense model with Llama's names.
        library: path of libggml-base.
        filled: whether rows are filled up to whole super-blocks; else they get what llama.cpp falls back to.
    """

    def __init__(self, arch: Architecture, library: Path, filled: bool) -> None:
        super().__init__(arch.source, block_matrices(arch), QUANTIZERS["rtn"], Blocks(4))
        self._arch, self._library, self._filled = arch, ctypes.CDLL(str(library)), filled
        self._library.ggml_quantize_chunk.restype = self._library.ggml_row_size.restype = ctypes.c_size_t

    def type_of(self, name: str) -> str:
        """Name the format of a matrix."""
        layers, fine = self._arch.facts.layers, name == self._arch.head.weight
        if name.endswith(FINE):
            layer = int(name.split("layers.")[1].split(".")[0])
            fine = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
        found = "q6_K" if fine else "q4_K"
        return found if self._filled or self._source.shape(name)[1] % SUPER == 0 else OTHER[found]

    def size(self) -> float:
        """Compute the bytes of all matrices over those of int4; what rows are filled up with does not count."""
        weights = {name: float(np.prod(self._source.shape(name))) for name in self._matrices}
        return sum(count * BITS[self.type_of(name)] for name, count in weights.items()) / sum(weights.values()) / 4.5

    def rounded(self, name: str, rows: Array) -> Array:  # [r, k] both
        if name not in self._matrices:
            return rows
        form, (count, k) = self.type_of(name), rows.shape
        block = SUPER if form.endswith("K") else 32
        whole = np.ascontiguousarray(np.pad(rows, ((0, 0), (0, -k % block))))
        size, number = whole.shape[1], NUMBERS[form]
        packed = ctypes.create_string_buffer(count * self._library.ggml_row_size(number, ctypes.c_int64(size)))
        start, many, each = (ctypes.c_int64(value) for value in (0, count, size))
        source = whole.ctypes.data_as(ctypes.c_void_p)
        self._library.ggml_quantize_chunk(number, source, packed, start, many, each, None)
        out = np.empty_like(whole)
        read = getattr(self._library, f"dequantize_row_{form}")
        read(packed, out.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(out.size))
        return np.ascontiguousarray(out[:, :k])


def k_quantized(arch: Architecture, library: Path, filled: bool) -> tuple[Architecture, float]:
    """Give a model whose matrices are those that come back from Q4_K_M, and their bytes over those of int4."""
    found, source = copy(arch), KQuants(arch, library, filled)
    found.source = cast(Checkpoint, source)  # reads as one does
    return found, source.size()
