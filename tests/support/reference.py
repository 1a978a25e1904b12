"""Targets in numpy, for tests: logits are a pure function of the prefix, and every misuse of the contract raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.target import Ids, Output, Pass, Target

Function = Callable[[tuple[int, ...]], NDArray[np.float32]]  # prefix -> logits [vocab] of the token after it


class FunctionTarget(Target):
    """A target (and self-draft target) whose logits are ``function(prefix)``.

    Args:
        function: the model; the prefix of a tree row is the slot, then the path to the row.
        vocab_size: size of the vocabulary.
        context: maximum tokens of a sequence.
        draft: what drafts compute; None = the same function.

    Raises:
        ValueError: a call that the contract of ``Target`` does not allow.
    """

    can = frozenset({"parents", "draft", "offset", "skip", "scored", "hidden", "adapters"})

    def __init__(self, function: Function, vocab_size: int, context: int = 512, draft: Function | None = None) -> None:
        self.function = function
        self.draft = function if draft is None else draft
        self.vocab_size = vocab_size
        self.context = context
        self.tokens: list[int] = []
        self.passes: list[int] = []  # rows of each pass, for tests
        self.skipped = 0  # passes of drafts, for tests
        self._rows: list[tuple[int, int]] | None = None  # (token, parent) of each row of a pass not yet kept
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

    def read(self, tokens: Sequence[int], aux_hidden: bool = False) -> Iterator[Output]:
        """See ``Target.read``."""
        self._check(tokens, len(self.tokens) + len(tokens))
        self.tokens += [int(token) for token in tokens]
        self._rows = None
        yield Output(np.zeros((0, self.vocab_size), np.float32))

    def run(self, wanted: Pass) -> Output:
        """See ``Target.run``; ``hidden`` is the logits."""
        self.check(wanted)
        assert wanted.tokens is not None
        tokens, parents = wanted.tokens.tolist(), wanted.parents
        self._check(tokens, len(self.tokens) + 1)
        if wanted.draft:
            return self._run_draft(tokens, wanted.offset, wanted.adapters)
        above = list(range(-1, len(tokens) - 1)) if parents is None else parents.tolist()
        if len(above) != len(tokens) or above[0] != -1 or any(not 0 <= p < i for i, p in enumerate(above) if i):
            raise ValueError(f"parents must be -1 and then earlier rows: {above}")
        prefixes: list[tuple[int, ...]] = []
        for token, parent in zip(tokens, above, strict=True):
            prefixes.append((*(tuple(self.tokens) if parent < 0 else prefixes[parent]), token))
        self._rows = list(zip(tokens, above, strict=True))
        self.passes.append(len(tokens))
        logits = np.stack([self.function(prefix) for prefix in prefixes]).astype(np.float32)
        return Output(logits, logits)

    def keep(self, rows: Sequence[int]) -> None:
        """See ``Target.keep``."""
        if self._rows is None:
            raise ValueError("keep without a pass")
        rows = list(rows)
        for row, before in zip(rows, [-1, *rows], strict=False):
            if not 0 <= row < len(self._rows) or self._rows[row][1] != before:
                raise ValueError(f"rows to keep must be a root path: {rows}")
        self.tokens += [self._rows[row][0] for row in rows]
        self._rows = None
        self._check(self.tokens or [0], len(self.tokens))

    def _run_draft(self, tokens: list[int], offset: int, adapters: Ids | None) -> Output:
        if self._rows is not None:
            raise ValueError("a draft pass between a pass and keep")
        if not 0 <= offset <= len(self._draft_rows):
            raise ValueError(f"draft rows from {offset}, but only {len(self._draft_rows)} have run")
        self._draft_rows[offset:] = tokens
        self.skipped += 1
        if adapters is not None:  # rows with an adapter compute what drafts do
            prefixes = [(*self.tokens, *tokens[: at + 1]) for at in range(len(tokens))]
            pairs = zip(adapters, prefixes, strict=True)
            rows = [(self.draft if adapter else self.function)(prefix) for adapter, prefix in pairs]
            return Output(np.stack(rows).astype(np.float32))
        logits = self.draft((*self.tokens, *self._draft_rows))
        return Output(logits[None].astype(np.float32))


class LayeredFunctionTarget(FunctionTarget):
    """A ``FunctionTarget`` with separable layers: its hidden states name a prefix and the number of layers run.

    Args:
        exits: results of the exit after each number of layers: a function of the prefix.
        heads: results of group "medusa": for each head a function of the prefix whose last row chose the pending token.
        layers: how many there are.
        tokens: int64 [size], the vocabulary of heads and exits; None = all.
    """

    can = FunctionTarget.can | {"inputs", "layers", "group"}

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
        self.layer_rows = 0  # rows times layers, for tests
        self._states: list[tuple[tuple[int, ...], int]] = []  # (prefix, layers run) of each hidden state ever given

    def _state(self, prefix: tuple[int, ...], layers: int) -> list[float]:
        self._states.append((prefix, layers))
        return [len(self._states) - 1.0]

    def run(self, wanted: Pass) -> Output:
        """See ``Target.run``."""
        if wanted.group:
            assert wanted.inputs is not None
            return self._ask(wanted.group, wanted.inputs, wanted.top)
        if wanted.layers is not None and wanted.scored == 0:
            return self._run_layers(wanted, *wanted.layers)
        if wanted.layers is not None:
            self._check_rest(wanted, wanted.layers[0])
        output = super().run(wanted._replace(hidden=False))
        if wanted.draft:
            return output
        assert self._rows is not None
        first, last = wanted.layers or (0, self.layers)
        self.layer_rows += len(self._rows) * (last - first)
        prefixes: list[tuple[int, ...]] = []
        for token, parent in self._rows:
            prefixes.append((*(tuple(self.tokens) if parent < 0 else prefixes[parent]), token))
        hidden = np.array([self._state(prefix, self.layers) for prefix in prefixes], np.float32)
        return Output(output.logits, hidden if wanted.hidden else None, share=(last - first) / self.layers)

    def _run_layers(self, wanted: Pass, first: int, last: int) -> Output:
        if self._rows is not None:
            raise ValueError("layers run between a pass and keep")
        assert wanted.tokens is not None
        tokens, offset = wanted.tokens.tolist(), wanted.offset
        self.layer_rows += len(tokens) * (last - first)
        self._check(tokens, len(self.tokens) + 1)
        if first == 0:
            del self._draft_rows[offset:]
            if len(self._draft_rows) != offset:
                raise ValueError(f"rows at {offset}, but only {len(self._draft_rows)} have run")
            self._draft_rows += tokens
        else:
            assert wanted.inputs is not None
            if tokens != self._draft_rows[offset : offset + len(tokens)]:
                raise ValueError(f"rows at {offset} were other tokens below")
            for at, row in enumerate(wanted.inputs, offset):
                if self._states[int(row[0])] != (self._prefix(at), first):
                    raise ValueError(f"row {at} is not the state of that place after {first} layers")
        found = [self._state(self._prefix(at), last) for at in range(offset, offset + len(tokens))]
        return Output(np.zeros((0, self.vocab_size), np.float32), np.array(found, np.float32))

    def _prefix(self, at: int) -> tuple[int, ...]:
        return (*self.tokens, *self._draft_rows[: at + 1])

    def _check_rest(self, wanted: Pass, layer: int) -> None:
        assert wanted.tokens is not None
        assert wanted.inputs is not None
        for at, row in enumerate(wanted.inputs):
            known = (*self.tokens, *wanted.tokens[: at + 1].tolist()), layer
            if self._states[int(row[0])] != known:
                raise ValueError(f"row {at} is not the state of that place after {layer} layers")
        if len(wanted.inputs) != len(wanted.tokens):
            raise ValueError(f"{len(wanted.tokens)} tokens, but {len(wanted.inputs)} hidden states")

    def _ask(self, group: str, hidden: NDArray[np.float32], top: int) -> Output:
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
            return Output(logits, tokens=self.head_tokens)
        ids = np.argsort(-logits, -1, kind="stable")[..., :top]
        values = np.take_along_axis(logits, ids, -1)
        return Output(logits, None, (ids if self.head_tokens is None else self.head_tokens[ids], values))


class TableTarget(FunctionTarget):
    """A Markov model: ``table`` float32 [vocab] * order + [vocab] holds the logits after the last ``order`` tokens.

    A prefix shorter than the order is continued to the left with token 0.  ``draft_table`` is what
    drafts read.
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
