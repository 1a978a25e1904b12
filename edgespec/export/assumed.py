"""Heads and a draft for a plan: those that exist, or such as `edgespec train` makes by default."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.drafters.registry import METHODS, has_exits, needing
from edgespec.export.architectures import Architecture, architecture
from edgespec.export.drafters.drafter import layers_like
from edgespec.export.drafters.eagle3 import Eagle3
from edgespec.export.drafters.head_choice import given_heads
from edgespec.export.drafters.heads import (
    DESCRIPTION,
    HeadsFile,
    TrainedHeads,
    group_shapes,
    read_description,
    read_heads,
)
from edgespec.export.source.derived import held
from edgespec.export.source.source import ConfigOnly
from edgespec.export.training.options import TrainOptions, choose_exits, choose_taps, draft_shape
from edgespec.runtimes.files.manifest import ModelFacts


def planned_heads(
    model: str, folders: Sequence[str], methods: Sequence[str], arch: Architecture
) -> tuple[dict[str, TrainedHeads], list[str]]:
    """Plan the heads of the methods: of given folders, of an embedded model, or else of the shape that training gives.

    Returns heads without values, by method, and sentences that say what does not exist yet.
    """

    def read(folder: Path) -> TrainedHeads:
        described = (folder / DESCRIPTION).is_file()
        return _shaped(read_description(folder) if described else read_heads(folder).file, arch.facts)

    found = given_heads(model, folders, methods, read, arch, None)
    missing = [kind for kind in needing("heads") if kind in methods and kind not in found]
    found |= {kind: _shaped(assumed_heads(kind, arch.facts), arch.facts) for kind in missing}
    return found, [f"{kind} heads as `edgespec train {kind}` makes them: they are not trained yet" for kind in missing]


def _shaped(file: HeadsFile, facts: ModelFacts) -> TrainedHeads:
    """Return heads whose tensors have only shapes."""
    shapes: dict[str, tuple[int, ...]] = {}
    for group in file.groups:
        shapes |= group_shapes(group, facts.hidden, facts.vocab)
    return TrainedHeads(file, {name: held(np.broadcast_to(np.float32(0), shape)) for name, shape in shapes.items()})


def assumed_heads(kind: str, facts: ModelFacts) -> HeadsFile:
    """Describe heads of the shape that ``edgespec train`` gives by default."""
    exits = list(choose_exits((), facts.layers)) if has_exits(kind) else []
    count = len(exits) or TrainOptions.heads
    return HeadsFile(kind=kind, count=count, hidden=facts.hidden, vocab=facts.vocab, exits=exits,
                     inner=count * facts.hidden if METHODS[kind].heads == "blockwise" else 0,
                     own=METHODS[kind].heads == "medusa" and TrainOptions.own_lm_heads)  # fmt: skip


def assumed_draft(target: Architecture) -> Architecture:
    """Return a draft of the shape that ``edgespec train draft`` gives by default."""
    shape = draft_shape(TrainOptions("draft", "", Path()), target.facts)
    config: dict[str, Any] = layers_like(target, shape.layers) | {
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "tie_word_embeddings": True,
    }
    return architecture(ConfigOnly(target.source.path, config))


def assumed_drafter(target: Architecture) -> tuple[Eagle3, tuple[int, ...]]:
    """Give a drafter of the shape that ``edgespec train eagle`` gives by default, and where it looks at the target."""
    tapped = choose_taps(target.facts.layers)
    source = ConfigOnly(target.source.path, layers_like(target, 1))
    return Eagle3(source, len(tapped), target.facts.context), tapped
