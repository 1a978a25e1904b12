"""OpenAI's embeddings: request fields, and formats of vectors."""

from __future__ import annotations

import base64
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from starlette.responses import Response

from edgespec.decoding.loop import check_prompt
from edgespec.decoding.sampling import SamplingParams
from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.manifest import Pooling
from edgespec.server.call import Call, Jobs, ModelTokens, in_pieces
from edgespec.server.requests import Count, Ids, Name, StrictModel, several
from edgespec.server.writer import listed

MOST_INPUTS = 2048  # texts of a request, as OpenAI takes
MOST_WAITING = 4 * MOST_INPUTS  # texts of all requests to a model
Vector = NDArray[np.float32]  # [dimensions]


class EmbeddingExtension(StrictModel):
    """The field ``edgespec``: ``pooling`` of the tokens' states; None = as the model says."""

    pooling: Pooling | None = None


class EmbeddingOptions(StrictModel):
    """Options of an embedding request, without the texts."""

    model: Name
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[Count, Field(ge=1)] | None = None
    edgespec: EmbeddingExtension = EmbeddingExtension()


class EmbeddingRequest(EmbeddingOptions):
    """``POST /v1/embeddings``."""

    ignored: ClassVar[Sequence[str]] = ("user", "metadata", "input_type", "truncate_prompt_tokens")
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


def read(tokens: ModelTokens, sent: EmbeddingRequest) -> tuple[dict[str, Any], list[array[int]]]:
    """Read a request, as the fields of ``EmbeddingOptions``, and the token ids of each text."""
    known = tokens.known
    texts = [tokens.codec.encode(one) if isinstance(one, str) else one for one in sent.texts]
    for text in texts:
        check_prompt(text, SamplingParams(), known.vocab, known.context)
    return sent.model_dump(exclude={"input"}), [array("i", text) for text in texts]


async def respond(jobs: Jobs, call: Call) -> Response:
    """Answer with embeddings."""
    wanted = EmbeddingOptions(**call.asked)
    pooling, dimensions = wanted.edgespec.pooling, wanted.dimensions

    def run(text: Sequence[int]) -> Callable[[threading.Event], Vector]:
        return lambda cancel: jobs.engine.embed([text], pooling=pooling, dimensions=dimensions, cancel=cancel)[0]

    queue = jobs.queue("texts to be embedded", MOST_WAITING, MOST_WAITING - MOST_WAITING // 4)
    found = await jobs.wait(call.request, queue.results(call.client, [run(text) for text in call.prompts]))
    tokens = sum(map(len, call.prompts))
    jobs.metrics.embedded(jobs.name, tokens)
    return await in_pieces(written(found, wanted, tokens))


def written(vectors: Sequence[Vector], wanted: EmbeddingOptions, tokens: int) -> Iterator[str]:
    """Write an answer, as some pieces of JSON."""

    def value(vector: Vector) -> str | list[float]:
        if wanted.encoding_format != "base64":
            return vector.tolist()
        return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")

    each = ({"object": "embedding", "index": at, "embedding": value(one)} for at, one in enumerate(vectors))
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return listed({"object": "list"}, "data", each, {"model": wanted.model, "usage": usage})
