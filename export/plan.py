"""What an export will do and how large it will be, before anything is written (``--dry-run``)."""

from __future__ import annotations

from math import prod
from typing import Any

from edgespec.export.architectures import Architecture
from edgespec.export.extended import ExtendedCheckpoint
from edgespec.export.foreign.model import ForeignModel
from edgespec.export.heads import is_head
from edgespec.export.quantize import BLOCK
from edgespec.export.vectors import HEADROOM
from edgespec.export.weights import WeightChoice
from edgespec.runtimes.manifest import Format, Layout


def weight_bytes(arch: Architecture, form: Format, head: Format | None = None, layout: Layout = "native") -> int:
    """Bytes of the weight file, from shapes alone; alignment and, in the native layout, padding apart."""
    total, rest = 0, form
    scale = 2 if layout == "native" else 4  # bytes
    for name, shape in arch.tensors.items():
        form = head if head and name == arch.head.weight else rest
        if len(shape) == 1 or form == "fp32" or name == arch.positions:
            size = 4 * prod(shape)
        elif form == "w8a8" or (name == arch.embedding and not arch.facts.tied and shape[1] % BLOCK):
            size = shape[0] * (shape[1] + 4)
        else:
            bits = 4 if form == "int4" else 8
            size = shape[0] * -(-shape[1] // BLOCK) * (BLOCK * bits // 8 + scale)
            if name == arch.embedding and arch.facts.tied and shape[1] % BLOCK:  # rows to look up are stored apart
                size += shape[0] * (shape[1] + 4)
        total += size
    return total + sum(4 * (arch.facts.context + HEADROOM) * rotary.dims for rotary in arch.rotaries.values())


def head_bytes(arch: Architecture, form: Format, head: Format | None = None, layout: Layout = "native") -> int:
    """Bytes of what the heads, or a cut LM head, add to the weight file."""
    if not isinstance(arch.source, ExtendedCheckpoint):
        return 0
    scale, total = 2 if layout == "native" else 4, 0
    for name, tensor in arch.source.extra.items():
        shape, kind = tensor.shape, head if head and is_head(name, arch) else form
        if len(shape) == 1 or kind == "fp32":
            total += 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        elif kind == "w8a8":
            total += shape[0] * (shape[1] + 4)
        else:
            total += shape[0] * -(-shape[1] // BLOCK) * (BLOCK * (4 if kind == "int4" else 8) // 8 + scale)
    return total


def describe_export(
    arch: Architecture | ForeignModel,
    choice: WeightChoice,
    methods: list[str],
    draft: Architecture | ForeignModel | None,
    layout: Layout = "native",
) -> dict[str, Any]:
    """The plan as a JSON object; bytes are estimates good to a few percent."""
    sizes = {}
    for name, model in (("target", arch), ("draft", draft)):
        if isinstance(model, ForeignModel):
            sizes[name] = model.weight_bytes(choice)
        elif model is not None:
            sizes[name] = weight_bytes(model, choice.format, choice.head, layout)
    if isinstance(arch, Architecture) and (extra := head_bytes(arch, choice.format, choice.head, layout)):
        sizes["heads"] = extra
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
