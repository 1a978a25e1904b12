"""Heads next to the LM head that predict several tokens ahead from one hidden state.

Medusa (Cai et al., arXiv 2401.10774): head i sees the hidden state that the pending token was chosen from, and predicts
the token i + 1 places after that one.  The best predictions of all heads make a tree, and the target verifies it in one
pass.  The next tree starts from the hidden state of the last accepted row, so the only cost of drafting is that of the
heads.  Draft tokens are the top predictions, and are verified by matching, which is lossless also for sampling.

Blockwise parallel decoding (Stern et al., arXiv 1811.03115) uses only the first predictions, a chain.  Exact acceptance
is lossless; the paper's looser rules are the request's choice.  With ``cycles`` a block is refined before it is
verified: each cycle is a pass over the block that replaces the least certain tokens by the model's own predictions,
fewer of them each time, as in mask-predict (Ghazvininejad et al., arXiv 1904.09324), but on a causal model, which makes
it Jacobi iteration (arXiv 2305.10427).  Accepting every draft token then takes a constant number of passes per block,
and is lossy; verifying them is lossless.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.drafter import HIDDEN, Drafter, DraftRequest
from edgespec.decoding.proposal import EMPTY, Proposal, Verdict
from edgespec.decoding.settings import DraftOptions
from edgespec.decoding.target import Output, Pass, Target
from edgespec.drafters.registry import Parts
from edgespec.errors import EdgespecError
from edgespec.formulas.tree import Path, best_tree, chain, grow, layout
from edgespec.runtimes.files.manifest import MethodPart

MOST_NODES = 16  # of a tree: beyond it rows cost more on a CPU than they bring
_TOP = 10  # guesses of a head


class Medusa(Drafter):
    """Draws trees, ``paths`` of ranks, of the guesses of the target's heads named ``group``."""

    name = "medusa"
    wants = HIDDEN
    steps_at_once = True  # drafting costs the same for any depth

    def __init__(self, target: Target, group: str, paths: Sequence[Path]) -> None:
        self.target, self.group, self.paths = target, group, list(paths)
        self._parents, self._heads, self._ranks = layout(self.paths)
        self._chain = bool((self._parents == np.arange(len(self.paths)) - 1).all())
        self._top = 1 + max((max(path) for path in self.paths), default=0)
        deepest = max(map(len, self.paths), default=0)
        # of a pass over the tree cut at each depth
        self._rows = [1 + sum(len(path) <= depth for path in self.paths) for depth in range(deepest + 1)]
        self._hidden: NDArray[np.float32] | None = None  # [1, hidden]: of the row that chose the pending token

    def begin(self, request: DraftRequest) -> None:
        """Forget the last request: the first round has no hidden state yet and is plain."""
        self._hidden = None

    def forecast(self, budget: int) -> tuple[int | None, list[int] | None]:
        known = self._rows[: budget + 1]
        return None, known + known[-1:] * (budget + 1 - len(known))

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        """Read the tree off the heads, down to the budget."""
        if self._hidden is None or not self.paths:
            return EMPTY
        ids, _ = self._best(self._top)  # [count, top]
        guesses = ids[self._heads, self._ranks]  # [nodes]
        return Proposal(guesses, None if self._chain else self._parents).truncated(budget)

    def _best(self, top: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Ask each head for its best tokens -> (ids [count, top], logits [count, top])."""
        assert self._hidden is not None
        best = self.target.run(Pass(inputs=self._hidden, top=top, group=self.group)).best
        assert best is not None
        ids, values = best[0][:, 0], best[1][:, 0]
        if not np.isfinite(values[:, 0]).all():
            raise EdgespecError(f"expected finite logits of heads {self.group}, got NaN or infinity")
        return ids, values

    def benchmark_step(self, first: bool = False) -> bool:
        if first:
            return False
        width = self.target.model.facts.hidden  # type: ignore[attr-defined]
        hidden = np.zeros((1, width), np.float32)
        self.target.run(Pass(inputs=hidden, top=max(self._top, 1), group=self.group))
        return True

    def observe(self, proposal: Proposal, verdict: Verdict, output: Output) -> None:
        """Keep the hidden state of the row that chose the token now pending."""
        if output.hidden is None:
            raise EdgespecError("the target gave no hidden states")
        row = verdict.path[-1] + 1 if verdict.path else 0
        self._hidden = output.hidden[row : row + 1].copy()


class Blockwise(Medusa):
    """Draws a chain of the first guesses of ``count`` heads.

    ``cycles`` passes refine a block before it is verified; blocks are then as long as the budget.
    """

    name = "blockwise"

    def __init__(self, target: Target, group: str, count: int, cycles: int = 0) -> None:
        super().__init__(target, group, chain([[1.0]] * count, count))
        self.cycles = cycles
        self.steps_at_once = not cycles

    def forecast(self, budget: int) -> tuple[int | None, list[int] | None]:
        return (None, None) if self.cycles else super().forecast(budget)

    def propose(self, tokens: list[int], budget: int) -> Proposal:
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
        """Replace the ``renewed`` least certain guesses in one pass: block [n], margin [n] -> the same."""
        output = self.target.forward(np.concatenate(([pending], block)))
        logits = output.logits[:-1]  # [n, vocab]: row i guesses block[i]
        two = np.partition(logits, -2, -1)[:, -2:]  # [n, 2]
        at = np.argsort(margin, kind="stable")[:renewed]
        block, margin = block.copy(), margin.copy()
        block[at] = logits[at].argmax(-1)
        margin[at] = (two[:, 1] - two[:, 0])[at]
        return block, margin


def build_medusa(parts: Parts, part: MethodPart, options: DraftOptions) -> Medusa:
    """Choose the tree with the highest predicted speed here, or the best one of ``options.nodes`` nodes."""
    group = part.heads[0]
    if options.nodes is not None:
        paths = [path for path, _ in grow(part.ranks, options.nodes)]
    else:
        costs = parts.costs()
        paths, _ = best_tree(part.ranks, costs.v, part.draft_cost or 0.0, MOST_NODES)
    return Medusa(parts.target, group, paths or chain(part.ranks, 1))


def build_blockwise(parts: Parts, part: MethodPart, options: DraftOptions) -> Blockwise:
    """Build a block of the bundle's heads; ``options.cycles`` refine it."""
    group = next(group for group in parts.manifest.target.heads if group.name == part.heads[0])
    return Blockwise(parts.target, group.name, group.count, options.cycles or 0)
