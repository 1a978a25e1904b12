"""One source model -> one weight file and its graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from edgespec.export.architectures import Architecture
from edgespec.export.bundle.model_part import (
    ENCODER,
    FINAL_NORM,
    INDEX,
    STANDARD,
    ModelSpec,
    front_of,
    model_part,
    taps_of,
)
from edgespec.export.bundle.source_model import WrittenModel
from edgespec.export.drafters.heads import HeadPlan
from edgespec.export.emit.fill import fill
from edgespec.export.emit.plan import WEIGHTS, StoragePlan
from edgespec.export.emit.plans import Plans, index_text, storage_plans
from edgespec.export.emit.program import NativePlan, native_graph
from edgespec.export.emit.standard import StandardOps
from edgespec.export.emit.stock import GraphOps
from edgespec.export.quantization.quantizer import DirectLevels
from edgespec.runtimes.files.manifest import ModelPart


@dataclass(frozen=True)
class ModelPlan:
    """A model of a bundle before any value is read: all of it follows from shapes.

    Attributes:
        arch: the model.
        spec: how it is stored.
        part: its entry in the manifest.
        plans: of its weight file in either layout.
        encoders: of the weight files of its encoders, by name.
    """

    arch: Architecture
    spec: ModelSpec
    part: ModelPart
    plans: Plans
    encoders: dict[str, NativePlan]

    @property
    def weight_bytes(self) -> int:
        """Size of the weight file, without those of encoders."""
        return self.plans[self.spec.layout].end


def plan_model(arch: Architecture, spec: ModelSpec, quantizer: str | None = None) -> ModelPlan:
    """Plan the files of a model; ``quantizer``: the name of what chooses its levels, None = they are rounded."""
    plans = storage_plans(arch, spec.format, spec.head, spec.plan, spec.fine, spec.layout)
    native, encoders, kept = plans["native"], encoder_plans(arch, spec), plans[spec.layout].kept
    share = fine_share(native, spec.fine) if spec.fine else None
    low = encoders[ENCODER].low_nibble_bytes if ENCODER in encoders else 0
    part = model_part(arch, spec, quantizer, 0 if spec.stays_stock else native.low_nibble_bytes, share, low, kept)
    return ModelPlan(arch, spec, part, plans, encoders)


def write_model(
    folder: Path,
    arch: Architecture,
    spec: ModelSpec,
    chosen: DirectLevels | None = None,
    progress: Callable[[int, int], None] | None = None,  # called with (bytes of weights written, of) as it grows
) -> WrittenModel:
    """Write what ``plan_model`` planned into ``folder``: the weights, the graphs over them, and an index.

    The weights are stored once.  ``model.weights.json`` lists their locations in either layout, so that the other
    layout can be made without reading the graphs.
    """
    plan = plan_model(arch, spec, chosen.quantizer_name if chosen else None)
    part, trace = plan.part, arch.trace()
    for name, graph in part.graphs.items():
        file = folder / graph.file.removeprefix(spec.prefix)
        if name == "native":
            native_graph(plan.plans["native"]).save(file)
            continue
        kind = StandardOps if name == STANDARD else GraphOps
        ops = kind(plan.plans["stock"], gates=graph.gated, padded=graph.padded, hidden=graph.hidden, plan=spec.plan)
        ops.run(trace)
        ops.graph.save(file)
    errors = fill(folder / WEIGHTS, plan.plans[spec.layout], chosen, progress)
    for name, encoder in plan.encoders.items():
        native_graph(encoder).save(folder / f"{name}.onnx")
        fill(folder / encoder.file, encoder, chosen.encoder if chosen and name == ENCODER else None, progress)
    if arch.sight is not None and arch.sight.places is not None and arch.sight.image.position_embedding is not None:
        arch.sight.places.read(slice(None), None).astype("<f4").tofile(
            folder / arch.sight.image.position_embedding.file
        )
    if part.index is not None:
        (folder / INDEX).write_text(index_text(plan.plans), "utf-8")
    if part.final_norm is not None:
        names = filter(None, (arch.final_norm.weight, arch.final_norm.bias))
        np.stack([arch.source.read(name) for name in names]).astype("<f4").tofile(folder / FINAL_NORM)
    return WrittenModel(part, errors)


def encoder_plans(arch: Architecture, spec: ModelSpec) -> dict[str, NativePlan]:
    """Plan the weight files of a model's encoders, by name; weights shared with the decoder are stored twice."""
    sides = {} if arch.encoder is None or spec.shares_encoder else {ENCODER: arch.encoder}
    found = {}
    for name, side in (sides | front_of(arch)).items():
        form = spec.format if name == ENCODER else spec.front_format
        found[name] = storage_plans(side, form, spec.head, HeadPlan(tapped=taps_of(arch, name)))["native"]
        found[name].file = f"{name}.data"
    return found


def fine_share(plan: StoragePlan, fine: frozenset[str]) -> float:
    """Return the share of the weights of layers that are int8, for any format of the others."""
    sizes = [(plan.shapes[name], name in fine) for name in plan.arch.tensors if len(plan.shapes[name]) == 2
             and name not in (plan.arch.head.weight, plan.arch.embedding)]  # fmt: skip
    return sum(prod(shape) for shape, is_fine in sizes if is_fine) / sum(prod(shape) for shape, _ in sizes)
