"""Other ways to read a drafter's checkpoint: the settings that checkpoints get wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product

from edgespec.export.drafters.assistant import Assistant
from edgespec.export.drafters.dflash import DFlash
from edgespec.export.drafters.drafter import Drafter
from edgespec.export.drafters.mtp import Mtp

UNSAID = ", which this layout does not have"
RAW = "the hidden state before the model's final norm"


@dataclass(frozen=True)
class Reading:
    """One of them.

    Attributes:
        words: what is other.
        tapped: which boundaries of the target are looked at, in order.
        flags: attributes of the architecture, by name.
    """

    words: str
    tapped: tuple[int, ...]
    flags: Mapping[str, bool] = field(default_factory=dict)

    def said_by(self, drafter: Drafter) -> dict[str, bool]:
        """The same attributes as the drafter was read."""
        return {name: getattr(drafter.arch, name) for name in self.flags}


def other_readings(drafter: Drafter, layers: int) -> list[Reading]:
    """What a checkpoint may have meant; none for EAGLE's, which ``probe.best_setting`` reads in numpy.

    Args:
        drafter: what was read.
        layers: of the target.
    """
    arch, tapped = drafter.arch, drafter.tapped
    found = []
    if isinstance(arch, Mtp):
        for hidden_first, raw in product((False, True), (False, True)):
            first = "hidden state before the embedding" if hidden_first else "embedding before the hidden state"
            words = [f"the {first}"] if hidden_first != arch.hidden_first else []
            words += [RAW] if raw else []
            found.append(Reading(" and ".join(words) + UNSAID, tapped, {"hidden_first": hidden_first, "raw": raw}))
    if isinstance(arch, Assistant):
        for raw, last in product((False, True), (layers, layers - 1)):
            words = [f"the hidden state after layer {last} of {layers}"] if last != layers else []
            words += [RAW] if raw else []
            found.append(Reading(" and ".join(words) + UNSAID, (last,), {"raw": raw}))
    if isinstance(arch, DFlash):
        for shift, order in product((0, -1, 1), (1, -1)):
            others = tuple(at + shift for at in tapped[::order])
            if all(1 <= at <= layers for at in others):
                ids = [at - 1 for at in others]  # of a list that counts outputs of layers
                found.append(Reading(f"target_layer_ids: {ids} in its config.json", others))
    return [each for each in found if (each.tapped, each.flags) != (tapped, each.said_by(drafter))]
