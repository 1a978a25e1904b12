"""Passes as tests ask for them: a name for each, over ``Target.run``."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.target import Output, Pass, SkipSet, Target

Ids = NDArray[np.int64]
Rows = NDArray[np.float32]


def run_draft(slot: Target, tokens: Ids, offset: int = 0, skip: SkipSet | None = None, best: bool = False) -> Output:
    """Run a chain of draft rows [n] -> the logits of the last one."""
    return slot.run(Pass(tokens, None, int(best), scored=1, draft=True, offset=offset, skip=skip))


def run_hypotheses(
    slot: Target, tokens: Ids, visible: Ids, parents: Ids, skip: SkipSet | None = None, hidden: bool = False
) -> Output:
    """Run rows [n] that each continue some beginning of the text."""
    return slot.run(Pass(tokens, parents, 0, hidden, visible=visible, skip=skip))


def run_heads(slot: Target, group: str, hidden: Rows, top: int = 0) -> Output:
    """Ask a group of heads about rows [r, hidden]."""
    return slot.run(Pass(inputs=hidden, top=top, group=group))


def run_layers(slot: Target, rows: Ids | Rows, offset: int, first: int, last: int, tokens: Ids | None = None) -> Rows:
    """Run layers over tokens [n], or rows of the residual stream [n, hidden] -> [n, hidden], a copy."""
    inputs = None
    if rows.ndim > 1:
        inputs = np.asarray(rows, np.float32)
    else:
        tokens = np.asarray(rows, np.int64)
    part = (first, last)
    found = slot.run(Pass(tokens, hidden=True, scored=0, offset=offset, inputs=inputs, layers=part)).hidden
    assert found is not None
    return found.copy()


def run_rest(slot: Target, tokens: Ids, hidden: Rows, layer: int, best: bool = False, states: bool = False) -> Output:
    """Run the layers from one on, over the rows [n, hidden] before it."""
    return slot.run(Pass(tokens, None, int(best), states, inputs=hidden, layers=(layer, slot.layers)))


def run_inputs(slot: Target, inputs: Rows, recycled: bool, best: bool = False, parents: Ids | None = None) -> Output:
    """Run rows [n, columns] of a drafter -> its hidden states, and logits of the last row, or of all of a tree."""
    scored = 1 if parents is None else None
    return slot.run(Pass(None, parents, int(best), True, scored=scored, inputs=inputs, fused=not recycled))


def absorb(slot: Target, inputs: Rows) -> None:
    """Append rows [n, columns] to a drafter's cache."""
    slot.run(Pass(scored=0, read=True, inputs=inputs, fused=True))


def states(slot: Target, tokens: Ids, parents: Ids | None = None) -> Output:
    """Run a pass that also gives hidden states."""
    return slot.run(Pass(tokens, parents, hidden=True))
