"""What sampling says about the rows of a pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.noise import Noise
from edgespec.decoding.proposal import Proposal
from edgespec.decoding.sampling import SamplingParams, Support, adjusted, log_softmax_at, not_finite, support
from edgespec.decoding.text import Prefix


class Rows(Protocol):
    """What verification asks of the rows of a target pass.  Row 0 follows the pending token, row i + 1 node i."""

    @property
    def matching(self) -> bool:
        """Whether drawn guesses too are verified by matching: greedy, or coupled sampling."""
        ...

    @property
    def block(self) -> bool:
        """Whether drawn chains are verified as a block."""
        ...

    def choose(self, row: int) -> int:
        """The token that plain decoding emits there."""
        ...

    def position(self, row: int) -> int:
        """Index, in the sequence, of the token that the row predicts."""
        ...

    def distribution(self, row: int) -> NDArray[np.float64]:
        """float64 [vocab]: p, after temperature and truncation; one-hot where greedy."""
        ...

    def likeliest(self, row: int) -> int:
        """The token of the largest logit, after bias and repetition penalty."""
        ...

    def rank(self, row: int, token: int) -> int:
        """How many tokens come before ``token`` by logit, after bias and repetition penalty."""
        ...


class RowSampler:
    """What sampling says about each row of one target pass.  Row 0 follows the pending token, row i + 1 node i.

    Args:
        logits: float32 [r, vocab], r = 1 + nodes of the proposal.
        tokens: committed tokens; of a ``Text`` none is looked at again in the next pass.
        proposal: what was verified.
        params: how tokens are chosen.
        noise: the request's randomness.
        best: likeliest token [r] and its logit [r], where the pass gave only those; greedy requests need no more.
    """

    __slots__ = ("_best", "_plain", "block", "logits", "matching", "noise", "params", "proposal", "tokens")

    def __init__(
        self,
        logits: NDArray[np.float32],
        tokens: Sequence[int],
        proposal: Proposal,
        params: SamplingParams,
        noise: Noise,
        best: tuple[NDArray[np.int64], NDArray[np.float32]] | None = None,
    ) -> None:
        self.logits = logits
        self._best = best
        self.tokens = tokens
        self.proposal = proposal
        self.params = params
        self.noise = noise
        self._plain = params.plain_greedy
        self.matching = not params.rejects
        self.block = params.verification == "block"

    def prefix(self, row: int) -> Prefix:
        """Committed tokens and the guesses on the path to ``row``; no copy of them."""
        path: list[int] = []
        node = row - 1
        while node >= 0:
            path.append(int(self.proposal.tokens[node]))
            node = self.proposal.parent(node)
        return Prefix(self.tokens, path[::-1])

    def position(self, row: int) -> int:
        """Index, in the sequence, of the token that ``row`` predicts."""
        proposal = self.proposal
        return len(self.tokens) + (row if proposal.parents is None else proposal.depth(row - 1))

    def _seen(self, row: int) -> Sequence[int]:
        # mostly nothing reads the prefix
        return self.prefix(row) if self.params.reads_prefix else ()

    def _support(self, row: int) -> Support:
        return support(self.logits[row], self.params, self._seen(row))

    def choose(self, row: int) -> int:
        """The token that plain decoding emits at ``row``.

        Raises:
            EdgespecError: the row has a NaN or infinite logit.
        """
        if self._plain:
            return self.likeliest(row)
        return self._support(row).draw(self.noise, self.position(row))

    def distribution(self, row: int) -> NDArray[np.float64]:
        """float64 [vocab]: p at ``row``.  Raises like ``choose``."""
        probs = np.zeros(self.logits.shape[1])
        if self._plain:
            probs[self.likeliest(row)] = 1
        else:
            found = self._support(row)
            probs[found.ids] = found.probs()
        return probs

    def likeliest(self, row: int) -> int:
        """The token of the largest logit after bias and penalty, the lowest on a tie.  Raises like ``choose``."""
        if self._best is not None:
            best, logit = int(self._best[0][row]), float(self._best[1][row])
        else:
            logits = self.logits[row] if self._plain else adjusted(self.logits[row], self.params, self._seen(row))
            best = int(logits.argmax())
            logit = float(logits[best])
        if not math.isfinite(logit):
            raise not_finite(self.position(row))
        return best

    def rank(self, row: int, token: int) -> int:
        """How many tokens come before ``token`` by logit after bias and penalty, by id on a tie.

        A forbidden token comes after all others.
        Raises like ``choose``.
        """
        logits = adjusted(self.logits[row], self.params, self._seen(row))
        if not math.isfinite(logits.max()):
            raise not_finite(self.position(row))
        mine = logits[token]
        if mine == -math.inf:
            return len(logits)
        return int((logits > mine).sum() + (logits[:token] == mine).sum())

    def logprob(self, row: int, token: int) -> float:
        """Log-probability of ``token`` at ``row`` by the model itself: before bias, penalty and truncation."""
        return log_softmax_at(self.logits[row], token)
