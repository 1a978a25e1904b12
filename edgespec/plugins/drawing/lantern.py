"""LANTERN (arXiv 2410.03355): accept a draft code on behalf of the codes most similar to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.sampling import Rules, whole
from edgespec.decoding.verify import Accept, RowSampler
from edgespec.engine.loaded import LoadedBundle
from edgespec.errors import InvalidRequest
from edgespec.plugins.lossy import POSITIVE
from edgespec.runtimes.images.drawn import NearestCodes


@dataclass(frozen=True, kw_only=True)
class Lantern(Accept):
    """Accepts a draft code with the probability of the ``k`` codes most similar to it, of at most ``delta`` together.

    Attributes:
        near: the codes nearest to one, int64 [n], the nearest first; ``for_model`` sets it.
    """

    rule: ClassVar[str] = "lantern"
    form: ClassVar[str] = "lantern, lantern:K,DELTA"
    k: int = 100
    delta: float = 0.2
    near: Callable[[int], NDArray[np.int64]] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def ranges(cls) -> Rules:
        return {"k": ("an integer >= 1", lambda value: whole(value, 1)), "delta": POSITIVE}

    def described(self) -> list[str]:
        return [f"guesses stand for the {self.k} codes most like them, up to {self.delta:g} (LANTERN)"]

    def for_model(self, model: LoadedBundle) -> Accept:
        if (codes := model.bundle.manifest.codes) is None or codes.image is None:
            raise InvalidRequest("acceptance rule lantern is for codes of pictures, and this model does not draw")
        return replace(self, near=NearestCodes(model.bundle.path, codes, self.k).near)

    def alike(self, rows: RowSampler, row: int, guess: int) -> NDArray[np.int64] | tuple[()]:
        if self.near is None:
            return ()
        found = self.near(guess)[: self.k]
        return found[np.cumsum(rows.chances(row)[found]) <= self.delta]
