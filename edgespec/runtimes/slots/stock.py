"""A KV slot over stock operators: keys and values bound once, updated in place.

Facts this rests on (docs/dev/runtime.md): GroupQueryAttention with the same buffer bound as past and present writes in
place; ``seqlens_k`` must be exact, ``total`` may be the capacity; a rollback is a smaller past, nothing else; an
output that is not bound means that the cache is silently not written.

Where a lone row would have other bits than one among others, no pass of a strict graph and no LM head has one row
(``pairs.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.target import HYPOTHESES, Heads, Pass, SkipSet
from edgespec.errors import BundleError, InvalidRequest
from edgespec.runtimes.slots.pairs import needs_pairs
from edgespec.runtimes.slots.shared import Bound, Model, inputs_of, own_pages
from edgespec.runtimes.slots.slot import Ids, Rows, Slot, best_of, depths_of

HIDE = np.float32(-1e30)  # finite, so that a row that hides everything cannot become NaN


class StockSlot(Slot):
    """A slot for graphs of stock operators; see ``open_slot``."""

    can = frozenset({HYPOTHESES})

    def __init__(self, model: Model, *, context: int | None = None, reserve: int = 256) -> None:
        super().__init__(model, context)
        facts = model.facts
        pairs = model.graph.padded and needs_pairs(model, lambda: StockSlot(model, reserve=1))
        self._fewest = 2 if pairs else 1  # rows of a pass, and of an LM head
        self._extra = int(model.graph.padded)  # dummy rows of attention in a pass that may leave it out
        self._least = min(model.graph.least_length or 0, facts.context + model.part.headroom)  # tokens of attention
        self._io = model.session.io_binding()
        self._bound: dict[str, Bound] = {}  # what each name is bound to now
        self._kv: dict[str, Bound] = {}
        self._fed = inputs_of(model.session)
        self._seqlens = self._bind("seqlens_k", Bound(np.zeros(1, np.int32))).array
        self._total = self._bind("total", Bound(np.array(0, np.int32))).array
        if model.graph.gated:
            self._gate_attn = self._bind("gate_attn", Bound(np.ones(facts.layers, bool))).array
            self._gate_mlp = self._bind("gate_mlp", Bound(np.ones(facts.layers, bool))).array
        if model.graph.hidden:
            self._gate_embed = self._bind("gate_embed", Bound(np.array(True))).array
            columns = model.part.decoder.columns if model.part.decoder else facts.hidden
            self._no_hidden_in = self._bind("hidden_in", Bound(np.zeros((1, 1, columns), np.float32)))
        if model.graph.hidden and model.part.heads:
            self._gate_lm = self._bind("gate_lm", Bound(np.array(True))).array
            self._gate_heads = self._bind("gate_heads", Bound(np.zeros(len(model.part.heads), bool))).array
        self._skip: SkipSet | None = None
        self.reserve(reserve)

    def forward(self, tokens: Ids, parents: Ids | None = None, best: bool = False) -> Pass:
        above = None if parents is None else parents.tolist()
        self._pending = (tokens.tolist(), above)
        return self._run(tokens, len(self.tokens), rows=len(tokens), parents=above)

    def _move(self, rows: list[tuple[int, int]]) -> None:
        if rows:
            source, to = ([pair[end] for pair in rows] for end in (0, 1))
            for bound in self._kv.values():  # keys carry positions by depth, so they move without a new rotation
                bound.array[0, :, to] = bound.array[0, :, source]

    def forward_draft(self, tokens: Ids, offset: int = 0, skip: SkipSet | None = None, best: bool = False) -> Pass:
        self._set_gates(skip)
        try:
            return self._run(tokens, len(self.tokens) + offset, rows=-1)
        finally:
            self._set_gates(None)

    def forward_hypotheses(self, tokens: Ids, visible: Ids, parents: Ids, skip: SkipSet | None = None) -> Pass:
        past, n = len(self.tokens), len(tokens)
        count = self._attended(past, n)
        self._need_room(past + count)
        self._set_gates(skip)
        try:
            mask = self._attach("bias", "hypotheses_bias", (1, 1, count, past + count), np.float32)[0, 0]
            mask[:, :] = HIDE
            for row in range(count):
                if row < n and parents[row] >= 0:
                    mask[row] = mask[parents[row]]
                elif row < n:
                    mask[row, : visible[row]] = 0
                mask[row, past + row] = 0
            self._total[...] = past + count
            positions = np.append(visible + depths_of(parents.tolist()), [past + n] * (count - n))
            return self._launch(tokens, positions, past, range(n), count, self._says_hidden)
        finally:
            self._set_gates(None)

    # -- parts of the model ------------------------------------------------------------------------------------------

    def embed(self, tokens: Ids) -> Rows:
        with self._layers(0, 0, None):
            hidden = self._launch_outside(tokens, [0], hidden=True).hidden
        assert hidden is not None
        return hidden.copy()

    def forward_inputs(self, inputs: Rows, recycled: bool, best: bool = False, parents: Ids | None = None) -> Pass:
        tokens = np.zeros(len(inputs), np.int64)
        self._feed_hidden(inputs)
        above = None if parents is None else parents.tolist()
        self._pending, self._gate_embed[...] = (tokens.tolist(), above), not recycled
        try:
            rows = -1 if above is None else len(inputs)
            output = self._run(tokens, len(self.tokens), rows=rows, parents=above, hidden=True)
        finally:
            self._gate_embed[...] = True
        if best:
            at = output.logits.argmax(-1)  # a NaN, if there is one
            values = output.logits[np.arange(len(at)), at]
            output.best = at if self.head_tokens is None else self.head_tokens[at], values
        return output

    def absorb_inputs(self, inputs: Rows) -> None:
        self.forward_inputs(inputs, recycled=False)
        self.keep(range(len(inputs)))

    @property
    def _says_hidden(self) -> bool:
        """Whether passes are to say their hidden states, and the graph can."""
        return self.keep_hidden and self.model.graph.hidden

    def forward_heads(self, group: str, hidden: Rows, top: int = 0) -> Heads:
        at, which = self._group(group)
        r = len(hidden)
        self._gate_heads[at], self._gate_lm[...] = True, False
        try:
            with self._layers(0, 0, hidden):
                logits = self._launch_outside(np.zeros(r, np.int64), range(r), which.count, self._head_size).logits
        finally:
            self._gate_heads[at], self._gate_lm[...] = False, True
        logits = logits.reshape(which.count, -1, self._head_size)[:, :r]
        return Heads(logits, self.head_tokens) if not top else Heads(None, None, best_of(logits, self.head_tokens, top))

    def forward_layers(self, rows: Ids | Rows, offset: int, first: int, last: int) -> Rows:
        n = len(rows)
        tokens = rows if first == 0 else np.zeros(n, np.int64)  # [n]
        with self._layers(first, last, None if first == 0 else np.asarray(rows, np.float32)):
            output = self._run(np.asarray(tokens, np.int64), len(self.tokens) + offset,
                               rows=self.model.part.min_rows, hidden=True)  # fmt: skip
        assert output.hidden is not None
        return output.hidden.copy()

    def forward_from(self, tokens: Ids, hidden: Rows, layer: int, best: bool = False) -> Pass:
        self._pending = (tokens.tolist(), None)
        with self._layers(layer, self.layers, hidden):
            return self._run(tokens, len(self.tokens), rows=len(tokens))

    @contextmanager
    def _layers(self, first: int, last: int, hidden: Rows | None) -> Iterator[None]:
        """Let passes run these layers only, from rows of the residual stream [n, hidden] if there are any."""
        if not (self.model.graph.hidden and self.model.graph.gated):
            raise self._lacks("hidden states")
        layers = np.arange(self.layers)
        on = (layers >= first) & (layers < last)
        self._gate_attn[:], self._gate_mlp[:], self._gate_embed[...] = on, on, hidden is None
        if hidden is not None:
            self._feed_hidden(hidden)
        try:
            yield
        finally:
            self._gate_attn[:], self._gate_mlp[:], self._gate_embed[...] = True, True, True
            if hidden is not None:
                self._bind("hidden_in", self._no_hidden_in)

    # -- memory ------------------------------------------------------------------------------------------------------

    def reserve(self, tokens: int) -> None:
        need = self._grown(tokens)
        if need == self.capacity:
            return
        facts, used = self.model.facts, len(self.tokens)
        for layer in range(facts.layers):
            for kind in ("key", "value"):
                name = f"past_key_values.{layer}.{kind}"
                array = own_pages((1, facts.kv_heads, need, facts.head_dim), np.float32)
                if name in self._kv:
                    array[:, :, :used] = self._kv[name].array[:, :, :used]
                self._kv[name] = bound = Bound(array)
                self._bind(name, bound)
                self._io.bind_ortvalue_output(f"present.{layer}.{kind}", bound.value)
        self.capacity = need

    @property
    def kv_bytes(self) -> int:
        return sum(bound.array.nbytes for bound in self._kv.values())

    def stand_in(self, tokens: int) -> None:
        self.reserve(tokens)
        for bound in self._kv.values():
            bound.array[:, :, :tokens] = 0  # untouched pages would cost no reading
        self.tokens = [0] * tokens

    def held(self) -> list[NDArray[Any]]:
        return [bound.array[0, :, : len(self.tokens)] for bound in self._kv.values()]

    def snapshot(self) -> dict[str, Rows]:
        return {name: bound.array[0, :, : len(self.tokens)].copy() for name, bound in self._kv.items()}

    # -- one pass ----------------------------------------------------------------------------------------------------

    def _attended(self, past: int, n: int) -> int:
        """Count the rows that attention has in a pass of ``n`` after ``past`` tokens: some of them are dummies."""
        return max(self._rows_run(n) + self._extra, self._least - past)

    def _rows_run(self, n: int) -> int:
        """Count the rows that a pass or an LM head gets for ``n``: two for one where lone rows go as pairs."""
        return max(n, self._fewest) if n else 0

    def _fill(self, chunk: Ids) -> Rows | None:
        past, n = len(self.tokens), len(chunk)
        total = past + self._attended(past, n)  # exact: attention's scratch space has a row of it per head and token
        return self._run(chunk, past, rows=self.model.part.min_rows, total=total).aux_hidden

    def _run(
        self,
        tokens: Ids,  # [n]
        past: int,
        *,
        rows: int,
        parents: list[int] | None = None,
        total: int | None = None,
        hidden: bool = False,
    ) -> Pass:
        n = len(tokens)
        count = self._attended(past, n)
        self._need_room(past + count)
        self._total[...] = width = total or self.capacity
        if parents is None:
            self._attach("bias", "zero_bias", (1, 1, count, width), np.float32)
            positions = None
        else:
            positions = self._tree(parents, past, count, width)
        wanted = [n - 1] if rows < 0 else range(rows)
        return self._launch(tokens, positions, past, wanted, count, hidden or self._says_hidden)

    def _launch_outside(
        self, tokens: Ids, wanted: Sequence[int], heads: int = 1, columns: int | None = None, hidden: bool = False
    ) -> Pass:
        """Run a pass that has no layer: nothing of the cache is read or written; see ``_launch``."""
        count = self._rows_run(len(tokens)) + self._extra
        self._attach("bias", "zero_bias", (1, 1, count, self.capacity), np.float32)
        self._total[...] = self.capacity
        return self._launch(tokens, None, 0, wanted, count, hidden, heads, columns)

    def _launch(
        self,
        tokens: Ids,  # [n]
        positions: Ids | None,  # [count]
        past: int,
        wanted: Sequence[int],
        count: int,
        hidden: bool = False,
        heads: int = 1,
        columns: int | None = None,
    ) -> Pass:
        """Run a pass whose mask and given rows are bound.

        Args:
            tokens: the rows.
            positions: of all rows of attention; None = one after the other.
            past: tokens before them.
            wanted: rows that reach the LM head, of which there are ``heads`` with ``columns`` each.
            count: rows of attention.
            hidden: give the residual stream of all rows.

        Returns logits [rows, columns] of the wanted rows. Several heads give [heads * rows run, columns], the first
        head's first, and a lone row of each is followed by its double.
        """
        n, rows = len(tokens), len(wanted)
        fed, reached = self._rows_run(n), self._rows_run(rows)
        ids = self._attach("input_ids", "ids", (1, fed), np.int64)[0]
        ids[:n] = tokens
        if n < fed:
            ids[n:] = tokens[-1]
        pos = self._attach("position_ids", "pos", (1, count), np.int64)
        pos[0] = np.arange(past, past + count) if positions is None else positions
        self._seqlens[0] = past + count - 1
        chosen = self._attach("rows", "rows", (reached,), np.int64)
        chosen[:rows] = wanted
        if rows < reached:
            chosen[rows:] = wanted[-1]
        logits = self._bind_output("logits", (1, heads * reached, columns or self.columns))[0]
        stream: Rows | None = None
        if hidden or "hidden" in self._bound:  # once bound, it must fit every pass
            stream = self._bind_output("hidden", (1, fed, self.model.facts.hidden))[0, :n]
        states: Rows | None = None
        if tapped := self.model.part.tapped:
            wants = self.model.graph.hidden and (self.keep_aux_hidden or self.aux_hidden_sink is not None)
            if wants or "taps" in self._bound:
                states = self._bind_output("taps", (1, fed, len(tapped) * self.model.facts.hidden))[0, :n]
        self.model.run_bound(self._io)
        return Pass(logits if heads > 1 else logits[:rows], stream if hidden else None, aux_hidden=states)

    def _feed_hidden(self, rows: Rows) -> None:  # [n, columns]
        """Bind rows that a pass begins with instead of tokens."""
        fed = self._rows_run(len(rows))
        given = self._attach("hidden_in", "hidden_in", (1, fed, rows.shape[1]), np.float32)[0]
        given[: len(rows)] = rows
        if len(rows) < fed:
            given[len(rows) :] = rows[-1]

    def _bind_output(self, name: str, shape: tuple[int, ...]) -> Rows:
        bound = self.model.buffer(name, shape, np.float32)
        if self._bound.get(name) is not bound:
            self._io.bind_ortvalue_output(name, bound.value)
            self._bound[name] = bound
        array: Rows = bound.array
        return array

    def _tree(self, parents: list[int], past: int, count: int, width: int) -> Ids:
        """Bind the mask of a tree; returns the rows' positions [count]."""
        bias = self._attach("bias", "tree_bias", (1, 1, count, width), np.float32)[0, 0]
        bias[:, :past] = 0
        bias[:, past:] = HIDE
        parents = parents + [-1] * (count - len(parents))  # dummy rows stand alone
        for row, parent in enumerate(parents):
            if parent >= 0:
                bias[row, past : past + row] = bias[parent, past : past + row]
            bias[row, past + row] = 0
        return past + depths_of(parents)

    def _set_gates(self, skip: SkipSet | None) -> None:
        if skip is self._skip:
            return
        if not self.model.graph.gated:
            raise InvalidRequest(
                "this graph has no gates: layers cannot be skipped", "export with `--method self-spec`"
            )
        self._gate_attn[:], self._gate_mlp[:] = True, True
        if skip is not None:
            self._gate_attn[list(skip.attention)] = False
            self._gate_mlp[list(skip.mlp)] = False
        self._skip = skip

    def _bind(self, name: str, bound: Bound) -> Bound:
        if name not in self._fed:
            file = self.model.folder / self.model.graph.file
            raise BundleError(f"{file}: expected an input {name!r}, and there is none", "export the bundle again")
        self._io.bind_ortvalue_input(self._fed[name], bound.value)
        self._bound[name] = bound
        return bound

    def _attach(self, name: str, buffer: str, shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
        bound = self.model.buffer(buffer, shape, dtype)
        if self._bound.get(name) is not bound:
            self._bind(name, bound)
        return bound.array
