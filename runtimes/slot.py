"""A KV slot: one sequence's keys and values over a shared model.  What both kinds of operators share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import InvalidRequest
from edgespec.runtimes.session import Model
from edgespec.runtimes.target import Pass, SkipSet, common_prefix

PREFILL_CHUNK = 128


class Slot(ABC):
    """The target (or draft) of one sequence; ``open_slot`` makes the kind that fits the model's graph.

    Args:
        model: the session and shared buffers.
        context: most tokens of the sequence; at most what the bundle was exported for.
    """

    def __init__(self, model: Model, context: int | None) -> None:
        facts = model.facts
        self.model = model
        self.vocab_size, self.layers = facts.vocab, facts.layers
        self.context = min(context or facts.context, facts.context)
        self.tokens: list[int] = []
        self.capacity = 0
        self._pending: tuple[list[int], list[int] | None] = ([], None)

    # -- the Target contract ---------------------------------------------------------------------------------------

    def follow(self, tokens: Sequence[int]) -> int:
        """Crop the slot to its longest common prefix with ``tokens``; returns its length."""
        same = common_prefix(self.tokens, tokens)
        del self.tokens[same:]
        return same

    def prefill(self, tokens: Sequence[int]) -> None:
        """Append tokens in chunks, without the LM head."""
        self.reserve(len(self.tokens) + len(tokens))
        for start in range(0, len(tokens), PREFILL_CHUNK):
            chunk = np.asarray(tokens[start : start + PREFILL_CHUNK], np.int64)
            self._fill(chunk)
            self.tokens.extend(chunk.tolist())

    @abstractmethod
    def forward(self, tokens: NDArray[np.int64], parents: NDArray[np.int64] | None = None) -> Pass:
        """Run rows after the slot's tokens -> logits of every row, [n, vocab]."""

    @abstractmethod
    def keep(self, rows: Sequence[int]) -> None:
        """Commit rows of the last forward, a root path in ascending order; the others are forgotten."""

    def forward_skipped(self, tokens: NDArray[np.int64], offset: int, skip: SkipSet) -> Pass:
        """Run a chain of draft rows with sub-layers left out -> logits of the last row, [1, vocab]."""
        return self.forward_draft(tokens, offset, skip)

    @abstractmethod
    def forward_draft(self, tokens: NDArray[np.int64], offset: int = 0, skip: SkipSet | None = None) -> Pass:
        """Run rows ``offset`` rows after the slot's tokens -> logits of the last row, [1, vocab]."""

    # -- for tools: scoring many hypotheses in one pass --------------------------------------------------------------

    @abstractmethod
    def forward_hypotheses(
        self,
        tokens: NDArray[np.int64],  # [n]
        visible: NDArray[np.int64],  # [n]
        parents: NDArray[np.int64],  # [n]
        skip: SkipSet | None = None,
    ) -> Pass:
        """Run rows that each continue some beginning of the slot's text -> logits of all, [n, vocab].

        Args:
            tokens: the rows.
            visible: how many of the slot's tokens a row sees; the same along a chain.
            parents: an earlier row that a row continues, -1: the slot's text; its position is ``visible`` + depth.
            skip: sub-layers to leave out.

        Nothing is committed.
        """

    # -- memory ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def reserve(self, tokens: int) -> None:
        """Make room for this many tokens and the rows after them; what the slot holds stays."""

    @property
    @abstractmethod
    def kv_bytes(self) -> int:
        """Bytes of KV allocated."""

    @abstractmethod
    def snapshot(self) -> dict[str, NDArray[np.float32]]:
        """Copies of the committed keys and values, [kv_heads, tokens, head_dim] by name; for tests and tools."""

    # -- parts -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def _fill(self, chunk: NDArray[np.int64]) -> None:
        """Run rows after the slot's tokens for their KV alone; [n]."""

    def _need_room(self, rows: int) -> None:
        if rows > self.capacity:
            self.reserve(rows)
        if rows > self.capacity:
            raise InvalidRequest(f"a pass up to row {rows} does not fit the cache of {self.capacity} rows")


def depths_of(parents: Sequence[int]) -> NDArray[np.int64]:  # [n]
    """How many ancestors each row has."""
    depths = np.zeros(len(parents), np.int64)
    for row, parent in enumerate(parents):
        if parent >= 0:
            depths[row] = depths[parent] + 1
    return depths


def open_slot(model: Model, *, context: int | None = None, reserve: int = 256) -> Slot:
    """A slot over a model.

    Args:
        model: the session and shared buffers.
        context: most tokens of the sequence; at most what the bundle was exported for.
        reserve: tokens to allocate for at once; the buffers grow when more are needed.
    """
    # here, because both kinds are Slots
    from edgespec.runtimes.native_slot import NativeSlot
    from edgespec.runtimes.stock_slot import StockSlot

    kind = NativeSlot if model.graph.operators == "native" else StockSlot
    return kind(model, context=context, reserve=reserve)
