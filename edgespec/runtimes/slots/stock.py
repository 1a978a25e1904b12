"""A KV slot over stock operators: keys and values bound once, updated in place.

Facts this rests on (docs/dev/runtime.md): GroupQueryAttention with the same buffer bound as past and present writes in
place; ``seqlens_k`` must be exact, ``total`` may be the capacity; a rollback is a smaller past, nothing else; an
output that is not bound means that the cache is silently not written.

Where a lone row would have other bits than one among others, no pass of a strict graph and no LM head has one row
(``pairs.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.target import EMBEDDING, OPTIONAL, Ids, Output, Pass, Rows
from edgespec.errors import BundleError, InvalidRequest
from edgespec.runtimes.slots.pairs import needs_pairs
from edgespec.runtimes.slots.shared import Bound, Model, inputs_of, own_pages
from edgespec.runtimes.slots.slot import Slot, best_of, depths_of

HIDE = np.float32(-1e30)  # finite, so that a row that hides everything cannot become NaN
# fields that passes take over every graph, over one with gates, and over one with hidden states
ALWAYS = frozenset({"parents", "scored", "read", "draft", "offset", "visible"})
GATED, HIDDEN, NEITHER = frozenset({"skip"}), frozenset({"hidden", "inputs"}), frozenset[str]()


class StockSlot(Slot):
    """A slot for graphs of stock operators; see ``open_slot``."""

    def __init__(self, model: Model, *, context: int | None = None, reserve: int = 256) -> None:
        super().__init__(model, context)
        facts, graph = model.facts, model.graph
        self.can = ALWAYS | (GATED if graph.gated else NEITHER) | (HIDDEN if graph.hidden else NEITHER)
        if graph.hidden and graph.gated:
            self.can |= {"layers", "group"}
        if graph.hidden and model.part.aux_hidden_layers:
            self.can |= {"aux_hidden"}
        if graph.hidden and model.part.decoder:
            self.can |= {"fused"}
        pairs = model.graph.padded and needs_pairs(model, lambda: StockSlot(model, reserve=1))
        self._fewest = 2 if pairs else 1  # rows of a pass, and of an LM head
        self._extra = int(model.graph.padded)  # dummy rows of attention in a pass that may leave it out
        self._least = min(model.graph.min_length or 0, facts.context + model.part.extra_rows)  # tokens of attention
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
        self.reserve(reserve)

    def lacks(self, field: str) -> InvalidRequest:
        return InvalidRequest(
            f"this graph has no {OPTIONAL[field]}",
            "export with `--method self-spec`" if field == "skip" else
            "export with the method that needs them, and use the graph for all methods",
        )  # fmt: skip

    def run(self, wanted: Pass) -> Output:
        if wanted.whole and not (wanted.hidden or wanted.aux_hidden or wanted.top):
            assert wanted.tokens is not None  # what every round of a text asks for needs no check
            return self._run(wanted.tokens, len(self.tokens), range(len(wanted.tokens)), wanted)
        self.check(wanted)
        parts = not wanted.whole
        tokens, past, min_rows = self._given(wanted), len(self.tokens), self.model.part.min_rows
        n = len(tokens)
        scored = n if wanted.scored is None else wanted.scored
        at = range(min_rows) if not scored else range(n - scored, n)  # rows that reach the LM head
        heads, columns = self._open_gates(wanted) if parts else (1, self.columns)
        try:
            if wanted.group:
                output = self._launch_outside(tokens, at, wanted, heads, columns)
            elif wanted.visible is not None:
                output = self._score(tokens, wanted.visible, at, wanted)
            else:
                output = self._run(tokens, past + wanted.offset, at, wanted)
        finally:
            if parts:
                self._reset_gates()
        if wanted.read:
            self.keep(range(n))
        if wanted.layers is not None:
            output.share = (wanted.layers[1] - wanted.layers[0]) / self.layers
        if wanted.group and wanted.group != EMBEDDING:
            output.logits, output.tokens = output.logits.reshape(heads, -1, columns)[:, :scored], self.head_tokens
            if wanted.top:
                output.best = best_of(output.logits, self.head_tokens, wanted.top)
        elif wanted.top:
            best = output.logits.argmax(-1)  # a NaN, if there is one
            values = output.logits[np.arange(scored), best]
            named = self.head_tokens if self.model.part.cut else None
            output.best = best if named is None else named[best], values
        return output

    def _move(self, rows: list[tuple[int, int]]) -> None:
        if rows:
            source, to = ([pair[end] for pair in rows] for end in (0, 1))
            for bound in self._kv.values():  # keys carry positions by depth, so they move without a new rotation
                bound.array[0, :, to] = bound.array[0, :, source]

    def _score(self, tokens: Ids, visible: Ids, at: Sequence[int], wanted: Pass) -> Output:  # [n] each
        """Run rows that each continue some beginning of the text."""
        past, n = len(self.tokens), len(tokens)
        parents = np.arange(-1, n - 1) if wanted.parents is None else wanted.parents
        count = self._attended(past, n)
        self._need_room(past + count)
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
        return self._launch(tokens, positions, past, at, count, wanted)

    # -- parts of the model ------------------------------------------------------------------------------------------

    def _open_gates(self, wanted: Pass) -> tuple[int, int]:
        """Let the parts of the model run that a pass wants -> how many heads, and the columns of each."""
        graph, count, columns = self.model.graph, 1, self.columns
        if wanted.group and wanted.group != EMBEDDING:
            number, group = self._group(wanted.group)
            count, columns = group.count, self._head_size
            self._gate_heads[number], self._gate_lm[...] = True, False
        if graph.gated:
            first, last = (0, 0) if wanted.group else wanted.layers or (0, self.layers)
            layers = np.arange(self.layers)
            self._gate_attn[:] = self._gate_mlp[:] = (layers >= first) & (layers < last)
            if wanted.skip is not None:
                self._gate_attn[list(wanted.skip.attention)] = False
                self._gate_mlp[list(wanted.skip.mlp)] = False
        if wanted.inputs is not None:
            self._feed_hidden(wanted.inputs)
            self._gate_embed[...] = wanted.fused
        return count, columns

    def _reset_gates(self) -> None:
        """Switch all gates on, so that passes run the whole model."""
        graph = self.model.graph
        if graph.gated:
            self._gate_attn[:], self._gate_mlp[:] = True, True
        if graph.hidden:
            self._gate_embed[...] = True
            if self._bound["hidden_in"] is not self._no_hidden_in:
                self._bind("hidden_in", self._no_hidden_in)
        if graph.hidden and self.model.part.heads:
            self._gate_heads[:], self._gate_lm[...] = False, True

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

    def _run(self, tokens: Ids, past: int, at: Sequence[int], wanted: Pass) -> Output:  # [n]
        """Run rows after ``past`` tokens, of which those ``at`` these places reach the LM head."""
        count = self._attended(past, len(tokens))
        self._need_room(past + count)
        # exact where a text is read: attention's scratch space has a row of it per head and token
        self._total[...] = width = past + count if wanted.read else self.capacity
        above = positions = None
        if wanted.parents is None:
            self._attach("bias", "zero_bias", (1, 1, count, width), np.float32)
        else:
            above = wanted.parents.tolist()
            positions = self._tree(above, past, count, width)
        if not wanted.draft:
            self._pending = (tokens.tolist(), above)
        return self._launch(tokens, positions, past, at, count, wanted)

    def _launch_outside(self, tokens: Ids, at: Sequence[int], wanted: Pass, heads: int, columns: int) -> Output:
        """Run a pass that has no layer: nothing of the cache is read or written; see ``_launch``."""
        count = self._rows_run(len(tokens)) + self._extra
        self._attach("bias", "zero_bias", (1, 1, count, self.capacity), np.float32)
        self._total[...] = self.capacity
        return self._launch(tokens, None, 0, at, count, wanted, heads, columns)

    def _launch(
        self,
        tokens: Ids,  # [n]
        positions: Ids | int | None,  # [count]
        past: int,
        at: Sequence[int],
        count: int,
        wanted: Pass,
        heads: int = 1,
        columns: int | None = None,
    ) -> Output:
        """Run a pass whose mask and given rows are bound.

        Args:
            tokens: the rows.
            positions: of all rows of attention; None = one after the other.
            past: tokens before them.
            at: rows that reach the LM head, of which there are ``heads`` with ``columns`` each.
            count: rows of attention.
            wanted: the pass, for the hidden states that it is to give.

        Returns logits [rows, columns] of these rows. Several heads give [heads * rows run, columns], the first
        head's first, and a lone row of each is followed by its double.
        """
        n, rows = len(tokens), len(at)
        fed = self._rows_run(n)
        reached = fed if rows == n else self._rows_run(rows)
        ids = self._attach("input_ids", "ids", (1, fed), np.int64)[0]
        ids[:n] = tokens
        if n < fed:
            ids[n:] = tokens[-1]
        pos = self._attach("position_ids", "pos", (1, count), np.int64)
        if positions is None and count == 1:
            pos[0, 0] = past
        else:
            pos[0] = np.arange(past, past + count) if positions is None else positions
        self._seqlens[0] = past + count - 1
        chosen = self._attach("rows", "rows", (reached,), np.int64)
        if rows == 1:
            chosen[0] = at[0]
        else:
            chosen[:rows] = at
        if rows < reached:
            chosen[rows:] = at[-1]
        logits = self._bind_output("logits", (1, heads * reached, columns or self.columns))[0]
        stream: Rows | None = None
        if wanted.hidden or "hidden" in self._bound:  # once bound, it must fit every pass
            stream = self._bind_output("hidden", (1, fed, self.model.facts.hidden))[0, :n]
        states: Rows | None = None
        tapped = self.model.part.aux_hidden_layers
        if wanted.aux_hidden or "taps" in self._bound:
            states = self._bind_output("taps", (1, fed, len(tapped) * self.model.facts.hidden))[0, :n]
        self.model.run_bound(self._io)
        return Output(logits if heads > 1 else logits[:rows], stream if wanted.hidden else None, aux_hidden=states)

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
        parents = parents + [-1] * (count - len(parents))  # dummy rows see only themselves
        for row, parent in enumerate(parents):
            if parent >= 0:
                bias[row, past : past + row] = bias[parent, past : past + row]
            bias[row, past + row] = 0
        return past + depths_of(parents)

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
