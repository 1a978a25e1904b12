"""Quantize rows to blocks of GGUF files: Q4_K, Q5_K and Q6_K, and for rows that these do not fit Q4_1 and Q8_0.

Of Q4_K and Q5_K a weight is ``d * scale * code - m * minimum``: d and m are float16 and belong to 256 weights, scale
and minimum are integers of 6 bits and belong to 32.  Q6_K has no minimum: a weight is ``d * scale * (code - 32)``, the
scale an integer of 8 bits that belongs to 16.  Q4_1 and Q8_0 are like them, with blocks of 32 and without integers.
Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.

Scales are searched for the least squared error, weighted by the channels' importance.  With error feedback (gptq.py),
a block's d and m are searched when the block is reached, and the scale and minimum of 32 weights when those are.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np
from threadpoolctl import threadpool_limits

from edgespec.export.quantization.levels import HALF_MAX, Array, Bytes, half
from edgespec.export.quantization.native_packing import pack_rows, unpack_rows
from edgespec.export.source.stored import FileRows
from edgespec.runtimes.files.formats import FILE_KINDS
from edgespec.runtimes.files.packing import Packed
from edgespec.runtimes.ort.session import default_threads

KName = Literal["q4_1", "q4_k", "q5_k", "q6_k", "q8_0"]
TOGETHER = 1024  # rows of a thread, at most: a few arrays of a block of them fit a core's cache
RATIOS = np.linspace(0.7, 1.1, 9, dtype=np.float32)  # of the range of 32 weights that codes are tried to cover
ROUNDS = 2  # refinements, of what each starts from


@dataclass(frozen=True)
class KBlocks:
    """A type of such blocks."""

    kind: KName
    bits: int  # of a code
    size: int  # weights that share a scale
    block: int  # weights that share d and m
    bytes: int  # of a block

    @property
    def symmetric(self) -> bool:
        """Whether codes have a middle instead of a minimum."""
        return self.kind in ("q6_k", "q8_0")

    @property
    def top(self) -> np.float32:
        """Return the largest integer of a scale; 0 = it has none."""
        return np.float32(0 if self.block == self.size else 127 if self.symmetric else 63)


K_BLOCKS: dict[KName, KBlocks] = {
    "q4_1": KBlocks("q4_1", 4, 32, 32, 20),
    "q4_k": KBlocks("q4_k", 4, 32, 256, 144),
    "q5_k": KBlocks("q5_k", 5, 32, 256, 176),
    "q6_k": KBlocks("q6_k", 6, 16, 256, 210),
    "q8_0": KBlocks("q8_0", 8, 32, 32, 34),
}


@dataclass
class _Scales:
    """Scales and minima of parts [parts, n] of one block of n rows: integers, and what they are times."""

    scale: Array  # [parts, n]
    low: Array  # [parts, n]; zeros of a symmetric type
    d: Array  # [n], float16 values
    m: Array  # [n]


def quantize_k(
    weight: Array,  # [n, k], k a multiple of form.block
    form: KBlocks,
    importance: Array | None = None,  # [k], not negative
    feedback: Array | None = None,  # [k, k], of ``feedback_factor``
) -> tuple[Bytes, Array]:  # rows [n, bytes], their values [n, k]
    """Quantize rows, with error feedback if ``feedback`` is given."""
    threads = default_threads()
    count = threads * -(-len(weight) // (threads * TOGETHER))
    parts = [part for part in np.array_split(weight, count) if len(part)]
    with threadpool_limits(1, "blas"), ThreadPoolExecutor(threads) as pool:  # see ``quantize_corrected``
        made = list(pool.map(lambda rows: _rows(rows, form, importance, feedback), parts))
    return np.concatenate([rows for rows, _ in made]), np.concatenate([values for _, values in made])


def k_values(rows: Bytes, form: KBlocks) -> Array:  # [n, bytes] -> [n, k]
    """Return the weights of rows in such blocks.

    Raises:
        BundleError: no native operators.
    """
    k = rows.shape[1] // form.bytes * form.block
    packed = Packed(FILE_KINDS[form.kind.upper()], len(rows), k, parts=(("", len(rows)),))
    found = list(pack_rows(packed, [FileRows(form.kind.upper(), lambda some: rows[some])]))
    low = [each for _, each in found if each is not None]
    data = np.concatenate([each for each, _ in found])
    return unpack_rows(packed, data, np.concatenate(low) if low else None, slice(0, len(rows)))


def _rows(weight: Array, form: KBlocks, importance: Array | None, feedback: Array | None) -> tuple[Bytes, Array]:
    n, k = weight.shape
    exact = np.clip(np.ascontiguousarray(weight.T), -HALF_MAX, HALF_MAX)  # [k, n]
    values, out = np.empty_like(exact), np.empty((n, k // form.block, form.bytes), np.uint8)
    errors = np.empty_like(exact) if feedback is not None else None
    with np.errstate(over="ignore", invalid="ignore", divide="ignore", under="ignore"):
        for start in range(0, k, form.block):
            part = slice(start, start + form.block)
            wanted = exact[part].copy()
            # large weights count more than their squared errors say, as in ggml's search: 4 to 6 % less divergence
            weights = np.sqrt(2 * np.square(wanted).mean(0) + np.square(wanted))
            if importance is not None:
                weights *= importance[part, None]
            if feedback is not None and errors is not None:
                wanted += feedback[:start, part].T @ errors[:start]
                own = np.ascontiguousarray(feedback[part, part].T)
                codes, found = _corrected(exact[part], wanted, form, weights, own, errors[part])
            else:
                codes, found = _searched(wanted, form, weights)
            values[part] = _values(codes, found, form)
            out[:, start // form.block] = _packed(codes, found, form)
    return out.reshape(n, -1), np.ascontiguousarray(values.T)


def _searched(x: Array, form: KBlocks, weights: Array | None) -> tuple[Array, _Scales]:
    """Quantize one block of each row: x [block, n] -> codes [block, n], scales."""
    parts = x.reshape(-1, form.size, x.shape[1])
    own = None if weights is None else weights.reshape(-1, form.size, weights.shape[1])
    found = _block_scales(parts, form, own)
    codes = _codes(parts, found.scale * found.d, found.low * found.m, form)
    return codes.reshape(x.shape), found


def _corrected(
    exact: Array, wanted: Array, form: KBlocks, weights: Array | None, feedback: Array, errors: Array
) -> tuple[Array, _Scales]:
    """As ``_searched``, column by column; ``feedback`` [block, block] of the columns before each row's."""
    size, n = form.size, exact.shape[1]
    own = None if weights is None else weights.reshape(-1, size, weights.shape[1])
    found = _block_scales(wanted.reshape(-1, size, n), form, own)
    codes = np.empty_like(exact)
    for first in range(0, form.block, size):
        last, at = first + size, first // size
        if first:
            wanted[first:last] += feedback[first:last, :first] @ errors[:first]
            alone = slice(at, at + 1)
            scale, low = _part_scales(wanted[None, first:last], form, None if own is None else own[alone])
            found.scale[alone], found.low[alone] = _integers(
                wanted[None, first:last], scale, low, found.d, found.m, form, None if own is None else own[alone]
            )
        scale, low = found.scale[at] * found.d, found.low[at] * found.m
        inverse = _inverse(scale)
        for j in range(first, last):
            if j > first:
                wanted[j] += feedback[j, first:j] @ errors[first:j]
            code = codes[j]
            np.add(wanted[j], low, out=code)
            code *= inverse
            np.rint(code, out=code)
            _clip(code, form)
            np.subtract(exact[j] + low, code * scale, out=errors[j])
    return codes, found


