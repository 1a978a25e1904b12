"""Several sequences over native operators whose passes run together: the weights are read once for all of them.

One array [S, bytes] holds the caches.  A slot of the batch is a ``NativeSlot`` over its row, with all it can do alone;
``forward`` gathers the rows of many slots into one plan.  A row has the same bits whatever stands beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.target import Pass
from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.formats import LONGEST_PASS
from edgespec.runtimes.slots.native import NativeSlot
from edgespec.runtimes.slots.native_runner import COMMITTED, PARENT, SLOT, grown
from edgespec.runtimes.slots.shared import Bound, Model, give_back_pages, own_pages
from edgespec.runtimes.slots.slot import Ids


@dataclass(frozen=True)
class BatchPass:
    """A pass that a slot of a batch wants.

    Attributes:
        slot: which slot.
        tokens: int64 [n], its rows.
        parents: int64 [n], parent row of each, -1 for row 0; None = a chain.
    """

    slot: BatchSlot
    tokens: Ids
    parents: Ids | None = None


class NativeBatch:
    """Slots whose passes may run together.

    Args:
        model: the session and shared buffers, of native operators.
        width: how many slots.
        context: most tokens of each sequence.
        reserve: tokens to allocate for at once; the caches of all slots grow when one needs more.

    Attributes:
        slots: [width].
    """

    def __init__(self, model: Model, width: int, *, context: int | None = None, reserve: int = 256) -> None:
        if width < 1 or model.graph.operators != "native":
            raise InvalidRequest(f"a batch of {width}: expected at least one slot, and native operators")
        self.model, self.width = model, width
        self._array = np.zeros((width, 0), np.uint8)  # [width, bytes]; pages never written cost nothing
        self.capacity = 0
        self._runner = _Runner(model, context=context)
        self._context, self._closing = context, False
        self.slots: list[BatchSlot] = []
        for number in range(width):
            self.slots.append(BatchSlot(self, number, context, reserve))

    def close(self) -> None:
        self._closing = True
        for slot in (*self.slots, self._runner):
            slot.close()
        vars(self).clear()

    def renew(self, number: int) -> None:
        """Put a new slot where one was closed; the memory of its row goes back to the system."""
        if not self._closing:
            row = self._array.shape[1]
            give_back_pages(self._array, number * row, (number + 1) * row)
            self.slots[number] = BatchSlot(self, number, self._context, 0)

    def forward(self, wanted: Sequence[BatchPass], best: bool = False) -> list[Pass]:
        """Run the passes of several slots as one, as ``forward`` or ``forward_best`` of each of them would.

        Args:
            wanted: at most one of each slot, and at most 128 rows in all.
            best: only the likeliest token of each row and its logit.

        Returns:
            their passes, in order; copies, which stay valid.

        Raises:
            InvalidRequest: a slot twice, or of another batch, or too many rows.
        """
        order = sorted(range(len(wanted)), key=lambda i: wanted[i].slot.number)
        numbers = [wanted[i].slot.number for i in order]
        if len(set(numbers)) < len(numbers) or any(item.slot.batch is not self for item in wanted):
            raise InvalidRequest("expected at most one pass of each slot of this batch")
        if (rows := sum(len(item.tokens) for item in wanted)) > LONGEST_PASS:
            raise InvalidRequest(f"{rows} rows in a pass: expected at most {LONGEST_PASS}", "gather fewer sequences")
        for item in wanted:
            item.slot.make_room(len(item.tokens))  # before any plan: all caches move when one grows
        plans: list[Ids] = []  # [6, n] each
        runner, first = self._runner, [0] * len(wanted)
        at = 0
        for i in order:
            slot = wanted[i].slot
            plan = slot.planned(wanted[i].tokens, wanted[i].parents)
            plan[PARENT] += np.where(plan[PARENT] >= 0, at, 0)
            runner.add_moves(slot.take_moves())
            plans.append(plan)
            first[i], at = at, at + plan.shape[1]
        runner.keep_hidden = any(item.slot.keep_hidden for item in wanted)
        runner.keep_aux_hidden = any(item.slot.keep_aux_hidden for item in wanted)
        output = runner.gathered(np.concatenate(plans, axis=1), best)
        return [_part(output, first[i], item) for i, item in enumerate(wanted)]

    def grow(self, tokens: int) -> None:
        """Make room for this many tokens in every slot, and the rows after them."""
        facts, kv = self.model.facts, self.model.kv
        need, capacity = grown(self.model, tokens, self.capacity)
        if need:
            # a block of tokens lies together: what is there already is the beginning of the larger cache
            array = own_pages((self.width, kv.nbytes(facts, need)), np.uint8)
            for number, slot in enumerate(self.slots):
                row = self._array.shape[1]
                used = min(kv.nbytes(facts, slot.furthest), row)
                array[number, :used] = self._array[number, :used]
                give_back_pages(self._array, number * row, (number + 1) * row)  # so that no text is there twice
            self._array, self.capacity = array, capacity
            self._runner.attach(array, self.capacity)
        for slot in self.slots:
            if slot.capacity != self.capacity:
                slot.attach(self._array[slot.number : slot.number + 1], self.capacity)

    @property
    def kv_bytes(self) -> int:
        return sum(slot.kv_bytes for slot in self.slots)


class BatchSlot(NativeSlot):
    """A slot of a batch: its cache is a row of the batch's array.

    Attributes:
        batch: whose.
        number: which row.
    """

    def __init__(self, batch: NativeBatch, number: int, context: int | None, reserve: int) -> None:
        self.batch, self.number = batch, number
        self._written = 0  # tokens: the most that this row of the array has held
        super().__init__(batch.model, context=context, reserve=0)
        if reserve:
            batch.grow(reserve)
        self.attach(batch._array[number : number + 1], batch.capacity)

    def reserve(self, tokens: int) -> None:
        if self in self.batch.slots:  # else it is being made
            self.batch.grow(tokens)

    @property
    def kv_bytes(self) -> int:
        kept = self._checkpoints.nbytes if self._checkpoints else 0
        return kept + min(self.kv.nbytes(self.model.facts, max(self._written, self.furthest)), self._row)

    def close(self) -> None:
        batch, number = self.batch, self.number
        super().close()
        batch.renew(number)

    def attach(self, cache: NDArray[np.uint8], capacity: int) -> None:
        """Use this cache [1, bytes] from now on."""
        self._row = cache.shape[1]
        self._cache = self._bind("kv", Bound(cache))
        self.capacity = capacity

    def make_room(self, rows: int) -> None:
        """Grow if so many rows more do not fit."""
        self._need_room(len(self.tokens) + rows)

    def _need_room(self, rows: int) -> None:
        super()._need_room(rows)
        self._written = max(self._written, rows)

    def planned(self, tokens: Ids, parents: Ids | None) -> Ids:
        """[6, n], a copy: the plan of a pass whose rows may be kept; it begins here."""
        self._verify(tokens, parents)
        plan = self.model.buffer("plan", (6, len(tokens)), np.int64).array.copy()
        plan[SLOT] = self.number
        return plan

    def take_moves(self) -> list[tuple[int, int, int]]:
        """Hand over the moves (slot, from, to) that come before the next pass."""
        moves, self._moves = self._moves, []
        if self.model.facts.delta:
            moves = [*moves, (0, COMMITTED, self._committed())]
        return [(self.number, *move[1:]) for move in moves]


class _Runner(NativeSlot):
    """Runs gathered plans over the caches of all slots; it has no sequence of its own."""

    commits = False

    def __init__(self, model: Model, *, context: int | None) -> None:
        self._gathered = np.zeros((6, 0), np.int64)
        super().__init__(model, context=context, reserve=0)

    def reserve(self, tokens: int) -> None:
        """Leave it to the batch."""

    def attach(self, caches: NDArray[np.uint8], capacity: int) -> None:
        """Use these caches [S, bytes] from now on."""
        self._cache = self._bind("kv", Bound(caches))
        self.capacity = capacity

    def add_moves(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Make these moves before the next pass."""
        self._moves.extend(moves)

    def gathered(self, plan: Ids, best: bool) -> Pass:
        """Run a plan [6, n]."""
        self._gathered = plan
        return self.forward_best(plan[0]) if best else self.forward(plan[0])

    def _verify(self, tokens: Ids, parents: Ids | None) -> None:
        self._attach("plan", "plan", self._gathered.shape, np.int64)[:] = self._gathered


def _part(output: Pass, first: int, item: BatchPass) -> Pass:
    """Copy the rows of one slot, ``first`` and on."""
    rows, slot = slice(first, first + len(item.tokens)), item.slot
    best = None if output.best is None else (output.best[0][rows].copy(), output.best[1][rows].copy())
    stream = output.hidden[rows].copy() if slot.keep_hidden and output.hidden is not None else None
    aux_hidden = output.aux_hidden[rows].copy() if slot.keep_aux_hidden and output.aux_hidden is not None else None
    return Pass(output.logits[rows].copy() if best is None else output.logits, stream, best, aux_hidden=aux_hidden)
