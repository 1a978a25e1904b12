"""A KV slot over native operators.

One node runs the whole pass.  It is told, for every row, where it stands, what it sees and where its key and value go
(the plan), so a chain, a tree, a draft with layers left out and many hypotheses at once are the same call.  A row has
the same bits whatever stands beside it; nothing is padded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import InvalidRequest
from edgespec.runtimes.kv import BLOCK, LONGEST_PASS
from edgespec.runtimes.kv_reader import read_cache
from edgespec.runtimes.native_gates import Gates
from edgespec.runtimes.session import Bound, Model
from edgespec.runtimes.slot import Slot, depths_of
from edgespec.runtimes.target import Heads, Pass, Resume, SkipSet

TOKEN, POSITION, SLOT, VISIBLE, PARENT, PLACE = range(6)  # lines of the plan
TOP, READ_CODES, WINDOW, SINKS = 0, 4, 5, 6  # among the controls


class NativeSlot(Slot):
    """A slot for the graph of native operators; see ``open_slot``."""

    def __init__(self, model: Model, *, context: int | None = None, reserve: int = 256) -> None:
        super().__init__(model, context)
        self.kv = model.kv
        self._io = model.session.io_binding()
        self._bound: dict[str, Bound] = {}
        self._at = at = Gates(self.layers, len(model.part.heads))
        self._plain = np.zeros(at.count, bool)  # the gates of an ordinary pass
        self._plain[: 2 * self.layers] = self._plain[[at.embed, at.lm]] = True
        self._gates = self._bind("gates", Bound(self._plain.copy())).array
        self._bind("hidden_in", Bound(np.zeros((0, model.facts.hidden), np.float32)))
        self._control = self._bind("control", Bound(np.array([0, *self.kv.controls()], np.int64))).array
        self._bind("tables", model.key_tables)
        self._no_moves = self._bind("moves", Bound(np.zeros((0, 3), np.int64)))
        self._moves: list[tuple[int, int]] = []  # rows that the next pass puts in their place first
        self._furthest = 0  # tokens ever written, of those that the ring may have lost
        self._cache: Bound | None = None
        self._skip: SkipSet | None = None
        self.reserve(reserve)

    # -- the Target contract ---------------------------------------------------------------------------------------

    def follow(self, tokens: Sequence[int]) -> int:
        same = super().follow(tokens)
        if self.kv.ring and self._furthest - same > LONGEST_PASS:
            # the ring has overwritten exact keys that the next rows would read: begin again
            self.tokens.clear()
            same = self._furthest = 0
        return same

    def forward(self, tokens: NDArray[np.int64], parents: NDArray[np.int64] | None = None) -> Pass:
        self._verify(tokens, parents)
        return self._launch(len(tokens), rows=len(tokens), hidden=self.keep_hidden)

    def forward_best(self, tokens: NDArray[np.int64], parents: NDArray[np.int64] | None = None) -> Pass:
        """Like ``forward``, but only the likeliest token of each row and its logit leave the LM head."""
        self._verify(tokens, parents)
        with self._top(1):
            return self._likeliest(self._launch(len(tokens), rows=len(tokens), hidden=self.keep_hidden))

    def _verify(self, tokens: NDArray[np.int64], parents: NDArray[np.int64] | None) -> None:
        """The plan of a pass whose rows may be kept; [n], [n]."""
        past = len(self.tokens)
        self._furthest = max(self._furthest, past + len(tokens))  # kept or not, the rows are in the ring
        self._pending = (tokens.tolist(), None if parents is None else parents.tolist())
        plan = self._plan(tokens, past)
        if parents is not None:
            plan[PARENT] = parents
            plan[POSITION] = past + depths_of(parents.tolist())

    def keep(self, rows: Sequence[int]) -> None:
        tokens, parents = self._pending
        past = len(self.tokens)
        if parents is not None:
            self._moves = [(past + row, past + at) for at, row in enumerate(rows) if row != at]
        self.tokens.extend([tokens[row] for row in rows])
        self._pending = ([], None)

    def forward_draft(self, tokens: NDArray[np.int64], offset: int = 0, skip: SkipSet | None = None) -> Pass:
        past, n = len(self.tokens), len(tokens)
        plan = self._plan(tokens, past + offset)
        plan[VISIBLE] = past + offset
        self._furthest = max(self._furthest, past + offset + n)
        self._set_gates(skip)
        self._read_codes(self.kv.codes is not None)
        try:
            return self._launch(n, rows=-1)
        finally:
            self._set_gates(None)
            self._read_codes(False)

    # -- parts of the model: see HeadTarget and LayeredTarget ---------------------------------------------------------

    def forward_heads(self, group: str, hidden: NDArray[np.float32], top: int = 0) -> Heads:
        """Compute a group of heads from rows of the residual stream, [r, hidden].

        Neither the cache nor the last forward is touched: its rows may still be kept afterwards.
        """
        number, found = self._group(group)
        r = len(hidden)
        plan = self._attach("plan", "plan", (6, r), np.int64)
        plan[:], plan[PARENT] = 0, -1  # no layer runs: the rows stand nowhere
        self._load(hidden, r)
        with self._parts((), load=True, group=number), self._top(top):
            output = self._launch(r, rows=r, times=found.count, columns=self._head_size(found))
        if not top:
            return Heads(output.logits.reshape(found.count, r, self._head_size(found)), self.head_tokens)
        assert output.best is not None
        ids, values = output.best
        if self.head_tokens is not None:  # -1 where more are asked for than there are
            ids = np.where(ids < 0, -1, self.head_tokens[ids])
        shape = found.count, r, top
        return Heads(None, self.head_tokens, (ids.reshape(shape), values.reshape(shape)))

    def forward_layers(
        self, rows: NDArray[np.int64] | NDArray[np.float32], offset: int, first: int, last: int
    ) -> NDArray[np.float32]:
        """Run some layers over a chain of rows -> their residual stream, [n, hidden], a copy."""
        if not 0 <= first <= last <= self.layers:
            raise InvalidRequest(f"layers {first} to {last}: expected a range within 0 to {self.layers}")
        past, n, load = len(self.tokens) + offset, len(rows), first > 0
        plan = self._plan(np.zeros(n, np.int64) if load else rows.astype(np.int64, copy=False), past)
        plan[VISIBLE] = past
        self._furthest = max(self._furthest, past + n)
        if load:
            self._load(rows, n)
        with self._parts(range(first, last), load):
            hidden = self._launch(n, rows=0, hidden=True).hidden
        assert hidden is not None
        return hidden.copy()

    def forward_resumed(self, tokens: NDArray[np.int64], resume: Resume, best: bool = False) -> Pass:
        """Run the other layers of rows whose first ones have run -> logits of every row, [n, columns]."""
        if not 0 <= resume.layer <= self.layers:
            raise InvalidRequest(f"resumed after {resume.layer} layers: expected 0 to {self.layers}")
        n = len(tokens)
        self._load(resume.hidden, n)
        self._verify(tokens, None)
        with self._parts(range(resume.layer, self.layers), load=True, lm=True), self._top(int(best)):
            return self._likeliest(self._launch(n, rows=n, hidden=self.keep_hidden))

    def _likeliest(self, output: Pass) -> Pass:
        """A pass of the only best of each row, as tokens [n]."""
        if output.best is not None:
            ids, values = output.best[0][:, 0], output.best[1][:, 0]
            if self.model.part.cut and self.head_tokens is not None:
                ids = self.head_tokens[ids]
            output.best = ids, values
        return output

    def _load(self, hidden: NDArray[np.float32] | NDArray[np.int64], n: int) -> None:
        """Let the next pass begin with these rows of the residual stream, [n, hidden]."""
        if hidden.shape != (n, self.model.facts.hidden):
            raise InvalidRequest(f"hidden states {list(hidden.shape)}: expected [{n}, {self.model.facts.hidden}]")
        self._attach("hidden_in", "hidden_in", hidden.shape, np.float32)[:] = hidden

    @contextmanager
    def _parts(
        self, layers: Sequence[int], load: bool, *, lm: bool = False, group: int | None = None
    ) -> Iterator[None]:
        """Passes over these layers only, from tokens or hidden states, to the LM head or a group of heads."""
        at, gates = self._at, self._gates
        gates[:] = False
        gates[[2 * layer + part for layer in layers for part in (0, 1)]] = True
        gates[at.load if load else at.embed] = True
        gates[at.lm] = lm
        if group is not None:
            gates[at.group(group)] = True
        try:
            yield
        finally:
            gates[:] = self._plain

    @contextmanager
    def _top(self, top: int) -> Iterator[None]:
        """Passes that give only the best so many tokens of each row."""
        self._control[TOP] = top
        try:
            yield
        finally:
            self._control[TOP] = 0

    # -- for tools: scoring many hypotheses in one pass --------------------------------------------------------------

    def forward_hypotheses(
        self,
        tokens: NDArray[np.int64],  # [n]
        visible: NDArray[np.int64],  # [n]
        parents: NDArray[np.int64],  # [n]
        skip: SkipSet | None = None,
    ) -> Pass:
        n, past = len(tokens), len(self.tokens)
        if self.kv.ring and past + n - int(visible.min()) > LONGEST_PASS:
            raise InvalidRequest(
                f"hypotheses reach {past + n - int(visible.min())} tokens back, but exact recent keys {LONGEST_PASS}",
                "score hypotheses with attention f32, f16 or int8",
            )
        plan = self._plan(tokens, past)
        plan[VISIBLE], plan[PARENT] = visible, parents
        plan[POSITION] = visible + depths_of(parents.tolist())
        self._furthest = max(self._furthest, past + n)
        self._set_gates(skip)
        try:
            return self._launch(n, rows=n, hidden=self.keep_hidden)
        finally:
            self._set_gates(None)

    # -- memory ------------------------------------------------------------------------------------------------------

    def reserve(self, tokens: int) -> None:
        headroom = self.model.part.headroom
        most = self.model.facts.context + headroom
        need = -(-min(most, tokens + headroom) // BLOCK) * BLOCK
        if min(need, most) <= self.capacity:
            return
        need = min(-(-most // BLOCK) * BLOCK, max(need, -(-self.capacity * 3 // 2 // BLOCK) * BLOCK))
        # a block of tokens lies together: what is there already is the beginning of the larger cache
        array = np.zeros((1, self.kv.nbytes(self.model.facts, need)), np.uint8)
        if self._cache is not None:
            used = self.kv.nbytes(self.model.facts, max(len(self.tokens), self._furthest))
            held = self._cache.array
            array[:, : min(used, held.shape[1])] = held[:, : min(used, held.shape[1])]
        self._cache = self._bind("kv", Bound(array))
        self.capacity = min(need, most)  # the last block may reach beyond the table of angles

    @property
    def kv_bytes(self) -> int:
        return 0 if self._cache is None else self._cache.array.nbytes

    def snapshot(self) -> dict[str, NDArray[np.float32]]:
        assert self._cache is not None
        self._settle()
        return read_cache(self._cache.array[0], self.kv, self.model.facts, len(self.tokens))

    # -- one pass ----------------------------------------------------------------------------------------------------

    def _fill(self, chunk: NDArray[np.int64]) -> None:
        self._plan(chunk, len(self.tokens))
        self._furthest = max(self._furthest, len(self.tokens) + len(chunk))
        self._launch(len(chunk), rows=0)

    def _settle(self) -> None:
        """Carry out what ``keep`` left to the next pass."""
        if self._moves:
            self._plan(np.zeros(0, np.int64), len(self.tokens))
            self._launch(0, rows=0)

    def _plan(self, tokens: NDArray[np.int64], past: int) -> NDArray[np.int64]:  # [n] -> [6, n]
        """The plan of a chain after ``past`` tokens, bound; callers change what differs."""
        n = len(tokens)
        if past + n > self.capacity:
            self._need_room(past + n)
        plan = self._attach("plan", "plan", (6, n), np.int64)
        plan[TOKEN] = tokens
        plan[POSITION] = plan[PLACE] = np.arange(past, past + n)
        plan[SLOT] = 0
        plan[VISIBLE] = past
        plan[PARENT] = np.arange(-1, n - 1)
        return plan

    def _launch(self, n: int, rows: int, *, hidden: bool = False, times: int = 1, columns: int | None = None) -> Pass:
        """Run what the plan says.

        Args:
            n: rows of the plan.
            rows: how many of the first reach the LM head, -1: the last one.
            hidden: give the residual stream after the last layer.
            times: rows of logits for each of them.
            columns: of the logits; None = those of the model's own LM head.

        Returns a pass whose ``best`` are columns and logits [rows * times, top].
        """
        model, count = self.model, 1 if rows < 0 else rows
        wanted = self._attach("rows", "rows", (count,), np.int64)
        wanted[:] = n - 1 if rows < 0 else np.arange(count)
        self._gates[self._at.hidden] = hidden
        if self._moves:
            self._bind("moves", Bound(np.array([(0, *move) for move in self._moves], np.int64)))
        top, given = int(self._control[TOP]), count * times
        logits = model.buffer("logits", (0 if top else given, columns or self.columns), np.float32)
        ids = model.buffer("ids", (given, top), np.int64)
        values = model.buffer("values", (given, top), np.float32)
        stream = model.buffer("hidden", (n if hidden else 0, model.facts.hidden), np.float32)
        for name, bound in (("logits", logits), ("ids", ids), ("values", values), ("hidden", stream)):
            self._bind_output(name, bound)
        model.session.run_with_iobinding(self._io)
        if self._moves:
            self._moves = []
            self._bind("moves", self._no_moves)
        best = (ids.array, values.array) if top else None
        return Pass(logits.array, stream.array if hidden else None, best)

    def _read_codes(self, on: bool) -> None:
        """Let passes read the coarser copy of the keys, with a window of its own."""
        kv = self.kv
        self._control[READ_CODES] = on
        self._control[WINDOW] = kv.draft_window if on else kv.window
        self._control[SINKS] = kv.sinks if self._control[WINDOW] else 0

    def _set_gates(self, skip: SkipSet | None) -> None:
        if skip is self._skip:
            return
        self._gates[:] = self._plain
        if skip is not None:
            self._gates[[2 * layer for layer in skip.attention]] = False
            self._gates[[2 * layer + 1 for layer in skip.mlp]] = False
        self._skip = skip

    def _bind(self, name: str, bound: Bound) -> Bound:
        self._io.bind_ortvalue_input(name, bound.value)
        self._bound[name] = bound
        return bound

    def _bind_output(self, name: str, bound: Bound) -> None:
        if self._bound.get(name) is not bound:
            self._io.bind_ortvalue_output(name, bound.value)
            self._bound[name] = bound

    def _attach(self, name: str, buffer: str, shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
        bound = self.model.buffer(buffer, shape, dtype)
        if self._bound.get(name) is not bound:
            self._bind(name, bound)
        return bound.array
