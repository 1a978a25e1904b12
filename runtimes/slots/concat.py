"""A KV slot over a graph that optimum exported: a pass gives all keys and values anew, the new rows behind the old.

Two sets of buffers take turns: what a pass writes is what the next one reads, so nothing is copied beyond the graph's
own concatenation.  Rows that do not stay (refused guesses, a dummy row) are cropped before the next
pass, which copies what stays once.

Strict mode (docs/runtime.md): attention of one row goes through other kernels than that of several.  The strict graph
sees to it; a *padded* one gets a dummy row behind the real ones in every pass instead.  Whether a row then has the same
bits in all passes depends on the graph: ``probe.rows_exact`` says it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.target import Pass, SkipSet
from edgespec.errors import BundleError, InvalidRequest
from edgespec.runtimes.files.operators import EMITTED
from edgespec.runtimes.slots.concat_graph import ConcatPorts
from edgespec.runtimes.slots.shared import Bound, Model
from edgespec.runtimes.slots.slot import PREFILL_CHUNK, Slot

LARGEST_LOGITS = 1 << 22  # values: the graph gives those of every row, of a prefill too


class ConcatSlot(Slot):
    """A slot for graphs of optimum; see ``open_slot``."""

    trees = False

    def __init__(self, model: Model, *, context: int | None = None, reserve: int = 256) -> None:
        super().__init__(model, context)
        try:
            self._ports = ConcatPorts.of_session(model.session)
        except ValueError as error:
            raise BundleError(f"{model.folder / model.graph.file}: the graph {error}", "export it again") from error
        self.chunk = max(1, min(PREFILL_CHUNK, LARGEST_LOGITS // self.columns))
        self._extra = int(model.graph.padded)
        self._io = model.session.io_binding()
        self._halves: list[dict[str, NDArray[np.float32]]] = [{}, {}]  # flat buffers, by the name of the past
        self._now = 0  # which half holds the slot's keys and values
        self._held: dict[str, Bound] = {}  # float32 [1, kv_heads, held rows, head_dim], by the name of the past
        self._held_rows = 0  # the slot's tokens come first; rows behind them are cropped before the next pass
        self._made: dict[str, Bound] = {}  # what the last pass wrote into the other half
        self._ones = np.zeros(0, np.int64)  # [capacity]
        self._positions = np.zeros(0, np.int64)  # [capacity]
        self.reserve(reserve)

    # -- the Target contract ---------------------------------------------------------------------------------------

    def forward(self, tokens: NDArray[np.int64], parents: NDArray[np.int64] | None = None) -> Pass:
        """Run a chain of rows after the slot's tokens -> logits of every row, [n, vocab].

        Raises:
            InvalidRequest: the rows are a tree.
        """
        if parents is not None and not np.array_equal(parents, np.arange(-1, len(tokens) - 1)):
            raise self._cannot("run trees")
        self._pending = (tokens.tolist(), None)
        return Pass(self._run(tokens))

    def keep(self, rows: Sequence[int]) -> None:
        """Commit the first rows of the last forward; the others are forgotten."""
        tokens, _ = self._pending
        count = len(rows)
        if count > len(tokens) or any(row != at for at, row in enumerate(rows)):
            raise self._cannot("keep rows that are not the first ones")
        if count:
            self._commit()
            self.tokens.extend(tokens[:count])
        self._pending = ([], None)

    def forward_draft(self, tokens: NDArray[np.int64], offset: int = 0, skip: SkipSet | None = None) -> Pass:
        """Run rows after the slot's tokens -> logits of the last row, [1, vocab]; no offset, no layer left out."""
        if offset or skip is not None:
            raise self._cannot("leave layers out")
        return Pass(self._run(tokens)[-1:])

    def forward_hypotheses(
        self,
        tokens: NDArray[np.int64],  # [n]
        visible: NDArray[np.int64],  # [n]
        parents: NDArray[np.int64],  # [n]
        skip: SkipSet | None = None,
    ) -> Pass:
        """Like ``Slot.forward_hypotheses`` for chains, each of them a pass of its own."""
        if skip is not None:
            raise self._cannot("leave layers out")
        starts = np.flatnonzero(parents < 0)
        ends = np.append(starts[1:], len(tokens))
        if not np.array_equal(
            np.where(parents < 0, -1, parents), np.where(parents < 0, -1, np.arange(-1, len(parents) - 1))
        ):
            raise self._cannot("run trees")
        self._trim()
        held = list(self.tokens)
        saved = {name: bound.array.copy() for name, bound in self._held.items()}
        found = np.empty((len(tokens), self.columns), np.float32)
        try:
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
                self.tokens = held[: int(visible[start])]
                self._load(saved, len(self.tokens))
                found[start:end] = self._run(tokens[start:end])
        finally:
            self.tokens = held
            self._load(saved, len(held))
        return Pass(found)

    # -- memory ------------------------------------------------------------------------------------------------------

    def reserve(self, tokens: int) -> None:
        """Make room for this many tokens and the rows after them; what the slot holds stays."""
        need = self._grown(tokens)
        if need == self.capacity:
            return
        self._trim()
        size = self._ports.kv_heads * need * self._ports.head_dim
        held, rows = self._held, len(self.tokens)
        self._halves = [{past: np.zeros(size, np.float32) for past, _ in self._ports.cache} for _ in range(2)]
        self._load({past: bound.array for past, bound in held.items()}, rows)
        self._ones, self._positions = np.ones(need, np.int64), np.arange(need)
        self.capacity = need

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV allocated, both sets of buffers."""
        return sum(flat.nbytes for half in self._halves for flat in half.values())

    def held(self) -> list[NDArray[Any]]:
        self._trim()
        return [bound.array for bound in self._held.values()]

    def take_up(self, tokens: Sequence[int], furthest: int) -> list[NDArray[Any]]:
        self.reserve(len(tokens))
        self.tokens = list(tokens)
        self._held, self._held_rows = self._views(self._now, len(tokens)), len(tokens)
        return self.held()

    def snapshot(self) -> dict[str, NDArray[np.float32]]:
        """Copies of the committed keys and values, [kv_heads, tokens, head_dim] by name; for tests and tools."""
        return {name: bound.array[0, :, : len(self.tokens)].copy() for name, bound in self._held.items()}

    # -- one pass ----------------------------------------------------------------------------------------------------

    def _fill(self, chunk: NDArray[np.int64]) -> None:
        self._run(chunk)
        self._commit()

    def _run(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """Run rows after the slot's tokens -> logits [n, vocab]; their keys and values are in ``_made``."""
        past, n = len(self.tokens), len(tokens)
        rows = n + self._extra
        self._need_room(past + rows)
        self._trim()
        ids = self.model.buffer("ids", (1, rows), np.int64)
        ids.array[0, :n], ids.array[0, n:] = tokens, tokens[-1]
        fed = {"input_ids": ids}
        if "attention_mask" in self._ports.fed:
            fed["attention_mask"] = Bound(self._ones[None, : past + rows])
        if "position_ids" in self._ports.fed:
            fed["position_ids"] = Bound(self._positions[None, past : past + rows])
        for name, bound in fed.items():
            self._io.bind_ortvalue_input(name, bound.value)
        self._made = self._views(1 - self._now, past + rows)
        for name, present in self._ports.cache:
            self._io.bind_ortvalue_input(name, self._held[name].value)
            self._io.bind_ortvalue_output(present, self._made[name].value)
        logits = self.model.buffer("logits", (1, rows, self.columns), np.float32)
        self._io.bind_ortvalue_output("logits", logits.value)
        self.model.run_bound(self._io)
        found: NDArray[np.float32] = logits.array[0, :n]
        return found

    def _commit(self) -> None:
        """What the last pass wrote is what the slot holds; rows that do not stay are cropped later."""
        self._now, self._held = 1 - self._now, self._made
        self._held_rows = next(iter(self._made.values())).array.shape[2]

    def _trim(self) -> None:
        """Forget rows behind the slot's tokens."""
        if self._held_rows != len(self.tokens):
            self._load({name: bound.array for name, bound in self._held.items()}, len(self.tokens))

    def _load(self, source: Mapping[str, NDArray[np.float32]], rows: int) -> None:
        """Hold the first ``rows`` rows of ``source``, [1, kv_heads, .., head_dim] by name, in the other half."""
        views = self._views(1 - self._now, rows)
        if rows:
            for name, bound in views.items():
                bound.array[...] = source[name][:, :, :rows]
        self._now, self._held, self._held_rows = 1 - self._now, views, rows

    def _views(self, half: int, rows: int) -> dict[str, Bound]:
        """The beginnings of a half's buffers as [1, kv_heads, rows, head_dim]."""
        shape = (1, self._ports.kv_heads, rows, self._ports.head_dim)
        size = int(np.prod(shape))
        return {name: Bound(flat[:size].reshape(shape)) for name, flat in self._halves[half].items()}

    @staticmethod
    def _cannot(what: str) -> InvalidRequest:
        return InvalidRequest(
            f"this model's graph was exported by optimum: it cannot {what}, only chains of rows after the text",
            f"that needs an architecture that edgespec emits itself: {', '.join(EMITTED)}",
        )
