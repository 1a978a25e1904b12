"""Embeddings of OpenAI's API, with the fields by which others name prompts: request fields, and formats of vectors."""

from __future__ import annotations

import base64
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from starlette.responses import Response

from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.manifest import Pooling
from edgespec.runtimes.text.prompted import Prompted, check_text, other_name
from edgespec.server.call import Call, Jobs, ModelTokens, in_pieces
from edgespec.server.requests import Count, Ids, Name, StrictModel, several
from edgespec.server.writer import listed

MOST_INPUTS = 2048  # texts of a request, as OpenAI takes
MOST_WAITING = 4 * MOST_INPUTS  # texts of all requests to a model
TOGETHER = 32  # texts of an encoder's turn, which share passes
QUEUE = "texts to be embedded"
Vector = NDArray[np.float32]  # [dimensions]
Found = TypeVar("Found")


class EmbeddingExtension(StrictModel):
    """The field ``edgespec``: ``pooling``, ``prompt`` and ``normalize`` of ``Engine.embed``; None = the model's."""

    pooling: Pooling | None = None
    prompt: Annotated[str, Field(max_length=256)] | None = None
    normalize: bool | None = None


class EmbeddingOptions(StrictModel):
    """Options of an embedding request, without the texts.

    ``input_type`` (Cohere, NVIDIA) and ``task`` (Jina) choose the model's prompt for queries or documents.
    ``truncate`` cuts texts that are too long.
    """

    model: Name
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[Count, Field(ge=1)] | None = None
    input_type: Name | None = None
    task: Name | None = None
    truncate: bool | Literal["END", "NONE"] = False
    edgespec: EmbeddingExtension = EmbeddingExtension()


class EmbeddingRequest(EmbeddingOptions):
    """``POST /v1/embeddings``."""

    ignored: ClassVar[Sequence[str]] = ("user", "metadata", "truncate_prompt_tokens")
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
    known, part = tokens.known, tokens.known.embedding
    name = sent.edgespec.prompt
    if name is None:
        name = other_name(part, sent.input_type or sent.task)
    prompted = Prompted(tokens.codec, part, name, known.context, sent.truncate in (True, "END"))
    texts = [prompted.tokens(one) if isinstance(one, str) else one for one in sent.texts]
    for text in texts:
        check_text(text, part, known.vocab, known.context)
    skips = [prompted.skip if isinstance(one, str) else 0 for one in sent.texts]
    asked = sent.model_dump(exclude={"input"}) | ({"skips": skips} if any(skips) else {})
    return asked, [array("i", text) for text in texts]


async def respond(jobs: Jobs, call: Call) -> Response:
    """Answer with embeddings."""
    asked = {**call.asked}
    skips = asked.pop("skips", None) or [0] * len(call.prompts)
    wanted = EmbeddingOptions(**asked)
    own, dimensions = wanted.edgespec, wanted.dimensions

    def run(numbers: Sequence[int], cancel: threading.Event) -> list[Vector]:
        texts = [call.prompts[number] for number in numbers]
        return list(jobs.engine.embed(texts, pooling=own.pooling, dimensions=dimensions, normalize=own.normalize,
                                      skips=[skips[number] for number in numbers], cancel=cancel))  # fmt: skip

    found = await each(jobs, call, run)
    tokens = sum(map(len, call.prompts))
    jobs.metrics.embedded(jobs.name, tokens)
    return await in_pieces(written(found, wanted, tokens))


async def each(jobs: Jobs, call: Call, run: Callable[[Sequence[int], threading.Event], Sequence[Found]]) -> list[Found]:
    """Line up the texts of a call: one after the other, or of an encoder several of similar length at a time.

    Args:
        jobs: of the model.
        call: the request.
        run: called with the numbers of some texts; returns their results.
    """
    together = 1 if jobs.engine.inputs.encoder is None else TOGETHER
    order = sorted(range(len(call.prompts)), key=lambda number: len(call.prompts[number]))
    parts = [order[at : at + together] for at in range(0, len(order), together)]

    def work(part: Sequence[int]) -> Callable[[threading.Event], Sequence[Found]]:
        return lambda cancel: run(part, cancel)

    queue = jobs.queue(QUEUE, MOST_WAITING, MOST_WAITING - MOST_WAITING // 4)
    done = await jobs.wait(call.request, queue.results(call.client, [work(part) for part in parts]))
    found = {number: one for part, results in zip(parts, done, strict=True)
             for number, one in zip(part, results, strict=True)}  # fmt: skip
    return [found[number] for number in range(len(order))]


def written(vectors: Sequence[Vector], wanted: EmbeddingOptions, tokens: int) -> Iterator[str]:
    """Write an answer, as some pieces of JSON."""

    def value(vector: Vector) -> str | list[float]:
        if wanted.encoding_format != "base64":
            return vector.tolist()
        return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")

    each = ({"object": "embedding", "index": at, "embedding": value(one)} for at, one in enumerate(vectors))
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return listed({"object": "list"}, "data", each, {"model": wanted.model, "usage": usage})
