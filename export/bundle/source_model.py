"""What an export does with a model, whoever makes its graphs: edgespec (emitted.py) or optimum (optimum/model.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.export.bundle.progress import Progress
from edgespec.export.drafters.head_choice import HeadChoice
from edgespec.export.emit.fill import Errors
from edgespec.export.quantization.weights import WeightChoice
from edgespec.export.tokenizers.facts import DescribedModel
from edgespec.runtimes.devices.webgpu import DeviceName
from edgespec.runtimes.files.manifest import ModelPart, Precision, SkipSetPart
from edgespec.runtimes.files.operators import WantedOperators
from edgespec.runtimes.slots.slot import Slot


@dataclass(frozen=True)
class WrittenModel:
    """A model part on disk, and the squared errors of its matrices."""

    part: ModelPart
    errors: Errors


@dataclass(frozen=True)
class Writing:
    """How a model is to be written.

    Attributes:
        folder: of the bundle; a draft goes to ``draft`` in it.
        draft: it is the draft.
        gated: sub-layers can be left out of a pass.
        choice: how matrices are stored.
        operators: whose layout the weights get.
        texts: context -> tokens int64 [S, T] that quantizers calibrate on.
        threads: of what is tried on the way.
        progress: told of every stage.
    """

    folder: Path
    draft: bool
    gated: bool
    choice: WeightChoice
    operators: WantedOperators
    texts: Callable[[int], NDArray[np.int64]]
    threads: int | None
    progress: Progress

    @property
    def what(self) -> str:
        """For people."""
        return "draft" if self.draft else "target"

    @property
    def prefix(self) -> str:
        """Where the model's files are in the bundle."""
        return "draft/" if self.draft else ""


class SourceModel(DescribedModel, Protocol):
    """A target or a draft on its way into a bundle."""

    @property
    def remedies(self) -> list[str]:
        """What to warn of before an export: where it differs from the source, and what to do about it."""
        ...

    def limit(self, context: int) -> None:
        """Serve no more tokens than these."""
        ...

    def equip(self, heads: HeadChoice) -> None:
        """Give a target its trained heads."""
        ...

    def cut(self, tokens: NDArray[np.int64]) -> None:  # [size]
        """Leave only some rows of a draft's LM head."""
        ...

    def weight_bytes(self, choice: WeightChoice, operators: WantedOperators) -> tuple[int, int]:
        """Bytes of the model itself, and those that heads or a cut LM head for them add."""
        ...

    def write(self, writing: Writing) -> WrittenModel:
        """Write weights and graphs."""
        ...

    def parity(self, written: WrittenModel, slot: Slot, tokens: Sequence[int], progress: Progress) -> dict[str, Any]:
        """How far the written model, open in ``slot``, is from its source on a text."""
        ...

    def for_device(
        self, writing: Writing, part: ModelPart, device: DeviceName, precision: Precision, skip: SkipSetPart | None
    ) -> ModelPart:
        """Write graphs for a device, too."""
        ...

    def provenance(self) -> dict[str, Any]:
        """Return what the manifest says of where the graphs come from."""
        ...
