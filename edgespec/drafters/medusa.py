"""Heads that guess several tokens ahead from one hidden state: Medusa (Cai et al., arXiv 2401.10774).

Head i sees the hidden state from which the pending token was chosen, and guesses the token i + 1 places after that one.
The best guesses of all heads make a tree; the target verifies it in one pass, and the hidden state of the last accepted
row is where the next tree grows from, so that the heads themselves are all that drafting costs.  Guesses are taken as
they are and verified by matching: lossless for sampling too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.drafter import Drafter
from edgespec.decoding.proposal import EMPTY, Proposal, Verdict
from edgespec.decoding.settings import DraftOptions
from edgespec.decoding.target import HeadTarget, Pass
from edgespec.drafters.parts import Parts
from edgespec.errors import EdgespecError
from edgespec.formulas.tree import Path, best_tree, chain, grow, layout
from edgespec.runtimes.files.manifest import MethodPart

MOST_NODES = 16  # of a tree: beyond it rows cost more on a CPU than they bring
_TOP = 10  # guesses of a head


class Medusa(Drafter):
    """Trees of heads' guesses.

    Args:
        target: the model with the heads.
        group: their name.
        paths: the tree, as ranks of the heads' guesses.
    """

    name = "medusa"
    wants_hidden = True
    steps_at_once = True  # drafting costs the same however deep the guesses reach

    def __init__(self, target: HeadTarget, group: str, paths: Sequence[Path]) -> None:
        self.target, self.group, self.paths = target, group, list(paths)
        self._parents, self._heads, self._ranks = layout(self.paths)
        self._chain = bool((self._parents == np.arange(len(self.paths)) - 1).all())
        self._top = 1 + max((max(path) for path in self.paths), default=0)
        self._hidden: NDArray[np.float32] | None = None  # [1, hidden]: of the row that chose the pending token

    def begin(self, tokens: list[int]) -> None:
        """Forget the last request: the first round has no hidden state yet and is plain."""
        self._hidden = None

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        """The tree, down to the budget."""
        if self._hidden is None or not self.paths:
            return EMPTY
        ids, _ = self._best(self._top)  # [count, top]
        guesses = ids[self._heads, self._ranks]  # [nodes]
        return Proposal(guesses, None if self._chain else self._parents).truncated(budget)

    def _best(self, top: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """([count, top], [count, top]): each head's best tokens and their logits."""
        assert self._hidden is not None
        best = self.target.forward_heads(self.group, self._hidden, top).best
        assert best is not None
        ids, values = best[0][:, 0], best[1][:, 0]
        if not np.isfinite(values[:, 0]).all():
            raise EdgespecError(f"expected finite logits of heads {self.group}, got NaN or infinity")
        return ids, values

    def step_once(self) -> bool:
        """The heads once."""
        width = self.target.model.facts.hidden  # type: ignore[attr-defined]
        self.target.forward_heads(self.group, np.zeros((1, width), np.float32), max(self._top, 1))
        return True

    def observe(self, proposal: Proposal, verdict: Verdict, output: Pass) -> None:
        """Keep the hidden state of the row that chose the token now pending."""
        if output.hidden is None:
            raise EdgespecError("the target gave no hidden states")
        row = verdict.path[-1] + 1 if verdict.path else 0
        self._hidden = output.hidden[row : row + 1].copy()


def build(parts: Parts, part: MethodPart, options: DraftOptions) -> Medusa:
    """The tree that is predicted to be fastest here, or the best one of ``options.nodes`` guesses."""
    group = part.heads[0]
    if options.nodes is not None:
        paths = [path for path, _ in grow(part.ranks, options.nodes)]
    else:
        costs = parts.costs()
        paths, _ = best_tree(part.ranks, costs.v, part.draft_cost or 0.0, MOST_NODES)
    return Medusa(parts.target, group, paths or chain(part.ranks, 1))