def _clip(codes: Array, form: KBlocks) -> None:
    zero = 1 << (form.bits - 1)
    least, most = (-zero, zero - 1) if form.symmetric else (0, 2 * zero - 1)
    np.clip(codes, np.float32(least), np.float32(most), out=codes)


def _inverse(scale: Array) -> Array:
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)


def _codes(x: Array, scale: Array, low: Array, form: KBlocks) -> Array:
    """Round x [parts, size, n] to codes, by scales and minima [parts, n]."""
    codes = np.add(x, low[:, None])
    codes *= _inverse(scale)[:, None]
    np.rint(codes, out=codes)
    _clip(codes, form)
    return codes


def _total(x: Array, weights: Array | None) -> Array:  # [parts, size, n] -> [parts, n]
    return x.sum(1) if weights is None else (x * weights).sum(1)


def _error(x: Array, scale: Array, low: Array, form: KBlocks, weights: Array | None) -> Array:
    """Compute the weighted squared error of each part, [parts, n]."""
    made = _codes(x, scale, low, form)
    made *= scale[:, None]
    made -= low[:, None]
    made -= x
    made *= made
    return _total(made, weights)


def _fit(codes: Array, x: Array, form: KBlocks, weights: Array | None) -> tuple[Array, Array, Array]:
    """Find scale and minimum [parts, n] of least squares for given codes, and what they take from the error."""
    weighted = codes if weights is None else codes * weights
    along, own = (weighted * x).sum(1), (weighted * codes).sum(1)
    alone = np.divide(along, own, out=np.zeros_like(own), where=own > 0)
    if form.symmetric:
        return alone, np.zeros_like(alone), alone * along
    count = np.float32(form.size) if weights is None else weights.sum(1)
    ones, middle = weighted.sum(1), _total(x, weights)
    det = count * own - ones * ones
    usable = det > np.float32(1e-6) * count * own
    scale = np.divide(count * along - middle * ones, det, out=alone.copy(), where=usable)
    offset = np.divide(own * middle - ones * along, det, out=np.zeros_like(alone), where=usable)
    wrong = (offset > 0) | (scale < 0)
    scale, offset = np.where(wrong, np.maximum(alone, 0), scale), np.where(wrong, np.float32(0), offset)
    return scale, -offset, scale * along + offset * middle


