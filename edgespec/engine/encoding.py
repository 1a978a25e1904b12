"""Input of an encoder-decoder: sources, and the memories that decoders attend over."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.engine.input import Input
from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.operators import NATIVE
from edgespec.runtimes.slots.encoder import EncodedSources, Encoder, encoder_attention
from edgespec.runtimes.slots.native import NativeSlot
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot

Rows = NDArray[np.float32]
MOST = 132  # memories in use at a time: a pass has no more rows
KEPT = 1  # memories of earlier sources that are kept: another try need not read its source again
TIMED = 64  # rows of the placeholder memory for timing


class Source(Input):
    """The input of an encoder, and the tokens that its decoder begins with, at least one.

    Args:
        content: int64 [S] token ids, or float32 [S, columns] features.
        begin: the decoder's first tokens.
        digest: the digest of ``content``.
    """

    def __init__(self, content: NDArray[np.int64] | Rows, begin: Iterable[int], digest: bytes) -> None:
        super().__init__(begin)
        self.content, self.digest = content, digest
        self.tokens = [] if content.ndim > 1 else content.tolist()

    @classmethod
    def of(cls, content: Sequence[int] | NDArray[Any], begin: Sequence[int]) -> Source:
        """Make a source of token ids or features."""
        features = isinstance(content, np.ndarray) and content.ndim > 1
        array: NDArray[np.int64] | Rows = (
            np.ascontiguousarray(content, np.float32) if features else np.ascontiguousarray(content, np.int64)
        )
        digest = hashlib.sha256(f"{array.dtype}{array.shape}".encode() + array.tobytes()).digest()
        return cls(array, begin, digest)

    @property
    def begin(self) -> tuple[int, ...]:
        """The decoder's first tokens."""
        return tuple(self)

    def beginning(self, begin: Iterable[int]) -> Source:
        """Return the same source with different first tokens."""
        return Source(self.content, begin, self.digest)

    def cache_key(self, owner: str | None) -> str:
        return f"{owner or ''} {self.digest.hex()}"


class Encoding:
    """Encoders of a bundle, opened as they are needed, and the memories of its decoders."""

    def __init__(self, bundle: Bundle, threads: int | None, encoders: dict[str, Encoder] | None = None) -> None:
        self._bundle, self._threads = bundle, threads
        self._encoders = {} if encoders is None else encoders
        self._memories: dict[str, EncodedSources] = {}
        self._rows: dict[str, tuple[bytes, Rows]] = {}  # the last output of each encoder, by digest of its source

    def shared(self) -> Encoding:
        """Return the same encoders for another decoder, with separate cross-attention caches."""
        return Encoding(self._bundle, self._threads, self._encoders)

    def check(self, source: Source) -> None:
        """Raise ``InvalidRequest`` for input that no encoder of this bundle reads."""
        part = self._bundle.manifest.target
        wanted = part.source
        assert wanted is not None
        features = source.content.ndim > 1
        if features != (wanted.kind == "features"):
            got, what = ("features", "a text or token ids") if features else ("a text", "rows of features")
            raise InvalidRequest(f"got {got}, but this model reads {what}")
        if not 0 < len(source.content) <= wanted.max_rows:
            raise InvalidRequest(
                f"a source of {len(source.content)} {'rows' if features else 'tokens'}: "
                f"expected 1 to {wanted.max_rows}",
                "cut it into parts",
            )
        if not features:
            vocab = part.encoder.facts.vocab if part.encoder else part.facts.vocab
            if source.content.min() < 0 or source.content.max() >= vocab:
                raise InvalidRequest(f"the source has a token outside the vocabulary of {vocab}", "check the tokenizer")

    def attend(self, name: str, slot: Slot, given: Input) -> None:
        """Let a slot attend over what an encoder makes of an input; of one without content, over a placeholder.

        Args:
            name: of its model, ``target`` or ``draft``.
            slot: of the decoder.
            given: the input.
        """
        if not isinstance(slot, NativeSlot) or not slot.attends:
            return
        if name not in self._memories:
            self._memories[name] = EncodedSources(slot.model, MOST)
        memories = self._memories[name]
        if given.digest:
            found = memories.find(given.digest)
            slot.attend(found or memories.fill(self._encoded(name, given), given.digest))
        else:
            slot.attend(memories.stand_in(min(TIMED, memories.longest)))
            memories.shrink(KEPT)

    def _encoded(self, name: str, source: Input) -> Rows:
        """Run the encoder of a model, or return its last output for the same source -> [S, width]."""
        part = self._bundle.part(name)
        if part.source is not None and part.source.shares_encoder:
            name, part = "target", self._bundle.part("target")
        known = self._rows.get(name)
        if known is None or known[0] != source.digest:
            if name not in self._encoders:
                own = part.encoder
                assert own is not None
                formats, checked = encoder_attention(own), self._bundle.checked
                model = Model(self._bundle.path, own, NATIVE, self._threads, formats, checked)
                self._encoders[name] = Encoder(model)
            self._rows[name] = known = source.digest, self._encoders[name].encode(source.content)
        return known[1]

    @property
    def nbytes(self) -> int:
        """Bytes of memories, and of buffers of encoders."""
        held = sum(memories.nbytes for memories in self._memories.values())
        return held + sum(encoder.nbytes for encoder in self._encoders.values())

    def close(self) -> None:
        """Free all; encoders that another engine shares close with the last one that has them."""
        for memories in self._memories.values():
            memories.close()
        self._memories.clear()
        self._encoders = {}
        self._rows.clear()
