"""How far a written graph is from the float32 graph that optimum made."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.export.emit.fill import Errors
from edgespec.export.measuring.parity import ROWS, compare_logits, error_by_layer, plain_logits, relative_error
from edgespec.runtimes.files.manifest import Graph, ModelPart
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot

AGAINST = "the float32 graph of optimum"
_PASS = 64  # rows


def foreign_parity(file: Path, part: ModelPart, errors: Errors, slot: Slot, tokens: Sequence[int]) -> dict[str, Any]:
    """Compare a written graph with the one it was made of, on one text; nothing is compared with the checkpoint.

    Args:
        file: optimum's graph.
        part: what was written of it.
        errors: squared errors of the stored matrices.
        slot: the written model.
        tokens: the text.

    Returns the JSON object of ``parity_report``, and ``against``, what the figures are relative to.
    """
    tokens = list(tokens)
    rows = np.unique(np.linspace(0, len(tokens) - 2, ROWS).astype(np.int64))  # [R]
    exact = _graph_logits(file, part, tokens, rows, slot.model.threads)
    return {
        "against": AGAINST,
        "positions": len(rows),
        "weight_error_by_layer": error_by_layer(errors, part.facts.layers),
        "weight_error": relative_error(errors.values()),
        **compare_logits(exact, plain_logits(slot, tokens, rows), np.asarray(tokens)[rows + 1]),
    }


def _graph_logits(
    file: Path, part: ModelPart, tokens: list[int], rows: NDArray[np.int64], threads: int
) -> NDArray[np.float32]:  # [R, vocab]
    """Logits of the rows of a text by optimum's graph, many rows a pass."""
    original = part.model_copy(update={"format": "fp32", "graphs": {"plain": Graph(file=file.name)}})
    slot = open_slot(Model(file.parent, original, "plain", threads))
    found = []
    for start in range(0, len(tokens), _PASS):
        piece = np.asarray(tokens[start : start + _PASS], np.int64)
        logits = slot.forward(piece).logits  # [n, vocab]
        found.append(logits[rows[(rows >= start) & (rows < start + _PASS)] - start])
        slot.keep(range(len(piece)))
    return np.concatenate(found)
