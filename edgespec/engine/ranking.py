"""Rank documents for a query, by a cross-encoder or by embeddings."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.engine.embedding import Ranked, embed, score
from edgespec.engine.loaded import LoadedBundle
from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.embedding import EmbeddingPart
from edgespec.runtimes.text.codec import TextCodec
from edgespec.runtimes.text.prompted import DOCUMENT, QUERY, Prompted, encode_pairs, prompt_for


def rerank(
    engine: LoadedBundle,
    query: str,
    documents: Sequence[str],
    top: int | None = None,
    cancel: threading.Event | None = None,
) -> list[Ranked]:
    """Rank documents; see ``Engine.rerank``."""
    if isinstance(documents, (str, bytes)) or not isinstance(documents, Sequence):
        raise InvalidRequest(f"rerank got {type(documents).__name__}: expected a list of documents")
    for text in (query, *documents):
        if not isinstance(text, str) or not text.strip():
            raise InvalidRequest(f"rerank got {text!r:.80}: expected texts that are not empty")
    if top is not None and top < 1:
        raise InvalidRequest(f"top {top}: expected at least 1")
    part = engine.bundle.manifest.embedding
    if part is not None and part.scores:
        scores = score(engine, encode_pairs(engine.codec, query, documents, engine.context), cancel)
    else:
        given = tokens_of(engine.codec, part, engine.context, query, documents)
        scores = products(embed(engine, given, cancel=cancel)) if documents else np.zeros(0, np.float32)
    return ranked(scores, top)


def tokens_of(
    codec: TextCodec, part: EmbeddingPart | None, context: int, query: str, documents: Sequence[str]
) -> list[list[int]]:
    """Encode a query and documents for embeddings, with the model's prompts for both."""
    asked, told = (
        Prompted(codec, part, prompt_for(part, names), context, truncate=True) for names in (QUERY, DOCUMENT)
    )
    return [asked.tokens(query), *(told.tokens(document) for document in documents)]


def products(vectors: NDArray[np.float32]) -> NDArray[np.float32]:  # [1 + n, width] -> [n]
    """Multiply the first vector with each other one; a product does not depend on the others."""
    query = vectors[0].astype(np.float64)
    return np.array([(query * row).sum() for row in vectors[1:]], np.float32)


def ranked(scores: NDArray[np.float32], top: int | None) -> list[Ranked]:
    """List documents by score, the best first."""
    order = np.argsort(-scores, kind="stable")[:top]
    return [Ranked(int(index), float(scores[index])) for index in order]
