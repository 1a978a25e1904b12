"""An image in a prompt."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Any

import numpy as np

from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.images import ImagePart
from edgespec.runtimes.images.processing import Processed, process
from edgespec.runtimes.images.reading import MOST_PIXELS, Pixels, Source, read


def proof_picture(size: tuple[int, int]) -> Image:
    """Make the image of golden vectors: height and width -> stripes and curves of all colors."""
    down, across, channel = np.indices((*size, 3))
    return Image(((across * (down + 3 * channel) + 7 * down) % 256).astype(np.uint8))


class Image:
    """An image as a part of a prompt; ``edgespec.Image``.

    Attributes:
        pixels: uint8 [h, w, 3], red, green and blue; not to be changed.
        kind: of parts of messages that hold one.
    """

    kind = "image"

    def __init__(self, pixels: Pixels) -> None:
        self.pixels = pixels
        self._text: tuple[ImagePart, str] | None = None
        self._processed: tuple[ImagePart, Processed] | None = None

    @classmethod
    def open(cls, source: Source) -> Image:
        """Read an image; see ``reading.open_picture`` for kinds and errors.

        Args:
            source: a file or its bytes.
        """
        return cls(read(source))

    @classmethod
    def of(cls, source: Any) -> Image:
        """Make an image from an ``Image``, a file, its bytes, or an array.

        Args:
            source: of an array: uint8 [h, w, 3] red, green and blue, or [h, w] grey.

        Raises:
            InvalidRequest: the input is not an image, or too large.
        """
        if isinstance(source, Image):
            return source
        if not isinstance(source, np.ndarray):
            return cls.open(source)
        shape = list(source.shape)
        if source.dtype != np.uint8 or len(shape) not in (2, 3) or shape[2:] not in ([], [3]):
            raise InvalidRequest(f"a picture {source.dtype} {shape}: expected uint8 [h, w, 3] or [h, w]")
        if not 0 < shape[0] * shape[1] <= MOST_PIXELS:
            raise InvalidRequest(f"a picture of {shape[1]} x {shape[0]}: expected 1 to {MOST_PIXELS} pixels")
        array = source if len(shape) == 3 else np.repeat(source[:, :, None], 3, 2)
        return cls(np.array(array, order="C"))  # a copy, so no other code writes into it

    @cached_property
    def digest(self) -> bytes:
        """Return the SHA-256 of size and pixels."""
        return hashlib.sha256(f"{self.pixels.shape}".encode() + np.ascontiguousarray(self.pixels).tobytes()).digest()

    def processed(self, part: ImagePart) -> Processed:
        """Cut it into a model's inputs, and keep them until ``forget``.

        Args:
            part: the image part of a bundle's model.
        """
        if self._processed is None or self._processed[0] != part:
            self._processed = part, process(self.pixels, part)
            self._text = part, self._processed[1].text
        return self._processed[1]

    def text(self, part: ImagePart) -> str:
        """Return the text that represents it in a prompt.

        Args:
            part: the image part of a bundle's model.
        """
        if self._text is None or self._text[0] != part:
            return self.processed(part).text
        return self._text[1]

    def forget(self) -> None:
        """Free the inputs of models; its text stays known."""
        self._processed = None
