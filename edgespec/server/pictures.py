"""Pictures in requests: parts of messages become pixels.

A picture comes with its request, as a data URL or base64.  Nothing is fetched, and files of this machine are read only
from a folder that whoever started the server has named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.images import ImagePart
from edgespec.runtimes.images.processing import process
from edgespec.runtimes.images.prompt import expanded
from edgespec.runtimes.images.reading import Pixels, from_data_url, read

MOST_BODY = 25 << 20  # bytes of a request to a model that sees
MOST_PICTURES = 32  # of a request
MOST_PIXELS = 1 << 25  # of them all: 100 MB
DATA = "send it as a data URL: data:image/png;base64,..."


def part(url: Any) -> dict[str, Any]:
    """Write a picture as a part of a chat, as OpenAI's API has it."""
    return {"type": "image_url", "image_url": {"url": url}}


def has_pictures(content: Any) -> bool:
    """Whether the content of a message has such a part."""
    return isinstance(content, list) and any(
        isinstance(one, dict) and one.get("type") == "image_url" for one in content
    )


@dataclass(frozen=True)
class Sight:
    """How a model sees.

    Attributes:
        image: as in the manifest.
        folder: whose pictures requests may name; empty = none.
    """

    image: ImagePart
    folder: str = ""

    def opener(self) -> Opener:
        """Begin a request."""
        return Opener(self.folder)

    def written(self, text: str, pictures: Sequence[Pixels]) -> str:
        """Put what stands for pictures, uint8 [h, w, 3], into a text; errors as of ``expanded``."""
        return expanded(text, self.image.words, [process(one, self.image).text for one in pictures])


@dataclass
class Opener:
    """Opens the pictures of one request.

    Attributes:
        folder: whose files may be named; empty = none.
    """

    folder: str = ""
    _count: int = 0
    _left: int = MOST_PIXELS

    def parts(self, content: Sequence[Any]) -> list[dict[str, Any]]:
        """Return texts and pictures of a message, as ``{"type": "image", "image": uint8 [h, w, 3]}``.

        Raises:
            InvalidRequest: a part that is neither, a picture that cannot be read or may not be, or too many.
        """
        made: list[dict[str, Any]] = []
        for one in content:
            kind = one.get("type") if isinstance(one, dict) else None
            if kind == "text" and isinstance(one.get("text"), str):
                made.append({"type": "text", "text": one["text"]})
            elif kind == "image_url":
                made.append({"type": "image", "image": self._opened(one.get("image_url"))})
            else:
                raise InvalidRequest(f"a part of type {str(kind)[:80]!r}: expected text and image_url")
        return made

    def _opened(self, named: Any) -> Pixels:
        url = named.get("url") if isinstance(named, dict) else named
        self._count += 1
        if not isinstance(url, str):
            raise InvalidRequest("image_url: expected an object with `url`", DATA)
        if self._count > MOST_PICTURES:
            raise InvalidRequest(f"more than {MOST_PICTURES} pictures in a request")
        if url[:5].lower() == "file:":
            found = read(self._permitted(url), self._left)
        elif url[:5].lower() == "data:":
            found = read(from_data_url(url), self._left)
        else:
            raise InvalidRequest(f"a picture at {url[:80]!r}: this server fetches nothing", DATA)
        self._left -= found.shape[0] * found.shape[1]
        return found

    def _permitted(self, url: str) -> Path:
        """Find the file of a ``file:`` URL, in the folder that may be read; what is elsewhere is not looked at."""
        if not self.folder:
            raise InvalidRequest("a picture in a file of the server: it was not started with --image-folder", DATA)
        try:
            named, folder = urlsplit(url), Path(self.folder).resolve()
            file = (folder / url2pathname(named.path)).resolve()
            if named.netloc in ("", "localhost") and file.is_relative_to(folder) and file.is_file():
                return file
        except (OSError, ValueError, RuntimeError):  # a NUL, a name that is too long, links in a circle
            pass
        raise InvalidRequest(f"no picture {url[:80]!r} in the folder that this server may read")
