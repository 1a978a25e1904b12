"""What a drafter hands to the loop, and what verification hands back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.target import Resume


@dataclass(frozen=True)
class Proposal:
    """Guessed tokens hanging off the pending token, in topological order (parents before children).

    A chain is the tree in which every node follows the one before; the empty proposal is plain decoding.

    Attributes:
        tokens: int64 [n], the guesses.
        parents: int64 [n], index of each node's parent, -1 = the pending token; None = a chain.
        probs: float [n, vocab], the draft distribution q each token was drawn from; None = a deterministic guess.
        replacement: whether siblings were drawn with replacement; without, q is renormalised after each rejection.
        resume: [n + 1] rows, the pending token's first: layers that ran while the guesses were made (chains only).  A
            proposal without guesses may carry it too.
        bucket: a small label of how sure the drafter is; adaptive control keeps one acceptance record per label.
    """

    tokens: NDArray[np.int64]
    parents: NDArray[np.int64] | None = None
    probs: NDArray[np.floating] | None = None
    replacement: bool = True
    bucket: int = 0
    resume: Resume | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def parent(self, node: int) -> int:
        """Index of the parent of ``node``; -1 is the pending token."""
        return node - 1 if self.parents is None else int(self.parents[node])

    def depth(self, node: int) -> int:
        """Number of nodes on the path from the pending token to ``node``, itself included."""
        count = 0
        while node >= 0:
            node, count = self.parent(node), count + 1
        return count

    def truncated(self, budget: int) -> Proposal:
        """The same proposal without nodes deeper than ``budget``."""
        if self.parents is None:
            if len(self) <= budget:
                return self
            probs = None if self.probs is None else self.probs[:budget]
            resume = None if self.resume is None else self.resume.truncated(budget + 1)
            return Proposal(self.tokens[:budget], None, probs, self.replacement, self.bucket, resume)
        kept = [i for i in range(len(self)) if self.depth(i) <= budget]
        if len(kept) == len(self):
            return self
        new = {-1: -1} | {old: at for at, old in enumerate(kept)}
        parents = np.array([new[int(self.parents[i])] for i in kept], np.int64)
        probs = None if self.probs is None else self.probs[kept]
        return Proposal(self.tokens[kept], parents, probs, self.replacement, self.bucket)


EMPTY = Proposal(np.empty(0, np.int64))


@dataclass(frozen=True)
class Verdict:
    """The outcome of verifying a proposal.

    Attributes:
        path: accepted nodes of the proposal, from the pending token down.
        next_token: the token after them: recovered (a guess was rejected) or bonus (all were accepted).
    """

    path: Sequence[int] = field(default_factory=tuple)
    next_token: int = -1
