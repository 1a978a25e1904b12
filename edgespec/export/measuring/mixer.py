"""Eight bits for the parts of an int4 model that need them most, under a limit of bytes or of divergence.

Every attention, every MLP, the LM head and an embedding that is not tied to it are rounded one at a time, and the
effect on the predictions is measured on a text (``variants.py``).  Parts become int8 in the order of gain per byte.
For a limit of divergence, prefixes of that order are also measured: errors do not quite add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from edgespec.errors import ExportError
from edgespec.export.architectures import Architecture
from edgespec.export.architectures.ops import Kind
from edgespec.export.architectures.rules import Norm
from edgespec.export.drafters.heads import HeadPlan
from edgespec.export.emit.plan import StockPlan
from edgespec.export.emit.plans import storage_plans
from edgespec.export.measuring.variants import EMBEDDING, HEAD, MEMORY, Choice, Rounded, VariantOps, part_of
from edgespec.export.quantization.layers import Array
from edgespec.export.quantization.levels import BLOCKS
from edgespec.export.quantization.quantizer import QUANTIZERS
from edgespec.export.quantization.weights import DEFAULT_QUANTIZER, WeightChoice
from edgespec.planning.budget import show_bytes
from edgespec.runtimes.files.formats import Format
from edgespec.runtimes.files.manifest import Layout

TOKENS = 96  # of the text that is measured on
BEGINNINGS = 8  # of the order, measured on the way to a goal of divergence

Progress = Callable[[int, int], None]  # sub-layers done, of


@dataclass(frozen=True)
class BitAllocation:
    """Chosen formats of a model's parts."""

    choice: WeightChoice  # how matrices are stored
    facts: dict[str, Any]  # for the manifest
    note: str  # message for the user