def _part_scales(x: Array, form: KBlocks, weights: Array | None) -> tuple[Array, Array]:
    """Search scales and minima of least squared error, floats: x [parts, size, n] -> [parts, n] both."""
    if form.symmetric:
        at = np.abs(x).argmax(1)[:, None]
        largest = np.take_along_axis(x, at, 1)[:, 0]
        first = largest / np.float32(-(1 << (form.bits - 1)))
        tried = [(first / ratio, np.zeros_like(first)) for ratio in (0.94, 0.97, 1, 1.03)]
    else:
        high, least = x.max(1), np.minimum(x.min(1), 0)
        middle, reach = (high + least) / 2, (high - least) / 2
        steps = np.float32((1 << form.bits) - 1)
        tried = [(2 * ratio * reach / steps, np.maximum(ratio * reach - middle, 0)) for ratio in RATIOS]
    best, kept, low = np.full_like(tried[0][0], -1), np.zeros_like(tried[0][0]), np.zeros_like(tried[0][0])
    for scale, under in tried:
        found, minimum, gain = _fit(_codes(x, scale, under, form), x, form, weights)
        best, kept, low = np.where(gain > best, (gain, found, minimum), (best, kept, low))
    for _ in range(ROUNDS):
        kept, low, _ = _fit(_codes(x, kept, low, form), x, form, weights)
    return kept, low


def _block_scales(x: Array, form: KBlocks, weights: Array | None) -> _Scales:
    """Search all scales of one block of each row: x [parts, size, n]."""
    scale, low = _part_scales(x, form, weights)
    if not form.top:
        return _Scales(np.ones_like(scale), np.ones_like(low), half(scale[0]), half(low[0]))
    if form.symmetric:
        at = np.abs(scale).argmax(0)[None]
        d = half(np.take_along_axis(scale, at, 0)[0] / -(form.top + 1))
        return _Scales(np.clip(np.rint(scale * _inverse(d)), -form.top - 1, form.top), low, d, np.zeros_like(d))
    d, m = half(scale.max(0) / form.top), half(low.max(0) / form.top)
    scales, lows = _integers(x, scale, low, d, m, form, weights)
    for _ in range(ROUNDS):  # d and m of least squares for the codes and integers so far
        found = _refit(x, scales, lows, d, m, form, weights)
        again = _integers(x, scales * found[0], lows * found[1], *found, form, weights)
        old = _error(x, scales * d, lows * m, form, weights).sum(0)
        better = _error(x, again[0] * found[0], again[1] * found[1], form, weights).sum(0) < old
        scales, lows = np.where(better, again, (scales, lows))
        d, m = np.where(better, found, (d, m))
    return _Scales(scales, lows, d, m)


