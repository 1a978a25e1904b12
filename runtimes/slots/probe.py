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

    Decodes a few tokens one by one, again in blocks and, where trees are to be exact, in a tree, and compares logits.
    It costs next to no memory: the tokens go
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
        return not slot.exact_trees or _tree_exact(slot, prefix, text, plain)
    finally:
        slot.follow(held)
        slot.revocable = False


def _tree_exact(slot: Slot, prefix: list[int], text: NDArray[np.int64], plain: list[bytes]) -> bool:
    """The same of the rows of a tree: two of three have a sibling, which nothing continues, before them."""
    slot.prefill(prefix[slot.follow(prefix) :])
    spread = np.repeat(text[:3], 2)[1:]  # [5]
    spread[1::2] = (spread[1::2] + 1) % slot.vocab_size
    rows = slot.forward(spread, np.array([-1, 0, 0, 2, 2])).logits  # [5, vocab]
    return [_digest(row) for row in rows[::2]] == plain[:3]


def _digest(row: NDArray[np.float32]) -> bytes:  # [vocab]
    """A row's bits in short: large vocabularies make copies dear."""
    return hashlib.blake2b(row.data, digest_size=16).digest()
