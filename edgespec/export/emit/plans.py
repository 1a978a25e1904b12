"""The weight file of a model in either layout, and the program over the native one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TypedDict

from edgespec.export.architectures.base import Architecture
from edgespec.export.drafters.heads import HeadPlan
from edgespec.export.emit.native import lower
from edgespec.export.emit.plan import StockPlan, WeightLayout, converted_name
from edgespec.export.emit.program import NativePlan
from edgespec.runtimes.files.formats import FILE, Format
from edgespec.runtimes.files.manifest import Layout
from edgespec.runtimes.files.packing import Packed


class Plans(TypedDict):
    """The weight file in either layout."""

    stock: StockPlan
    native: NativePlan


def storage_plans(
    arch: Architecture,
    form: Format,
    head: Format | None,
    heads: HeadPlan | None,
    fine: frozenset[str] = frozenset(),
    written: Layout | None = None,
) -> Plans:
    """Plan the weight file in either layout.

    Args:
        arch: the model, with the tensors of its heads; its own tensors have the shapes that config.json implies.
        head: of its LM heads; None = ``form``.
        written: layout of the bundle; the other layout's file gets a separate name.  None = either is written.
    """
    trace, plan = arch.trace(), heads or HeadPlan()
    native = NativePlan(arch, form, head or form, plan, fine)
    # weights of a file are never converted: nothing is written by the other plan
    form = "int8" if form == FILE and written != "stock" else form
    stock = StockPlan(arch, form, head or form, plan, fine)
    stock.run(trace)
    lower(trace, native)
    if written == "native":
        stock.file = converted_name("stock")
    elif written == "stock":
        native.file = converted_name("native")
    return {"stock": stock, "native": native}


def index_text(plans: Plans) -> str:
    """Describe as JSON the location of each tensor in either layout, and the matrices that differ between them.

    With it a bundle's weights can be converted without reading its graphs.
    """
    packed = {name: matrix.packed for name, matrix in plans["native"].matrices.items() if matrix.packed}
    return layouts_text(packed, plans["stock"], plans["native"])


def layouts_text(packed: Mapping[str, Packed], stock: WeightLayout, native: WeightLayout) -> str:
    """Describe as JSON where each tensor is in two weight files; ``index_text`` says more."""
    entries = {
        layout: {
            name: [entry.offset, entry.length, entry.dtype.str, list(entry.dims)] for name, entry in of.entries.items()
        }
        for layout, of in (("stock", stock), ("native", native))
    }
    return json.dumps({"matrices": {name: asdict(one) for name, one in packed.items()}, **entries})
