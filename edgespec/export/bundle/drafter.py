"""Write a drafter into a bundle, and describe it in the manifest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from edgespec.errors import ExportError
from edgespec.export.bundle.model import ModelPlan, plan_model, write_model
from edgespec.export.bundle.model_part import CONFIDENCE, MASKED, SELECTOR, ModelSpec
from edgespec.export.drafters.drafter import Drafter
from edgespec.export.drafters.head_choice import head_vocab, write_tokens
from edgespec.export.emit.stock import native_only
from edgespec.export.quantization.levels import BLOCKS
from edgespec.export.quantization.quantizer import QUANTIZERS, DirectLevels
from edgespec.export.quantization.weights import DEFAULT_QUANTIZER, WeightChoice
from edgespec.runtimes.files.manifest import Layout, ModelPart
from edgespec.runtimes.files.operators import WantedOperators

PREFIX = "drafter/"


def plan_drafter(drafter: Drafter, choice: WeightChoice, layout: Layout) -> ModelPlan:
    """Plan the files of a drafter; its matrices are not calibrated."""
    choice = choice.for_drafter
    return plan_model(drafter.arch, _spec(drafter, choice, layout), _quantizer(choice).quantizer_name)


def write_drafter(folder: Path, drafter: Drafter, choice: WeightChoice, layout: Layout) -> ModelPart:
    """Write its weights and graphs into ``drafter/`` of the bundle's folder."""
    choice = choice.for_drafter
    (folder / PREFIX).mkdir()
    write_tokens(folder / PREFIX, drafter.tokens)
    for name, numbers in ((CONFIDENCE, drafter.spec.confidence), (MASKED, drafter.spec.masked)):
        if numbers is not None:
            numbers().astype("<f4").tofile(folder / PREFIX / name)
    if drafter.spec.selector is not None:
        drafter.spec.selector.numbers().astype("<f2").tofile(folder / PREFIX / SELECTOR)
    quantizer = _quantizer(choice).quantizer
    chosen = DirectLevels(quantizer) if quantizer and choice.format in BLOCKS else None
    return write_model(folder / PREFIX, drafter.arch, _spec(drafter, choice, layout), chosen).part


def _spec(drafter: Drafter, choice: WeightChoice, layout: Layout) -> ModelSpec:
    return ModelSpec(choice.stored, head=choice.drafter_head, draft=True, prefix=PREFIX, layout=layout,
                     plan=drafter.plan, head_vocab=head_vocab(PREFIX, drafter.tokens))  # fmt: skip


def _quantizer(choice: WeightChoice) -> WeightChoice:
    """Replace a quantizer that calibrates."""
    calibrated = choice.quantizer is not None and choice.quantizer.calibrated
    return replace(choice, quantizer=QUANTIZERS[DEFAULT_QUANTIZER]) if calibrated else choice


def check_drafter(drafter: Drafter, methods: Sequence[str], operators: WantedOperators) -> None:
    """Refuse a drafter of another method than is wanted, and operators that cannot run it."""
    if drafter.method not in methods:
        raise ExportError(
            f"{drafter.arch.source.path}: is a drafter for --method {drafter.method}", f"add --method {drafter.method}"
        )
    if operators == "stock" and (what := native_only(drafter.arch)):
        raise ExportError(
            f"--operators stock: --method {drafter.method} has {what}, which only native operators compute",
            "leave --operators out",
        )
