"""Several sequences over native operators whose passes run together: the weights are read once for all of them.

One pool holds the caches.  A slot of the batch is a ``NativeSlot`` over its blocks there, with all functions of one.
``NativeBatch.run`` gathers the rows of many slots into one plan.  A row has the same bits regardless of the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.target import BEST, Ids, Output, Pass
from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.formats import KV_BLOCK, LONGEST_PASS
from edgespec.runtimes.slots.blocks import BlockPool
from edgespec.runtimes.slots.kv_reader import tokens_held
from edgespec.runtimes.slots.native import NativeSlot
from edgespec.runtimes.slots.native_runner import COMMITTED, PARENT, grown
from edgespec.runtimes.slots.shared import Bound, Model


class NativeBatch:
    """Slots whose passes may run together.

    Args:
        model: of native operators.
        width: number of slots.
        context: maximum tokens of each sequence.

    Attributes:
        capacity: tokens of a slot, and the rows after them.
    """

    def __init__(self, model: Model, width: int, *, context: int | None = None) -> None:
        if width < 1 or model.graph.operators != "native":
            raise InvalidRequest(f"a batch of {width}: expected at least one slot, and native operators")
        self.model, self.width = model, width
        rows, self.capacity = grown(model, min(context or model.facts.context, model.facts.context), 0)
        self.pool = BlockPool(model, width, rows // KV_BLOCK)
        self._runner = _Runner(model, self.pool, context, self.capacity)
        self._context, self._closing = context, False
        self.slots = [BatchSlot(self, number, context) for number in range(width)]

    def close(self) -> None:
        self._closing = True
        for slot in (*self.slots, self._runner):
            slot.close()
        vars(self).clear()

    def renew(self, number: int, blocks: Sequence[int]) -> None:
        """Put a new slot where one was closed, and free its memory."""
        if not self._closing:
            self.pool.release(blocks)
            self.pool.clear(number)
            self.slots[number] = BatchSlot(self, number, self._context)

    def take_block(self) -> int:
        """Give a slot a block of the pool -> its number."""
        before = self.pool.bound
        number = self.pool.take()
        self._follow(before)
        return number

    def make_room(self, blocks: int) -> None:
        """Make room for this many blocks in each slot."""
        before = self.pool.bound
        self.pool.make_room(self.width * blocks)
        self._follow(before)

    def _follow(self, before: Bound) -> None:
        """Use the pool's new address, if it has moved."""
        if self.pool.bound is not before:
            self._runner.attach()
            for slot in self.slots:
                slot.attach()

    def run(self, passes: Sequence[tuple[BatchSlot, Pass]]) -> list[Output]:
        """Run the passes of several slots as one, as ``run`` of each of them would.

        Args:
            passes: at most one of each slot, and at most 128 rows in all, through the whole model.  Logits are left out
                only if all passes need only the likeliest tokens.

        Returns:
            their outputs, in order; copies, which stay valid.

        Raises:
            InvalidRequest: a slot twice, or of another batch, another kind of pass, or too many rows.
        """
        order = sorted(range(len(passes)), key=lambda i: passes[i][0].number)
        numbers = [passes[i][0].number for i in order]
        if len(set(numbers)) < len(numbers) or any(slot.batch is not self for slot, _ in passes):
            raise InvalidRequest("expected at most one pass of each slot of this batch")
        wants = [wanted for _, wanted in passes]
        for wanted in wants:
            self._runner.check(wanted)
        if (rows := sum(len(_rows(wanted)) for wanted in wants)) > LONGEST_PASS:
            raise InvalidRequest(f"{rows} rows in a pass: expected at most {LONGEST_PASS}", "gather fewer sequences")
        for slot, wanted in passes:
            slot._need_room(len(slot.tokens) + len(_rows(wanted)))  # before anything is planned
        plans: list[Ids] = []  # [6, n] each, or more
        runner, first = self._runner, [0] * len(passes)
        at = 0
        for i in order:
            slot, wanted = passes[i]
            plan = slot.planned(wanted)
            plan[PARENT] += np.where(plan[PARENT] >= 0, at, 0)
            runner._moves += slot.take_moves()
            plans.append(plan)
            if slot.memory is not None:
                runner.memories = slot.memory.of.bound
            first[i], at = at, at + plan.shape[1]
        joint = Pass(
            top=int(all(wanted.top for wanted in wants)),
            hidden=any(wanted.hidden for wanted in wants),
            aux_hidden=any(wanted.aux_hidden for wanted in wants),
        )
        output = runner.gathered(np.concatenate(plans, axis=1), joint)
        return [_part(output, first[i], wanted) for i, wanted in enumerate(wants)]

    @property
    def kv_bytes(self) -> int:
        return sum(slot.kv_bytes for slot in self.slots)


