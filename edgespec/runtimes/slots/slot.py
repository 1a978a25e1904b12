"""A KV slot: one sequence's keys and values over a shared model.  What both kinds of operators share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.target import Ids, Output, Pass, Rows, Target, common_prefix
from edgespec.errors import InvalidRequest, SessionError
from edgespec.runtimes.files.bundle import read_head_tokens
from edgespec.runtimes.files.manifest import HeadGroup
from edgespec.runtimes.slots.shared import Model

PREFILL_CHUNK = 128
ROUND_CAPACITY = 64


class Slot(Target, ABC):
    """The target (or draft) of one sequence; ``runtimes.opening.open_slot`` makes the kind that fits the model's graph.

    ``stateful``: ``state`` is not empty.
    ``adapter``: number of the LoRA adapter of its rows; 0 = none.
    """

    adapter = 0

    def __init__(self, model: Model, context: int | None) -> None:
        facts = model.facts
        self.model = model
        self.vocab_size, self.layers = facts.vocab, facts.layers
        self.context = min(context or facts.context, facts.context)
        self.tokens: list[int] = []
        self.capacity = 0
        self.chunk = PREFILL_CHUNK  # maximum rows of a prefill pass
        self.on_read: Callable[[], None] | None = None  # called when a prefill has ended, and where it was marked
        # called by a drafter that this is the slot of, with itself and the names of a text's rows, when it begins one
        self.on_begin: Callable[[Any, list[int]], None] | None = None
        part = model.part
        self.columns = part.head_vocab.size if part.cut and part.head_vocab else facts.vocab  # of the logits
        self.head_tokens = read_head_tokens(model.folder, part)  # int64 [size]: what the columns of a cut LM head mean
        self._head_size = facts.vocab if self.head_tokens is None else len(self.head_tokens)  # columns of a group
        self._pending: tuple[list[int], list[int] | None] = ([], None)

    @property
    def streams(self) -> bool:
        """Whether passes read experts from the disk."""
        return getattr(self.model, "experts", None) is not None  # a device's model has no such thing

    # -- the Target contract ---------------------------------------------------------------------------------------

    def follow(self, tokens: Sequence[int]) -> int:
        """Crop the slot to its longest common prefix with ``tokens`` -> its length."""
        return self.crop(common_prefix(self.tokens, tokens))

    def crop(self, length: int) -> int:
        """Forget the tokens after the first ``length``; returns how many remain, see ``cropped``."""
        del self.tokens[length:]
        return len(self.tokens)

    def cropped(self, length: int) -> int:
        """Count the tokens that ``crop`` would leave: ``length``, fewer where states go back to a checkpoint."""
        return min(length, len(self.tokens))

    def use_adapter(self, number: int) -> None:
        """Add an adapter to the rows of later passes, by its number, 0 = none; the text of another one is forgotten."""
        if number != self.adapter:
            self.follow([])
            self.adapter = number

    def leave(self) -> None:
        """Stop attending over a cross-attention cache; tokens read with it stay, for the same one."""

    def read(self, tokens: Sequence[int], aux_hidden: bool = False) -> Iterator[Output]:
        self.reserve(len(self.tokens) + len(tokens))
        aux_hidden, stop = aux_hidden and "aux_hidden" in self.can, 0
        while (start := stop) < len(tokens):
            stop = self.end_of_piece(tokens, start + self.chunk)
            chunk = np.asarray(tokens[start:stop], np.int64)
            yield self.run(Pass(chunk, aux_hidden=aux_hidden, scored=0, read=True))
        if self.on_read is not None and len(tokens):
            self.on_read()

    def end_of_piece(self, tokens: Sequence[int], stop: int) -> int:
        """Move an end of what is read of a text at once to where it may be: rows that see each other are not parted."""
        return min(stop, len(tokens))

    def mark(self, lengths: Sequence[int], most: int) -> None:
        """Say where a text to be read may be gone back to: states that cannot be cut back are kept there.

        Args:
            lengths: of beginnings of the text, in tokens.
            most: checkpoints that memory allows.
        """

    def keep(self, rows: Sequence[int]) -> None:
        """Commit rows of the last pass, a root path in ascending order; the others are forgotten."""
        tokens, parents = self._pending
        past = len(self.tokens)
        if parents is not None:
            self._move([(past + row, past + at) for at, row in enumerate(rows) if row != at])
        self.tokens.extend([tokens[row] for row in rows])
        self._pending = ([], None)

    @abstractmethod
    def run(self, wanted: Pass) -> Output: ...

    # -- memory ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def reserve(self, tokens: int) -> None:
        """Make room for this many tokens and the rows after them; what the slot holds stays."""

    @property
    @abstractmethod
    def kv_bytes(self) -> int:
        """Bytes of KV allocated."""

    def close(self) -> None:
        """Free all it holds, even if this slot is still referenced; it cannot be used afterwards."""
        vars(self).clear()

    def stand_in(self, tokens: int) -> None:
        """Hold ``tokens`` tokens of whatever keys and values: passes at a depth can be timed without a prefill.

        A slot whose memory cannot be written from here is prefilled.
        """
        same = self.follow([0] * tokens)
        self.prefill([0] * (tokens - same))

    def held(self) -> list[NDArray[Any]]:
        """Give all that the slot's tokens left in memory, in the slot's own order and layout; not to be written.

        Raises:
            SessionError: this memory is out of reach.
        """
        raise SessionError("what a device holds of a conversation cannot be saved or restored", "use --device cpu")

    def take_up(self, tokens: Sequence[int], high_water_mark: int) -> list[NDArray[Any]]:
        """Hold these tokens, of what the caller writes next into the arrays that this returns: what ``held`` gave.

        No pass may run before ``taken_up``.

        Args:
            tokens: the text, [n].
            high_water_mark: as it was when they were saved.

        Raises:
            SessionError: this memory is out of reach.
        """
        self.reserve(len(tokens))
        self.tokens = list(tokens)
        return self.held()

    def taken_up(self) -> bool:
        """Continue from the written data; returns whether it can be the result of passes over the tokens.

        If not, the slot is empty.
        """
        return True

    def part(self, start: int, stop: int) -> list[NDArray[Any]]:
        """View the cache of tokens ``start`` to ``stop`` of those that it holds; not between a pass and ``keep``.

        ``state`` has the data that belongs to no single token.

        Args:
            start: a multiple of ``KV_BLOCK``.
            stop: at most as many as it holds.

        Raises:
            SessionError: this memory is out of reach.
        """
        return [array[..., start:stop, :] for array in self.held()]

    def state(self) -> NDArray[np.uint8]:  # [bytes]
        """Copy the data besides ``part`` that the next token reads; empty if there is none."""
        return np.zeros(0, np.uint8)

    def put_state(self, state: NDArray[np.uint8]) -> bool:  # [bytes]
        """Restore the data of ``state``, between ``take_up`` of the same tokens and ``taken_up``.

        Returns:
            whether its size is right.
        """
        return not len(state)

    def copy_prefix_from(self, other: Slot, length: int) -> int:
        """Hold at most ``length`` first tokens of another slot over this model, copied without a pass -> how many.

        0 where this memory is out of reach.
        """
        try:
            lent = other.held()  # [.., tokens, head_dim] each
        except SessionError:
            return 0
        same = other.cropped(length)
        for array, one in zip(self.take_up(other.tokens[:same], same), lent, strict=True):
            array[...] = one[..., :same, :]
        return same

    @property
    def high_water_mark(self) -> int:
        """Count the tokens ever written that may be read again, including rejected draft tokens."""
        return len(self.tokens)

    @abstractmethod
    def snapshot(self) -> dict[str, Rows]:
        """Copy the committed keys and values, [kv_heads, tokens, head_dim] by name; for tests and tools."""

    # -- parts -------------------------------------------------------------------------------------------------------

    def _move(self, rows: list[tuple[int, int]]) -> None:
        """Move rows of the cache (from, to) before the next pass."""

    def _group(self, name: str) -> tuple[int, HeadGroup]:
        """Find a group of heads -> its number and description."""
        groups = self.model.part.heads
        found = next((at for at, group in enumerate(groups) if group.name == name), None)
        if found is None:
            have = ", ".join(group.name for group in groups) or "none"
            raise InvalidRequest(f"this model has no heads {name!r}; it has: {have}", "export it with `--heads DIR`")
        return found, groups[found]

    def _given(self, wanted: Pass) -> Ids:  # [n]
        """Return the tokens of a pass's rows; 0 where only their inputs are given."""
        if wanted.tokens is not None:
            return wanted.tokens
        assert wanted.inputs is not None
        return np.zeros(len(wanted.inputs), np.int64)

    def _grown(self, tokens: int) -> int:
        """Count the rows to allocate for ``tokens`` and those after them; the current capacity, if they fit."""
        extra = self.model.part.extra_rows
        most = self.model.facts.context + extra
        need = min(most, -(-(tokens + extra) // ROUND_CAPACITY) * ROUND_CAPACITY)
        return self.capacity if need <= self.capacity else min(most, max(need, self.capacity * 3 // 2))

    def _need_room(self, rows: int) -> None:
        if rows > self.capacity:
            self.reserve(rows)
        if rows > self.capacity:
            raise InvalidRequest(f"a pass up to row {rows} does not fit the cache of {self.capacity} rows")


def depths_of(parents: Sequence[int]) -> Ids:  # [n]
    """Count the ancestors of each row."""
    depths = np.zeros(len(parents), np.int64)
    for row, parent in enumerate(parents):
        if parent >= 0:
            depths[row] = depths[parent] + 1
    return depths


def best_of(
    logits: Rows,  # [.., size]
    tokens: Ids | None,  # [size]
    top: int,
) -> tuple[Ids, Rows]:  # [.., top], [.., top]
    """Find the largest logits of each row and their tokens, in order; the lowest token wins a tie."""
    top = min(top, logits.shape[-1])
    # a stable sort of all would do the same, for much more
    least = -np.partition(-logits, top - 1, -1)[..., top - 1 : top]  # [.., 1]
    found = np.zeros((*logits.shape[:-1], top), np.int64)
    for at in np.ndindex(logits.shape[:-1]):
        near = np.flatnonzero(logits[at] >= least[at])  # ascending: ties stay in order
        found[at] = near[np.argsort(-logits[at][near], kind="stable")[:top]]
    values = np.take_along_axis(logits, found, -1)
    return found if tokens is None else tokens[found], values
