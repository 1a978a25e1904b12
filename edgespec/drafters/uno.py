"""The target drafts for itself with a LoRA adapter that only mask rows read ("Uno": sglang#37667, vllm#55947).

::

    pass      pending   mask      mask      mask         the adapter is added to mask rows alone
    guesses   t1        t2        t3        t4           t1 is the target's own token
    verify    pending   t1        t2        t3        t4

The keys and values of the first pass are overwritten by the second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.proposal import Proposal
from edgespec.decoding.settings import DraftOptions
from edgespec.decoding.target import Output, Pass, Target
from edgespec.drafters.registry import Parts
from edgespec.drafters.sampling_drafts import DrawingDrafter, draw_chain
from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.manifest import MethodPart
from edgespec.runtimes.slots.slot import Slot


class Uno(DrawingDrafter):
    """Draws a block of guesses from one pass of the target.

    Args:
        target: takes ``Pass.adapters``.
        adapter: number of the draft adapter.
        masks: tokens of the mask rows, int64 [n].
        rates: of each guess, if all before it are right; empty = not known.
    """

    name = "uno"
    steps_at_once = True

    def __init__(self, target: Target, adapter: int, masks: NDArray[np.int64], rates: Sequence[float] = ()) -> None:
        self.target, self.adapter, self.masks, self.vocab = target, adapter, masks, target.vocab_size
        self.rates = {0: rates} if rates else {}

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        """Draw the target's own next token, and a guess from each mask row; less deep where the context ends."""
        length = min(budget, 1 + len(self.masks))
        output = self._run(tokens[-1], length, self.params.plain_greedy)
        best, logits = output.best, output.logits
        choose: Callable[[int | None], tuple[int, float]] | None = None
        if best is not None:
            pairs = zip(best[0].tolist(), best[1].tolist(), strict=True)
            choose = lambda guess: next(pairs)  # noqa: E731
        rows = iter(logits)
        return draw_chain(lambda guess: next(rows), self.how(tokens), length, choose=choose)

    def _run(self, pending: int, rows: int, best: bool) -> Output:
        ids = np.empty(rows, np.int64)
        ids[0], ids[1:] = pending, self.masks[: rows - 1]
        adapters = np.full(rows, self.adapter)
        adapters[0] = getattr(self.target, "adapter", 0)
        return self.target.run(Pass(ids, None, int(best), draft=True, adapters=adapters))

    def benchmark_step(self, first: bool = False) -> bool:
        if first:
            return False
        self._run(0, 1 + len(self.masks), True)
        return True


def build(parts: Parts, part: MethodPart, options: DraftOptions) -> Uno:
    """Draft with the adapter that was loaded for it."""
    slot: Slot = parts.target
    store = getattr(slot.model, "adapters", None)
    if store is None or store.draft is None:
        raise InvalidRequest(
            "method uno needs a draft adapter, and none was loaded", "load it with draft_adapter=FOLDER"
        )
    number, draft = store.draft
    return Uno(slot, number, draft.masks(draft.block, slot.vocab_size), draft.rates if draft.acceptance else ())
