"""Entries of a drafter that guesses a block of tokens in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.decoding.noise import Noise
from edgespec.decoding.proposal import Proposal
from edgespec.decoding.sampling import SamplingParams
from edgespec.drafters.drawing.chain import draw_chain
from edgespec.drafters.entries import FIRST_ROWS, Entries
from edgespec.drafters.given import Rows


class Blocks(Entries):
    """An entry for every token, of what was tapped of the target there alone, and a block of guesses in one pass.

    DFlash (arXiv 2602.06036).  The guesses of a block do not know each other: each is drawn from its own row.
    """

    held = 0

    @property
    def block(self) -> int:
        """Rows that the drafter was trained with: the pending token and guesses."""
        decoder = self.slot.model.part.decoder
        assert decoder is not None
        assert decoder.block is not None
        return decoder.block

    def draw(self, tokens: Sequence[int], taps: Rows, length: int, params: SamplingParams, noise: Noise) -> Proposal:
        if len(taps):
            self.absorb((), taps)
        length = min(length, self.block - 1)
        given = self._block(tokens[-1], length)
        if params.plain_greedy:
            found = self.slot.forward_block(given, best=True).best
            assert found is not None
            pairs = iter(zip(found[0].tolist(), found[1].tolist(), strict=True))
            return draw_chain(_none, tokens, length, self.target.vocab_size, params, noise, best=lambda _: next(pairs))
        rows = iter(self._whole(self.slot.forward_block(given).logits))
        return draw_chain(lambda _: next(rows), tokens, length, self.target.vocab_size, params, noise)

    def absorb(self, tokens: Sequence[int], taps: Rows) -> None:
        given = np.zeros((len(taps), self._given.columns), np.float32)
        given[:, self._given.columns - taps.shape[1] :] = taps
        self.slot.absorb_given(given)

    def try_once(self) -> None:
        self.slot.forward_block(self._block(0, self.block - 1), best=True)

    def try_first(self) -> bool:
        known = len(self)
        self.absorb((), np.zeros((FIRST_ROWS, self.no_taps.shape[1]), np.float32))
        self.try_once()
        self.crop(known)
        return True

    def _block(self, pending: int, length: int) -> Rows:
        """[1 + length, columns]: the pending token, and masks where guesses will be."""
        decoder = self.slot.model.part.decoder
        assert decoder is not None
        assert decoder.mask is not None
        return self._given([pending] + [decoder.mask] * length, np.zeros((1, 0), np.float32))


def _none(guess: int | None) -> Rows:
    raise AssertionError("rows of a block are there at once")
