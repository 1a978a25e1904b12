"""Sound parts of the manifest: features, placeholders of recordings, and the wording of requests for transcripts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from edgespec.runtimes.files.bounds import Context, Guesses, Width
from edgespec.runtimes.files.facts import Part
from edgespec.runtimes.files.images import ImagePart, ImageWords, Word
from edgespec.runtimes.files.manifest_parts import FeaturePart
from edgespec.runtimes.files.speech import Language

Text = Annotated[str, StringConstraints(max_length=4096)]


class WhisperFrontend(Part):
    """A tower of Whisper's kind (Voxtral, arXiv 2507.13264): its convolutions are in its first rows.

    Silence fills a recording to whole windows of ``features.frames``; ``merge`` rows of the tower are concatenated
    before the projector.
    """

    kind: Literal["whisper"]
    features: FeaturePart
    merge: Guesses

    @property
    def bands(self) -> int:
        """Features of a frame."""
        return self.features.bands

    def rows(self, frames: int) -> int:
        """Count the decoder's rows of ``frames`` frames."""
        return -(-frames // self.features.frames) * (self.features.frames // 2 // self.merge)


class ChunkedFrontend(Part):
    """Chunks of ``chunk`` frames go through convolutions that halve frames and bands (Qwen3-ASR, arXiv 2601.21337).

    There is one for each of ``ModelPart.convolutions``: 3 by 3, stride 2 in both directions, zeros around the chunk.
    The tower's rows are the ``bands`` of a frame in sequence, and attend within ``window`` chunks.  Silence fills a
    recording of fewer than ``min_samples`` samples.
    """

    kind: Literal["chunks"]
    bands: Width
    chunk: Width
    window: Guesses
    convolutions: Annotated[int, Field(ge=1, le=8)]
    min_samples: Context = 8000

    def rows(self, frames: int) -> int:
        """Count the decoder's rows of ``frames`` frames."""
        whole, rest = divmod(frames, self.chunk)
        return whole * self.halved(self.chunk) + self.halved(rest)

    def halved(self, size: int) -> int:
        """Return how many of ``size`` frames, or bands, remain after the convolutions."""
        return -(-size >> self.convolutions)


class ConformerFrontend(Part):
    """Features of whole frames in sequence go through convolutions that halve frames and bands (Gemma 4).

    The convolutions are those of ``ChunkedFrontend``, but over the whole recording: ``piece`` rows of the tower are
    made at a time.  Features are logarithms of magnitudes (``audio.features.log_magnitudes``), less ``mean``, over
    ``deviation`` where they are given.  Silence fills a recording of fewer than ``min_samples`` samples.
    """

    kind: Literal["conformer"]
    bands: Width = 128
    convolutions: Annotated[int, Field(ge=1, le=8)] = 2
    piece: Guesses = 16
    min_samples: Context = 161
    mean: list[float] | None = None
    deviation: list[float] | None = None

    def rows(self, frames: int) -> int:
        """Count the decoder's rows of ``frames`` frames."""
        return self.halved(frames)

    def halved(self, size: int) -> int:
        """Return how many of ``size`` frames, or bands, remain after the convolutions."""
        return -(-size >> self.convolutions)


Frontend = WhisperFrontend | ChunkedFrontend | ConformerFrontend


class TranscriptPrompt(Part):
    """How to ask for a transcript.

    ``text``: the request, with ``{sound}`` for the recording, ``{prompt}`` for the user's words (optional), and
    ``{language}``.  ``language``: the replacement of ``{language}`` if one is named, with its ``{code}`` or English
    ``{name}``; ``languages``: names of the supported ones by code; empty = all.  ``marker``: separates the detected
    language, written as ``language``, from the transcript.
    """

    text: Text
    language: Word = ""
    languages: dict[Language, Word] = Field(default_factory=dict, max_length=1000)
    marker: Word = ""


class SoundPart(Part):
    """How sound becomes rows of a decoder, at positions that have no token embedding.

    ``prompt_template``: the text of a recording.  ``max_rows``: rows of the longest one.
    """

    front: Annotated[Frontend, Field(discriminator="kind")]
    prompt_template: ImageWords
    max_rows: Context
    transcript_prompt: TranscriptPrompt


def read_alike(some: Sequence[ImagePart | SoundPart], others: Sequence[ImagePart | SoundPart]) -> bool:
    """Whether a draft uses the same rows for images and recordings as its target, at the same positions."""
    return len(some) == len(others) and all(map(reads_alike, some, others))


def reads_alike(one: ImagePart | SoundPart | None, other: ImagePart | SoundPart | None) -> bool:
    """Whether a draft uses the same rows for an image or a recording as its target, at the same positions."""
    if isinstance(one, SoundPart) or isinstance(other, SoundPart) or one is None or other is None:
        return isinstance(one, SoundPart) and isinstance(other, SoundPart) and one.front == other.front
    names = ("processor", "prompt_template", "merge", "max_rows", "positions")
    return all(getattr(one, name) == getattr(other, name) for name in names)
