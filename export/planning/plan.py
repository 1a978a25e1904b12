"""What an export will do and how large it will be, before anything is written (``--dry-run``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgespec.export.architectures import Architecture
from edgespec.export.heads.description import HeadPlan
from edgespec.export.quantization.weights import WeightChoice
from edgespec.export.storage.plan import storage_plans
from edgespec.runtimes.files.manifest import Format, Layout

if TYPE_CHECKING:  # it needs onnx, and a plan does not
    from edgespec.export.optimum.model import ForeignModel


def weight_bytes(
    arch: Architecture,
    form: Format,
    head: Format | None = None,
    layout: Layout = "native",
    plan: HeadPlan | None = None,
) -> int:
    """Bytes of the weight file, exactly; with ``plan`` that of a checkpoint extended by its heads."""
    return storage_plans(arch, form, head, plan)[layout].end


def model_bytes(
    arch: Architecture, form: Format, head: Format | None, layout: Layout, plan: HeadPlan | None
) -> tuple[int, int]:
    """Bytes of the model itself, and those that heads or a cut LM head for them add."""
    if plan is None or plan.only:
        return weight_bytes(arch, form, head, layout, plan), 0
    alone = weight_bytes(arch, form, head, layout)
    return alone, weight_bytes(arch, form, head, layout, plan) - alone


def describe_export(
    arch: Architecture | ForeignModel,
    choice: WeightChoice,
    methods: list[str],
    draft: Architecture | ForeignModel | None,
    layout: Layout = "native",
    plan: HeadPlan | None = None,
    draft_plan: HeadPlan | None = None,
) -> dict[str, Any]:
    """The export as a JSON object; bytes of what goes through optimum are estimates good to a few percent.

    Args:
        arch: the target.
        choice: how matrices are stored.
        methods: all of the bundle.
        draft: the draft, if there is one.
        layout: of the weights.
        plan: heads of the target, whose tensors its checkpoint has.
        draft_plan: the cut LM head of the draft.
    """
    sizes: dict[str, int] = {}
    heads = 0
    for name, model, its in (("target", arch, plan), ("draft", draft, draft_plan)):
        if isinstance(model, Architecture):
            sizes[name], extra = model_bytes(model, choice.format, choice.head, layout, its)
            heads += extra
        elif model is not None:
            sizes[name] = model.weight_bytes(choice)
    if heads:
        sizes["heads"] = heads
    return {
        "model": str(arch.source.path),
        "architecture": arch.facts.architecture,
        "format": choice.format,
        "head_format": choice.head or choice.format,
        "quantizer": choice.quantizer.name if choice.quantizer else None,
        "methods": methods,
        "context": arch.facts.context,
        "weight_bytes": sizes,
        "kv_bytes_per_token": arch.facts.kv_bytes_per_token + (draft.facts.kv_bytes_per_token if draft else 0),
    }
