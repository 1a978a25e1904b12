"""Image generation: the answer to a prompt is the codes of one image."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from edgespec.decoding.settings import Settings
from edgespec.engine.captions import CaptionReader
from edgespec.engine.loaded import LoadedBundle
from edgespec.engine.outputs import Output, Written
from edgespec.engine.request import Request
from edgespec.engine.result import Result
from edgespec.engine.stream import Stream
from edgespec.errors import EdgespecError, InvalidRequest
from edgespec.runtimes.files.codes import CodesPart, ImageCodes
from edgespec.runtimes.images.drawn import Pixels, pixels_of, png

if TYPE_CHECKING:
    from edgespec.runtimes.files.manifest import Manifest


@dataclass(frozen=True)
class Drawing:
    """An image."""

    pixels: Pixels  # uint8 [height, width, 3]
    result: Result  # its codes as tokens, and how they were decoded

    def png(self) -> bytes:
        """Return it as a PNG file."""
        return png(self.pixels)


def image_part(manifest: Manifest) -> tuple[CodesPart, ImageCodes]:
    """Return how a bundle generates images; an ``InvalidRequest``: it does not."""
    part = manifest.codes
    if part is None or part.image is None:
        raise InvalidRequest("this bundle's model does not draw", "expected one like builtin:glyphs")
    return part, part.image


def draw(engine: LoadedBundle, prompt: str, settings: Settings, cancel: threading.Event | None = None) -> Drawing:
    """Generate an image; see ``Engine.draw``."""
    part, image = image_part(engine.bundle.manifest)
    count = image.rows * image.columns
    other = settings.negative_prompt if isinstance(settings.negative_prompt, str) else ""
    tokens, instead = _prompt(engine, image, prompt, other)
    if instead is not None and (image.caption or settings.negative_prompt is None):
        settings = settings.changed(negative_prompt=instead)
    settings = settings.changed(max_new_tokens=count, ignore_eos=True)
    stream = Stream(Request(engine, tokens, settings, cancel))
    for _ in stream:
        pass
    result = stream.result
    if len(result.tokens) < count:
        raise EdgespecError(f"the picture has {len(result.tokens)} of {count} codes: {result.finish}")
    codes = np.array(result.tokens, np.int64).reshape(image.rows, image.columns) - part.first
    whole = replace(result, finish="eos")  # the image is complete, without an EOS token
    return Drawing(pixels_of(engine.code_decoder.run(codes)), whole)


def _prompt(engine: LoadedBundle, image: ImageCodes, prompt: str, other: str) -> tuple[Sequence[int], list[int] | None]:
    """Encode the description of an image -> its tokens, and those of guidance's other half; None = the bundle's own."""
    if image.caption is not None and prompt.strip():
        reader = engine.inputs.reader
        assert isinstance(reader, CaptionReader)
        return reader.caption(prompt, other)
    words = engine.codec.encode(image.template.replace("{}", prompt), special=image.pad is not None)
    if not prompt.strip() or words == image.null or set(words) & set(image.null) - {*image.begin, *image.end}:
        raise InvalidRequest(f"the prompt {prompt[:80]!r} has words that this model does not know", "see its page")
    tokens, kept = [*image.begin, *words, *image.end], {engine.bundle.manifest.tokenizer.bos, *image.end}
    if image.pad is None:
        return tokens, None
    return tokens, [token if token in kept else image.pad for token in tokens]


class ImageOutput(Output):
    """Images."""

    file = "picture.png"

    def fits(self, manifest: Manifest) -> bool:
        return manifest.codes is not None and manifest.codes.image is not None

    def make(
        self,
        engine: LoadedBundle,
        prompt: str,
        settings: Settings | None,
        cancel: threading.Event | None = None,
        **options: Any,
    ) -> Drawing:
        return draw(engine, prompt, settings or self.defaults(engine), cancel)

    def write(
        self, engine: LoadedBundle, prompt: str, settings: Settings, live: BinaryIO | None, **options: Any
    ) -> Written:
        made = draw(engine, prompt.strip(), settings)
        height, width, _ = made.pixels.shape
        data = made.png()
        if live is not None:
            live.write(data)
        return Written(data, f"{width} x {height} pixels", made.result)


OUTPUT = ImageOutput()
