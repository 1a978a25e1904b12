"""A KV slot over native operators.

One node runs the whole pass.  It is told, for every row, where it stands, what it sees and where its key and value go
(the plan), so a chain, a tree, a draft with layers left out and many hypotheses at once are the same call.  A row has
the same bits whatever stands beside it; nothing is padded.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.decoding.target import BEST, HYPOTHESES, Heads, Pass, SkipSet
from edgespec.decoding.text import INSERTED
from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.formats import LONGEST_PASS, STATE_ROWS
from edgespec.runtimes.files.manifest import EMBEDDING, MARKOV
from edgespec.runtimes.files.session_file import fill
from edgespec.runtimes.slots.memory import Memory
from edgespec.runtimes.slots.native_runner import PARENT, PLACE, POSITION, SLOT, TOP, VISIBLE, NativeRunner
from edgespec.runtimes.slots.slot import Ids, Rows, Slot, depths_of


class NativeSlot(NativeRunner):
    """A slot for the graph of native operators; see ``open_slot``."""

    can = frozenset({BEST, HYPOTHESES})

    exact_trees = True

    # -- the Target contract ---------------------------------------------------------------------------------------

    def crop(self, length: int) -> int:
        del self.tokens[length:]
        same = len(self.tokens)
        if self._turns is not None:
            self._turns.crop(same)
        if self._lost(same):
            self._marks.add(same)  # what was gone back to once is likely to be gone back to again
            same = self._restart(same)
        elif self._checkpoints:
            self._checkpoints.crop(same)
        self._certain = same
        return same

    def cropped(self, length: int) -> int:
        same = min(length, len(self.tokens))
        if not self._lost(same):
            return same
        kept = self._checkpoints.lengths if self._checkpoints else []
        return max((at for at in kept if at <= same), default=0)

    def _lost(self, same: int) -> bool:
        """Tell whether exact keys or states that rows after ``same`` tokens read are overwritten, or hold more."""
        gone = self.stateful and (self._furthest - same > LONGEST_PASS or same < self._since)
        return bool(gone or (self._held > same).any())

    def mark(self, lengths: Sequence[int], most: int) -> None:
        self._marks = set(lengths)
        if self._checkpoints:
            self._checkpoints.limit(most)

    def taken_up(self) -> bool:
        if (self._held != len(self.tokens)).any():
            self._restart()
            return False
        self.remember()
        return True

    def attend(self, memory: Memory) -> None:
        """Attend over this memory from now on; tokens that were read beside another source are forgotten."""
        if not self.attends or memory.of.model is not self.model:
            raise InvalidRequest("a memory of another model, or of one that attends over nothing but its own text")
        memory.hold()
        self.leave()
        self.memory = memory
        if self.beside != memory.digest:
            self.crop(0)
            self.beside = memory.digest

    def leave(self) -> None:
        if self.memory is not None:
            self.memory.release()
        self.memory = None

    def close(self) -> None:
        self.leave()
        super().close()

    def begin_like(self, other: Slot, length: int) -> int:
        assert isinstance(other, NativeSlot)
        if other.beside != self.beside:
            return self.crop(0)
        # what is moved by the next pass does not lie where it should yet
        same = other.cropped(min([length, *(to for _, _, to in other._moves)]))
        if not same:
            return self.crop(0)
        back = other._lost(same)  # to a checkpoint
        self._copy(other, same, same if back else other.furthest)
        self._since = other._since
        if self._checkpoints and other._checkpoints:
            self._checkpoints.share(other._checkpoints, same)
        return self._restart(same) if back else same

    def _copy(self, other: NativeSlot, tokens: int, furthest: int) -> None:
        """Hold the first tokens of another slot."""
        arrays = self.take_up(other.tokens[:tokens], furthest)
        fill(arrays, other._whole()[: self.kv.nbytes(self.model.facts, tokens)])

    def remember(self) -> None:
        """Keep the states of the text as it is now."""
        if self._checkpoints and not self.revocable and (self._held == len(self.tokens)).all():
            self._settle()
            self._checkpoints.take(self._head, len(self.tokens))

    def end_of_piece(self, tokens: Sequence[int], stop: int) -> int:
        stop = min(stop, len(tokens))
        return self.model.inserted.block_end(tokens, stop) if self._both_ways else stop

    def prefill(self, tokens: Sequence[int]) -> None:
        past = len(self.tokens)
        self.reserve(past + len(tokens))
        marks = [mark - past for mark in self._marks if past < mark <= past + len(tokens)] if self._checkpoints else []
        start = 0
        for stop in sorted(marks):
            super().prefill(tokens[start:stop])
            self.remember()
            start = stop
        super().prefill(tokens[start:])

    def prefill_hidden(self, tokens: Ids) -> Rows:
        """Append a chunk of tokens [n] -> the residual stream after the last layer, [n, hidden], a view."""
        self.reserve(len(self.tokens) + len(tokens))
        hidden = self._run_chunk(tokens, hidden=True).hidden
        assert hidden is not None
        self.tokens.extend(tokens.tolist())
        return hidden

    def forward(self, tokens: Ids, parents: Ids | None = None, best: bool = False) -> Pass:
        self._verify(tokens, parents)
        n = len(tokens)
        if not best:
            return self._launch(n, rows=n, hidden=self.keep_hidden, aux_hidden=self.keep_aux_hidden)
        self._control[TOP] = 1  # not ``_top``: every token of a greedy text comes through here
        try:
            return self._likeliest(self._launch(n, rows=n, hidden=self.keep_hidden, aux_hidden=self.keep_aux_hidden))
        finally:
            self._control[TOP] = 0

    def _verify(self, tokens: Ids, parents: Ids | None) -> None:
        """Plan a pass whose rows may be kept; [n], [n]."""
        if self.model.facts.convolutions and len(tokens) > LONGEST_PASS:
            raise InvalidRequest(f"a pass of {len(tokens)} rows: expected at most {LONGEST_PASS}", "prefill first")
        past = len(self.tokens)
        self._furthest = max(self._furthest, past + len(tokens))  # kept or not, the rows are in the ring
        self._pending = (tokens.tolist(), None if parents is None else parents.tolist())
        plan = self._plan(tokens, past)
        if parents is not None:
            plan[PARENT] = parents
            plan[POSITION] = past + depths_of(parents.tolist())

    def _move(self, rows: list[tuple[int, int]]) -> None:
        self._moves = [(self.number, at, to) for at, to in rows]

    def forward_draft(self, tokens: Ids, offset: int = 0, skip: SkipSet | None = None, best: bool = False) -> Pass:
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

    # -- parts of the model ------------------------------------------------------------------------------------------

    def forward_heads(self, group: str, hidden: Rows, top: int = 0) -> Heads:
        """Compute a group of heads from rows of the residual stream, [r, hidden].

        Neither the cache nor the last forward is touched: its rows may still be kept afterwards.
        """
        number, found = self._group(group)
        r = len(hidden)
        self._nowhere(r)
        self._load(hidden, r)
        with self._parts((), load=True, group=number), self._top(top):
            output = self._launch(r, rows=r, times=found.count, columns=self._head_size)
        if not top:
            return Heads(output.logits.reshape(found.count, r, self._head_size), self.head_tokens)
        assert output.best is not None
        ids, values = output.best
        if self.head_tokens is not None:  # -1 where more are asked for than there are
            ids = np.where(ids < 0, -1, self.head_tokens[ids])
        shape = found.count, r, top
        return Heads(None, self.head_tokens, (ids.reshape(shape), values.reshape(shape)))

    def forward_layers(self, rows: Ids | Rows, offset: int, first: int, last: int) -> Rows:
        if not 0 <= first <= last <= self.layers:
            raise InvalidRequest(f"layers {first} to {last}: expected a range within 0 to {self.layers}")
        past, n, load = len(self.tokens) + offset, len(rows), first > 0
        if not load:
            self._tried |= zip(range(past, past + n), rows.tolist(), strict=True)
        # layers with embeddings of their own ask for the tokens again
        tokens = [self._tried.get(at, 0) for at in range(past, past + n)] if load else rows
        plan = self._plan(np.asarray(tokens, np.int64), past)
        plan[VISIBLE] = past
        self._furthest = max(self._furthest, past + n)
        if load:
            self._load(rows, n)
        with self._parts(range(first, last), load):
            hidden = self._launch(n, rows=0, hidden=True).hidden
        assert hidden is not None
        return hidden.copy()

    def forward_from(self, tokens: Ids, hidden: Rows, layer: int, best: bool = False) -> Pass:
        if not 0 <= layer <= self.layers:
            raise InvalidRequest(f"resumed after {layer} layers: expected 0 to {self.layers}")
        n = len(tokens)
        self._load(hidden, n)
        self._verify(tokens, None)
        with self._parts(range(layer, self.layers), load=True, lm=True), self._top(int(best)):
            return self._likeliest(self._launch(n, rows=n, hidden=self.keep_hidden))

    def _likeliest(self, output: Pass) -> Pass:
        """Name the only best of each row of a pass as tokens [n]."""
        if output.best is not None:
            ids, values = output.best[0][:, 0], output.best[1][:, 0]
            if self.model.part.cut and self.head_tokens is not None:
                ids = self.head_tokens[ids]
            output.best = ids, values
        return output

    # -- a drafter conditioned on a target ---------------------------------------------------------------------------

    def embed(self, tokens: Ids) -> Rows:
        own = next((at for at, group in enumerate(self.model.part.heads) if group.kind == EMBEDDING), None)
        plan = self._nowhere(len(tokens))
        self._name(plan, tokens)
        plan[POSITION] = np.arange(len(tokens))
        if own is not None:  # a drafter's, behind its layers
            self._load(np.zeros((len(tokens), self._columns_in), np.float32), len(tokens))
        with self._parts((), load=own is not None, group=own):
            hidden = self._launch(len(tokens), rows=0, hidden=True).hidden
        assert hidden is not None
        return hidden.copy()

    def _nowhere(self, n: int) -> Ids:  # [6, n]
        """Plan rows that no layer runs over."""
        plan = self._attach("plan", (6, n), np.int64)
        plan[:], plan[PARENT] = 0, -1
        self._offsets = 0
        if self.attends:
            self._see(n, 0, 0, None)  # nor does any row attend
        return plan

    def forward_inputs(self, inputs: Rows, recycled: bool, best: bool = False, parents: Ids | None = None) -> Pass:
        n = len(inputs)
        self._load(inputs, n)
        self._verify(np.zeros(n, np.int64), parents)
        with self._parts(range(self.layers), load=recycled, lm=True), self._top(int(best)):
            return self._likeliest(self._launch(n, rows=-1 if parents is None else n, hidden=True))

    def forward_block(self, inputs: Rows, best: bool = False, hidden: bool = False) -> Pass:
        n, decoder = len(inputs), self.model.part.decoder
        first = 0 if decoder and decoder.anchor else 1
        self._load(inputs, n)
        self._verify(np.zeros(n, np.int64), np.full(n, -1, np.int64))
        plan = self._bound["plan"].array
        plan[POSITION], plan[VISIBLE] = plan[PLACE], len(self.tokens) + n
        with self._parts(range(self.layers), load=True, lm=True), self._top(int(best)):
            return self._likeliest(self._launch(n, rows=n - first, first=first, hidden=hidden))

    def forward_markov(self, tokens: Ids) -> Rows:
        number, _ = self._group(MARKOV)
        n = len(tokens)
        self._name(self._nowhere(n), tokens)
        self._load(np.zeros((n, self._columns_in), np.float32), n)
        with self._parts((), load=True, group=number):
            return self._launch(n, rows=n).logits

    def forward_over(self, other: Slot, rows: int, inputs: Rows, recycled: bool, best: bool = False) -> Pass:
        plan = self._plan(np.zeros(1, np.int64), 0)  # the cache is the other's: none of this one's own need grow
        self._borrow(other)
        self._load(inputs, 1)
        # its own place is one that it sees anyway: nothing is written there
        plan[POSITION], plan[VISIBLE], plan[PLACE], plan[SLOT] = rows, rows, rows - 1, self.number
        with self._parts(range(self.layers), load=recycled, lm=True), self._top(int(best)):
            return self._likeliest(self._launch(1, rows=-1, hidden=True))

    def absorb_inputs(self, inputs: Rows) -> None:
        n, decoder = len(inputs), self.model.part.decoder
        self._load(inputs, n)
        self._verify(np.zeros(n, np.int64), None)
        # of a block nothing but keys and values; else nothing reads what the last MLP gives
        with self._parts(() if decoder and decoder.block else range(self.layers), load=False):
            self._gates[2 * self.layers - 1] = False
            self._launch(n, rows=0)
        self.keep(range(n))

    # -- for tools: scoring many hypotheses in one pass --------------------------------------------------------------

    def forward_hypotheses(self, tokens: Ids, visible: Ids, parents: Ids, skip: SkipSet | None = None) -> Pass:
        n, past, facts = len(tokens), len(self.tokens), self.model.facts
        reach = max(self._furthest, past + n) - int(visible.min()) + facts.taps
        behind = facts.delta is not None and (visible < past).any()
        if behind or (facts.convolutions and (reach > STATE_ROWS or visible.min() < self._since)):
            return self._hypotheses_in_turn(tokens, visible, parents, skip)
        if self.kv.ring and past + n - int(visible.min()) > LONGEST_PASS:
            raise InvalidRequest(
                f"hypotheses reach {past + n - int(visible.min())} tokens back, but exact recent keys {LONGEST_PASS}",
                "score hypotheses with attention f32, f16 or int8",
            )
        return self._hypotheses(tokens, visible, parents, skip)

    def _hypotheses(self, tokens: Ids, visible: Ids, parents: Ids, skip: SkipSet | None) -> Pass:
        n, past = len(tokens), len(self.tokens)
        plan = self._plan(tokens, past)
        plan[VISIBLE], plan[PARENT] = visible, parents
        plan[POSITION] = visible + depths_of(parents.tolist())
        if self._turns is not None:
            self._offsets = self._turns.behind(visible)
        self._furthest = max(self._furthest, past + n)
        self._set_gates(skip)
        try:
            return self._launch(n, rows=n, hidden=self.keep_hidden)
        finally:
            self._set_gates(None)

    def _hypotheses_in_turn(self, tokens: Ids, visible: Ids, parents: Ids, skip: SkipSet | None) -> Pass:
        """Run each right behind the text that it sees: states that far back are not kept, the text is run again."""
        text = list(self.tokens)
        self._restart()
        columns = self.columns if skip is None else min(skip.head_rows or self.columns, self.columns)
        logits = np.empty((len(tokens), columns), np.float32)
        hidden = np.empty((len(tokens), self.model.facts.hidden), np.float32) if self.keep_hidden else None
        for part in sorted(
            np.split(np.arange(len(tokens)), np.flatnonzero(parents < 0)[1:]), key=lambda at: visible[at[0]]
        ):
            self.prefill(text[len(self.tokens) : int(visible[part[0]])])
            own = np.where(parents[part] < 0, -1, parents[part] - part[0])
            found = self._hypotheses(tokens[part], visible[part], own, skip)
            logits[part] = found.logits
            if hidden is not None and found.hidden is not None:
                hidden[part] = found.hidden
        self.prefill(text[len(self.tokens) :])
        return Pass(logits, hidden)

    def _restart(self, most: int = 0) -> int:
        """Forget the text behind the last checkpoint of at most so many tokens, or all of it; returns what is left."""
        self._held[:] = 0
        left = self._checkpoints.restore(self._head, most) if self._checkpoints else 0
        del self.tokens[left:]
        self._moves, self._furthest, self._certain, self._since = [], left, left, left
        return left

    # -- one pass ----------------------------------------------------------------------------------------------------

    def _fill(self, chunk: Ids) -> Rows | None:
        return self._run_chunk(chunk, aux_hidden=self.aux_hidden_sink is not None).aux_hidden

    def _see_blocks(self, plan: Ids, chunk: Ids) -> None:  # [6, n], [n]
        """Let rows of a part of an image see all of it."""
        for start, item, row, count in self.model.inserted.runs(chunk):
            for at in range(count):
                plan[VISIBLE, start + at] = plan[PLACE, start] + item.end_of_block(row + at) - row
                plan[PARENT, start + at] = -1

    def _run_chunk(self, chunk: Ids, *, hidden: bool = False, aux_hidden: bool = False) -> Pass:
        plan = self._plan(chunk, len(self.tokens))
        if self._both_ways and int(chunk.max(initial=0)) >= INSERTED:
            self._see_blocks(plan, chunk)
        self._certain = len(self.tokens) + len(chunk)
        self._furthest = max(self._furthest, len(self.tokens) + len(chunk))
        return self._launch(len(chunk), rows=0, hidden=hidden, aux_hidden=aux_hidden, read=len(chunk))
