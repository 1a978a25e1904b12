"""Choose 8-bit levels whose upper four bits are a good model too: the draft model of self-speculation.

A level of 8 bits is 16 h + l.  A draft reads only h, and uses 16 h + 7.5 for the level (kind ``p8``).  The draft of a
matrix depends on its scales, and, with error feedback, on the choice between the two levels near a step of h.  MatGPTQ
(arXiv 2602.03537) quantizes for several precisions at once with one remainder per weight, from a mean of their errors.
Here each precision has a separate remainder, which lost less in both with the same weight (docs/dev/log.md).
"""

from __future__ import annotations

import numpy as np

from edgespec.export.quantization.levels import Array, half, reciprocal

STEP = np.float32(16)  # levels of 8 bits for one of 4
MIDDLE = np.float32(7.5)  # mean of the levels that are equal for a draft
# Weights of the draft's squared error.  In the choice of a scale without feedback: it costs 8 bits 1 % at most.  With
# feedback, which gains 8 bits a third over that, both together cost about 2 % of it (docs/dev/log.md).
SCALE_WEIGHT, CORRECTED_SCALE_WEIGHT = 0.006, 0.02
LEVEL_WEIGHT = np.float32(0.005)
RATIOS = (1.01, 1.025, 1.05, 1.09, 1.15)  # of the scale of least error: a larger one may suit the draft
MOST = np.float32(1.4)  # times the least error, of any block: what is exact stays exact


def drafted(levels: Array) -> Array:  # [...] signed -> [...]
    """Compute a draft's values of levels, from their upper four bits."""
    return np.floor(levels / STEP) * STEP + MIDDLE


def scales_for_both(
    columns: Array,  # [size, m], a block a column
    scales: Array,  # [m], of least error
    errors: Array,  # [m], with them
    importance: Array | None,  # [size, m] or [size, 1]
    weight: float,
) -> Array:  # [m], float16 values
    """Choose scales by the squared errors of 8 bits and, with a small ``weight``, of their upper four."""

    def both(scale: Array) -> tuple[Array, Array]:  # [m]: of 8 bits, and with the draft's share
        levels = np.clip(np.rint(columns * reciprocal(scale)), -128, 127)
        found = [np.square(columns - read * scale) for read in (levels, drafted(levels))]
        own, draft = (np.add.reduce(each if importance is None else each * importance, 0) for each in found)
        return own, own + np.float32(weight) * draft

    best, least = scales, both(scales)[1]
    for ratio in RATIOS:
        scale = half(scales * np.float32(ratio))
        own, total = both(scale)
        better = (total < least) & (own <= MOST * errors)
        best, least = np.where(better, scale, best), np.where(better, total, least)
    return best


def levels_for_both(exact: Array, draft: Array) -> Array:  # [n], [n] -> [n]
    """Choose levels of 8 bits between -128 and 127.

    Args:
        exact: weights that 8 bits are to give, over their scales.
        draft: goal of their upper four bits; each includes the fed-back errors of its precision.
    """
    best, least = np.zeros_like(exact), np.full_like(exact, np.inf)
    for wanted in (draft - MIDDLE, exact - MIDDLE):
        for upper in (np.floor(wanted / STEP), np.ceil(wanted / STEP)):
            start = np.clip(upper, -8, 7) * STEP
            level = start + np.clip(np.rint(exact - start), 0, STEP - 1)
            cost = np.square(exact - level) + LEVEL_WEIGHT * np.square(draft - start - MIDDLE)
            better = cost < least
            best, least = np.where(better, level, best), np.where(better, cost, least)
    return best
