"""A drafter with the settings that checkpoints get wrong, and in other formats, to say which of them would help.

Readings are compared in float32, the current one among them: what its format costs is no reason to read it otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.export.bundle.drafter import write_drafter
from edgespec.export.drafters.assistant import Assistant
from edgespec.export.drafters.dflash import DFlash
from edgespec.export.drafters.drafter import Drafter
from edgespec.export.drafters.eagle3 import TAPS, Eagle3
from edgespec.export.drafters.mtp import TARGET_NORM, Mtp
from edgespec.export.measuring.guesses import LEAST, Text, accepted, decoder_of, opened, tapped
from edgespec.export.quantization.levels import BLOCKS
from edgespec.export.quantization.weights import WeightChoice
from edgespec.export.source.derived import ExtendedCheckpoint, held
from edgespec.runtimes.files.formats import FOUR_BITS, Format
from edgespec.runtimes.files.staged import scratch
from edgespec.runtimes.slots.slot import Slot

HELPS = 0.05  # how much more often first guesses must be right


UNSAID = ", which this layout does not have"
RAW = "the hidden state before the model's final norm"
SCALED = 1.5  # from this scale of embeddings on, it makes a difference whether a drafter was trained on it


@dataclass(frozen=True)
class Reading:
    """One of them."""

    words: str  # what is other
    tapped: tuple[int, ...]  # boundaries of the target that are tapped, in order
    # attributes of the architecture, by name; ``source`` is another checkpoint
    flags: Mapping[str, Any] = field(default_factory=dict)
    mask: int | None = None  # the token that stands for a guess of a block; None = as it was read
    scale: float = 1.0  # what embeddings are multiplied by, as the target sees them


def as_read(drafter: Drafter) -> Reading:
    """Return the current reading."""
    arch = drafter.arch
    names = [name for name in ("hidden_first", "norm_first", "raw") if hasattr(arch, name)]
    return Reading("", drafter.tapped, {name: getattr(arch, name) for name in names})


def other_readings(drafter: Drafter, layers: int, scale: float) -> list[Reading]:
    """Return what a checkpoint may have meant.

    Args:
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
    if isinstance(arch, Eagle3):
        found += _others_looked_at(first, layers, TAPS, 0)
        residual = f"norm_before_residual: {str(not arch.norm_first).lower()} in its config.json"
        found.append(Reading(residual, tapped, {**first.flags, "norm_first": not arch.norm_first}))
        swapped = f"the hidden state before the embedding{UNSAID}"
        found.append(Reading(swapped, tapped, {**first.flags, "hidden_first": True}))
    if isinstance(arch, DFlash):
        found += _others_looked_at(first, layers, "target_layer_ids", 1)
        for mask in sorted(arch.masks - {arch.drafter.mask}):
            found.append(Reading(f"mask_token_id: {mask} in its config.json", tapped, mask=mask))
    if isinstance(arch, (Assistant, DFlash)) and scale >= SCALED:
        stored = f"embeddings as they are stored, not {scale:.3g} times that, as the model has them{UNSAID}"
        found.append(Reading(stored, tapped, first.flags, scale=1 / scale))
    same = first.tapped, first.flags, None, 1.0
    return [each for each in found if (each.tapped, each.flags, each.mask, each.scale) != same]


def _others_looked_at(first: Reading, layers: int, key: str, least: int) -> list[Reading]:
    """Look one layer earlier or later, or in the other order; ``least``: the boundary that the key calls 0."""
    others = (tuple(at + shift for at in first.tapped[::step]) for shift, step in product((0, -1, 1), (1, -1)))
    return [
        Reading(f"{key}: {[at - least for at in tapped]} in its config.json", tapped, first.flags)
        for tapped in others
        if all(least <= at <= layers for at in tapped)
    ]


def _without_one(arch: Mtp) -> ExtendedCheckpoint:
    """Return its checkpoint with its own norms reduced by 1, for a converter that has already added the 1."""
    own = [name for name, shape in arch.tensors.items() if len(shape) == 1 and name.endswith("norm.weight")]
    own.remove(f"{TARGET_NORM}.weight")
    return ExtendedCheckpoint(arch.source, {name: held(arch.source.read(name) - np.float32(1)) for name in own})


FORMATS: tuple[Format, ...] = "fp32", "int8", "int4"  # that guesses are compared in
ROWS = 16  # of the embedding, to measure its scale


