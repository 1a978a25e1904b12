"""Manifest entries of a model that reads images: how they are cut, their placeholders, and their rows."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from edgespec.runtimes.files.bounds import Context, Guesses, Layers, Share, Token, Tokens, Width
from edgespec.runtimes.files.facts import Part
from edgespec.runtimes.files.manifest_parts import InsidePath

Resample = Literal["bilinear", "bicubic", "lanczos"]
Word = Annotated[str, StringConstraints(max_length=256)]
Channels = tuple[float, float, float]


class ImageWords(Part):
    """Placeholders of an image in a text.

    A chat template writes ``placeholder``, which is replaced by text that has ``token`` once for each row; its id is
    ``id``.  ``written``: the text of an image in a prompt without a template, if it is more than the placeholder.

    ``begin`` and ``end`` surround an image, ``tile`` comes before the rows of a tile (with ``{row}`` and ``{column}``,
    from 1 on), ``line`` after the last tile of a line, ``whole`` before the rows of the whole image next to tiles.
    """

    placeholder: Annotated[Word, StringConstraints(min_length=1)]
    token: Annotated[Word, StringConstraints(min_length=1)]
    id: Token
    written: Word = ""
    begin: Word = ""
    end: Word = ""
    tile: Word = ""
    line: Word = ""
    whole: Word = ""


class Pixels(Part):
    """Common preprocessing: a pixel of 0 to 255 becomes (pixel * rescale - mean) / std, by channel.

    ``patch``: side in pixels of one input row of the encoder's first matrix.
    """

    patch: Width
    mean: Channels = (0.5, 0.5, 0.5)
    std: Channels = (0.5, 0.5, 0.5)
    rescale: Share = 1 / 255
    resample: Resample = "bilinear"


class Idefics3Pixels(Pixels):
    """Idefics 3 and SmolVLM: tiles of ``tile`` pixels, after the longer side was made ``longest``, and the whole."""

    kind: Literal["idefics3"]
    longest: Width
    tile: Width
    split: bool = True


class Lfm2VlPixels(Pixels):
    """LFM2-VL: native resolution of ``tokens`` rows, least and most, of ``factor`` times ``factor`` patches each.

    Beyond ``tolerance`` times the most: as many tiles of ``tile`` pixels as ``tiles`` says, and a ``thumbnail``.
    """

    kind: Literal["lfm2-vl"]
    tile: Width
    tiles: tuple[Width, Width]
    tokens: tuple[Width, Width]
    tolerance: Annotated[float, Field(ge=1, le=1e3)] = 2.0
    split: bool = True
    thumbnail: bool = True


class Gemma3Pixels(Pixels):
    """Gemma 3: squares of ``size`` pixels, for any image."""

    kind: Literal["gemma3"]
    size: Width


class InternVlPixels(Pixels):
    """InternVL3: as many tiles of ``tile`` pixels as ``tiles`` says, least and most, and the whole as one more."""

    kind: Literal["internvl"]
    tile: Width
    tiles: tuple[Width, Width]
    split: bool = True


class Qwen2VlPixels(Pixels):
    """Qwen2-VL and later: native resolution of ``min_pixels`` to ``max_pixels``.

    A patch represents two equal pictures in sequence; the encoder's first matrix has the sum of both halves.
    """

    kind: Literal["qwen2-vl"]
    min_pixels: Context
    max_pixels: Annotated[int, Field(gt=0, le=1 << 30)]


class Gemma4Pixels(Pixels):
    """Gemma 4: native resolution, of the most patches that make ``max_tokens`` rows, never more."""

    kind: Literal["gemma4"]
    max_tokens: Context


Processor = Annotated[
    Idefics3Pixels | Lfm2VlPixels | Gemma3Pixels | InternVlPixels | Qwen2VlPixels | Gemma4Pixels,
    Field(discriminator="kind"),
]


class MergePart(Part):
    """How squares of ``factor`` times ``factor`` rows of a tower become one row each before the projector.

    ``blocks``: they are put side by side (pixel shuffle, pixel unshuffle and patch mergers all do that); ``average``:
    their mean.  ``lead``: leading rows without a patch; the encoder reads zeros there, and they are dropped.
    """

    how: Literal["blocks", "average"]
    factor: Guesses = 1
    lead: int = Field(default=0, ge=0, le=64)


class PositionEmbeddingPart(Part):
    """Learnt positions of a tower, which are resampled to the grid of patches that a picture has.

    ``file``: float32 [side * side, width].  A row of the encoder's input is a patch followed by its position.
    ``how``: bilinear, with the middles of outer cells ``inside`` the grid, widened where it shrinks (antialiased), or
    with the ``corners`` of both on each other.  ``axes``: they are not resampled; those of columns come first, then
    those of lines, [2 * side, width], and a patch has the sum of both.
    """

    file: InsidePath
    side: Width
    width: Width
    how: Literal["inside", "corners", "axes"]

    @property
    def rows(self) -> int:
        """Positions in the file."""
        return 2 * self.side if self.how == "axes" else self.side**2


class WindowsPart(Part):
    """Layers of a tower in which a row sees those of a square of ``side`` times ``side`` patches; ``full``: the others.

    Squares are counted from the picture's first line and column on.
    """

    side: Width
    full: Layers


class SeenVector(Part):
    """Plain decoding's text about a picture of ``size`` (``runtimes.images.image.proof_picture``).

    ``prompt`` has the image's token for each of its rows.
    """

    size: tuple[Width, Width]
    prompt: Tokens
    tokens: Tokens


class ImagePart(Part):
    """How images become rows of a decoder, in place of embeddings.

    The tower reads the patches of a piece of an image (a tile, or all of it), float32 [T, columns], the rows that it
    gives are merged, and the first projector makes rows of them that are as wide as the decoder's.

    ``max_rows``: rows of the largest image.  ``positions``: ``text`` = one row after the other; ``grid`` = in three
    dimensions (M-RoPE, arXiv 2409.12191): rows form a grid, and a text continues after the longer side.
    ``bidirectional``: rows of a piece see each other.  ``deepstack_layers``: layers of the tower with a projector each.
    Its rows are added to the residual stream after one of the decoder's first layers (DeepStack, arXiv 2406.04334).
    ``proof``: golden vectors, which other runtimes must reproduce.
    """

    processor: Processor
    prompt_template: ImageWords
    merge: MergePart
    max_rows: Context
    position_embedding: PositionEmbeddingPart | None = None
    windows: WindowsPart | None = None
    positions: Literal["text", "grid"] = "text"
    bidirectional: bool = False
    deepstack_layers: Layers = Field(default_factory=list)
    proof: list[SeenVector] = Field(default_factory=list)
