"""How models read images, by the ``model_type`` of config.json."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from edgespec.export.architectures import gemma3_vl, idefics3, lfm2_vl, qwen2_5_vl, qwen_vl
from edgespec.export.architectures.base import Architecture, Sight
from edgespec.export.architectures.checked import check_tensors
from edgespec.export.architectures.rope import axes_of
from edgespec.export.architectures.towers import Whole
from edgespec.export.source.derived import DerivedCheckpoint
from edgespec.export.source.source import Checkpoint

SIGHTS: dict[str, Callable[[Whole], Sight]] = {
    "idefics3": idefics3.open_sight,
    "smolvlm": idefics3.open_sight,
    "lfm2_vl": lfm2_vl.open_sight,
    "lfm2-vl": lfm2_vl.open_sight,
    "gemma3": gemma3_vl.open_sight,
    "qwen2_5_vl": qwen2_5_vl.open_sight,
    "qwen3_vl": qwen_vl.open_sight,
    "qwen3_vl_moe": qwen_vl.open_sight,
    "qwen3_5": qwen_vl.open_sight,
    "qwen3_5_moe": qwen_vl.open_sight,
}


def open_sight(kind: str, source: Checkpoint, text: Architecture) -> Sight:
    """Open what stands in front of a decoder.

    Args:
        kind: the model's type, one of ``SIGHTS``.
        source: the whole checkpoint, with its own configuration.
        text: the decoder, which is told what it gets.

    Raises:
        ExportError: tensors or settings that do not fit.
    """
    found = SIGHTS[kind](Whole(source, text))
    for side in (found.tower, *found.projectors):
        assert isinstance(side.source, DerivedCheckpoint)
        check_tensors(side, side.source.base)
    text.inserts = text.facts.hidden * len(found.projectors)
    if found.image.positions == "grid":
        mixed = {"mrope_interleaved": kind != "qwen2_5_vl"}  # whatever config.json says of it
        text.rotaries = {
            name: replace(rotary, axes=axes_of({**rotary.parameters, **mixed}, rotary.dims))
            for name, rotary in text.rotaries.items()
        }
    return found
