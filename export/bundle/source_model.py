"""What an export does with a model, whoever makes its graphs: edgespec (emitted.py) or optimum (optimum/model.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.export.bundle.progress import Progress
from edgespec.export.emit.fill import Errors
from edgespec.export.quantization.calibrate import SourcedTexts
from edgespec.export.quantization.weights import WeightChoice
from edgespec.runtimes.files.manifest import ModelPart
from edgespec.runtimes.files.operators import WantedOperators


@dataclass(frozen=True)
class WrittenModel:
    """A model part on disk, and the squared errors of its matrices.

    Attributes:
        uncalibrated: matrices that a calibrating quantizer knew no inputs of.
    """

    part: ModelPart
    errors: Errors
    uncalibrated: int = 0


@dataclass(frozen=True)
class Writing:
    """How a model is to be written.

    Attributes:
        folder: of the bundle; a draft goes to ``draft`` in it.
        draft: it is the draft.
        gated: sub-layers can be left out of a pass.
        choice: how matrices are stored.
        operators: whose layout the weights get.
        texts: context -> tokens int64 [S, T] that quantizers calibrate on, of an encoder-decoder with its sources.
        threads: of what is tried on the way.
        progress: told of every stage.
    """

    folder: Path
    draft: bool
    gated: bool
    choice: WeightChoice
    operators: WantedOperators
    texts: Callable[[int], NDArray[np.int64] | SourcedTexts]
    threads: int | None
    progress: Progress

    @property
    def what(self) -> str:
        return "draft" if self.draft else "target"

    @property
    def prefix(self) -> str:
        """Where the model's files are in the bundle."""
        return "draft/" if self.draft else ""
