"""Decide whether single rows run as pairs: a row's bits must not depend on the number of rows in a pass.

On x86 processors without AVX-512, ONNX Runtime multiplies one row by a 4-bit matrix with another kernel than several
rows, and the kernels round differently (docs/dev/runtime.md).  In strict mode a pass of one row runs as a pass of two
equal rows.  The same applies to an LM head that one row reaches.  The results of the second row are dropped.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot

VARIABLE = "EDGESPEC_STOCK_PAIRS"


def forced_pairs() -> bool | None:
    """Return what ``EDGESPEC_STOCK_PAIRS`` sets: 1 = always pairs, 0 = never; None = a probe decides."""
    return {"1": True, "0": False}.get(os.environ.get(VARIABLE, ""))


def needs_pairs(model: Model, open_slot: Callable[[], Slot]) -> bool:
    """Tell whether lone rows of a strict graph go as pairs on this machine, and remember it in ``model.pairs``.

    Args:
        model: whose graph it is.
        open_slot: opens a slot over it, for the probe.
    """
    if model.pairs is None:
        model.pairs = forced_pairs()
    if model.pairs is None:
        model.pairs = False
        model.pairs = _lone_row_differs(open_slot())
    return model.pairs


def _lone_row_differs(slot: Slot) -> bool:
    """Compare the logits of two tokens, each as a single row and followed by the other."""
    tokens = np.random.default_rng(7).integers(0, slot.vocab_size, 2)
    for text in (tokens, tokens[::-1]):
        alone = slot.forward(text[:1]).logits[0].tobytes()
        if slot.forward(text).logits[0].tobytes() != alone:
            return True
    return False
