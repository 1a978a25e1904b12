"""Description of a LoRA adapter with which a model drafts for itself, in the folder of the adapter.

SGLang's Uno adapters have none: their mask rows are random tokens, and the server chooses the block.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from edgespec.errors import BundleError
from edgespec.runtimes.files import json_file

DRAFT = ""  # its name among the adapters that are loaded: no request can ask for it
DESCRIPTION = "edgespec_selfdraft.json"
SCHEMA = 1
BLOCK = 4  # mask rows of an adapter that says nothing
MOST_BLOCK = 16
_OWN = 0.99  # the first guess is the model's token, but an estimate is never sure
_NOISE = 20260902  # seed of the random tokens


class DraftAdapter(BaseModel):
    """``edgespec_selfdraft.json``.

    Attributes:
        block: mask rows that it was trained with.
        mask: the token that all of them are; None = random tokens.
        rank: of its matrices.
        acceptance: share of held-out texts where the guess of each mask row is right, with those before it.
        model: ``model_fingerprint`` of the model that it was trained for.
        training: how it was trained; free form.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = Field(default=SCHEMA, ge=SCHEMA, le=SCHEMA)
    block: int = Field(default=BLOCK, ge=1, le=MOST_BLOCK)
    mask: int | None = Field(default=None, ge=0)
    rank: int = Field(default=0, ge=0, description="0: not known")
    acceptance: list[float] = Field(default_factory=list, max_length=MOST_BLOCK)
    model: str | None = None
    training: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> DraftAdapter:
        """Read it from an adapter's folder; the defaults, for an adapter in SGLang's layout.

        Raises:
            BundleError: it is damaged.
        """
        file = folder / DESCRIPTION
        if not file.exists():
            return cls()
        return json_file.validated(cls, json_file.read_object(file, BundleError), file, BundleError)

    @property
    def rates(self) -> list[float]:
        """The chance of each guess, if all before it are right; the first one is the model's own token."""
        shares = [1.0, *self.acceptance]
        return [_OWN, *(now / before if before else 0.0 for before, now in pairwise(shares))]

    def masks(self, count: int, vocab: int) -> NDArray[np.int64]:  # [count]
        """Return the tokens of mask rows; the same ones in every pass.

        Raises:
            BundleError: the mask is outside the vocabulary.
        """
        if self.mask is None:
            return np.random.Generator(np.random.PCG64(_NOISE)).integers(0, vocab, count)
        if self.mask >= vocab:
            raise BundleError(f"{DESCRIPTION}: mask {self.mask}: expected a token below {vocab}", "use its own model")
        return np.full(count, self.mask, np.int64)
