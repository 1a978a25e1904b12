"""Inputs of requests: the same interface for text, images, recordings and the sources of encoder-decoders."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.text import INSERTED
from edgespec.runtimes.slots.inserted import EmbeddingSpan, EmbeddingSpanCache

EMPTY: NDArray[np.int64] = np.zeros(0, np.int64)


class Input(list[int]):
    """The tokens that a decoder begins with; this class is for those that need nothing else.

    Attributes:
        spans: embeddings that replace some of the tokens, with their positions.
        content: the encoder's input: int64 [S] token ids, or float32 [S, columns] features; empty without an encoder.
        tokens: the token ids in ``content``.
        digest: the digest of ``content``; the same tokens after another one have other keys and values.
        encode_ms: time that the spans took.
    """

    spans: Sequence[EmbeddingSpan] = ()
    content: NDArray[Any] = EMPTY
    tokens: Sequence[int] = ()
    digest = b""
    encode_ms = 0.0

    @property
    def span_rows(self) -> int:
        """How many of the tokens name rows of spans."""
        return 0

    def cache_key(self, owner: str | None) -> str | None:
        """Return the name under which ``owner`` finds the keys and values of this input again."""
        return owner

    def hold(self) -> None:
        """Keep the spans until ``release``: some may be read again."""

    def release(self) -> None:
        """Let the spans make room; each ``hold`` is released once."""

    def __enter__(self) -> Input:
        self.hold()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class MultimodalTokens(Input):
    """Token ids of which some name rows of images or recordings; the rows exist as long as this does.

    Args:
        tokens: the ids, from ``INSERTED`` on where they name rows.
        spans: the images or recordings, in order.
        rows: the storage of the spans.
        encode_ms: time that the spans took.
    """

    def __init__(
        self, tokens: Iterable[int], spans: Sequence[EmbeddingSpan], rows: EmbeddingSpanCache, encode_ms: float = 0.0
    ) -> None:
        super().__init__(tokens)
        self.spans, self.encode_ms, self._rows = tuple(spans), encode_ms, rows

    @property
    def span_rows(self) -> int:
        return sum(token >= INSERTED for token in self)

    def hold(self) -> None:
        self._rows.hold(self.spans)

    def release(self) -> None:
        self._rows.let_go(self.spans)
