"""The architectures that can be exported, by the ``model_type`` of config.json."""

from __future__ import annotations

from edgespec.errors import UnsupportedModel
from edgespec.export.architectures.base import Architecture, describe
from edgespec.export.architectures.llama import Llama
from edgespec.export.architectures.qwen2 import Qwen2
from edgespec.export.source import Checkpoint

__all__ = ["ARCHITECTURES", "Architecture", "architecture"]

ARCHITECTURES: dict[str, type[Architecture]] = {kind.model_type: kind for kind in (Llama, Qwen2)}


def architecture(source: Checkpoint) -> Architecture:
    """The architecture of a checkpoint.

    Raises:
        UnsupportedModel: unknown ``model_type``; the message lists what is supported.
    """
    name = describe(source.config)
    if name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{source.path}: architecture {name!r} is not supported; supported: {', '.join(sorted(ARCHITECTURES))}",
            "docs/architectures.md says how to add one",
        )
    return ARCHITECTURES[name](source)
