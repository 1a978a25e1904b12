"""Rows of a file's blocks as the levels, scales and zero points of stock operators: the same numbers.

Only kinds of ``STOCK_BLOCKS``, whose weights are a scale times an integer.  Block types:
https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from edgespec.export.quantization.native_packing import Rows
from edgespec.runtimes.files.formats import GGML, STOCK_BLOCKS, GgmlKind, Kind
from edgespec.runtimes.files.packing import pack_levels

PIECE = 1 << 22  # weights that are converted at once
Stock = tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.uint8]]


def stock_rows(kind: Kind, rows: Rows, n: int, k: int) -> Iterator[Stock]:
    """Convert the rows of a matrix, piece by piece.

    Args:
        kind: of ``STOCK_BLOCKS``.
        rows: as the file has them.
        n, k: shape of the matrix.

    Returns packed levels [r, blocks, bytes], scales [r, blocks], and packed zero points [r, bytes], which are empty
    where all are the middle of the range.
    """
    own, step = STOCK_BLOCKS[kind], max(1, PIECE // k)
    for start in range(0, n, step):
        data = rows.read(slice(start, min(n, start + step)))
        levels, scales, zeros = _levels(kind, np.ascontiguousarray(data))
        blocks = levels.reshape(len(data), -1, own.size)
        times = blocks.shape[1] // scales.shape[1]
        if own.bits == 4 and zeros.size:
            wide = zeros.repeat(times, 1)
            zeros = pack_levels(np.pad(wide, ((0, 0), (0, wide.shape[1] % 2))), 4)
        elif zeros.size:
            zeros = zeros.repeat(times, 1)
        yield pack_levels(blocks, own.bits), scales.repeat(times, 1), zeros


def _levels(kind: Kind, rows: NDArray[np.uint8]) -> Stock:  # [r, bytes] -> [r, k], [r, blocks], [r, blocks or 0]
    none = np.zeros((len(rows), 0), np.uint8)
    if kind == "q4":
        blocks = rows.reshape(len(rows), -1, 18)
        return _nibbles(blocks[..., 2:]), _halves(blocks[..., :2]), none
    if kind == "p8":
        blocks = rows.reshape(len(rows), -1, 34)
        return (blocks[..., 2:] ^ np.uint8(128)).reshape(len(rows), -1), _halves(blocks[..., :2]), none
    own = GGML[kind]
    if own.scale == "zero":
        blocks = rows.reshape(len(rows), -1, own.bytes)
        zeros = blocks[..., 2] + np.uint8(own.zero)
        codes = _nibbles(blocks[..., 3:]) if own.low == 4 else blocks[..., 3:].reshape(len(rows), -1)
        return codes, _halves(blocks[..., :2]), zeros
    if kind == "mxfp4":  # scales are powers of 2, of which the largest overflow
        blocks = rows.reshape(len(rows), -1, 17)
        table = np.array(own.table, np.uint8) + np.uint8(128 - own.zero)
        scales = np.ldexp(np.float32(0.5), blocks[..., 0].astype(np.int32) - 127)
        return table[_nibbles(blocks[..., 1:])], scales, none
    return (*_quotients(own.kind, rows), none)  # type: ignore[arg-type]


def _quotients(kind: GgmlKind, rows: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Divide weights by their scales, which gives integers, and add the middle of the range."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    type_, bits = GGMLQuantizationType[kind.upper()], STOCK_BLOCKS[kind].bits
    with np.errstate(all="ignore"):  # scales of a damaged file
        values = np.asarray(dequantize(rows, type_), np.float32)
        scales = _scales(kind, rows.reshape(len(rows), -1, GGML_QUANT_SIZES[type_][1]))
        each = scales.repeat(values.shape[1] // scales.shape[1], 1)
        levels = np.divide(values, each, out=np.zeros_like(values), where=np.isfinite(each) & (each != 0))
    return (np.rint(levels) + np.float32(1 << (bits - 1))).astype(np.uint8), scales


def _scales(kind: GgmlKind, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:  # [r, b, bytes] -> [r, scales]
    count = len(blocks)
    if kind in ("q5_0", "iq4_nl"):
        return _halves(blocks[..., :2])
    if kind == "q6_k":
        small, whole = blocks[..., 192:208].view(np.int8), blocks[..., 208:210]
    elif kind == "q3_k":
        packed, whole = blocks[..., 96:108], blocks[..., 108:110]
        low = np.concatenate([packed[..., :8] & 15, packed[..., :8] >> 4], -1)
        high = np.concatenate([packed[..., 8:] >> np.uint8(shift) & 3 for shift in (0, 2, 4, 6)], -1)
        small = (low | high << 4).astype(np.int8) - np.int8(32)
    else:  # iq4_xs
        packed, whole = blocks[..., 4:8], blocks[..., :2]
        low = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], 8)
        upper = np.ascontiguousarray(blocks[..., 2:4]).view("<u2") >> np.arange(0, 16, 2).astype(np.uint16) & 3
        small = (low | upper.astype(np.uint8) << 4).astype(np.int8) - np.int8(32)
    return (_halves(whole).reshape(count, -1, 1) * small.astype(np.float32)).reshape(count, -1)


def _halves(data: NDArray[np.uint8]) -> NDArray[np.float32]:  # [r, b, 2] -> [r, b]
    return np.ascontiguousarray(data).view("<f2")[..., 0].astype(np.float32)


def _nibbles(data: NDArray[np.uint8]) -> NDArray[np.uint8]:  # [r, b, m * 16] -> [r, k]: of each 16 bytes, low then high
    codes = data.reshape(*data.shape[:-1], -1, 16)
    return np.concatenate([codes & 15, codes >> 4], -1).reshape(len(data), -1)
