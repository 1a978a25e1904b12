"""A drafter conditioned on hidden states on its way into a bundle."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgespec.export.architectures.base import Architecture
from edgespec.export.heads.description import HeadPlan
from edgespec.runtimes.files.manifest import DrafterKind


@dataclass(frozen=True)
class Drafter:
    """A drafter on its way into a bundle.

    Attributes:
        arch: the drafter, over its checkpoint.
        tapped: which boundaries of the target it looks at, in its order.
        tokens: int64 [size], what its LM head scores, ascending; None = all tokens of the target, in order.
        notes: what the user should know about how it is read.
    """

    arch: Architecture
    tapped: tuple[int, ...]
    tokens: NDArray[np.int64] | None
    notes: list[str] = field(default_factory=list)

    @property
    def plan(self) -> HeadPlan:
        """What its graphs have."""
        return HeadPlan() if self.tokens is None else HeadPlan(cut=True, only=True)

    @property
    def method(self) -> DrafterKind:
        """The method that drafts by it."""
        assert self.arch.drafts is not None
        return self.arch.drafts
