"""``--image`` and ``/image``: pictures that go along with a question."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.common import COUNT, PATH, option
from edgespec.errors import InvalidRequest

if TYPE_CHECKING:
    from edgespec.engine.engine import Engine
    from edgespec.runtimes.images.image import Image

image_option = option(
    "--image",
    "A picture in front of the first prompt: png, jpeg, webp, gif or bmp; may be repeated.",
    PATH,
    dest="images",
    multiple=True,
    metavar="FILE",
)


image_rows_option = option(
    "--image-rows",
    "The most rows of a picture, each as a token: smaller pictures, fewer tiles.  [default: the bundle's]",
    COUNT,
)


def read_images(files: Iterable[Path]) -> list[Image]:
    """Read pictures, and say what is left out of them.

    Raises:
        InvalidRequest: one that cannot be read.
    """
    from edgespec.runtimes.images.image import Image
    from edgespec.runtimes.images.reading import open_picture

    made = []
    for file in files:
        found = open_picture(file)
        if found.note:
            click.echo(f"note: {found.note}", err=True)
        made.append(Image.of(found.pixels))
    return made


def require_sight(engine: Engine) -> None:
    """Refuse pictures where a model reads text alone.

    Raises:
        InvalidRequest: it does.
    """
    if engine.bundle.manifest.target.image is None:
        hint = "export a model that reads images; `edgespec info` says what a bundle reads"
        raise InvalidRequest("this bundle reads text alone, and there is a picture", hint)


def with_images(images: Sequence[Image], text: str) -> Any:
    """Return the content of a message: the text, behind pictures where there are some."""
    if not images:
        return text
    parts: list[dict[str, Any]] = [{"type": "image", "image": image} for image in images]
    return [*parts, {"type": "text", "text": text}] if text else parts


def text_of(content: Any) -> str:
    """Return what a message says, as a line shows it: ``[picture]`` for each picture."""
    if not isinstance(content, (list, tuple)):
        return str(content)
    return "".join("[picture] " if part.get("type") == "image" else str(part.get("text", "")) for part in content)
