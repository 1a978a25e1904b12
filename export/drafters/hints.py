"""A drafter written in other ways for a moment: in other formats, and as other readings of its checkpoint have it.

Readings are compared in float32, the one at hand among them: what its format costs is no reason to read it otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgespec.export.drafters.drafter import Drafter
from edgespec.export.drafters.guesses import LEAST, Text, accepted, decoder_of, opened, tapped
from edgespec.export.drafters.probe import HELPS
from edgespec.export.drafters.readings import Reading, as_read, other_readings
from edgespec.export.drafters.write import write_drafter
from edgespec.export.quantization.levels import BLOCKS
from edgespec.export.quantization.weights import WeightChoice
from edgespec.runtimes.files.formats import FOUR_BITS, Format
from edgespec.runtimes.files.staged import scratch
from edgespec.runtimes.slots.slot import Slot

FORMATS: tuple[Format, ...] = "fp32", "int8", "int4"  # that guesses are compared in
ROWS = 16  # of the embedding, by which its scale is known


@dataclass(frozen=True)
class Trials:
    """First guesses that a target accepts of a drafter that is written in other ways.

    Attributes:
        drafter: what was read.
        choice: how the bundle stores it.
        beside: what temporary files lie beside.
        target: the written target; its slot is overwritten.
        texts: that it wrote, with what the drafter looks at.
        threads: of passes.
    """

    drafter: Drafter
    choice: WeightChoice
    beside: Path
    target: Slot
    texts: Sequence[Text]
    threads: int | None

    def formats(self) -> dict[Format, float]:
        """By the formats that it could have been exported in, under the same ``--head-format``."""
        others = [form for form in FORMATS if form != self.choice.format]
        return {form: self._share(self._in(form)) for form in others}

    def hint(self, known: float) -> str:
        """What would help one of whose first guesses the share ``known`` is right, in words; "" = nothing known."""
        return "; ".join(each for each in self._hints(known) if each)

    def _hints(self, known: float) -> list[str]:
        drafter, whole = self.drafter, WeightChoice.of("fp32", None, None)
        first = as_read(drafter)
        shares = self._shares(whole, [first, *other_readings(drafter, self.target.layers, self._scale())])
        base = shares.pop(first.words)
        best = max(shares, key=lambda words: shares[words], default="")
        found = [f"{shares[best]:.0%} would be right with {best}"] if best and shares[best] >= base + HELPS else []
        if self.choice.format != "fp32" and base >= max(known + HELPS, LEAST):
            found.append(self._format(known, base))
        return found

    def _format(self, known: float, base: float) -> str:
        """The smallest format that helps: ``base`` are right in float32."""
        finer = [("--format int8", self._in("int8"))] if self.choice.format != "int8" else []
        if self.choice.drafter_head in FOUR_BITS:
            finer.insert(0, ("--head-format int8", self._in(self.choice.format, "int8")))
        for option, choice in finer:
            if (share := self._share(choice)) >= max(known + HELPS, LEAST):
                return f"{share:.0%} would be right with {option}, {base:.0%} in fp32: it is the format that costs them"
        return f"{base:.0%} would be right with --format fp32: it is the format that costs them"

    def _in(self, form: Format, head: Format | None = None) -> WeightChoice:
        """As ``--format`` would have it, and ``--head-format`` if it is given."""
        if form not in BLOCKS:
            return WeightChoice.of(form, None, None)
        quantizer = self.choice.quantizer.name if self.choice.quantizer else None
        return WeightChoice.of(form, quantizer, head or self.choice.asked)

    def _share(self, choice: WeightChoice) -> float:
        first = as_read(self.drafter)
        return self._shares(choice, [first])[first.words]

    def _shares(self, choice: WeightChoice, readings: Sequence[Reading]) -> dict[str, float]:
        """By words; it is written once for all readings that differ in what it is given alone."""
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
            slot = opened(folder, part, target, self.threads)
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
        """What the target multiplies embeddings by, where the drafter is given them as they are."""
        of = self.drafter.arch.target
        if of is None:
            return 1.0
        stored = of.source.read(of.embedding, slice(0, ROWS))  # [rows, hidden]
        seen = self.target.embed(np.arange(len(stored)))  # the same, as the target sees them
        return float(np.linalg.norm(seen) / max(np.linalg.norm(stored), 1e-9))