def _refit(
    x: Array, scales: Array, lows: Array, d: Array, m: Array, form: KBlocks, weights: Array | None
) -> tuple[Array, Array]:
    codes = _codes(x, scales * d, lows * m, form)
    codes *= scales[:, None]
    weighted = codes if weights is None else codes * weights
    own, along = (weighted * codes).sum((0, 1)), (weighted * x).sum((0, 1))
    count = np.float32(form.size) if weights is None else weights.sum(1)
    cross = (weighted.sum(1) * lows).sum(0)
    under, middle = (count * lows * lows).sum(0), (_total(x, weights) * lows).sum(0)
    det = own * under - cross * cross
    usable = det > np.float32(1e-6) * own * under
    new_d = np.divide(along * under - middle * cross, det, out=d.copy(), where=usable)
    new_m = np.divide(along * cross - middle * own, det, out=m.copy(), where=usable)
    fine = (new_d > 0) & (new_m > 0) & np.isfinite(new_d) & np.isfinite(new_m)
    return half(np.where(fine, new_d, d)), half(np.where(fine, new_m, m))


def _integers(
    x: Array, scale: Array, low: Array, d: Array, m: Array, form: KBlocks, weights: Array | None
) -> tuple[Array, Array]:
    """Round scales and minima [parts, n] to integers times d and m; of an asymmetric type the best near them."""
    inverse = _inverse(d)
    if form.symmetric:
        return np.clip(np.rint(scale * inverse), -form.top - 1, form.top), np.zeros_like(scale)
    first, under = np.rint(scale * inverse), _inverse(m)
    count = np.float32(form.size) if weights is None else weights.sum(1)
    middle = _total(x, weights)
    best, kept, lows = np.full_like(first, np.inf), np.zeros_like(first), np.zeros_like(first)
    for step in (0, -1, 1):
        own = np.clip(first + np.float32(step), 0, form.top)
        codes = _codes(x, own * d, low, form)
        least = (own * d * _total(codes, weights) - middle) / count  # the best minimum for these codes
        minimum = np.clip(np.rint(least * under), 0, form.top)
        error = _error(x, own * d, minimum * m, form, weights)
        best, kept, lows = np.where(error < best, (error, own, minimum), (best, kept, lows))
    return kept, lows


def _values(codes: Array, found: _Scales, form: KBlocks) -> Array:  # [block, n]
    parts = codes.reshape(-1, form.size, codes.shape[1])
    return (parts * (found.scale * found.d)[:, None] - (found.low * found.m)[:, None]).reshape(codes.shape)


def _packed(codes: Array, found: _Scales, form: KBlocks) -> Bytes:  # [block, n] -> [n, bytes]
    integers = (codes.T + np.float32(32 if form.symmetric else 0)).astype(np.uint8)  # [n, 256]
    d = found.d.astype("<f2")[:, None].view(np.uint8)
    if form.kind == "q8_0":
        return np.concatenate([d, codes.T.astype(np.int8).view(np.uint8)], 1)
    if form.symmetric:
        half = integers.reshape(len(integers), 2, 4, 32)
        low = half & 15
        nibbles = np.concatenate([low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4], -1)
        shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
        upper = np.bitwise_or.reduce((half >> 4) << shifts, 2)
        scales = found.scale.T.astype(np.int8).view(np.uint8)
        return np.concatenate([nibbles.reshape(len(half), -1), upper.reshape(len(half), -1), scales, d], 1)
    m = found.m.astype("<f2")[:, None].view(np.uint8)
    if form.kind == "q4_1":  # whose minimum is added
        m = (-found.m).astype("<f2")[:, None].view(np.uint8)
        return np.concatenate([d, m, integers[:, :16] | integers[:, 16:] << 4], 1)
    scale, low = (np.ascontiguousarray(each.T).astype(np.uint8) for each in (found.scale, found.low))  # [n, 8]
    first = [each[:, :4] | each[:, 4:] >> 4 << 6 for each in (scale, low)]
    scales = np.concatenate([*first, scale[:, 4:] & 15 | low[:, 4:] << 4], 1)
    pairs = integers.reshape(len(integers), 4, 2, 32)
    nibbles = (pairs[:, :, 0] & 15 | pairs[:, :, 1] << 4).reshape(len(pairs), -1)
    if form.bits == 4:
        return np.concatenate([d, m, scales, nibbles], 1)
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    upper = np.bitwise_or.reduce((integers.reshape(-1, 8, 32) >> 4) << shifts, 1)
    return np.concatenate([d, m, scales, upper, nibbles], 1)
