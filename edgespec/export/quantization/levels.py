"""Weight formats: numbers in, numbers out.  Nothing here knows of graphs or files.

* block formats (int4, int8): symmetric, a block of weights of a row shares a scale that is a float16 value, zero point
  8 (128).
  Quantizing gives (levels, scales); ``pack_levels`` makes the layout of ONNX Runtime's MatMulNBits of the levels.
* channel format (w8a8): int8 per row with one scale, 7 bits by default so that uint8 x int8 pairs cannot saturate
  16-bit accumulators on AVX2.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgespec.runtimes.files.formats import BLOCK as BLOCK  # exported with the functions that choose levels
from edgespec.runtimes.files.formats import FOUR_BITS as FOUR_BITS
from edgespec.runtimes.files.packing import BLOCKS as BLOCKS
from edgespec.runtimes.files.packing import Blocks as Blocks
from edgespec.runtimes.files.packing import pack_levels as pack_levels
from edgespec.runtimes.files.packing import unpack_levels as unpack_levels

Array = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Quantized = tuple[NDArray[np.uint8], Array]  # levels [n, blocks, size], scales [n, blocks], all float16 values

CHANNEL_LEVELS = 63  # 7-bit weights: see above
HALF_MAX = np.float32(65504)  # largest finite float16
EMBEDDING_LEVELS = 127  # rows that are only looked up cannot saturate anything


def half(scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Round ``scales`` [...] to float16, as float32; overflow becomes the largest finite value.

    Scales below half of float16's smallest subnormal (6e-8) become 0: the weights of such a block are zeros.
    """
    return np.clip(scales, -HALF_MAX, HALF_MAX).astype(np.float16).astype(np.float32)


def grouped(weight: NDArray[np.float32], size: int) -> NDArray[np.float32]:  # [n, k] -> [n, blocks, size]
    """Cut rows into blocks, the last one filled up with zeros."""
    n, k = weight.shape
    blocks = -(-k // size)
    if blocks * size != k:
        weight = np.pad(weight, ((0, 0), (0, blocks * size - k)))
    return weight.reshape(n, blocks, size)


def reciprocal(scales: NDArray[np.float32]) -> NDArray[np.float32]:  # [...]
    """1 / scale, and 0 for a scale of 0."""
    return np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)


def round_levels(
    blocks: NDArray[np.float32],  # [n, blocks, size]
    scales: NDArray[np.float32],  # [n, blocks]
    bits: int,
) -> NDArray[np.uint8]:  # [n, blocks, size]
    """Return the level nearest to every weight, zero point added."""
    zero = 1 << (bits - 1)
    levels = np.rint(blocks * reciprocal(scales)[..., None])
    levels += zero
    return np.clip(levels, 0, 2 * zero - 1, out=levels).astype(np.uint8)


def largest_scales(blocks: NDArray[np.float32], bits: int) -> NDArray[np.float32]:  # [n, blocks, size] -> [n, blocks]
    """Signed float16 scales that put the value of largest magnitude on the end of the range with one more level."""
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)[..., 0]
    return half(largest / np.float32(-(1 << (bits - 1))))


def quantize_block(
    weight: NDArray[np.float32],  # [n, k]
    form: Blocks,
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:  # levels [n, blocks, form.size], scales [n, blocks]
    """Round to the nearest of 2**bits levels per block; the scale follows the value of largest magnitude."""
    blocks = grouped(weight, form.size)
    scales = largest_scales(blocks, form.bits)
    return round_levels(blocks, scales, form.bits), scales


def dequantize_block(
    levels: NDArray[np.uint8],  # [n, blocks, size]
    scales: NDArray[np.float32],  # [n, blocks]
    k: int,
    bits: int,
) -> NDArray[np.float32]:  # [n, k]
    """Compute the float32 weights of a block-quantized matrix."""
    values = (levels.astype(np.float32) - np.float32(1 << (bits - 1))) * scales[..., None]
    return values.reshape(len(levels), -1)[:, :k]


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
    """Compute the float32 weights of a channel-quantized matrix."""
    return levels.astype(np.float32) * scales[:, None]


def squared_error(
    weight: NDArray[np.float32],  # [n, k]
    approximation: NDArray[np.float32],  # [n, k]
) -> tuple[float, float]:
    """Sum of squared differences, and of squared weights: their ratio is the relative error of a matrix."""
    difference = (weight - approximation).ravel()
    flat = weight.ravel()
    return float(np.dot(difference, difference)), float(np.dot(flat, flat))
