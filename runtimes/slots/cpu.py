"""The kind of slot that a model on the CPU needs."""

from __future__ import annotations

from edgespec.runtimes.slots.concat import ConcatSlot
from edgespec.runtimes.slots.native import NativeSlot
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot
from edgespec.runtimes.slots.stock import StockSlot


def cpu_slot(model: Model, *, context: int | None = None, reserve: int = 256) -> Slot:
    """A slot over a model on the CPU; arguments as for ``runtimes.opening.open_slot``."""
    if model.part.origin == "optimum":
        return ConcatSlot(model, context=context, reserve=reserve)
    kind = NativeSlot if model.graph.operators == "native" else StockSlot
    return kind(model, context=context, reserve=reserve)
