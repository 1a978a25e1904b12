"""What an export will do and how large it will be, before anything is written (``--dry-run``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edgespec.export.architectures import Architecture
from edgespec.export.bundle.model_part import counted
from edgespec.export.bundle.source_model import SourceModel
from edgespec.export.emit.plans import storage_plans
from edgespec.export.heads.description import HeadPlan
from edgespec.export.quantization.weights import WeightChoice
from edgespec.planning.cut import TYPICAL, paying_size
from edgespec.runtimes.files.formats import Format
from edgespec.runtimes.files.manifest import Layout
from edgespec.runtimes.files.operators import WantedOperators


def weight_bytes(
    arch: Architecture,
    form: Format,
    head: Format | None = None,
    layout: Layout = "native",
    plan: HeadPlan | None = None,
    fine: frozenset[str] = frozenset(),
) -> int:
    """Bytes of the weight file, exactly; with ``plan`` that of a checkpoint extended by its heads."""
    return storage_plans(arch, form, head, plan, fine)[layout].end


def model_bytes(arch: Architecture, choice: WeightChoice, layout: Layout, plan: HeadPlan | None) -> tuple[int, int]:
    """Bytes of the model itself, and those that heads or a cut LM head for them add."""

    def size(plan: HeadPlan | None) -> int:
        return weight_bytes(arch, choice.format, choice.head, layout, plan, choice.fine)

    alone = size(plan if plan is None or plan.only else None)
    return alone, size(plan) - alone


def paying_rows(
    target: Architecture, draft: Architecture, coverage: Callable[[int], float] = TYPICAL.__getitem__
) -> int | None:
    """As many rows of a draft's or drafter's LM head as pay (``paying_size``)."""
    return paying_size(counted(target), counted(draft), coverage, draft.drafts)


def describe_export(
    target: SourceModel,
    choice: WeightChoice,
    methods: list[str],
    draft: SourceModel | None,
    draft_choice: WeightChoice,
    operators: WantedOperators,
) -> dict[str, Any]:
    """The export as a JSON object; bytes of what goes through optimum are estimates good to a few percent.

    Args:
        target: with its heads.
        choice: how its matrices are stored.
        methods: all of the bundle.
        draft: the draft, if there is one.
        draft_choice: how its matrices are stored.
        operators: whose layout the weights get.
    """
    models = [target, draft] if draft else [target]
    found = {"target": target.weight_bytes(choice, operators)}
    if draft:
        found["draft"] = draft.weight_bytes(draft_choice, operators)
    sizes = {name: own for name, (own, _) in found.items()}
    if heads := sum(more for _, more in found.values()):
        sizes["heads"] = heads
    return {
        "model": str(target.source.path),
        "architecture": target.facts.architecture,
        "format": choice.format,
        "head_format": choice.head or choice.format,
        "quantizer": choice.quantizer.name if choice.quantizer else None,
        "methods": methods,
        "context": target.facts.context,
        "weight_bytes": sizes,
        "kv_bytes_per_token": sum(model.facts.kv_bytes_per_token for model in models),
    }