@dataclass(frozen=True)
class Trials:
    """First guesses that a target accepts of a drafter that is written in other ways."""

    drafter: Drafter  # what was read
    choice: WeightChoice  # how the bundle stores it
    beside: Path  # temporary files are stored next to this path
    target: Slot  # the written target; its slot is overwritten
    texts: Sequence[Text]  # texts that it generated, with the drafter's taps

    def formats(self) -> dict[Format, float]:
        """By the formats that it could have been exported in, under the same ``--head-format``."""
        others = [form for form in FORMATS if form != self.choice.format]
        return {form: self._share(self._in(form)) for form in others}

    def hint(self, known: float) -> str:
        """Return a hint for a drafter whose first tokens have the acceptance ``known``; "" = none."""
        better, base = self.reading()
        costly = self.choice.format != "fp32" and base >= max(known + HELPS, LEAST)
        return "; ".join(filter(None, (better, self._format(known, base) if costly else "")))

    def reading(self) -> tuple[str, float]:
        """Say how it should be read, "" = as it is, and how often first guesses are right in float32."""
        first = as_read(self.drafter)
        others = other_readings(self.drafter, self.target.layers, self._scale())
        shares = self._shares(WeightChoice.of("fp32", None, None), [first, *others])
        base = shares.pop(first.words)
        best = max(shares, key=lambda words: shares[words], default="")
        helps = best and shares[best] >= base + HELPS
        return f"{shares[best]:.0%} would be right with {best}" if helps else "", base

    def _format(self, known: float, base: float) -> str:
        """Return the smallest format that helps: ``base`` are right in float32."""
        finer = [("--format int8", self._in("int8"))] if self.choice.format != "int8" else []
        if self.choice.drafter_head in FOUR_BITS:
            finer.insert(0, ("--head-format int8", self._in(self.choice.stored, "int8")))
        for option, choice in finer:
            if (share := self._share(choice)) >= max(known + HELPS, LEAST):
                return f"{share:.0%} would be right with {option}, {base:.0%} in fp32: it is the format that costs them"
        return f"{base:.0%} would be right with --format fp32: it is the format that costs them"

    def _in(self, form: Format, head: Format | None = None) -> WeightChoice:
        """Return the choice of ``--format``, with ``--head-format`` if it is given."""
        if form not in BLOCKS:
            return WeightChoice.of(form, None, None)
        quantizer = self.choice.quantizer.name if self.choice.quantizer else None
        return WeightChoice.of(form, quantizer, head or self.choice.asked)

    def _share(self, choice: WeightChoice) -> float:
        first = as_read(self.drafter)
        return self._shares(choice, [first])[first.words]

    def _shares(self, choice: WeightChoice, readings: Sequence[Reading]) -> dict[str, float]:
        """Measure acceptance by name of the reading; readings that differ only in input share one written drafter."""
        arch, found = self.drafter.arch, dict[str, float]()
        rest = list(readings)
        while rest:
            flags = rest[0].flags
            alike, rest = [r for r in rest if r.flags == flags], [r for r in rest if r.flags != flags]
            said = {name: getattr(arch, name) for name in flags}
            try:
                vars(arch).update(flags)
                found |= self._written(choice, alike)
            finally:
                vars(arch).update(said)
        return found

    def _written(self, choice: WeightChoice, readings: Sequence[Reading]) -> dict[str, float]:
        target, found = self.target, dict[str, float]()
        with scratch(self.beside) as folder:
            part = write_drafter(folder, self.drafter, choice, target.model.graph.operators)
            slot = opened(folder, part, target)
            for reading in readings:
                read = self.texts
                if reading.tapped != self.drafter.tapped:
                    read = tapped(target, read, reading.tapped)
                decoder = decoder_of(part)
                if reading.mask is not None:
                    decoder = decoder.model_copy(update={"mask": reading.mask})
                given = part.model_copy(update={"decoder": decoder})
                found[reading.words] = accepted(target, slot, given, read, 1, reading.scale).rates[0]
        return found

    def _scale(self) -> float:
        """Return the target's factor of embeddings, if the drafter reads them without it."""
        of = self.drafter.spec.target
        if of is None:
            return 1.0
        stored = of.source.read(of.embedding, slice(0, ROWS))  # [rows, hidden]
        seen = self.target.embed(np.arange(len(stored)))  # the same, as the target sees them
        return float(np.linalg.norm(seen) / max(np.linalg.norm(stored), 1e-9))
