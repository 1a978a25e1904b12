"""Does a row have the same bits whatever stands beside it?  Strict mode rests on it; machines differ: try."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from edgespec.runtimes.slots.slot import Slot

SIZES = (2, 3, 5)  # rows of the passes that are compared
PREFIX = 24  # fewest tokens of context
# nothing is known of a graph that optimum made: more is tried
FOREIGN_SIZES, FOREIGN_PREFIX = (2, 3, 5, 9), 80


def rows_exact(slot: Slot, sizes: tuple[int, ...] | None = None) -> bool:
    """Whether verified rows equal plain decoding's bit for bit on this machine, in strict mode.

    Decodes a few tokens one by one and again in blocks, and compares logits.  It costs next to no memory: the tokens go
    after the slot's own, which stay, and repeat those, whose embeddings are in memory.
    """
    foreign = slot.model.part.origin == "optimum"
    sizes = sizes or (FOREIGN_SIZES if foreign else SIZES)
    prefix_length = min(FOREIGN_PREFIX, slot.context // 2) if foreign else PREFIX
    held, longest, slot.revocable = list(slot.tokens), max(sizes), True
    arbitrary = np.random.default_rng(7).integers(0, slot.vocab_size, max(prefix_length, longest)).tolist()
    known = held if len(held) >= prefix_length else [*held, *arbitrary]
    text = np.array(known[-longest:], np.int64)  # [longest]
    try:
        slot.prefill(arbitrary[: max(0, prefix_length - len(held))])
        prefix, plain = list(slot.tokens), []
        for at in range(longest):
            plain.append(_digest(slot.forward(text[at : at + 1]).logits[0]))
            slot.keep([0])
        for size in sizes:
            slot.prefill(prefix[slot.follow(prefix) :])
            rows = slot.forward(text[:size]).logits  # [size, vocab]
            if [_digest(row) for row in rows] != plain[:size]:
                return False
        return True
    finally:
        slot.follow(held)
        slot.revocable = False


def _digest(row: NDArray[np.float32]) -> bytes:  # [vocab]
    """A row's bits in short: large vocabularies make copies dear."""
    return hashlib.blake2b(row.data, digest_size=16).digest()
