"""Vectors and scores of an encoder: several texts in a pass, each as if it were alone.

Texts of similar length share a pass over the weights.  A row sees only the rows of its text, and every row has the
same bits in any pass, so no vector depends on other texts.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import EdgespecError
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.embedding import EmbeddingPart, Pooling, read_steps
from edgespec.runtimes.slots.encoder import Encoder
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.text.pooling import Doubles, Pool, finish

ROWS = 512  # of a pass with several texts, at most
TEXTS = 32  # of a pass, at most: each has a whole block of keys and values
Ids = NDArray[np.int64]


class TextEncoder:
    """The encoder of a bundle.

    Args:
        bundle: of an encoder.
        model: its target.
    """

    def __init__(self, bundle: Bundle, model: Model) -> None:
        part, self._facts = bundle.manifest.embedding, model.facts
        assert part is not None
        self.part: EmbeddingPart = part
        self.pooling: Pooling = bundle.manifest.pooling or "mean"
        self._encoder, self.steps = Encoder(model), read_steps(bundle.path, part, model.facts.hidden)

    @property
    def width(self) -> int:
        """Numbers of a vector."""
        return self.steps[-1].step.outputs if self.steps else self._facts.hidden

    @property
    def nbytes(self) -> int:
        """Bytes that passes work with."""
        return self._encoder.nbytes

    def vectors(
        self,
        texts: Sequence[Sequence[int]],
        pooling: Pooling | None = None,
        skips: Sequence[int] = (),
        second: Sequence[int] = (),
        cancel: threading.Event | None = None,
    ) -> Iterator[tuple[int, Doubles]]:
        """Compute the vector of each text, pass by pass -> its number, and float64 [width].

        Args:
            texts: token ids each.
            pooling: None = the model's.
            skips: tokens of each text's prompt that do not count.
            second: of each pair, where its second text begins.
            cancel: set it to end with an error before the next pass.

        Raises:
            EdgespecError: cancelled.
        """
        for numbers in _passes([len(text) for text in texts]):
            if cancel is not None and cancel.is_set():
                raise EdgespecError("cancelled before the text was embedded")
            ids = [np.asarray(texts[number], np.int64) for number in numbers]
            places = [self._positions(len(texts[number]), second[number] if second else None) for number in numbers]
            for number, rows in zip(numbers, self._encoder.encode_texts(ids, places), strict=True):
                pool = Pool(pooling or self.pooling, rows.shape[1], skips[number] if skips else 0)
                pool.add(rows.astype(np.float64))
                yield number, finish(pool.vector, self.steps)

    def _positions(self, length: int, second: int | None) -> Ids:
        """Return the positions of a text, or of a pair whose second text begins at ``second``."""
        found = np.arange(length)
        if second is not None and self.part.second_text is not None:
            found[second:] += self.part.second_text
        return found

    def close(self) -> None:
        """Free what passes work with."""
        self._encoder.close()


def _passes(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Put texts of similar length together, the longest first -> numbers of the texts of each pass."""
    waiting = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    while waiting:
        most = min(TEXTS, max(1, ROWS // max(1, lengths[waiting[0]])))
        yield waiting[:most]
        waiting = waiting[most:]
