"""Steps of an export for one model: graphs of edgespec (onnx_model.py) or of another exporter (foreign/model.py)."""

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

DRAFT = "draft/"  # the folder of a draft in a bundle


@dataclass(frozen=True)
class WrittenModel:
    """A model part on disk, and the squared errors of its matrices."""

    part: ModelPart
    errors: Errors
    uncalibrated: int = 0  # matrices that a calibrating quantizer knew no inputs of


@dataclass(frozen=True)
class Writing:
    """How a model is to be written."""

    folder: Path  # of the bundle; a draft goes to ``draft`` in it
    draft: bool  # it is the draft
    gated: bool  # sub-layers can be left out of a pass
    choice: WeightChoice  # how matrices are stored
    operators: WantedOperators  # whose layout the weights get
    # context -> tokens int64 [S, T] that quantizers calibrate on, of an encoder-decoder with its sources
    texts: Callable[[int], NDArray[np.int64] | SourcedTexts]
    threads: int | None  # of what is tried on the way
    progress: Progress  # called at every stage

    @property
    def what(self) -> str:
        return "draft" if self.draft else "target"

    @property
    def prefix(self) -> str:
        """Where the model's files are in the bundle."""
        return DRAFT if self.draft else ""
