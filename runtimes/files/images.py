"""What a manifest says of a model that reads images: how they are cut, what stands for them, and their rows."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from edgespec.runtimes.files.bounds import Context, Guesses, Layers, Share, Token, Width
from edgespec.runtimes.files.facts import Part

Resample = Literal["bilinear", "bicubic", "lanczos"]
Word = Annotated[str, StringConstraints(max_length=256)]
Channels = tuple[float, float, float]


class ImageWords(Part):
    """What stands for an image in a text.

    A chat template writes ``placeholder``, which is replaced by text that has ``token`` once for each row; its id is
    ``id``.  ``written``: what a prompt without a template has for an image, where that is more than the placeholder.

    ``begin`` and ``end`` stand around an image, ``tile`` before the rows of a tile (with ``{row}`` and ``{column}``,
    from 1 on), ``line`` behind the last tile of a line, ``whole`` before the rows of the whole image beside tiles.
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
    """What all kinds of preprocessing have: a pixel of 0 to 255 becomes (pixel * rescale - mean) / std, by channel.

    ``patch``: pixels of a side of what the tower's first matrix reads as one row.
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
    """LFM2-VL: native resolution within tokens, tiles of ``tile`` pixels and a thumbnail beyond ``tolerance`` of it."""

    kind: Literal["lfm2-vl"]
    tile: Width
    tiles: tuple[Width, Width]
    tokens: tuple[Width, Width]
    tolerance: Annotated[float, Field(ge=1, le=1e3)] = 2.0
    split: bool = True
    thumbnail: bool = True


class Gemma3Pixels(Pixels):
    """Gemma 3: squares of ``size`` pixels, whatever the image's sides."""

    kind: Literal["gemma3"]
    size: Width


class Qwen2VlPixels(Pixels):
    """Qwen2-VL and later: native resolution of ``least`` to ``most`` pixels; a patch is ``frames`` pictures deep."""

    kind: Literal["qwen2-vl"]
    least: Context
    most: Context
    frames: Guesses = 2


Processor = Annotated[Idefics3Pixels | Lfm2VlPixels | Gemma3Pixels | Qwen2VlPixels, Field(discriminator="kind")]


class MergePart(Part):
    """How ``factor`` times ``factor`` rows of a tower become one before the projector.

    ``shuffle``: Idefics 3's pixel shuffle; ``unshuffle``: LFM2-VL's; ``average``: their mean; ``blocks``: they already
    follow one another, and are put side by side.
    """

    how: Literal["shuffle", "unshuffle", "average", "blocks"]
    factor: Guesses = 1


class ImagePart(Part):
    """How images become rows of a decoder, which stand where its embedding has none.

    The tower reads the patches of a piece of an image (a tile, or all of it), float32 [T, columns], the rows that it
    gives are merged, and the first projector makes rows of them that are as wide as the decoder's.

    ``most``: rows of the largest image.  ``positions``: ``text`` = one row after the other; ``grid`` = in three
    dimensions (M-RoPE, arXiv 2409.12191): rows stand beside and below each other, and a text goes on after the longer
    side.  ``bidirectional``: rows of a piece see each other.  ``deepstack``: so many projectors more make rows of what
    layers inside the tower give, which are added to the residual stream after the decoder's first layers, one each
    (arXiv 2406.04334); ``taps``: after which layers of the tower.
    """

    processor: Processor
    words: ImageWords
    merge: MergePart
    most: Context
    positions: Literal["text", "grid"] = "text"
    bidirectional: bool = False
    taps: Layers = Field(default_factory=list)

    @property
    def deepstack(self) -> int:
        """How many projectors there are beside the first."""
        return len(self.taps)
