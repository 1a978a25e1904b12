"""Targets in numpy, for tests: logits are a pure function of the prefix, and every misuse of the contract raises."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.target import Heads, Pass, SkipSet, Target

Function = Callable[[tuple[int, ...]], NDArray[np.float32]]  # prefix -> logits [vocab] of the token after it


class FunctionTarget(Target):
    """A target (and self-draft target) whose logits are ``function(prefix)``.

    Args:
        function: the model; the prefix of a tree row is the slot, then the path to the row.
        vocab_size: size of the vocabulary.
        context: maximum tokens of a sequence.
        draft: what ``forward_draft`` computes; None = the same function.

    Raises:
        ValueError: a call that the contract of ``Target`` does not allow.
    """

    def __init__(self, function: Function, vocab_size: int, context: int = 512, draft: Function | None = None) -> None:
        self.function = function
        self.draft = function if draft is None else draft
        self.vocab_size = vocab_size
        self.context = context
        self.tokens: list[int] = []
        self.passes: list[int] = []  # rows of each forward, for tests
        self.skipped = 0  # calls of forward_draft, for tests
        self._rows: list[tuple[int, int]] | None = None  # (token, parent) of each row of a forward not yet kept
        self._draft_rows: list[int] = []

    def _check(self, tokens: Sequence[int], committed: int) -> None:
        if not len(tokens):
            raise ValueError("a pass of no rows")
        if min(tokens) < 0 or max(tokens) >= self.vocab_size:
            raise ValueError(f"a token outside the vocabulary of {self.vocab_size}: {list(tokens)}")
        if committed > self.context:
            raise ValueError(f"{committed} tokens in a context of {self.context}")

    def follow(self, tokens: Sequence[int]) -> int:
        """See ``Target.follow``."""
        kept = 0
        for mine, theirs in zip(self.tokens, tokens, strict=False):
            if mine != theirs:
                break
            kept += 1
        return self.crop(kept)

    def crop(self, length: int) -> int:
        """See ``Target.crop``."""
        del self.tokens[length:]
        self._rows = None
        return len(self.tokens)

    def prefill(self, tokens: Sequence[int]) -> None:
        """See ``Target.prefill``."""
        self._check(tokens, len(self.tokens) + len(tokens))
        self.tokens += [int(token) for token in tokens]
        self._rows = None

    def forward(self, tokens: NDArray[np.int64], parents: NDArray[np.int64] | None = None, best: bool = False) -> Pass:
        """See ``Target.forward``; ``hidden`` is the logits."""
        self._check(tokens.tolist(), len(self.tokens) + 1)
        above = list(range(-1, len(tokens) - 1)) if parents is None else parents.tolist()
        if len(above) != len(tokens) or above[0] != -1 or any(not 0 <= p < i for i, p in enumerate(above) if i):
            raise ValueError(f"parents must be -1 and then earlier rows: {above}")
        prefixes: list[tuple[int, ...]] = []
        for token, parent in zip(tokens.tolist(), above, strict=True):
            prefixes.append((*(tuple(self.tokens) if parent < 0 else prefixes[parent]), token))
        self._rows = list(zip(tokens.tolist(), above, strict=True))
        self.passes.append(len(tokens))
        logits = np.stack([self.function(prefix) for prefix in prefixes]).astype(np.float32)
        return Pass(logits, logits)

    def keep(self, rows: Sequence[int]) -> None:
        """See ``Target.keep``."""
        if self._rows is None:
            raise ValueError("keep without a forward")
        rows = list(rows)
        for row, before in zip(rows, [-1, *rows], strict=False):
            if not 0 <= row < len(self._rows) or self._rows[row][1] != before:
                raise ValueError(f"rows to keep must be a root path: {rows}")
        self.tokens += [self._rows[row][0] for row in rows]
        self._rows = None
        self._check(self.tokens or [0], len(self.tokens))

    def forward_draft(
        self, tokens: NDArray[np.int64], offset: int = 0, skip: SkipSet | None = None, best: bool = False
    ) -> Pass:
        """See ``Target.forward_draft``."""
        if self._rows is not None:
            raise ValueError("a draft pass between forward and keep")
        if not 0 <= offset <= len(self._draft_rows):
            raise ValueError(f"draft rows from {offset}, but only {len(self._draft_rows)} have run")
        self._check(tokens.tolist(), len(self.tokens) + 1)
        self._draft_rows[offset:] = tokens.tolist()
        self.skipped += 1
        logits = self.draft((*self.tokens, *self._draft_rows))
        return Pass(logits[None].astype(np.float32))


class LayeredFunctionTarget(FunctionTarget):
    """A ``FunctionTarget`` with separable layers: its hidden states name a prefix and the number of layers run.

    Args:
        exits: results of the exit after each number of layers: a function of the prefix.
        heads: results of group "medusa": for each head a function of the prefix whose last row chose the pending token.
        layers: how many there are.
        tokens: int64 [size], the vocabulary of heads and exits; None = all.
    """

    def __init__(
        self,
        function: Function,
        vocab_size: int,
        context: int = 512,
        exits: dict[int, Function] | None = None,
        heads: Sequence[Function] = (),
        layers: int = 4,
        tokens: NDArray[np.int64] | None = None,
    ) -> None:
        super().__init__(function, vocab_size, context)
        self.layers = layers
        self.exits, self.heads, self.head_tokens = exits or {}, list(heads), tokens
        self.keep_hidden = False
        self.layer_rows = 0  # rows times layers, for tests
        self._states: list[tuple[tuple[int, ...], int]] = []  # (prefix, layers run) of each hidden state ever given

    def _state(self, prefix: tuple[int, ...], layers: int) -> list[float]:
        self._states.append((prefix, layers))
        return [len(self._states) - 1.0]

    def forward(self, tokens: NDArray[np.int64], parents: NDArray[np.int64] | None = None, best: bool = False) -> Pass:
        """See ``Target.forward``."""
        output = super().forward(tokens, parents)
        assert self._rows is not None
        self.layer_rows += len(tokens) * self.layers
        prefixes: list[tuple[int, ...]] = []
        for token, parent in self._rows:
            prefixes.append((*(tuple(self.tokens) if parent < 0 else prefixes[parent]), token))
        hidden = np.array([self._state(prefix, self.layers) for prefix in prefixes], np.float32)
        return Pass(output.logits, hidden if self.keep_hidden else None)

    def forward_layers(
        self, rows: NDArray[np.int64] | NDArray[np.float32], offset: int, first: int, last: int
    ) -> NDArray[np.float32]:
        """See ``Target.forward_layers``."""
        if self._rows is not None:
            raise ValueError("layers run between forward and keep")
        self.layer_rows += len(rows) * (last - first)
        if first == 0:
            self._check(rows.tolist(), len(self.tokens) + 1)
            del self._draft_rows[offset:]
            if len(self._draft_rows) != offset:
                raise ValueError(f"rows at {offset}, but only {len(self._draft_rows)} have run")
            self._draft_rows += [int(token) for token in rows]
        else:
            for at, row in enumerate(rows, offset):
                if self._states[int(row[0])] != (self._prefix(at), first):
                    raise ValueError(f"row {at} is not the state of that place after {first} layers")
        return np.array([self._state(self._prefix(at), last) for at in range(offset, offset + len(rows))], np.float32)

    def _prefix(self, at: int) -> tuple[int, ...]:
        return (*self.tokens, *self._draft_rows[: at + 1])

    def forward_from(
        self, tokens: NDArray[np.int64], hidden: NDArray[np.float32], layer: int, best: bool = False
    ) -> Pass:
        """See ``Target.forward_from``."""
        self.layer_rows -= len(tokens) * layer
        for at, row in enumerate(hidden):
            wanted = (*self.tokens, *tokens[: at + 1].tolist()), layer
            if self._states[int(row[0])] != wanted:
                raise ValueError(f"row {at} is not the state of that place after {layer} layers")
        if len(hidden) != len(tokens):
            raise ValueError(f"{len(tokens)} tokens, but {len(hidden)} hidden states")
        return self.forward(tokens)

    def forward_heads(self, group: str, hidden: NDArray[np.float32], top: int = 0) -> Heads:
        """See ``Target.forward_heads``."""
        states = [self._states[int(row[0])] for row in hidden]
        name, _, layer = group.partition(".")
        functions = [self.exits[int(layer)]] if name == "exit" else self.heads
        wanted = int(layer) if layer else self.layers
        if any(layers != wanted for _, layers in states):
            raise ValueError(f"heads of layer {wanted} asked about other layers")
        logits = np.array([[function(prefix) for prefix, _ in states] for function in functions], np.float32)
        if self.head_tokens is not None:
            logits = logits[..., self.head_tokens]
        if not top:
            return Heads(logits, self.head_tokens)
        ids = np.argsort(-logits, -1, kind="stable")[..., :top]
        values = np.take_along_axis(logits, ids, -1)
        return Heads(None, None, (ids if self.head_tokens is None else self.head_tokens[ids], values))


class TableTarget(FunctionTarget):
    """A Markov model: ``table`` float32 [vocab] * order + [vocab] holds the logits after the last ``order`` tokens.

    A prefix shorter than the order is continued to the left with token 0.  ``draft_table`` is what
    ``forward_draft`` reads.
    """

    def __init__(
        self,
        table: NDArray[np.floating],
        context: int = 512,
        draft_table: NDArray[np.floating] | None = None,
    ) -> None:
        draft = None if draft_table is None else _markov(draft_table)
        super().__init__(_markov(table), table.shape[-1], context, draft)


def _markov(table: NDArray[np.floating]) -> Function:
    """Give the function that looks the end of a prefix up in ``table``."""
    order = table.ndim - 1
    table = table.astype(np.float32)

    def logits(prefix: tuple[int, ...]) -> NDArray[np.float32]:
        return np.asarray(table[((0,) * order + prefix)[len(prefix) :]])

    return logits
