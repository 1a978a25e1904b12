"""A checkpoint against the decoder that its config.json describes."""

from __future__ import annotations

import re

from edgespec.errors import ExportError
from edgespec.export.architectures.base import Architecture
from edgespec.export.source.derived import DerivedCheckpoint
from edgespec.export.source.source import Checkpoint, ConfigOnly

# not weights: tables that old versions of transformers saved with the model, scales of a quantized cache, an epsilon
BUFFERS = re.compile(r"\.(act_fn\.eps|inv_freq|masked_bias|attn\.bias|attention\.bias|[qkv]_scale|kv_scale)$")
LAYER = re.compile(r"(?:(?:^|\.)(?:layers|h)|(?:encoder|transformer)\.layer)\.(\d+)\.")


def check_tensors(arch: Architecture, source: Checkpoint) -> None:
    """Check that every tensor the decoder asks for is there with its shape, and that its layers hold nothing else.

    A config.json without weights is not checked here.

    A tensor that nothing reads is a bias or a norm of a variant that this architecture does not describe: the export
    would be wrong.

    Raises:
        ExportError: a tensor is missing, has another shape, or is unused.
    """
    if isinstance(source, ConfigOnly):
        return
    wanted = arch.tensors
    for name, shape in wanted.items():
        got = arch.source.shape(name)
        # position tables are cut to the context
        longer = name == arch.positions and got[0] >= shape[0] and got[1:] == shape[1:]
        if got != shape and not longer:
            raise ExportError(
                f"{arch.source.path}: {name} has shape {list(got)}, but config.json implies {list(shape)}",
                "config.json and the weights belong to different models",
            )
    assert isinstance(arch.source, DerivedCheckpoint)
    used = set().union(*(arch.source.origins(name) for name in wanted))
    for name in sorted(used):  # sources of tensors, such as each expert's matrix
        arch.source.base.shape(name)
    for name in source.index:
        layer = LAYER.search(name)
        ours = layer is not None and int(layer[1]) < arch.facts.layers and name.startswith(arch.layers_at)
        if (
            ours
            and name not in used
            and not BUFFERS.search(name)
            and not (arch.ignores(name) or _adds_nothing(source, name))
        ):
            raise ExportError(
                f"{arch.source.path}: {name} is part of the checkpoint, but {arch.model_type} has no use for it",
                "this is a variant that would come out wrong: open an issue with the config.json",
            )


def _adds_nothing(source: Checkpoint, name: str) -> bool:
    """Whether a tensor is a bias of zeros: GPTQ tools give one to every projection."""
    return name.endswith(".bias") and len(source.shape(name)) == 1 and not source.read(name).any()
