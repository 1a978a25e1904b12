"""OpenAI's pictures: what is asked, and how it is written."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from edgespec.decoding.settings import MOST_GUIDANCE
from edgespec.engine.drawing import Drawing
from edgespec.engine.engine import Engine
from edgespec.server.requests import SEED, Count, Name, Number, Strict
from edgespec.server.writer import listed

MOST_PROMPT, MOST_PICTURES = 4096, 10  # characters, and pictures of a request, as OpenAI takes
MOST_WAITING = 64  # pictures of all requests to a model
HOW = ("method_used", "reason", "lossless", "exact", "approximations")


class ImageRequest(Strict):
    """``POST /v1/images/generations``; ``guidance_scale`` and what follows are edgespec's own."""

    ignored: ClassVar[tuple[str, ...]] = ("user", "quality", "style", "background", "moderation", "output_compression")
    model: Name
    prompt: Annotated[str, Field(min_length=1, max_length=MOST_PROMPT)]
    n: Annotated[Count, Field(ge=1, le=MOST_PICTURES)] = 1
    size: Literal["auto"] | None = None
    response_format: Literal["b64_json"] | None = None
    output_format: Literal["png"] | None = None
    guidance_scale: Annotated[Number, Field(ge=0, le=MOST_GUIDANCE)] | None = None
    temperature: Annotated[Number, Field(ge=0)] | None = None
    seed: Annotated[int, Field(ge=-SEED, le=SEED)] | None = None
    method: Name | None = None
    accept: Name | None = None

    def changes(self) -> dict[str, Any]:
        """Say what it sets of ``Settings``."""
        names = ("guidance_scale", "temperature", "seed", "method", "accept")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def run_of(self, engine: Engine, at: int) -> Callable[[threading.Event], Drawing]:
        """Give what draws one of the pictures; with a seed the next ones have the seeds that follow."""
        changes = self.changes() | ({} if self.seed is None else {"seed": self.seed + at})
        return lambda cancel: engine.draw(self.prompt, cancel=cancel, **changes)


def drawn(drawings: Sequence[Drawing]) -> Iterator[str]:
    """Write an answer, as some pieces of JSON; ``edgespec`` says how the codes of each picture were decoded."""
    coded = ({"b64_json": base64.b64encode(one.png()).decode("ascii")} for one in drawings)
    how = [{name: getattr(one.result, name) for name in HOW} for one in drawings]
    height, width, _ = drawings[0].pixels.shape
    end = {"output_format": "png", "size": f"{width}x{height}", "edgespec": how}
    return listed({"created": int(time.time())}, "data", coded, end)
