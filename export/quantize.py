"""Weight formats: numbers in, numbers out.  Nothing here knows of graphs or files.

* block formats (int4, int8): symmetric, 32 weights of a row share a float32 scale; the layout is that of ONNX Runtime's
  MatMulNBits: ``[n, blocks, bytes]`` with two 4-bit values a byte, low nibble first, zero point 8 (128).  Scales are
  float16 values: the packed layout stores them so, and both layouts must hold the same numbers.
* channel format (w8a8): int8 per row with one scale, 7 bits by default so that uint8 x int8 pairs cannot saturate
  16-bit accumulators on AVX2.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCK = 32
CHANNEL_LEVELS = 63  # 7-bit weights: see above
HALF_MAX = np.float32(65504)  # largest finite float16
EMBEDDING_LEVELS = 127  # rows that are only looked up cannot saturate anything


def quantize_block(
    weight: NDArray[np.float32],  # [n, k]
    bits: int,
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:  # [n, blocks, BLOCK * bits // 8], [n, blocks]
    """Round to the nearest of 2**bits levels per block.

    The scale is signed: the value of largest magnitude always lands on the end of the range that has one more level.
    Blocks of weights below 1e-7 become zeros, as float16 scales do.
    """
    n, k = weight.shape
    blocks = -(-k // BLOCK)
    if blocks * BLOCK != k:
        weight = np.pad(weight, ((0, 0), (0, blocks * BLOCK - k)))
    grouped = weight.reshape(n, blocks, BLOCK)
    zero = 1 << (bits - 1)
    largest = np.take_along_axis(grouped, np.abs(grouped).argmax(-1)[..., None], -1)[..., 0]
    scales = np.clip(largest / np.float32(-zero), -HALF_MAX, HALF_MAX).astype(np.float16).astype(np.float32)
    scales[np.abs(scales) < np.finfo(np.float32).tiny] = 0  # 1 / scale would overflow: such weights are zeros
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)
    levels = np.rint(grouped * inverse[..., None])
    levels += zero
    levels = np.clip(levels, 0, 2 * zero - 1, out=levels).astype(np.uint8)
    return (levels if bits == 8 else levels[..., 0::2] | (levels[..., 1::2] << 4)), scales


def dequantize_block(
    packed: NDArray[np.uint8],  # [n, blocks, bytes]
    scales: NDArray[np.float32],  # [n, blocks]
    k: int,
    bits: int,
) -> NDArray[np.float32]:  # [n, k]
    """The float32 weights that a block-quantized matrix stands for."""
    if bits == 4:
        levels = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:2], -1)
    else:
        levels = packed
    values = (levels.astype(np.float32) - np.float32(1 << (bits - 1))) * scales[..., None]
    return values.reshape(len(packed), -1)[:, :k]


def quantize_channel(
    weight: NDArray[np.float32],  # [n, k]
    limit: int = CHANNEL_LEVELS,
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:  # [n, k], [n]
    """Round every row to ``limit`` levels either side of zero."""
    scales = np.abs(weight).max(1) / np.float32(limit)
    scales[scales == 0] = 1
    levels = np.rint(weight / scales[:, None])
    return np.clip(levels, -limit, limit).astype(np.int8), scales.astype(np.float32)


def dequantize_channel(
    levels: NDArray[np.int8],  # [n, k]
    scales: NDArray[np.float32],  # [n]
) -> NDArray[np.float32]:  # [n, k]
    """The float32 weights that a channel-quantized matrix stands for."""
    return levels.astype(np.float32) * scales[:, None]


def squared_error(
    weight: NDArray[np.float32],  # [n, k]
    approximation: NDArray[np.float32],  # [n, k]
) -> tuple[float, float]:
    """Sum of squared differences, and of squared weights: their ratio is the relative error of a matrix."""
    difference = (weight - approximation).ravel()
    flat = weight.ravel()
    return float(np.dot(difference, difference)), float(np.dot(flat, flat))
