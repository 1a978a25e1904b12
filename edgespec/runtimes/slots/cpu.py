"""Slots on the CPU: which kind a model needs, and whether its rows have the same bits in every pass.

Strict mode rests on the latter; machines differ, so it is tried.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgespec.runtimes.files.operators import NATIVE
from edgespec.runtimes.slots.concat import ConcatSlot
from edgespec.runtimes.slots.native import NativeSlot
from edgespec.runtimes.slots.pairs import forced_pairs
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot
from edgespec.runtimes.slots.stock import StockSlot

SIZES = (2, 3, 5)  # rows of the passes that are compared
PREFIX = 24  # fewest tokens of context
# nothing is known of a foreign graph: more is tried, and across 64 tokens, where sums of wide heads change
FOREIGN_SIZES, FOREIGN_PREFIX = (2, 3, 5, 9), 62
DEPTHS = (14, 30, 62, 126, 254, 510)  # tokens before passes of stock operators that cross a power of two
# how a lone row gets the bits that it has among others: as it is, as a pair (pairs.py), or not at all
StockRows = Literal["alone", "pairs", "differ"]
_MOST_BYTES = 8 << 20  # of keys and values for that


def cpu_slot(model: Model, *, context: int | None = None, reserve: int = 256) -> Slot:
    """Open a slot over a model on the CPU; ``runtimes.opening.open_slot`` describes the arguments."""
    kind: type[ConcatSlot | NativeSlot | StockSlot] = StockSlot
    if model.part.foreign and model.graph_name != NATIVE:
        kind = ConcatSlot
    elif model.graph.operators == "native":
        kind = NativeSlot
    return kind(model, context=context, reserve=reserve)


def rows_exact(slot: Slot) -> bool:
    """Tell whether verified rows equal plain decoding's bit for bit on this machine, in strict mode.

    Decodes a few tokens one by one, again in blocks and, where trees are to be exact, in a tree, and compares logits.
    The tokens go after the slot's own, which stay, and repeat those, whose embeddings are in memory.
    """
    foreign = slot.model.part.foreign
    sizes = FOREIGN_SIZES if foreign else SIZES
    prefix_length = min(FOREIGN_PREFIX, slot.context // 2) if foreign else PREFIX
    held, longest, slot.revocable = list(slot.tokens), max(sizes), True
    arbitrary = np.random.default_rng(7).integers(0, slot.vocab_size, max(prefix_length, longest)).tolist()
    known = held if len(held) >= prefix_length else [*held, *arbitrary]
    text = np.array(known[-longest:], np.int64)  # [longest]
    try:
        slot.prefill(arbitrary[: max(0, prefix_length - len(held))])
        prefix, plain = list(slot.tokens), _one_by_one(slot, text)
        for size in sizes:
            slot.prefill(prefix[slot.follow(prefix) :])
            rows = slot.forward(text[:size]).logits  # [size, vocab]
            if [_digest(row) for row in rows] != plain[:size]:
                return False
        return not slot.exact_trees or _tree_exact(slot, prefix, text, plain)
    finally:
        slot.follow(held)
        slot.revocable = False


def depths_exact(model: Model) -> bool:
    """Test whether a strict stock graph computes the same bits for single rows and for several, at some depths.

    Keys and values before the rows are random, so nothing is prefilled: 8 passes of 15 rows in all for each depth, and
    fewer depths where those take more than 8 MiB.
    """
    facts, random, longest = model.facts, np.random.default_rng(7), max(SIZES)
    most = max(72, min(facts.context, _MOST_BYTES // (8 * facts.layers * facts.kv_heads * facts.head_dim)))
    slot = StockSlot(model, reserve=1)  # which tries whether lone rows go as pairs, unless that is known
    earlier = int(bool(model.pairs))  # a lone row's pass is one row longer, and crosses one token before
    depths = [depth - earlier for depth in DEPTHS if depth + longest <= min(most, facts.context)] or [0]
    tokens = random.integers(0, facts.vocab, depths[-1] + longest).tolist()
    slot.reserve(len(tokens))
    for depth in depths:
        for array in slot.take_up(tokens[:depth], depth):  # [kv_heads, depth, head_dim]
            array[:] = random.standard_normal(array.shape, np.float32)
        text = np.array(tokens[depth : depth + longest], np.int64)
        plain = _one_by_one(slot, text)
        for size in SIZES:
            slot.follow(tokens[:depth])
            if [_digest(row) for row in slot.forward(text[:size]).logits] != plain[:size]:
                return False
    return True


def try_rows(model: Model) -> StockRows:
    """Find out how rows of a strict stock graph get the same bits in every pass; ``model.pairs`` is set to it."""
    forced = forced_pairs()
    for pairs in (False, True) if forced is None else (forced,):
        model.pairs = pairs
        if depths_exact(model):
            return "pairs" if pairs else "alone"
    model.pairs = bool(forced)
    return "differ"


def _one_by_one(slot: Slot, text: NDArray[np.int64]) -> list[bytes]:  # [n]
    """Decode tokens plainly, and digest the logits after each."""
    plain = []
    for at in range(len(text)):
        plain.append(_digest(slot.forward(text[at : at + 1]).logits[0]))
        slot.keep([0])
    return plain


def _tree_exact(slot: Slot, prefix: list[int], text: NDArray[np.int64], plain: list[bytes]) -> bool:
    """Compare the rows of a tree: two of three have a sibling, which nothing continues, before them."""
    slot.prefill(prefix[slot.follow(prefix) :])
    spread = np.repeat(text[:3], 2)[1:]  # [5]
    spread[1::2] = (spread[1::2] + 1) % slot.vocab_size
    rows = slot.forward(spread, np.array([-1, 0, 0, 2, 2])).logits  # [5, vocab]
    return [_digest(row) for row in rows[::2]] == plain[:3]


def _digest(row: NDArray[np.float32]) -> bytes:  # [vocab]
    """Digest a row's bits: large vocabularies make copies expensive."""
    return hashlib.blake2b(row.data, digest_size=16).digest()
