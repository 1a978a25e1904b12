"""Another choice of tokens for a drafter's LM head: those of one's own text, not of the text that it was trained on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgespec.export.architectures.base import Architecture
from edgespec.export.drafters.drafter import Drafter
from edgespec.export.drafters.read import HEAD
from edgespec.export.heads.description import CUT
from edgespec.export.source.extended import ChosenRows, ExtendedCheckpoint, Held

RIDGE = 1e-4  # of the mean square of an input: keeps what the shared tokens do not determine small


def with_tokens(drafter: Drafter, target: Architecture, tokens: NDArray[np.int64]) -> Drafter:
    """The drafter with an LM head for other tokens.

    A token that it could not guess gets the row of the target's LM head, through the linear map that takes the target's
    rows of the tokens that it could guess to its own, by least squares.

    Args:
        drafter: what was read; its checkpoint gets another head.
        target: the model that it is for.
        tokens: int64 [size], ascending.
    """
    arch = drafter.arch
    own = np.arange(arch.facts.vocab) if drafter.tokens is None else drafter.tokens  # [D]
    rows = arch.source.read(HEAD if drafter.tokens is None else CUT)  # [D, hidden]
    known = np.isin(tokens, own)
    head = np.empty((len(tokens), arch.facts.hidden), np.float32)
    head[known] = rows[np.searchsorted(own, tokens[known])]
    notes = list(drafter.notes)
    if not known.all():

        def theirs(ids: NDArray[np.int64]) -> NDArray[np.float32]:  # [n] -> [n, hidden]
            return ChosenRows(target.source, target.head.weight, ids).read(slice(None), None)

        x = theirs(own)
        square = x.T @ x
        square += np.float32(RIDGE * np.trace(square) / len(square)) * np.eye(len(square), dtype=np.float32)
        head[~known] = theirs(tokens[~known]) @ np.linalg.solve(square, x.T @ rows)
        notes.append(f"{int((~known).sum())} of the {len(tokens)} tokens that it guesses are new to it: their rows of "
                     "the LM head are the model's, mapped to its own")  # fmt: skip
    arch.source = ExtendedCheckpoint(arch.source, {CUT: Held(head)})
    return replace(drafter, tokens=tokens, notes=notes)
