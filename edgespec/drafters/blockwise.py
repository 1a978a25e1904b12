"""Blockwise parallel decoding (Stern et al., arXiv 1811.03115), and constant cycles of refinement.

Predicting, verifying and accepting are one pass: the target's pass over a block also leaves the hidden states from
which the heads guess the next block.  Exact acceptance is lossless; the paper's looser rules are the request's choice.

With ``cycles`` a block is refined before it is verified: each cycle is a pass over the block in which the least
certain guesses are replaced by what the model says there, fewer of them each time, as in mask-predict (Ghazvininejad
et al., arXiv 1904.09324), but on a causal model, which makes it Jacobi iteration (arXiv 2305.10427).  Accepting every
guess then takes a constant number of passes a block, and is lossy; verifying them is lossless.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.proposal import EMPTY, Proposal
from edgespec.decoding.settings import DraftOptions
from edgespec.decoding.target import HeadTarget
from edgespec.drafters.medusa import Medusa
from edgespec.drafters.parts import Parts
from edgespec.formulas.tree import chain
from edgespec.runtimes.files.manifest import MethodPart


class Blockwise(Medusa):
    """A chain of the heads' first guesses.

    Args:
        target: the model with the heads.
        group: their name.
        count: heads.
        cycles: passes that refine a block before it is verified; blocks are then as long as the budget.
    """

    name = "blockwise"

    def __init__(self, target: HeadTarget, group: str, count: int, cycles: int = 0) -> None:
        super().__init__(target, group, chain([[1.0]] * count, count))
        self.cycles = cycles
        self.steps_at_once = not cycles

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        """The block."""
        if not self.cycles:
            return super().propose(tokens, budget)
        if self._hidden is None:
            return EMPTY
        ids, values = self._best(2)  # [count, 2]
        count = min(len(ids), budget)
        block = np.full(budget, ids[count - 1, 0])  # [budget]; beyond the heads: the last guess again
        block[:count] = ids[:count, 0]
        margin = np.zeros(budget)  # how sure each guess is: logits between the best and the second
        margin[:count] = (values[:, 0] - values[:, -1])[:count]
        for cycle in range(self.cycles):
            renewed = -(-budget * (self.cycles - cycle) // self.cycles)
            block, margin = self._refine(tokens[-1], block, margin, renewed)
        return Proposal(block)

    def _refine(
        self, pending: int, block: NDArray[np.int64], margin: NDArray[np.float64], renewed: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """One cycle: [n], [n] -> the same with the ``renewed`` least certain guesses replaced."""
        output = self.target.forward(np.concatenate(([pending], block)))
        logits = output.logits[:-1]  # [n, vocab]: row i guesses block[i]
        two = np.partition(logits, -2, -1)[:, -2:]  # [n, 2]
        at = np.argsort(margin, kind="stable")[:renewed]
        block, margin = block.copy(), margin.copy()
        block[at] = logits[at].argmax(-1)
        margin[at] = (two[:, 1] - two[:, 0])[at]
        return block, margin


def build(parts: Parts, part: MethodPart, options: DraftOptions) -> Blockwise:
    """Blockwise decoding of a bundle."""
    group = next(group for group in parts.manifest.target.heads if group.name == part.heads[0])
    return Blockwise(parts.target, group.name, group.count, options.cycles or 0)
