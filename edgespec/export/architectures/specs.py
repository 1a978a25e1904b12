"""What only some models have: towers that read images or sound, and what makes a decoder a drafter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.export.source.derived import Extra
from edgespec.runtimes.files.manifest import DrafterKind, HeadGroup, ImagePart, SoundPart

if TYPE_CHECKING:
    from edgespec.export.architectures.base import Architecture


class VisionEncoderSpec(NamedTuple):
    """Vision encoder of a decoder.

    Attributes:
        image: its entry in the manifest.
        tower: the encoder.
        projectors: the first makes the decoder's rows, each other one rows that are added after one of its first
            layers.
        places: learned positions [side * side, width] that the runtime resamples; None = the encoder has them.
    """

    image: ImagePart
    tower: Architecture
    projectors: list[Architecture]
    places: Extra | None = None


class AudioEncoderSpec(NamedTuple):
    """Audio encoder of a decoder.

    Attributes:
        sound: its entry in the manifest; None = it reads captions.
        tower: the encoder.
        projectors: make the decoder's rows.
        convolutions: over chunks of features, in sequence, before the encoder.
    """

    sound: SoundPart | None
    tower: Architecture
    projectors: list[Architecture]
    convolutions: list[Architecture]


@dataclass
class DrafterSpec:
    """What only a drafter has; ``DecoderPart`` of the manifest says more.

    Attributes:
        method: the method that drafts by it.
        own_head: its LM head is not the target's.
        block: rows that a drafter of blocks was trained with.
        mask: the placeholder token of a guess there.
        anchor: the pending token's row also guesses.
        heads: groups of heads in its graph beside its LM head.
        scored: their matrices whose rows are tokens that can be guessed.
        confidence, masked: give these numbers.
        kv_dims: sizes of heads of the target's layers whose keys and values it reads.
        reads: which of them each layer reads.
        target: the model it is for, where it is given embeddings that it does not norm.
    """

    method: DrafterKind
    own_head: bool = False
    block: int | None = None
    mask: int | None = None
    anchor: bool | None = None
    heads: tuple[HeadGroup, ...] = ()
    scored: tuple[str, ...] = ()
    confidence: Callable[[], NDArray[np.float32]] | None = None
    masked: Callable[[], NDArray[np.float32]] | None = None
    kv_dims: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    target: Architecture | None = None
