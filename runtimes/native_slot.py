"""A KV slot over native operators.

One node runs the whole pass.  It is told, for every row, where it stands, what it sees and where its key and value go
(the plan), so a chain, a tree, a draft with layers left out and many hypotheses at once are the same call.  A row has
the same bits whatever stands beside it; nothing is padded.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import InvalidRequest
from edgespec.runtimes.kv import BLOCK, LONGEST_PASS
from edgespec.runtimes.kv_reader import read_cache
from edgespec.runtimes.session import Bound, Model
from edgespec.runtimes.slot import Slot, depths_of
from edgespec.runtimes.target import Pass, SkipSet

TOKEN, POSITION, SLOT, VISIBLE, PARENT, PLACE = range(6)  # lines of the plan
TOP, READ_CODES, WINDOW, SINKS = 0, 4, 5, 6  # among the controls


class NativeSlot(Slot):
    """A slot for the graph of native operators; see ``open_slot``."""

    def __init__(self, model: Model, *, context: int | None = None, reserve: int = 256) -> None:
        super().__init__(model, context)
        self.kv = model.kv
        self._io = model.session.io_binding()
        self._bound: dict[str, Bound] = {}
        self._gates = self._bind("gates", Bound(np.ones(2 * self.layers, bool))).array
        self._control = self._bind("control", Bound(np.array([0, *self.kv.controls()], np.int64))).array
        self._bind("tables", model.key_tables)
        self._no_moves = self._bind("moves", Bound(np.zeros((0, 3), np.int64)))
        self._moves: list[tuple[int, int, int]] = []  # (slot, from, to), before the next pass
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
        return self._launch(len(tokens), rows=len(tokens))

    def forward_best(self, tokens: NDArray[np.int64], parents: NDArray[np.int64] | None = None) -> Pass:
        """Like ``forward``, but only the likeliest token of each row and its logit leave the LM head."""
        self._verify(tokens, parents)
        self._control[TOP] = 1
        try:
            return self._launch(len(tokens), rows=len(tokens))
        finally:
            self._control[TOP] = 0

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
            self._moves = [(0, past + row, past + at) for at, row in enumerate(rows) if row != at]
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
            return self._launch(n, rows=n)
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

    def _launch(self, n: int, rows: int) -> Pass:
        """Run what the plan says; ``rows``: how many of the first rows reach the LM head, -1: the last one."""
        count = 1 if rows < 0 else rows
        wanted = self._attach("rows", "rows", (count,), np.int64)
        wanted[:] = n - 1 if rows < 0 else np.arange(count)
        if self._moves:
            self._bind("moves", Bound(np.array(self._moves, np.int64)))
        top = int(self._control[TOP])
        logits = self.model.buffer("logits", (0 if top else count, self.vocab_size), np.float32)
        ids = self.model.buffer("ids", (count, top), np.int64)
        values = self.model.buffer("values", (count, top), np.float32)
        for name, bound in (("logits", logits), ("ids", ids), ("values", values)):
            self._bind_output(name, bound)
        self.model.session.run_with_iobinding(self._io)
        if self._moves:
            self._moves = []
            self._bind("moves", self._no_moves)
        return Pass(logits.array, best=(ids.array[:, 0], values.array[:, 0]) if top else None)

    def _read_codes(self, on: bool) -> None:
        """Let passes read the coarser copy of the keys, with a window of its own."""
        kv = self.kv
        self._control[READ_CODES] = on
        self._control[WINDOW] = kv.draft_window if on else kv.window
        self._control[SINKS] = kv.sinks if self._control[WINDOW] else 0

    def _set_gates(self, skip: SkipSet | None) -> None:
        if skip is self._skip:
            return
        self._gates[:] = True
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

    def _attach(self, name: str, buffer: str, shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[np.int64]:
        bound = self.model.buffer(buffer, shape, dtype)
        if self._bound.get(name) is not bound:
            self._bind(name, bound)
        return bound.array