class Mixer:
    """Chooses the parts of a model that become int8.

    Args:
        choice: int4; if it sets a head format, the LM head is left out.
        read: [1, S, width], output of an encoder; the encoder's parts stay int4, and their bytes, ``beside``, count.
    """

    def __init__(
        self,
        arch: Architecture,
        choice: WeightChoice,
        layout: Layout,
        plan: HeadPlan | None,
        tokens: Sequence[int],
        progress: Progress = lambda done, of: None,
        read: Array | None = None,
        beside: int = 0,
    ) -> None:
        self._read, self._beside = read, beside
        self.arch, self.choice, self.layout, self.plan, self.progress = arch, choice, layout, plan, progress
        parts = _Parts(arch, choice.stored)
        self.matrices = parts.names if choice.head is None else {**parts.names, HEAD: frozenset()}
        self.parts = [part for part, names in self.matrices.items() if names]
        quantizer = choice.quantizer
        if quantizer is None or quantizer.calibrated:  # those need what comes in
            quantizer = QUANTIZERS[DEFAULT_QUANTIZER]
        self._rounded = Rounded(arch.source, frozenset().union(*parts.names.values()), quantizer,
                                BLOCKS[choice.stored])  # fmt: skip
        self._tokens = list(tokens[:TOKENS])
        self._rows = list(range(len(self._tokens) // 4, len(self._tokens)))  # rows that have enough context
        self._known: dict[str, float] = {}

    def allocate_for_size(self, size: int) -> BitAllocation:
        """Choose for the least divergence in ``size`` bytes of weights.

        Raises:
            ExportError: 4 bits throughout are larger.
        """
        self._check(size)
        if size >= self.bytes(self.parts):
            return self._made(self.parts, {})
        alone, fine = self._alone(1), list[str]()
        for part in self._ranked(alone):
            if self.bytes([*fine, part]) <= size:
                fine.append(part)
        return self._made(fine, alone)

    def estimate_text(self, size: int | None) -> str:
        """Describe the choice before measuring; ``size``: requested bytes, or None for a requested divergence."""
        if size is not None:
            self._check(size)
        most = self.bytes(self.parts)
        words = f"up to {show_bytes(min(size or most, most))} of weights; sizes are those of {self.choice.format}"
        return f"parts become int8: {words}"

    def _check(self, size: int) -> None:
        smallest = self.bytes([])
        if size < smallest:
            raise ExportError(
                f"--target-size {show_bytes(size)}: expected at least {show_bytes(smallest)}, "
                f"the weights of this model in {self.choice.format}",
                "give more, or choose a smaller model",
            )

    def allocate_for_kl(self, divergence: float) -> BitAllocation:
        """Choose for the fewest bytes with a mean divergence of at most ``divergence`` nats on the text."""
        alone = self._alone(2)
        ranked = self._ranked(alone)
        saved = np.cumsum([0, *(alone[part] for part in ranked)])
        steps = np.searchsorted(saved, np.linspace(0, saved[-1], BEGINNINGS))  # equal shares of the total savings
        counts = sorted({*steps.tolist()} - {len(ranked)})
        found = self._measure([Choice(self.parts) - {*ranked[:count]} for count in counts], 2, 2)
        measured = dict(zip(counts, found, strict=True))
        count = next((count for count in counts if measured[count] <= divergence), len(ranked))
        curve = {str(self.bytes(ranked[:count])): round(value, 6) for count, value in measured.items()}
        return self._made(ranked[:count], alone, {"divergence_by_bytes": curve})

    def bytes(self, fine: Iterable[str]) -> int:
        """Count the bytes of the weight files with these parts in int8."""
        made = self._choice(fine)
        return storage_plans(self.arch, made.stored, made.head, self.plan, made.fine)[self.layout].end + self._beside

    def _choice(self, fine: Iterable[str]) -> WeightChoice:
        names = frozenset[str]().union(*(self.matrices[part] for part in fine))
        head = self.arch.head.weight
        return replace(self.choice, head="int8" if head in names else self.choice.head, fine=names - {head})

    def _alone(self, runs: int) -> dict[str, float]:
        """Measure the divergence with only one part in 4 bits, for each part."""
        if not self._known:
            found = self._measure([Choice({part}) for part in self.parts], 1, runs)
            self._known = dict(zip(self.parts, found, strict=True))
        return self._known

    def _measure(self, coarse: Sequence[Choice], run: int, runs: int) -> list[float]:
        of = 2 * self.arch.facts.layers

        def report(done: int) -> None:
            self.progress((run - 1) * of + done, runs * of)

        ops = VariantOps(self.arch, self._tokens, self._rows, coarse, self._rounded, report, self._read)
        return ops.divergences()

    def _ranked(self, alone: Mapping[str, float]) -> list[str]:
        """Parts by what a byte saves, the most first."""
        none = self.bytes([])
        worth = {part: alone[part] / max(1, self.bytes([part]) - none) for part in self.parts}
        return sorted(self.parts, key=lambda part: -worth[part])

    def _made(self, fine: Sequence[str], alone: Mapping[str, float], more: Mapping[str, Any] = {}) -> BitAllocation:
        fine = [part for part in self.parts if part in fine]
        facts = {"int8": fine, "parts": len(self.parts), "bytes": self.bytes(fine), **more}
        if alone:
            facts["divergence_alone"] = {part: round(value, 6) for part, value in alone.items()}
            facts["divergence_left"] = round(sum(value for part, value in alone.items() if part not in fine), 6)
        note = (
            f"{len(fine)} of {len(self.parts)} parts are int8, the others {self.choice.format}: "
            f"{show_bytes(facts['bytes'])} of weights"
        )
        return BitAllocation(self._choice(fine), facts, note)


def block_matrices(arch: Architecture) -> frozenset[str]:
    """Name the matrices that a bundle of a block format stores in blocks."""
    return frozenset().union(*_Parts(arch, "int4").names.values())


class _Parts(StockPlan):
    """Names of the matrices in blocks of each part of a model.

    Attributes:
        names: by part, in the order of the model: first an untied embedding, last the LM head.
    """

    def __init__(self, arch: Architecture, form: Format) -> None:
        super().__init__(arch, form, form, HeadPlan())
        self.names: dict[str, frozenset[str]] = {EMBEDDING: frozenset(), MEMORY: frozenset()}
        self.run(arch.trace())
        head = frozenset({arch.head.weight})
        self.names[EMBEDDING] = self._blocks(set()) & {arch.embedding} - head
        self.names[HEAD] = self._blocks(set()) & head

    def fill_memory(self, memory: Callable[[], None]) -> None:
        before = set(self.matrices)
        super().fill_memory(memory)
        self.names[MEMORY] = self._blocks(before)

    def sublayer(
        self, kind: Kind, layer: int, x: None, body: Callable[[None], None], scale: str | None, norm: Norm | None
    ) -> None:
        before = set(self.matrices)
        super().sublayer(kind, layer, x, body, scale, norm)
        part = part_of(kind, layer)
        self.names[part] = self.names.get(part, frozenset()) | self._blocks(before)

    def _blocks(self, before: set[str]) -> frozenset[str]:
        """Find those that came since."""
        new = (matrix for name, matrix in self.matrices.items() if name not in before and matrix.form in BLOCKS)
        return frozenset(name for matrix in new for name in matrix.parts)
