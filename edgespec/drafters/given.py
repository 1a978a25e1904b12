"""Rows that a drafter conditioned on a target is given: embeddings of tokens, and what was tapped beside them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.target import TappedTarget

Rows = NDArray[np.float32]
KEPT = 1 << 20  # bytes of embeddings that are kept: asking the target for some takes as long as a small drafter's step


class Given:
    """Makes them.

    Args:
        target: gives embeddings of tokens.
        columns: of a row.
        hidden: columns of the embedding, the first ones.
    """

    def __init__(self, target: TappedTarget, columns: int, hidden: int) -> None:
        self.target, self.columns, self.hidden = target, columns, hidden
        self._embedded: dict[int, Rows] = {}  # [hidden] of each token asked for lately

    def __call__(self, tokens: Sequence[int], state: Rows) -> Rows:
        """[n, columns]: what the slot is given of tokens [n] and taps or hidden states [n, any]."""
        given = np.zeros((len(tokens), self.columns), np.float32)
        hidden, known = self.hidden, self._embedded
        if 4 * hidden * (len(known) + len(tokens)) > KEPT:
            known.clear()
        if new := [token for token in dict.fromkeys(tokens) if token not in known]:
            known.update(zip(new, self.target.embed(np.array(new, np.int64)), strict=True))
        for row, token in zip(given, tokens, strict=True):
            row[:hidden] = known[token]
        given[:, hidden : hidden + state.shape[1]] = state
        return given
