"""Rerank: the requests of Cohere's and Jina's APIs, and one answer that clients of both read."""

from __future__ import annotations

import secrets
import threading
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field
from starlette.responses import JSONResponse, Response

from edgespec.engine.embedding import score
from edgespec.engine.ranking import products, ranked, tokens_of
from edgespec.errors import InvalidRequest
from edgespec.runtimes.text.prompted import Pair, check_text, encode_pairs
from edgespec.server.call import Call, Jobs, ModelTokens
from edgespec.server.embeddings import Vector, each
from edgespec.server.requests import Count, Name, StrictModel

MOST_DOCUMENTS = 1024
Text = Annotated[str, Field(min_length=1)]


class Document(StrictModel):
    """A document as an object."""

    text: Text


class RerankRequest(StrictModel):
    """``POST /v1/rerank`` and ``/v2/rerank``."""

    ignored: ClassVar[Sequence[str]] = ("user", "metadata", "max_chunks_per_doc", "rank_fields", "priority",
                                        "return_embeddings", "truncation", "truncate", "input_type",
                                        "task")  # fmt: skip
    model: Name
    query: Text
    documents: Annotated[list[Text | Document], Field(min_length=1, max_length=MOST_DOCUMENTS)]
    top_n: Annotated[Count, Field(ge=1)] | None = None
    return_documents: bool = False
    max_tokens_per_doc: Annotated[Count, Field(ge=1)] | None = None

    @property
    def texts(self) -> list[str]:
        """The documents; raises InvalidRequest for a text of spaces."""
        found = [one if isinstance(one, str) else one.text for one in self.documents]
        for name, text in (("query", self.query), *((f"document {at}", one) for at, one in enumerate(found))):
            if not text.strip():
                raise InvalidRequest(f"the {name} is empty: expected a text")
        return found


def read(tokens: ModelTokens, sent: RerankRequest) -> tuple[dict[str, Any], list[array[int]]]:
    """Read a request -> what the answer needs, and the token ids of each pair, or of the query and each document."""
    known, texts = tokens.known, sent.texts
    part, second = known.embedding, list[int]()
    if part is not None and part.scores:
        pairs = encode_pairs(tokens.codec, sent.query, texts, known.context, sent.max_tokens_per_doc)
        given, second = [pair.tokens for pair in pairs], [pair.second for pair in pairs]
    else:
        given = tokens_of(tokens.codec, part, known.context, sent.query, texts)
    for text in given:
        check_text(text, part, known.vocab, known.context)
    asked = {"model": sent.model, "top": sent.top_n, "second": second}
    return asked | ({"documents": texts} if sent.return_documents else {}), [array("i", text) for text in given]


async def respond(jobs: Jobs, call: Call) -> Response:
    """Answer with documents by score, the best first."""
    asked, second = call.asked, call.asked["second"]

    def run(numbers: Sequence[int], cancel: threading.Event) -> list[Vector]:
        texts = [list(call.prompts[number]) for number in numbers]
        if not second:
            return list(jobs.engine.embed(texts, cancel=cancel))
        pairs = [Pair(text, second[number]) for text, number in zip(texts, numbers, strict=True)]
        return list(score(jobs.engine, pairs, cancel)[:, None])

    found = await each(jobs, call, run)
    scores = np.concatenate(found) if second else products(np.stack(found))
    tokens = sum(map(len, call.prompts))
    jobs.metrics.embedded(jobs.name, tokens)
    results = [
        {"index": one.index, "relevance_score": one.score}
        | ({"document": {"text": asked["documents"][one.index]}} if "documents" in asked else {})
        for one in ranked(scores, asked["top"])
    ]
    made = {"id": f"rerank-{secrets.token_hex(12)}", "object": "list", "model": asked["model"], "results": results,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            "meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}}  # fmt: skip
    return JSONResponse(made)
