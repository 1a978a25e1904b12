"""Proposals of drafters, and verdicts on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_OFF = 1e-3  # how far the probabilities of a guess may sum from 1


@dataclass(slots=True)  # created in every round: a frozen one takes three times as long
class Proposal:
    """Guessed tokens hanging off the pending token, in topological order (parents before children).

    A chain is the tree in which every node follows the one before; the empty proposal is plain decoding.

    Attributes:
        tokens: int64 [n], the guesses.
        parents: int64 [n], index of each node's parent, -1 = the pending token; None = a chain.
        probs: float [n, vocab], the draft distribution q each token was sampled from; None = a deterministic guess.
        replacement: whether siblings were sampled with replacement; without, q is renormalised after each rejection.
        bucket: a small label of how sure the drafter is; adaptive control keeps one acceptance record per label.
    """

    tokens: NDArray[np.int64]
    parents: NDArray[np.int64] | None = None
    probs: NDArray[np.floating] | None = None
    replacement: bool = True
    bucket: int = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def parent(self, node: int) -> int:
        """Return the index of the parent of ``node``; -1 is the pending token."""
        return node - 1 if self.parents is None else int(self.parents[node])

    def depth(self, node: int) -> int:
        """Count the nodes on the path from the pending token to ``node``, itself included."""
        count = 0
        while node >= 0:
            node, count = self.parent(node), count + 1
        return count

    def children(self, node: int) -> Sequence[int]:
        """List the nodes whose parent is ``node`` (-1 = the pending token), in the drafter's order."""
        if self.parents is None:
            return range(node + 1, min(node + 2, len(self)))
        return [i for i in range(node + 1, len(self)) if self.parents[i] == node]

    def tested(self, path: Sequence[int]) -> int:
        """Count the depths whose draft token was tested, given the accepted ``path``: its own, and the rejected."""
        if self.parents is None:
            return min(len(path) + 1, len(self.tokens))
        return len(path) + bool(self.children(path[-1] if path else -1))

    def refused(self, path: Sequence[int]) -> list[int]:
        """List the tokens of the drafter's first choices below the accepted ``path``."""
        if self.parents is None:
            return self.tokens[len(path) :].tolist()
        tokens: list[int] = []
        below = self.children(path[-1] if path else -1)
        while below:
            tokens.append(int(self.tokens[below[0]]))
            below = self.children(below[0])
        return tokens

    @property
    def deepest(self) -> int:
        """Depth of the deepest draft token; 0 = none."""
        return len(self) if self.parents is None else max(map(self.depth, range(len(self))), default=0)

    def check(self, vocab: int) -> None:
        """Raise ValueError for an invalid proposal over ``vocab`` tokens; the empty one passes."""
        tokens, parents, probs = self.tokens, self.parents, self.probs
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"guesses must be integers [n], got {tokens.dtype} {list(tokens.shape)}")
        if not len(tokens):
            return
        if tokens.min() < 0 or tokens.max() >= vocab:
            raise ValueError(f"a guess outside the vocabulary of {vocab}")
        # before anything walks up the tree: in a cycle it would walk for ever
        if parents is not None and (
            parents.shape != tokens.shape or (parents >= np.arange(len(parents))).any() or parents.min() < -1
        ):
            raise ValueError("parents must come before their children")
        if probs is None:
            return
        if probs.shape != (len(tokens), vocab):
            raise ValueError(f"draft probabilities must be of shape {(len(tokens), vocab)}, not {probs.shape}")
        # NaN also fails the comparisons; a q that does not sum to 1 would change the distribution of the text
        if not ((np.abs(probs.sum(1) - 1) < _OFF).all() and probs.min() >= 0):
            raise ValueError("draft probabilities must be finite, at least 0 and sum to 1 for each guess")

    def pruned(self, leaves: Sequence[int]) -> Proposal:
        """Cut everything below ``leaves``."""
        if self.parents is None:
            return self.truncated(leaves[0] + 1) if leaves else self
        dead: set[int] = set()
        for node in range(len(self)):
            parent = self.parent(node)
            if parent in leaves or parent in dead:
                dead.add(node)
        return self._only([node for node in range(len(self)) if node not in dead])

    def truncated(self, budget: int) -> Proposal:
        """Cut nodes deeper than ``budget``."""
        if self.parents is None:
            if len(self) <= budget:
                return self
            probs = None if self.probs is None else self.probs[:budget]
            return Proposal(self.tokens[:budget], None, probs, self.replacement, self.bucket)
        return self._only([i for i in range(len(self)) if self.depth(i) <= budget])

    def _only(self, kept: list[int]) -> Proposal:
        """Keep the nodes ``kept``, ascending, whose parents are among them."""
        assert self.parents is not None
        if len(kept) == len(self):
            return self
        new = {-1: -1} | {old: at for at, old in enumerate(kept)}
        parents = np.array([new[int(self.parents[i])] for i in kept], np.int64)
        probs = None if self.probs is None else self.probs[kept]
        return Proposal(self.tokens[kept], parents, probs, self.replacement, self.bucket)


EMPTY = Proposal(np.empty(0, np.int64))


@dataclass(slots=True)
class Verdict:
    """The outcome of verifying a proposal.

    Attributes:
        path: accepted nodes of the proposal, from the pending token down.
        next_token: the token after them: recovered (a guess was rejected) or bonus (all were accepted).
    """

    path: Sequence[int] = ()
    next_token: int = -1
