"""Pictures as models read them: red, green and blue of 0 to 255, upright, from a file or from bytes.

Files are read by Pillow, of the extra ``images``.  They may come from anywhere, so only kinds that people send are
opened (not Pillow's forty), and nothing is decoded before the size of the picture is known and allowed.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import InvalidRequest, first_line, install_hint

if TYPE_CHECKING:
    from PIL.Image import Image as Decoded

MOST_PIXELS = 1 << 26  # of a picture: 200 MB as red, green and blue
MOST_BYTES = 1 << 26  # of a file
EXTRA = install_hint("images")
KINDS = "png, jpeg, webp, gif or bmp"
_OPENERS = (  # how a file begins, and what of Pillow reads it
    (rb"\x89PNG\r\n\x1a\n", "PngImagePlugin.PngImageFile"),
    (rb"\xff\xd8\xff", "JpegImagePlugin.JpegImageFile"),
    (rb"RIFF....WEBP", "WebPImagePlugin.WebPImageFile"),
    (rb"GIF8[79]a", "GifImagePlugin.GifImageFile"),
    (rb"BM", "BmpImagePlugin.BmpImageFile"),
)
_DATA_URL = re.compile(r"data:image/[\w.+-]{1,64}(?:;[\w.=+-]{1,64})*;base64,", re.IGNORECASE)
_ORIENTATION = 0x0112  # of EXIF

Pixels = NDArray[np.uint8]
Source = str | os.PathLike[str] | bytes


class Picture(NamedTuple):
    """An image that was read."""

    pixels: Pixels  # uint8 [h, w, 3], red, green and blue
    note: str = ""  # what is not in them; empty = nothing


def read(source: Source, most_pixels: int = MOST_PIXELS) -> Pixels:
    """Read an image -> uint8 [h, w, 3]; see ``open_picture`` for arguments and errors."""
    return open_picture(source, most_pixels).pixels


def open_picture(source: Source, most_pixels: int = MOST_PIXELS) -> Picture:
    """Read an image, and report ignored parts of the file.

    EXIF orientation is applied, transparent parts show white, 16 bits become their upper 8, and only the first frame
    of an animation is read.

    Args:
        source: a file, or its bytes: png, jpeg, webp, gif or bmp.
        most_pixels: a larger picture is refused before it is decoded.

    Raises:
        InvalidRequest: no such file, one of another kind, a damaged, truncated or too large one, or no Pillow.
    """
    name = "the picture" if isinstance(source, bytes) else str(source)
    data = source if isinstance(source, bytes) else _contents(Path(source), name)
    if len(data) > MOST_BYTES:
        raise InvalidRequest(f"{name} has {len(data)} bytes: expected at most {MOST_BYTES}", "make it smaller first")
    opener = _opener(data, name)
    with _failing(name):
        picture: Decoded = opener(BytesIO(data))
    width, height = picture.size
    if not 1 <= width * height <= most_pixels:
        raise InvalidRequest(
            f"{name} has {width} x {height} pixels: expected at most {most_pixels} in all", "make it smaller first"
        )
    with _failing(name):
        several = bool(getattr(picture, "is_animated", False))
        picture.load()
        pixels = _turned(_flat(picture), _orientation(picture))
    note = f"{name} is animated: its first frame is read" if several else ""
    return Picture(np.ascontiguousarray(pixels), note)


def from_data_url(url: str) -> bytes:
    """Decode a ``data:image/...;base64,`` URL.

    Raises:
        InvalidRequest: another URL, or too much in it.
    """
    head = _DATA_URL.match(url[:256])
    if head is None:
        raise InvalidRequest(
            f"{url[:40]!r}: expected a picture's data URL", "begin it with data:image/png;base64, or the like"
        )
    if len(url) > MOST_BYTES // 3 * 4:
        raise InvalidRequest(f"a data URL of {len(url)} characters: expected at most {MOST_BYTES // 3 * 4}")
    return from_base64(url[head.end() :])


def from_base64(text: str, what: str = "picture") -> bytes:
    """Decode base64, which may have line ends; ``what`` is named in errors.

    Raises:
        InvalidRequest: something else.
    """
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"the {what} is no base64: {first_line(error)}") from error


def _contents(file: Path, name: str) -> bytes:
    try:
        if not file.is_file():
            raise InvalidRequest(f"expected a picture, and {name} is no file", f"name a file: {KINDS}")
        with file.open("rb") as opened:
            return opened.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        raise InvalidRequest(f"{name} cannot be read: {first_line(error)}") from error


def _opener(data: bytes, name: str) -> Any:
    """Return the reader of files with this beginning."""
    for begin, opener in _OPENERS:
        if re.match(begin, data[:16], re.DOTALL):
            module, kind = opener.split(".")
            try:
                return getattr(import_module(f"PIL.{module}"), kind)
            except ImportError as error:
                raise InvalidRequest(f"{name} needs Pillow to be read, which is not installed", EXTRA) from error
    raise InvalidRequest(f"{name} is no picture of a known kind: expected {KINDS}", "convert it first")


@contextmanager
def _failing(name: str) -> Iterator[None]:
    """Turn Pillow's exceptions, which are of many types, into one clear error, and silence its warnings."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except MemoryError as error:
        raise InvalidRequest(f"{name} does not fit the memory", "make it smaller first") from error
    except Exception as error:
        raise InvalidRequest(f"{name} is damaged or truncated: {first_line(error)[:200]}") from error


def _flat(picture: Decoded) -> Pixels:  # [h, w, 3]
    """Return red, green and blue, with transparent parts over white."""
    if picture.mode.startswith("I"):  # gray of 16 bits, which `convert` would clip
        gray = (np.asarray(picture).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
        return np.repeat(gray[..., None], 3, -1)
    if picture.mode not in ("RGBA", "LA", "PA", "La", "RGBa") and "transparency" not in picture.info:
        return np.asarray(picture.convert("RGB"))
    from PIL import Image

    white = Image.new("RGBA", picture.size, "white")
    white.alpha_composite(picture.convert("RGBA"))
    return np.asarray(white)[..., :3]


def _orientation(picture: Decoded) -> int:
    """Return the orientation of an image; unreadable EXIF data have no effect."""
    try:
        return int(picture.getexif().get(_ORIENTATION, 1))
    except Exception:
        return 1


def _turned(pixels: Pixels, orientation: int) -> Pixels:
    """Rotate and mirror by EXIF's number from 1 to 8: swap rows and columns from 5 on, then mirror each or not."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels
