"""Names of the inputs of stock graphs, which those of older bundles call otherwise."""

from __future__ import annotations

from typing import Any

BEFORE = {"ids": "input_ids", "pos": "position_ids"}  # up to schema 2 of bundles, and since


def inputs_of(session: Any) -> dict[str, str]:
    """Inputs of an ONNX Runtime session: the name of today -> what the graph calls it."""
    return {BEFORE.get(given.name, given.name): given.name for given in session.get_inputs()}
