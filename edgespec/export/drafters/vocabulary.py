"""The tokens of a drafter that has an LM head, and its copy of the target's embedding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from edgespec.errors import ExportError
from edgespec.export.architectures.base import Architecture
from edgespec.export.architectures.formula import HEAD
from edgespec.export.drafters.drafter import Drafter, extra_of
from edgespec.export.drafters.heads import CUT
from edgespec.export.source.derived import Extra, chosen_rows, extended, held, original, rows_of
from edgespec.export.source.source import Checkpoint

EMBEDDING, HEAD_WEIGHT, OFFSETS = "embed_tokens.weight", f"{HEAD}.weight", "d2t"
COMPARED = 64  # rows of a copy of the embedding that are compared


def check_embedding(source: Checkpoint, target: Architecture) -> None:
    """Check that a copy of the target's embedding, which is dropped, is one; another would be needed."""
    if not source.has(EMBEDDING):
        return
    rows = slice(0, COMPARED)
    theirs, ours = source.read(EMBEDDING, rows), target.source.read(target.embedding, rows)
    if theirs.shape != ours.shape or not np.allclose(theirs, ours, atol=1e-2 * float(np.abs(ours).max())):
        raise ExportError(
            f"{source.path}: {EMBEDDING} is not the target's embedding",
            "take the drafter that was made for this model, or one without an embedding of its own",
        )


def scored_tokens(source: Checkpoint, arch: Architecture) -> NDArray[np.int64] | None:
    """Return what each row of a drafter's own LM head scores, int64 [size]; None = all tokens, in order.

    Rows are put in ascending order of their tokens, with those of ``DrafterSpec.scored``.
    """
    rows, vocab = source.shape(HEAD_WEIGHT)[0], arch.facts.vocab
    if not source.has(OFFSETS):
        if rows != vocab:
            raise ExportError(
                f"{source.path}: the LM head scores {rows} of {vocab} tokens, but no {OFFSETS} says which",
                "take the drafter that was made for this model",
            )
        return None
    with safe_open(source.index[OFFSETS], "np") as file:
        if (kind := file.get_slice(OFFSETS).get_dtype()) not in ("I32", "I64"):
            raise ExportError(
                f"{source.path}: {OFFSETS} is of type {kind}, expected whole numbers (I32, I64)", "download it again"
            )
        tokens = np.arange(rows) + np.asarray(file.get_tensor(OFFSETS), np.int64).reshape(-1)[:rows]
    if len(np.unique(tokens)) != rows or tokens.min() < 0 or tokens.max() >= vocab:
        raise ExportError(
            f"{source.path}: {OFFSETS} names tokens {tokens.min()} to {tokens.max()}, {len(np.unique(tokens))} of "
            f"them: expected {rows} below {vocab}",
            "take the drafter that was made for this model",
        )
    if rows == vocab:
        return None
    order, scored = np.argsort(tokens), arch.drafter.scored if arch.drafter else ()
    ascending = (order == np.arange(rows)).all()
    own = {CUT: original(source, HEAD_WEIGHT)} | {name: extra_of(arch, name) for name in scored}
    arch.source = extended(
        arch.source, own if ascending else {name: rows_of(each, order) for name, each in own.items()}
    )
    return tokens[order]


RIDGE = 1e-4  # of the mean square of an input: keeps what the shared tokens do not determine small


def with_tokens(drafter: Drafter, target: Architecture, tokens: NDArray[np.int64]) -> Drafter:
    """Return the drafter with an LM head for other tokens.

    A token that it could not guess gets the row of the target's LM head, through the linear map that takes the target's
    rows of the tokens that it could guess to its own, by least squares.

    Args:
        drafter: what was read; its checkpoint gets another head.
    """
    arch = drafter.arch
    own = np.arange(arch.facts.vocab) if drafter.tokens is None else drafter.tokens  # [D]
    rows = arch.source.read(f"{HEAD}.weight" if drafter.tokens is None else CUT)  # [D, hidden]
    known = np.isin(tokens, own)
    head = np.empty((len(tokens), arch.facts.hidden), np.float32)
    head[known] = rows[np.searchsorted(own, tokens[known])]
    notes = list(drafter.notes)
    if not known.all():

        def theirs(ids: NDArray[np.int64]) -> NDArray[np.float32]:  # [n] -> [n, hidden]
            return chosen_rows(target.source, target.head.weight, ids, target.facts.hidden).read(slice(None), None)

        x = theirs(own)
        square = x.T @ x
        square += np.float32(RIDGE * np.trace(square) / len(square)) * np.eye(len(square), dtype=np.float32)
        head[~known] = theirs(tokens[~known]) @ np.linalg.solve(square, x.T @ rows)
        notes.append(f"{int((~known).sum())} of the {len(tokens)} tokens that it guesses are new to it: their rows of "
                     "the LM head are the model's, mapped to its own")  # fmt: skip
    found: dict[str, Extra] = {CUT: held(head)}
    for name in drafter.spec.scored:  # a new token's row is not known, so it is zero
        values, more = extra_of(arch, name), np.zeros((len(tokens), *extra_of(arch, name).shape[1:]), np.float32)
        more[known] = values.read(slice(None), None)[np.searchsorted(own, tokens[known])]
        found[name] = held(more)
    arch.source = extended(arch.source, found)
    return replace(drafter, tokens=tokens, notes=notes)
