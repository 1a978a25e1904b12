"""Entries of a drafter that has none: it reads the target's keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.noise import Noise
from edgespec.decoding.proposal import Proposal
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.target import Pass
from edgespec.drafters.entries import Entries
from edgespec.drafters.given import Rows
from edgespec.runtimes.slots.slot import Slot


class Borrowed(Entries):
    """None of its own: each step reads the target's keys and values of all tokens but the pending one.

    Gemma 4's assistants.  Of what is tapped only the last row is looked at, by a round's first step.
    """

    _rows = 1  # of the target's tokens that are seen

    def __len__(self) -> int:
        return self.slot.context  # wherever it is asked, they are there

    def crop(self, entries: int) -> None: ...

    def kept(self, same: int, rows: int) -> int:
        return max(rows - self.held, 0)

    def absorb(self, tokens: Sequence[int], taps: Rows) -> None: ...

    def draw(self, tokens: Sequence[int], taps: Rows, length: int, params: SamplingParams, noise: Noise) -> Proposal:
        self._rows = len(tokens) - 1
        return super().draw(tokens, taps[-1:], length, params, noise)

    def try_once(self) -> None:
        self._rows = max(1, len(self._slot.tokens))
        self._forward([0], np.zeros((1, 1), np.float32), True, True)

    def try_first(self) -> bool:
        return False  # it has no entries to make

    def _keep(self, rows: int) -> None: ...

    def _forward(
        self,
        tokens: Sequence[int],
        given: Rows,
        recycled: bool,
        best: bool = False,
        parents: NDArray[np.int64] | None = None,  # [n]
    ) -> Pass:
        output = self.slot.forward_over(self._slot, self._rows, self._given(tokens, given), recycled, best)
        assert output.hidden is not None
        self._states = output.hidden.copy()
        return output

    @property
    def _slot(self) -> Slot:
        assert isinstance(self.target, Slot)
        return self.target
