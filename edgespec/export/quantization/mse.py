"""Find scales that minimize the squared error of each block, optionally weighted by channel importance."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from edgespec.export.quantization.levels import (
    Array,
    Blocks,
    Quantized,
    grouped,
    half,
    largest_scales,
    reciprocal,
    round_levels,
)
from edgespec.export.quantization.planes import SCALE_WEIGHT, scales_for_both
from edgespec.runtimes.ort.session import default_threads

CHUNK = 8192  # blocks searched at once: a few arrays of this size fit a core's cache, and threads seldom take turns
GRID = {4: np.linspace(0.8, 1.3, 16, dtype=np.float32), 8: np.linspace(0.985, 1.015, 4, dtype=np.float32)}
REFINEMENTS = 2


def quantize_searched(
    weight: Array,  # [n, k]
    form: Blocks,
    importance: Array | None = None,  # [k], not negative
) -> Quantized:
    """Quantize with the scales of ``search_scales``; of 4 bits never worse than round to nearest, block by block."""
    bits, size = form.bits, form.size
    blocks = grouped(weight, size)  # [n, blocks, size]
    n, count = blocks.shape[:2]
    levels, scales = np.empty(blocks.shape, np.uint8), np.empty((n, count), np.float32)
    step = max(1, CHUNK // count)
    shared = None if importance is None else _tile(importance, size, count, min(step, n))  # [size, step * count]

    def search(start: int) -> None:
        part = slice(start, start + step)
        own = blocks[part]
        columns = np.ascontiguousarray(own.reshape(-1, size).T)  # [size, m]
        weights = None if shared is None else shared[:, : columns.shape[1]]
        scales[part] = search_scales(columns, largest_scales(own, bits).ravel(), bits, weights).reshape(-1, count)
        levels[part] = round_levels(own, scales[part], bits)

    with ThreadPoolExecutor(default_threads()) as pool:  # numpy computes without the lock
        for _ in pool.map(search, range(0, n, step)):
            pass
    return levels, scales


def search_scales(
    columns: Array,  # [size, m]: a block a column, so that every operation runs along m
    start: Array,  # [m], float16 values
    bits: int,
    importance: Array | None = None,  # [size, m] or [size, 1]
    planes: float = SCALE_WEIGHT,
) -> Array:  # [m], float16 values
    """Scales of least squared error.

    Candidates of both signs put the largest weight near either end of the range.  For the levels of each, the best
    scale is that of least squares, and its error is known without computing it: sum(x**2) - sum(x l)**2 / sum(l**2).
    The winner is refined by least squares, every time rounded to float16; ``start`` is kept where nothing beats it.

    Levels that a checkpoint had already are found again: where most blocks are exact, the largest weight of the others
    is tried as every level.  Of 8 bits, scales may be larger for the sake of their upper four, whose
    errors have the weight ``planes`` (planes.py).
    """
    zero = 1 << (bits - 1)
    low, high = np.float32(-zero), np.float32(zero - 1)
    at = np.abs(columns).argmax(0)  # [m]
    levels, work = np.empty_like(columns), np.empty_like(columns)
    best_gain, best = np.zeros_like(start), start.copy()

    def fit(inverse: Array, reach: float) -> tuple[Array, Array]:  # [m] -> sums of x l and of l l, [m]
        np.multiply(columns, inverse, out=levels)
        np.rint(levels, out=levels)
        if reach > high + 0.49:  # the largest level before rounding; below, nothing is beyond either end
            np.clip(levels, low, high, out=levels)
        along = np.add.reduce(np.multiply(levels, weighted, out=work), 0)
        np.multiply(levels, levels, out=work)
        if importance is not None:
            np.multiply(work, importance, out=work)
        return along, np.add.reduce(work, 0)

    def better(scale: Array, kept: Array, least: Array) -> tuple[Array, Array]:  # [m]
        """Keep scales where their weighted squared error is less."""
        np.multiply(columns, reciprocal(scale), out=work)
        np.rint(work, out=work)
        np.clip(work, low, high, out=work)
        np.multiply(work, scale, out=work)
        np.subtract(work, columns, out=work)
        np.multiply(work, work, out=work)
        if importance is not None:
            np.multiply(work, importance, out=work)
        error = np.add.reduce(work, 0)
        return np.where(error < least, scale, kept), np.where(error < least, error, least)

    with np.errstate(over="ignore", invalid="ignore", under="ignore"):  # huge and tiny weights: `start` stays
        weighted = columns if importance is None else columns * importance
        largest = np.take_along_axis(columns, at[None], 0)[0]  # [m]
        anchor = reciprocal(largest)
        for end in (low, high):
            for ratio in GRID[bits]:
                along, own = fit(anchor * (end * ratio), abs(end) * ratio)
                scale = np.divide(along, own, out=np.zeros_like(own), where=own > 0)
                gains = along * scale > best_gain
                best_gain = np.where(gains, along * scale, best_gain)
                best = np.where(gains, scale, best)
        kept, least = better(start, start, np.full_like(start, np.inf))
        for again in range(REFINEMENTS + 1):
            scale = half(best)
            kept, least = better(scale, kept, least)
            if again < REFINEMENTS:
                along, own = fit(reciprocal(scale), np.inf)
                best = np.divide(along, own, out=best.copy(), where=own > 0)
        ordinary = start != 0
        if 2 * ((least == 0) & ordinary).sum() > ordinary.sum():  # a checkpoint of levels already, in blocks as large
            for level in range(1, zero):  # also where a block has no level near either end
                kept, least = better(half(largest / np.float32(level)), kept, least)
        return scales_for_both(columns, kept, least, importance, planes) if bits == 8 else kept


def _tile(importance: Array, size: int, count: int, rows: int) -> Array:  # [k] -> [size, rows * count]
    padded = np.zeros(count * size, np.float32)
    padded[: len(importance)] = importance
    return np.ascontiguousarray(np.tile(padded.reshape(count, size).T, rows))
