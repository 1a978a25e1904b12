"""Other ways to read a drafter's checkpoint: the settings that checkpoints get wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from edgespec.export.drafters.assistant import Assistant
from edgespec.export.drafters.dflash import DFlash
from edgespec.export.drafters.drafter import Drafter
from edgespec.export.drafters.mtp import TARGET_NORM, Mtp
from edgespec.export.source.extended import ExtendedCheckpoint, Held

UNSAID = ", which this layout does not have"
RAW = "the hidden state before the model's final norm"
SCALED = 1.5  # from this scale of embeddings on, it makes a difference whether a drafter was trained on it


@dataclass(frozen=True)
class Reading:
    """One of them.

    Attributes:
        words: what is other.
        tapped: which boundaries of the target are looked at, in order.
        flags: attributes of the architecture, by name; ``source`` is another checkpoint.
        mask: the token that stands for a guess of a block; None = as it was read.
        scale: what embeddings are multiplied by, as the target sees them.
    """

    words: str
    tapped: tuple[int, ...]
    flags: Mapping[str, Any] = field(default_factory=dict)
    mask: int | None = None
    scale: float = 1.0


def as_read(drafter: Drafter) -> Reading:
    """The reading at hand."""
    arch = drafter.arch
    names = [name for name in ("hidden_first", "raw") if hasattr(arch, name)]
    return Reading("", drafter.tapped, {name: getattr(arch, name) for name in names})


def other_readings(drafter: Drafter, layers: int, scale: float) -> list[Reading]:
    """What a checkpoint may have meant; none for EAGLE's, which ``probe.best_setting`` reads in numpy.

    Args:
        drafter: what was read.
        layers: of the target.
        scale: what the target multiplies embeddings by.
    """
    arch, tapped = drafter.arch, drafter.tapped
    first = as_read(drafter)
    found = []
    if isinstance(arch, Mtp):
        for hidden_first, raw in product((False, True), (False, True)):
            order = "hidden state before the embedding" if hidden_first else "embedding before the hidden state"
            words = [f"the {order}"] if hidden_first != arch.hidden_first else []
            words += [RAW] if raw else []
            found.append(Reading(" and ".join(words) + UNSAID, tapped, {"hidden_first": hidden_first, "raw": raw}))
        if arch.norm_weight_is_offset:
            stored = f"its norms as they are stored, without the 1 that this model's add{UNSAID}"
            found.append(Reading(stored, tapped, {**first.flags, "source": _without_one(arch)}))
    if isinstance(arch, Assistant):
        for raw, last in product((False, True), (layers, layers - 1)):
            words = [f"the hidden state after layer {last} of {layers}"] if last != layers else []
            words += [RAW] if raw else []
            found.append(Reading(" and ".join(words) + UNSAID, (last,), {"raw": raw}))
    if isinstance(arch, DFlash):
        for shift, step in product((0, -1, 1), (1, -1)):
            others = tuple(at + shift for at in tapped[::step])
            if all(1 <= at <= layers for at in others):
                ids = [at - 1 for at in others]  # of a list that counts outputs of layers
                found.append(Reading(f"target_layer_ids: {ids} in its config.json", others))
        for mask in sorted(arch.masks - {arch.mask}):
            found.append(Reading(f"mask_token_id: {mask} in its config.json", tapped, mask=mask))
    if isinstance(arch, (Assistant, DFlash)) and scale >= SCALED:
        stored = f"embeddings as they are stored, not {scale:.3g} times that, as the model has them{UNSAID}"
        found.append(Reading(stored, tapped, first.flags, scale=1 / scale))
    same = first.tapped, first.flags, None, 1.0
    return [each for each in found if (each.tapped, each.flags, each.mask, each.scale) != same]


def _without_one(arch: Mtp) -> ExtendedCheckpoint:
    """Its checkpoint with norms of its own that multiply by what is stored: a converter has added the 1 already."""
    own = [name for name, shape in arch.tensors.items() if len(shape) == 1 and name.endswith("norm.weight")]
    own.remove(f"{TARGET_NORM}.weight")
    return ExtendedCheckpoint(arch.source, {name: Held(arch.source.read(name) - np.float32(1)) for name in own})
