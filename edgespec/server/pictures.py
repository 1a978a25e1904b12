"""Decode pictures and recordings in requests: parts of messages become pixels and samples.

A picture or recording comes with its request, as a data URL or base64.  Nothing is fetched.  Files of this machine are
read only from the folder that the operator named when the server was started.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from numpy.typing import NDArray

from edgespec.errors import InvalidRequest
from edgespec.runtimes.audio.audio import Audio
from edgespec.runtimes.audio.reading import RATE, Samples
from edgespec.runtimes.files.images import ImagePart
from edgespec.runtimes.files.sound import SoundPart
from edgespec.runtimes.images.image import Image
from edgespec.runtimes.images.processing import process
from edgespec.runtimes.images.prompt import expanded
from edgespec.runtimes.images.reading import Pixels, from_base64, from_data_url, read
from edgespec.server.requests import TEXTS

if TYPE_CHECKING:
    from edgespec.engine.engine import Engine

MOST_BODY = 25 << 20  # bytes of a request to a model that sees
MOST_PICTURES = 32  # of a request
MOST_PIXELS = 1 << 25  # of them all: 100 MB
MOST_WAITING, MOST_OF_ONE = 8, 6  # requests whose pictures wait for a model; of one client
MOST_SECONDS = 30 * 60  # of all recordings of a request: 115 MB
Given = NDArray[Any]  # a picture, uint8 [h, w, 3], or a recording, float32 [n]
PARTS = {"image": "image_url", "audio": "input_audio"}  # what requests call parts that templates call so
DATA = "send it as a data URL: data:image/png;base64,..."


def part(url: Any) -> dict[str, Any]:
    """Write a picture as a part of a chat, as OpenAI's API has it."""
    return {"type": "image_url", "image_url": {"url": url}}


def parts(content: Any, kind: str, picture: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Write texts and pictures, which are parts of type ``kind``, of a message as chats have them."""
    if not isinstance(content, list):
        return content
    return [
        picture(one)
        if _is(one, kind)
        else {"type": "text", "text": one["text"]}
        if _is(one, *TEXTS) and isinstance(one.get("text"), str)
        else one
        for one in content
    ]


def _is(one: Any, *kinds: str) -> bool:
    return isinstance(one, dict) and one.get("type") in kinds


def as_parts(content: Any) -> list[Any]:
    """List the parts of a message's content."""
    return content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []


def has_pictures(content: Any) -> bool:
    """Whether the content of a message has such a part, or a recording."""
    return isinstance(content, list) and any(_is(one, *PARTS.values()) for one in content)


@dataclass(frozen=True)
class VisionConfig:
    """Configuration of a model's vision or audio encoder."""

    senses: tuple[ImagePart | SoundPart, ...]  # as in the manifest, one of a kind
    folder: str = ""  # whose pictures requests may name; empty = none

    @property
    def kinds(self) -> tuple[str, ...]:
        """The types of parts that a template writes down."""
        return tuple("image" if isinstance(sense, ImagePart) else "audio" for sense in self.senses)

    @property
    def placeholders(self) -> list[str]:
        """Texts that a template writes for them."""
        return [sense.prompt_template.placeholder for sense in self.senses]

    def opener(self) -> Opener:
        """Begin a request."""
        return Opener(self.folder, tuple(PARTS[kind] for kind in self.kinds))

    def written(self, text: str, given: Sequence[Given]) -> str:
        """Put what stands for pictures, uint8 [h, w, 3], and recordings, float32 [n], into a text; as ``expanded``."""
        for sense in self.senses:
            if isinstance(sense, ImagePart):
                texts = [process(one, sense).text for one in given if one.ndim > 1]
            else:
                texts = [Audio(one).text(sense) for one in given if one.ndim == 1]
            text = expanded(text, sense.prompt_template, texts)
        return text


@dataclass
class Opener:
    """Opens the pictures, or recordings, of one request."""

    folder: str = ""  # whose files may be named; empty = none
    kinds: tuple[str, ...] = ("image_url",)  # of parts that the model reads, values of ``PARTS``
    _count: int = 0
    _left: int = MOST_PIXELS
    _seconds: float = MOST_SECONDS

    def parts(self, content: Sequence[Any]) -> list[dict[str, Any]]:
        """Return texts and pictures of a message, as ``{"type": "image", "image": uint8 [h, w, 3]}``.

        Recordings are ``{"type": "audio", "audio": float32 [n]}``.

        Raises:
            InvalidRequest: a part that the model does not read, one that cannot be read or may not be, or too many.
        """
        made: list[dict[str, Any]] = []
        for one in content:
            kind = one.get("type") if isinstance(one, dict) else None
            if kind in TEXTS and isinstance(text := one.get("text") or "", str):
                made.append({"type": "text", "text": text})
            elif kind == "image_url" in self.kinds:
                made.append({"type": "image", "image": self._opened(one.get("image_url"))})
            elif kind == "input_audio" in self.kinds:
                made.append({"type": "audio", "audio": self._heard(one.get("input_audio"))})
            else:
                raise InvalidRequest(f"a part of type {str(kind)[:80]!r}: expected text and {' and '.join(self.kinds)}")
        return made

    def _heard(self, given: Any) -> Samples:
        data = given.get("data") if isinstance(given, dict) else None
        if not isinstance(data, str):
            raise InvalidRequest("input_audio: expected an object with `data`, base64 of a wav, mp3, flac or ogg file")
        found = Audio.open(from_base64(data, "recording")).samples
        self._seconds -= len(found) / RATE
        if self._seconds < 0:
            raise InvalidRequest(f"more than {MOST_SECONDS} s of sound in a request", "send it to /v1/audio")
        return found

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


def placed(
    engine: Engine, ids: Sequence[int], pictures: Sequence[Given], owner: str | None
) -> Callable[[threading.Event], list[int]]:
    """Put the rows of pictures, or recordings, into a prompt that has their token for each row; as ``Engine.place``."""
    return lambda _: engine.place(ids, [Image(one) if one.ndim > 1 else Audio(one) for one in pictures], owner)
