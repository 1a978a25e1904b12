"""Does a row have the same bits whatever stands beside it?  Strict mode rests on it; machines differ: try."""

from __future__ import annotations

import numpy as np

from edgespec.runtimes.session import Model
from edgespec.runtimes.slot import Slot

SIZES = (2, 3, 5, 9)  # rows of the passes that are compared
PREFIX = 24


def rows_exact(model: Model, sizes: tuple[int, ...] = SIZES) -> bool:
    """Whether verified rows equal plain decoding's bit for bit on this machine, in strict mode.

    Decodes a few arbitrary tokens one by one and again in blocks, and compares logits.
    """
    slot = Slot(model, reserve=64)
    generator = np.random.default_rng(7)
    longest = max(sizes)
    if PREFIX + longest > slot.context:
        return False
    text = generator.integers(0, slot.vocab_size, PREFIX + longest)  # [PREFIX + longest]
    slot.prefill(text[:PREFIX].tolist())
    plain = []
    for at in range(PREFIX, PREFIX + longest):
        plain.append(slot.forward(text[at : at + 1]).logits[0].copy())
        slot.keep([0])
    for size in sizes:
        slot.follow(text[:PREFIX].tolist())
        rows = slot.forward(text[PREFIX : PREFIX + size]).logits  # [size, vocab]
        if not all(np.array_equal(rows[i], plain[i]) for i in range(size)):
            return False
    return True
