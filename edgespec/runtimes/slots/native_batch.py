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
from edgespec.runtimes.slots.native import NativeSlot
from edgespec.runtimes.slots.native_runner import POSITION, grown
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

    def renew(self, number: int) -> None:
        """Put a new slot where one was closed, and free its memory."""
        if not self._closing:
            self.pool.clear(number)
            self.slots[number] = BatchSlot(self, number, self._context)

    def make_room(self, blocks: int) -> None:
        """Make room for this many blocks in each slot."""
        self.pool.make_room(self.width * blocks)
        self.follow()

    def follow(self) -> None:
        """Use the pool's new address, if it has moved."""
        if self._runner.moved_from(self.pool):
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
        runner, first, at = self._runner, [0] * len(passes), 0
        plan = runner.begin(rows)
        for i in order:
            first[i] = at
            at = passes[i][0].gather(runner, plan, at, passes[i][1])
        joint = Pass(
            top=int(all(wanted.top for wanted in wants)),
            hidden=any(wanted.hidden for wanted in wants),
            aux_hidden=any(wanted.aux_hidden for wanted in wants),
        )
        output = runner.gathered(rows, [slot for slot, _ in passes], joint)
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
        super().__init__(batch.model, context=context, reserve=0)
        self.attach()

    def attach(self) -> None:
        """Use the pool's current address."""
        pool = self.batch.pool
        self._cache = self._bind("kv", pool.bound)
        self._head, self._table = pool.head(self.number), pool.table(self.number)
        self._books.attach(self._head)
        self.capacity = self.batch.capacity

    def reserve(self, tokens: int) -> None:
        """Have room for as much in every slot; which blocks are whose is left to what is written."""
        self.batch.make_room(-(-tokens // KV_BLOCK))

    @property
    def kv_bytes(self) -> int:
        """Bytes of its head, its checkpoints and its blocks; of one that it shares its part."""
        pool = self.batch.pool
        return len(self._head) + self._books.checkpoint_bytes + pool.share_of(self.number)

    def close(self) -> None:
        batch, number = self.batch, self.number
        super().close()
        batch.renew(number)

    def crop(self, length: int) -> int:
        same = super().crop(length)
        self.batch.pool.trim(self.number, self._books.needed)
        return same

    def _own(self, first: int, end: int) -> None:
        self.batch.pool.own(self.number, first, end)
        self.batch.follow()

    def _copy(self, other: NativeSlot, tokens: int) -> None:
        if not (isinstance(other, BatchSlot) and other.batch is self.batch):
            super()._copy(other, tokens)
            return
        self.batch.pool.share(self.number, other.number, tokens)
        self.batch.follow()
        self._hold(other.tokens[:tokens], tokens)

    def _arrays(self, tokens: int) -> list[NDArray[np.uint8]]:
        return [self._head, *self._blocks(0, -(-tokens // KV_BLOCK))]

    def _blocks(self, first: int, last: int) -> list[NDArray[np.uint8]]:
        pool = self.batch.pool
        return [pool.block(number) for number in pool.numbers(self.number)[first:last]]

    def _whole(self) -> NDArray[np.uint8]:
        pool = self.batch.pool
        return np.concatenate([*self._arrays(len(self.tokens)), np.zeros(pool.block_bytes, np.uint8)])

    def gather(self, runner: _Runner, plan: Bound, first: int, wanted: Pass) -> int:
        """Plan rows, which may be kept, from row ``first`` of a common pass on -> the row after them."""
        tokens = self._given(wanted)
        past, rows = len(self.tokens), slice(first, first + len(tokens))
        self._own(past, past + len(tokens))
        self._fill(plan, plan.array[:, rows], first, tokens, wanted.parents)
        if self.attends:
            number, seen, runner.memories = self._sources(len(tokens))
            runner._bound["sources"].array[:, rows] = [[number], [seen]]
        if self._turns is not None:
            runner._bound["axes"].array[:, rows] = plan.array[POSITION, rows] + self._offsets
        return rows.stop


def shared_bytes(slots: Sequence[BatchSlot]) -> int:
    """Bytes of blocks that slots have in common: of each block, once less than there are slots that refer to it."""
    found = 0
    for batch in {slot.batch for slot in slots}:
        numbers = [number for slot in slots if slot.batch is batch for number in batch.pool.numbers(slot.number)]
        found += (len(numbers) - len(set(numbers))) * batch.pool.block_bytes
    return found


class _Runner(NativeSlot):
    """Runs gathered plans over the caches of all slots; it has no sequence."""

    def __init__(self, model: Model, pool: BlockPool, context: int | None, capacity: int) -> None:
        self._slots: Sequence[BatchSlot] = ()  # of the next pass
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

    def moved_from(self, pool: BlockPool) -> bool:
        """Whether the pool has another address."""
        return self._cache is not pool.bound

    def begin(self, rows: int) -> Bound:
        """Bind the inputs of a pass with this many rows -> its plan."""
        self._attach("plan", (6, rows), np.int64)
        if self.attends:
            self._attach("sources", (2, rows), np.int64)
        if self._turns is not None:
            self._attach("axes", (3, rows), np.int64)
        return self._bound["plan"]

    def gathered(self, n: int, slots: Sequence[BatchSlot], wanted: Pass) -> Output:
        """Run the rows that these slots have planned."""
        self._slots = slots
        if self.memories is not None and self._bound["memory"] is not self.memories:
            self._bind("memory", self.memories)
        self._select(self._at.embed)
        return self._likeliest(self._launch(n, n, top=wanted.top, hidden=wanted.hidden, aux_hidden=wanted.aux_hidden))

    def _turn(self, n: int) -> None:
        """Leave it to the slots."""

    def _bind_moves(self, read: int) -> int:
        waiting = [slot._books.waiting for slot in self._slots]
        self._attach("moves", (sum(waiting), 3), np.int64)
        at = self._bound["moves"].address
        for slot, count in zip(self._slots, waiting, strict=True):
            slot._books.moves(at, slot.number, read, slot.revocable)
            at += 24 * count
        return sum(waiting)

    def _moved(self) -> None:
        for slot in self._slots:
            slot._moved()


def _rows(wanted: Pass) -> Ids:  # [n]
    assert wanted.tokens is not None
    return wanted.tokens


def _part(output: Output, first: int, wanted: Pass) -> Output:
    """Copy the rows of one slot, ``first`` and on."""
    rows = slice(first, first + len(_rows(wanted)))
    best = None if output.best is None else (output.best[0][rows].copy(), output.best[1][rows].copy())
    stream = output.hidden[rows].copy() if wanted.hidden and output.hidden is not None else None
    aux_hidden = output.aux_hidden[rows].copy() if wanted.aux_hidden and output.aux_hidden is not None else None
    logits = output.logits[rows].copy() if best is None else output.logits
    return Output(logits, stream, best, aux_hidden=aux_hidden, waited_ms=output.waited_ms, read=output.read)
