"""The weight file of a model in either layout."""

from __future__ import annotations

from edgespec.export.architectures.base import Architecture
from edgespec.export.drafters.heads import HeadPlan
from edgespec.export.emit.layout import converted_name
from edgespec.export.emit.native_plan import NativePlan
from edgespec.export.emit.plan import StoragePlan
from edgespec.export.emit.stock_plan import StockPlan
from edgespec.runtimes.files.formats import Format
from edgespec.runtimes.files.manifest import Layout


def storage_plans(
    arch: Architecture,
    form: Format,
    head: Format | None,
    heads: HeadPlan | None,
    fine: frozenset[str] = frozenset(),
    written: Layout | None = None,
) -> dict[Layout, StoragePlan]:
    """The weight file in either layout.

    Args:
        arch: the model, with the tensors of its heads; its own tensors have the shapes that config.json implies.
        form: of its matrices.
        head: of its LM heads; None = ``form``.
        heads: beside the LM head; None = none.
        fine: names of matrices that are int8, whatever ``form`` says.
        written: the layout that the bundle has; the other one's file has a name of its own.  None = either is written.
    """
    given = arch, form, head or form, heads or HeadPlan(), fine
    stock, native = StockPlan(*given), NativePlan(*given)
    arch.build(stock)
    arch.build(native)
    plans: dict[Layout, StoragePlan] = {"stock": stock, "native": native}
    for layout, plan in plans.items():
        if written not in (None, layout):
            plan.file = converted_name(layout)
    return plans
