"""The input of an export, once it is opened: models, tokenizers, texts and choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.target import SkipSet
from edgespec.drafters.registry import needing
from edgespec.export.architectures import Architecture
from edgespec.export.bundle.progress import Progress
from edgespec.export.calibrated import Calibration
from edgespec.export.format_choice import FormatChoice
from edgespec.export.measuring.reading import Reading
from edgespec.export.models import Models
from edgespec.export.options import ExportOptions
from edgespec.export.quantization.calibration_text import CalibrationText
from edgespec.export.sentences import Sentences
from edgespec.runtimes.files.formats import FILE, Attention
from edgespec.runtimes.files.manifest import SamplingPart, TextForm, TokenizerFacts
from edgespec.runtimes.files.seq2seq_format import WritingRules
from edgespec.runtimes.files.speech import SpeechPart
from edgespec.runtimes.text.codec import TextCodec

if TYPE_CHECKING:
    from edgespec.export.models import SourceModel


@dataclass(frozen=True)
class Tokenizers:
    """The tokenizers of a target, and what a manifest says of its texts."""

    codec: TextCodec
    source_codec: TextCodec | None  # of what an encoder reads, if it is another one
    facts: TokenizerFacts
    form: TextForm | None  # how an encoder-decoder's texts begin and end
    speech: SpeechPart | None  # of a model that transcribes
    sampling: SamplingPart | None
    sentences: Sentences  # how it embeds texts
    rules: WritingRules | None


@dataclass(frozen=True)
class Sample:
    """A text or recordings that an export measures on."""

    text: CalibrationText
    tokens: list[int]  # of the text
    sounds: NDArray[np.float32] | None  # float32 [S, R, columns], recordings to calibrate on
    read: Reading | None  # input of an encoder-decoder's encoder


@dataclass(frozen=True)
class LoadedSource:
    """Everything that an export works on.

    Attributes:
        options: with the format that was chosen.
        methods: all methods of the bundle.
        path: of the target.
        given_skip: a published skip set, instead of a search.
        calibration: how levels are calibrated; None = they are not.
        attention: how keys may be kept.
        notes: what to tell of the models.
        format_choice: how the format was chosen; None = it was given.
    """

    options: ExportOptions
    progress: Progress
    methods: list[str]
    path: Path
    models: Models[SourceModel]
    tokenizers: Tokenizers
    sample: Sample
    given_skip: SkipSet | None
    notes: list[str]
    format_choice: FormatChoice | None = None
    calibration: Calibration | None = None
    attention: Sequence[Attention] = ()

    @property
    def arch(self) -> Architecture | None:
        """Return the target's architecture; None = its graphs are foreign."""
        return self.models.target.arch

    @property
    def copies(self) -> bool:
        """Whether weights are copied and nothing is measured: ``quick`` with the weights of a file."""
        options = self.options
        return options.format == FILE and options.quick and not set(self.methods) - set(needing("text"))
