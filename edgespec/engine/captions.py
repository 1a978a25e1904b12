"""Captions of pictures: a text encoder and a projector compute the rows before the codes of a picture."""

from __future__ import annotations

import hashlib

import numpy as np

from edgespec.engine.input import MultimodalTokens
from edgespec.engine.spans import Rows, SpanReader
from edgespec.errors import BundleError
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.codes import CaptionPart
from edgespec.runtimes.files.seq2seq_format import SOURCE_TOKENIZER
from edgespec.runtimes.slots.inserted import EmbeddingSpan, EmbeddingSpanCache
from edgespec.runtimes.text.codec import TextCodec


class CaptionReader(SpanReader):
    """Reader of captions, as in LlamaGen (https://github.com/FoundationVision/LlamaGen, sample_t2i.py).

    A caption's last row comes right before the first code, for any length: codes have the same positions.
    """

    kinds = ("caption",)
    refusal = "this model draws from captions: it reads no images and no recordings"

    def __init__(self, bundle: Bundle, threads: int | None, rows: EmbeddingSpanCache, part: CaptionPart) -> None:
        super().__init__(bundle, threads, rows)
        file, front = bundle.path / part.unconditional, self._model.front
        if len(front) != 2 or not file.is_file() or not (bundle.path / SOURCE_TOKENIZER).is_file():
            raise BundleError(f"{bundle.path}: lacks what reads captions", "export the bundle again")
        self.codec = TextCodec(bundle.path, checked=bundle.checked, file=SOURCE_TOKENIZER)
        nothing = np.fromfile(file, "<f4")
        if not len(nothing) or len(nothing) % part.max_tokens:
            raise BundleError(
                f"{file}: {4 * len(nothing)} bytes, expected {part.max_tokens} equal rows", "export it again"
            )
        self._nothing = nothing.reshape(part.max_tokens, -1)  # [max_tokens, width]

    def caption(self, text: str, other: str = "") -> tuple[MultimodalTokens, list[int]]:
        """Make the rows of a caption -> a prompt of them, which also keeps those of guidance's other half, and these.

        ``other``: a caption for that half; empty = none.
        """
        with self._lock:
            asked, instead = self._read_caption(text)
            instead = self._read_caption(other)[0] if other.strip() else instead
        return MultimodalTokens(asked.tokens, [asked, instead], self.rows), instead.tokens

    def _read_caption(self, text: str) -> tuple[EmbeddingSpan, EmbeddingSpan]:
        """Make the rows of a caption, and as many of no caption."""
        most, ids = len(self._nothing), self.codec.encode(text.lower().strip())
        read = np.array(ids if len(ids) <= most else [*ids[: most - 1], ids[-1]], np.int64)
        digest = hashlib.sha256(read.tobytes()).digest()
        asked = self._projected(self._encoder(0).encode(read), digest)
        return asked, self._projected(self._nothing[-len(read) :], hashlib.sha256(digest).digest())

    def _projected(self, rows: Rows, digest: bytes) -> EmbeddingSpan:
        """Project rows; the text after them continues at the position of the first code."""
        found = self._encoder(1).encode(rows)
        return EmbeddingSpan(digest, found, (len(found),), np.full((2, len(found)), len(self._nothing) - 1))
