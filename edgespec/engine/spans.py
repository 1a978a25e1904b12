"""Embedding spans of prompts: the encoders that make them, opened as they are needed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.text import INSERTED
from edgespec.engine.input import Input, MultimodalTokens
from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.operators import NATIVE
from edgespec.runtimes.slots.encoder import Encoder, encoder_attention
from edgespec.runtimes.slots.inserted import MOST_ROWS, EmbeddingSpan, EmbeddingSpanCache
from edgespec.runtimes.slots.shared import Model

if TYPE_CHECKING:
    from edgespec.runtimes.audio.audio import Audio
    from edgespec.runtimes.images.image import Image
    from edgespec.runtimes.text.codec import TextCodec

Rows = NDArray[np.float32]


class SpanReader:
    """Makes the embedding spans of a model's prompts; this class knows the encoders, and finds spans again.

    Calls may come from several threads.

    Args:
        bundle: the bundle.
        threads: of the encoders.
        rows: the storage of the spans.
        name: whose encoders, ``target`` or ``draft``.
    """

    kinds: tuple[str, ...] = ()  # of the parts of messages that it reads
    refusal: ClassVar[str] = "this model reads text alone"

    def __init__(self, bundle: Bundle, threads: int | None, rows: EmbeddingSpanCache, name: str = "target") -> None:
        self._bundle, self._threads, self.rows = bundle, threads, rows
        self._model = bundle.part(name)
        self._encoders: dict[int, Encoder] = {}  # 0 = the tower, then projectors
        self._lock = threading.RLock()

    def prompt(self, codec: TextCodec, parts: Sequence[str | Image | Audio]) -> MultimodalTokens:
        """Encode a list of texts and images or recordings."""
        raise InvalidRequest(self.refusal)

    def chat(
        self, codec: TextCodec, messages: Sequence[Any], tools: Sequence[Any] | None, **how: Any
    ) -> MultimodalTokens:
        """Encode a conversation with images, or recordings; for the arguments see ``TextCodec.chat``."""
        raise InvalidRequest(self.refusal)

    def ask(self, codec: TextCodec, around: tuple[str, str], part: Image | Audio) -> MultimodalTokens:
        """Encode one part between two texts, in which special tokens are written out; nothing is stored on the disk."""
        raise InvalidRequest(self.refusal)

    def place(
        self, tokens: Sequence[int], images: Sequence[Image | Audio], owner: str | None = None, keep: bool = True
    ) -> MultimodalTokens:
        """Put rows of images, or recordings, where a text has ``ImageWords.id`` for each of them, in order.

        Args:
            tokens: the text.
            images: the images or recordings.
            owner: whose they are: rows of another owner's images are not used.
            keep: whether rows that took long are written to the disk.

        Raises:
            InvalidRequest: places and rows differ in number, or nothing follows the last image.
        """
        raise InvalidRequest(self.refusal)

    def of(self, kind: str, given: Any) -> Image | Audio:
        """Return the content of a part of a message, whose type is ``kind``."""
        raise InvalidRequest(self.refusal)

    def rows_of(self, image: Image | Audio, owner: str | None = None, keep: bool = True) -> EmbeddingSpan:
        """Make the rows of an image or a recording, unless memory or the disk has them."""
        raise InvalidRequest(self.refusal)

    @property
    def folder(self) -> Path:
        """The bundle's folder."""
        return self._bundle.path

    def find(self, tokens: Sequence[int]) -> Input:
        """Find the spans that token ids name; an ``InvalidRequest``: one does not exist any more."""
        first = dict.fromkeys(token // MOST_ROWS for token in tokens if token >= INSERTED)
        spans = [self.rows.find(number * MOST_ROWS)[0] for number in first]
        return MultimodalTokens(tokens, spans, self.rows) if spans else Input(tokens)

    def draft_rows(self, name: str) -> EmbeddingSpanCache:
        """Return the storage of a draft's own rows for the spans of the target's texts."""
        raise InvalidRequest(self.refusal)

    def encode(self, encoder: int, rows: Rows, inside: NDArray[np.int64] | None = None) -> Rows:
        """Run one of ``ModelPart.front``, the tower first; rows are padded with zeros to its width."""
        found = self._encoder(encoder)
        if (lacking := found.columns - rows.shape[1]) > 0:
            rows = np.pad(rows, ((0, 0), (0, lacking)))
        return found.encode(rows, inside)

    def _encoder(self, number: int) -> Encoder:
        if number not in self._encoders:
            bundle, image, part = self._bundle, self._model.image, self._model.front[number]
            model = Model(bundle.path, part, NATIVE, self._threads, encoder_attention(part), bundle.checked)
            self._encoders[number] = Encoder(model, image.windows if image and not number else None)
        return self._encoders[number]

    def close(self) -> None:
        """Free the encoders; they are opened again where they are needed."""
        with self._lock:
            for one in self._encoders.values():
                one.close()
            self._encoders.clear()
