"""OpenAI's API for image generation."""

from __future__ import annotations

import base64
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from starlette.responses import Response

from edgespec.decoding.settings import MOST_GUIDANCE
from edgespec.engine.engine import Engine
from edgespec.errors import InvalidRequest
from edgespec.plugins.drawing.picture import Drawing, draw
from edgespec.server.apis import Api
from edgespec.server.call import Call, Jobs, ModelTokens, in_pieces
from edgespec.server.requests import SEED, Count, Name, Number, StrictModel
from edgespec.server.writer import listed

MOST_PROMPT, MOST_PICTURES = 4096, 10  # characters, and pictures of a request, as OpenAI takes
MOST_WAITING = 64  # pictures of all requests to a model
HOW = ("method_used", "reason", "lossless", "exact", "approximations")


class ImageRequest(StrictModel):
    """``POST /v1/images/generations``; ``guidance_scale`` and what follows are edgespec's own."""

    ignored: ClassVar[Sequence[str]] = ("user", "quality", "style", "background", "moderation", "output_compression")
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
        """Return its changes of ``Settings``."""
        names = ("guidance_scale", "temperature", "seed", "method", "accept")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def run_of(self, engine: Engine, at: int) -> Callable[[threading.Event], Drawing]:
        """Return the function that generates one image; with a seed, further images have the next seeds."""
        changes = self.changes() | ({} if self.seed is None else {"seed": self.seed + at})
        return lambda cancel: draw(engine, self.prompt, engine.defaults.changed(**changes), cancel)


def drawn(drawings: Sequence[Drawing]) -> Iterator[str]:
    """Write an answer as pieces of JSON; ``edgespec`` has the decoding details of each image."""
    coded = ({"b64_json": base64.b64encode(one.png()).decode("ascii")} for one in drawings)
    how = [{name: getattr(one.result, name) for name in HOW} for one in drawings]
    height, width, _ = drawings[0].pixels.shape
    end = {"output_format": "png", "size": f"{width}x{height}", "edgespec": how}
    return listed({"created": int(time.time())}, "data", coded, end)


def read(tokens: ModelTokens, sent: ImageRequest) -> tuple[dict[str, Any], list[array[int]]]:
    """Read a request; an ``InvalidRequest``: the model generates no images."""
    codes = tokens.known.codes
    if codes is None or codes.image is None:
        raise InvalidRequest(f"model {sent.model!r} does not draw", "ask for one like builtin:glyphs")
    return sent.model_dump(), []


async def respond(jobs: Jobs, call: Call) -> Response:
    """Answer with images."""
    asked, engine = ImageRequest(**call.asked), jobs.engine
    engine.choose_for(engine.defaults.changed(**asked.changes()))
    queue = jobs.queue("pictures to be drawn", MOST_WAITING, MOST_WAITING - MOST_WAITING // 4)
    runs = [asked.run_of(engine, at) for at in range(asked.n)]
    return await in_pieces(drawn(await jobs.wait(call.request, queue.results(call.client, runs))))


PICTURES = {
    "type": "object",
    "properties": {
        "created": {"type": "integer"},
        "data": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"b64_json": {"type": "string"}},
                "required": ["b64_json"],
                "additionalProperties": False,
            },
        },
        "output_format": {"type": "string"},
        "size": {"type": "string"},
        "edgespec": {"type": "array", "items": {"type": "object"}},
    },
    "required": ["created", "data", "output_format", "size", "edgespec"],
    "additionalProperties": False,
}
API = Api(
    "/v1/images/generations",
    "Pictures",
    ImageRequest,
    "Pictures",
    read=read,
    respond=respond,
    shapes={"Pictures": PICTURES},
)
