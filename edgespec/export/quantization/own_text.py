"""Generate calibration text with the model itself: the best sample of its later input."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.sampling import draw
from edgespec.decoding.target import Pass
from edgespec.runtimes.slots.native import NativeSlot
from edgespec.runtimes.slots.native_batch import NativeBatch
from edgespec.runtimes.slots.slot import Slot

TOGETHER = 32  # sequences written at once
LENGTH = 256  # tokens of a sequence


def write_own_text(
    slot: Slot,
    count: int,
    begin: Sequence[int],
    eos: Collection[int],
    seed: int,
    progress: Callable[[int, int], None] = lambda done, of: None,
    longest: int = LENGTH,
    attend: Callable[[Sequence[NativeSlot], int], None] | None = None,
) -> NDArray[np.int64]:  # [count, T]
    """Let a model generate sequences at temperature 1, as in LLM-QAT (arXiv 2305.17888).

    Args:
        slot: any slot of the model; native operators generate ``TOGETHER`` sequences in a pass.
        begin: first tokens of a text, such as BOS; if empty, every text begins with a random token.
        eos: a new text begins in the same sequence after one of these.
        seed: of all sampling.
        progress: called with the tokens so far, and their total.
        longest: maximum tokens of a sequence; the model's context may be shorter.
        attend: lets slots attend over a source each, starting with that of the given sequence.
    """
    length, native = min(longest, slot.context - 1), isinstance(slot, NativeSlot)
    together = TOGETHER if native else 1
    rows = np.empty((count, length), np.int64)
    for start in range(0, count, together):
        part = rows[start : start + together]
        random = np.random.default_rng([seed, start])
        batch = NativeBatch(slot.model, len(part)) if native else None
        if batch and attend is not None:
            attend(batch.slots, start)
        slot.follow([])
        waiting = [_beginning(begin, slot.vocab_size, random) for _ in part]
        for at in range(length):
            part[:, at] = [tokens.pop(0) for tokens in waiting]
            progress(start * length + len(part) * (at + 1), count * length)
            logits = _joint(batch, part[:, at]) if batch else _next(slot, part[:, at])
            for number, row in enumerate(logits):
                if part[number, at] in eos and not waiting[number]:
                    waiting[number] = _beginning(begin, slot.vocab_size, random)
                elif not waiting[number]:
                    chances = np.exp(row - row.max()).astype(np.float64)  # of float32: as good to draw by, and faster
                    waiting[number] = [draw(chances, float(random.random()))]
        if batch:
            batch.close()
    return rows


def _beginning(begin: Sequence[int], vocab: int, random: np.random.Generator) -> list[int]:
    return list(begin) or [int(random.integers(vocab))]


def _joint(batch: NativeBatch, tokens: NDArray[np.int64]) -> list[NDArray[np.float32]]:
    """Logits after the next token of each sequence."""
    found = batch.run([(slot, Pass(tokens[at : at + 1])) for at, slot in enumerate(batch.slots)])
    for slot in batch.slots:
        slot.keep([0])
    return [each.logits[0] for each in found]


def _next(slot: Slot, token: NDArray[np.int64]) -> list[NDArray[np.float32]]:
    logits = slot.forward(token).logits[0].copy()
    slot.keep([0])
    return [logits]