class BatchSlot(NativeSlot):
    """A slot of a batch: its blocks are some of the batch's pool, which other slots may refer to as well.

    Attributes:
        batch: whose.
    """

    def __init__(self, batch: NativeBatch, number: int, context: int | None) -> None:
        self.batch, self.number, self.table_bits = batch, number, 2 * batch.pool.entries
        self._numbers: list[int] = []  # of the blocks in the pool
        self._shared = 0  # blocks from here on belong only to this slot
        super().__init__(batch.model, context=context, reserve=0)
        self.attach()

    def attach(self) -> None:
        """Use the pool's current address."""
        pool = self.batch.pool
        self._cache = self._bind("kv", pool.bound)
        self._head, self._table = pool.head(self.number), pool.table(self.number)
        self._held = tokens_held(self._head, self.model.facts)
        self.capacity = self.batch.capacity

    def reserve(self, tokens: int) -> None:
        """Have room for as much in every slot; which blocks are whose is left to what is written."""
        self.batch.make_room(-(-tokens // KV_BLOCK))

    @property
    def kv_bytes(self) -> int:
        """Bytes of its head, its checkpoints and its blocks; of one that it shares its part."""
        pool = self.batch.pool
        kept = len(self._head) + (self._checkpoints.nbytes if self._checkpoints else 0)
        return kept + round(pool.block_bytes * float((1 / pool.counts[self._numbers]).sum()))

    def close(self) -> None:
        batch, number, blocks = self.batch, self.number, self._numbers
        super().close()
        batch.renew(number, blocks)

    def crop(self, length: int) -> int:
        same = super().crop(length)
        self._moves = [move for move in self._moves if move[2] < same]
        self._keep_blocks(max([same, *(at + 1 for _, at, _ in self._moves)]))
        return same

    def _keep_blocks(self, tokens: int) -> None:
        """Free the blocks after the first ``tokens`` tokens."""
        kept = -(-tokens // KV_BLOCK)
        gone = self._numbers[kept:]
        del self._numbers[kept:]
        self._table[kept : kept + len(gone)] = -1
        self.batch.pool.release(gone)

    def _own(self, first: int, end: int) -> None:
        at, have = first // KV_BLOCK, len(self._numbers)
        if at >= self._shared and end <= KV_BLOCK * have:
            return
        pool = self.batch.pool
        for block in range(at, min(self._shared, have)):
            old = self._numbers[block]
            if pool.counts[old] > 1:
                self._numbers[block] = new = self.batch.take_block()
                pool.block(new)[:] = pool.block(old)
                self._table[block] = new
                pool.release([old])
        self._shared = min(self._shared, at)
        for block in range(have, -(-end // KV_BLOCK)):
            self._numbers.append(self.batch.take_block())
            self._table[block] = self._numbers[block]

    def _copy(self, other: NativeSlot, tokens: int, furthest: int) -> None:
        if not (isinstance(other, BatchSlot) and other.batch is self.batch):
            super()._copy(other, tokens, furthest)
            return
        pool, whole = self.batch.pool, tokens // KV_BLOCK
        pool.refer(other._numbers[:whole])
        self._keep_blocks(0)
        self._hold(other.tokens[:tokens], furthest)
        self._numbers = other._numbers[:whole]
        self._table[:whole] = self._numbers
        self._shared, other._shared = whole, max(other._shared, whole)
        self._own(tokens, tokens)  # the rest of them is a part of a block
        if tokens % KV_BLOCK:
            pool.block(self._numbers[whole])[:] = pool.block(other._numbers[whole])
        self._head[:] = other._head

    def _arrays(self, tokens: int) -> list[NDArray[np.uint8]]:
        return [self._head, *self._blocks(0, -(-tokens // KV_BLOCK))]

    def _blocks(self, first: int, last: int) -> list[NDArray[np.uint8]]:
        return [self.batch.pool.block(number) for number in self._numbers[first:last]]

    def _whole(self) -> NDArray[np.uint8]:
        pool = self.batch.pool
        return np.concatenate([*self._arrays(len(self.tokens)), np.zeros(pool.block_bytes, np.uint8)])

    def planned(self, wanted: Pass) -> Ids:
        """[6, n], a copy: the plan of a pass whose rows may be kept; it begins here; then memories, and turns."""
        self._place_text(self._given(wanted), wanted.parents)
        lines = [self._bound["plan"].array, *([self._bound["sources"].array] if self.attends else [])]
        if self._turns is not None:
            self._turn(lines[0].shape[1])
            lines.append(self._bound["axes"].array)
        return np.concatenate(lines)

    def take_moves(self) -> list[tuple[int, int, int]]:
        """Hand over the moves (slot, from, to) that come before the next pass."""
        moves, self._moves = self._moves, []
        if self.model.facts.delta:
            moves = [*moves, (self.number, COMMITTED, self._committed())]
        return moves


def shared_bytes(slots: Sequence[BatchSlot]) -> int:
    """Bytes of blocks that slots have in common: of each block, once less than there are slots that refer to it."""
    found = 0
    for batch in {slot.batch for slot in slots}:
        numbers = [number for slot in slots if slot.batch is batch for number in slot._numbers]
        found += (len(numbers) - len(set(numbers))) * batch.pool.block_bytes
    return found


class _Runner(NativeSlot):
    """Runs gathered plans over the caches of all slots; it has no sequence."""

    commits = False

    def __init__(self, model: Model, pool: BlockPool, context: int | None, capacity: int) -> None:
        self._gathered = np.zeros((6, 0), np.int64)
        self.memories: Bound | None = None  # of all slots
        self._pool, self.table_bits = pool, 2 * pool.entries
        super().__init__(model, context=context, reserve=0)
        self.can &= {"parents", "hidden", "aux_hidden", BEST}
        self.capacity = capacity
        self.attach()

    def reserve(self, tokens: int) -> None:
        """Leave it to the slots."""

    def attach(self) -> None:
        """Use the pool's current address."""
        self._cache = self._bind("kv", self._pool.bound)

    def gathered(self, plan: Ids, wanted: Pass) -> Output:
        """Run a plan [6, n]; more rows select cross-attention caches (2) and rotary positions (3)."""
        self._gathered, n = plan, plan.shape[1]
        self._attach("plan", (6, n), np.int64)[:] = plan[:6]
        if self.attends:
            self._see(n, plan[6], plan[7], self.memories)
        self._select(self._at.embed)
        return self._likeliest(self._launch(n, n, top=wanted.top, hidden=wanted.hidden, aux_hidden=wanted.aux_hidden))

    def _turn(self, n: int) -> None:
        self._attach("axes", (3, n), np.int64)[:] = self._gathered[-3:]


def _rows(wanted: Pass) -> Ids:  # [n]
    assert wanted.tokens is not None
    return wanted.tokens


def _part(output: Output, first: int, wanted: Pass) -> Output:
    """Copy the rows of one slot, ``first`` and on."""
    rows = slice(first, first + len(_rows(wanted)))
    best = None if output.best is None else (output.best[0][rows].copy(), output.best[1][rows].copy())
    stream = output.hidden[rows].copy() if wanted.hidden and output.hidden is not None else None
    aux_hidden = output.aux_hidden[rows].copy() if wanted.aux_hidden and output.aux_hidden is not None else None
    return Output(output.logits[rows].copy() if best is None else output.logits, stream, best, aux_hidden=aux_hidden)
