"""Manifest entries of a model whose tokens are codes of a picture or of sound, and the graph that decodes them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from edgespec.runtimes.files.bounds import Count, Token, Tokens
from edgespec.runtimes.files.facts import Part
from edgespec.runtimes.files.manifest_parts import InsidePath

Name = Annotated[str, StringConstraints(min_length=1, max_length=64)]
MOST_SIDE = 256  # codes of a line or a column


class CaptionPart(Part):
    """A caption is read by the model's tower and its projector, up to ``max_tokens`` tokens.

    ``unconditional``: a file of the input of guidance's other half, float32 [max_tokens, width]: its last rows.
    """

    max_tokens: int = Field(ge=1, le=1 << 12)
    unconditional: InsidePath


class ImageCodes(Part):
    """A picture is ``rows`` lines of ``columns`` codes, in sequence.

    A prompt is between ``begin`` and ``end``, followed by the codes; ``null``: the prompt of guidance's other half,
    without those; ``guidance``: the scale of a request that says nothing; ``codebook``: the codes' vectors, float32.
    ``template``: the prompt replaces {}.  ``pad``: the replacement in guidance's other half for each token
    of the prompt but BOS and ``end``.
    """

    rows: int = Field(ge=1, le=MOST_SIDE)
    columns: int = Field(ge=1, le=MOST_SIDE)
    begin: Tokens = Field(default_factory=list)
    end: Tokens = Field(default_factory=list)
    null: Tokens = Field(default_factory=list)
    template: Annotated[str, StringConstraints(max_length=256, pattern=r"\{\}")] = "{}"
    pad: Token | None = None
    caption: CaptionPart | None = None
    guidance: float | None = Field(default=None, ge=0, le=100)
    codebook: InsidePath | None = None


class SoundCodes(Part):
    """Sound of ``rate`` samples per second, by frames of ``places`` codes.  Each place has its own codes, in the
    order of places.

    A prompt is a voice and its text, between ``begin`` and ``end``; codes follow until ``stop``.  ``voices``: known
    ones, the usual one first.  ``noise``: random numbers that the graph takes for a frame.
    """

    rate: int = Field(ge=1, le=1 << 20)
    places: int = Field(ge=1, le=64)
    begin: Tokens
    end: Tokens
    stop: Token
    voices: Annotated[list[Name], Field(min_length=1, max_length=256)]
    noise: int = Field(default=0, ge=0, le=1 << 20)


class CodesPart(Part):
    """Tokens ``first`` to ``first + size - 1`` are codes; ``graph``: the stock graph that decodes them.

    Its weights are inside; it is given int64 and gives one float32 output.  ``working``: bytes of the largest array of
    a decode.
    """

    graph: InsidePath
    first: Token
    size: Count
    working: Count = 0
    image: ImageCodes | None = None
    sound: SoundCodes | None = None

    @model_validator(mode="after")
    def _fits(self) -> CodesPart:
        if (self.image is None) == (self.sound is None) or not self.size:
            raise ValueError("codes: expected codes of pictures, or of sound")
        if self.sound and self.size % self.sound.places:
            raise ValueError(f"codes: {self.size} of them do not share {self.sound.places} places evenly")
        return self

    @property
    def kind(self) -> Literal["image", "sound"]:
        """Return the kind of output."""
        return "image" if self.image is not None else "sound"
