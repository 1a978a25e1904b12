"""OpenAI's embeddings: what is asked, and how vectors are written."""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from edgespec.engine.engine import Engine
from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.manifest import Pooling
from edgespec.server.requests import Count, Ids, Name, Strict, several
from edgespec.server.writer import listed

MOST_INPUTS = 2048  # texts of a request, as OpenAI takes
MOST_WAITING = 4 * MOST_INPUTS  # texts of all requests to a model
Vector = NDArray[np.float32]  # [dimensions]


class HowEmbedded(Strict):
    """The field ``edgespec``: ``pooling`` of the tokens' states; None = as the model says."""

    pooling: Pooling | None = None


class Wanted(Strict):
    """What is asked of a model beside the texts."""

    model: Name
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[Count, Field(ge=1)] | None = None
    edgespec: HowEmbedded = HowEmbedded()


class EmbeddingRequest(Wanted):
    """``POST /v1/embeddings``."""

    ignored: ClassVar[tuple[str, ...]] = ("user", "metadata", "input_type", "truncate_prompt_tokens")
    input: (
        str
        | Ids
        | Annotated[list[str], Field(min_length=1, max_length=MOST_INPUTS)]
        | Annotated[list[Ids], Field(min_length=1, max_length=MOST_INPUTS)]
    )

    @property
    def texts(self) -> list[str | list[int]]:
        """Every text.

        Raises:
            InvalidRequest: an empty one.
        """
        found = several(self.input)
        if not all(found):
            raise InvalidRequest(f"input {found.index('')} is empty: expected a text")
        return found


def run_of(engine: Engine, text: Sequence[int], wanted: Wanted) -> Callable[[threading.Event], Vector]:
    """Give what embeds a text."""
    pooling, dimensions = wanted.edgespec.pooling, wanted.dimensions
    return lambda cancel: engine.embed([text], pooling=pooling, dimensions=dimensions, cancel=cancel)[0]


def written(vectors: Sequence[Vector], wanted: Wanted, tokens: int) -> Iterator[str]:
    """Write an answer, as some pieces of JSON."""

    def value(vector: Vector) -> str | list[float]:
        if wanted.encoding_format != "base64":
            return vector.tolist()
        return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")

    each = ({"object": "embedding", "index": at, "embedding": value(one)} for at, one in enumerate(vectors))
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return listed({"object": "list"}, "data", each, {"model": wanted.model, "usage": usage})
