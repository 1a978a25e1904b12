"""One pass of native operators over a slot's cache: its inputs and outputs, bound, and running it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.target import BEST, EMBEDDING, OPTIONAL, Ids, Output, Rows, SkipSet, Target, common_prefix
from edgespec.decoding.text import INSERTED
from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.formats import KV_BLOCK
from edgespec.runtimes.files.kv import state_bytes
from edgespec.runtimes.slots.adapters import ROW
from edgespec.runtimes.slots.books import DRAFT, TREE, Books
from edgespec.runtimes.slots.cross_attention import CrossAttentionCache
from edgespec.runtimes.slots.inserted import MRopeOffsets
from edgespec.runtimes.slots.kv_reader import read_cache
from edgespec.runtimes.slots.shared import Bound, Model, own_pages
from edgespec.runtimes.slots.slot import Slot

TOKEN, POSITION, SLOT, VISIBLE, PARENT, PLACE = range(6)  # lines of the plan
TOP, READ_CODES, WINDOW, SINKS = 0, 4, 5, 6  # among the controls
COLUMNS = 2048  # factor, in the control of the top, of the number of columns of the LM head that are computed


class Gates:
    """Indices of the gates of a native graph.

    Gate 2 i is the attention of layer i, 2 i + 1 its MLP.  A drafter that is conditioned on a target fuses the target's
    hidden states with ``embed`` on, and continues with its own hidden state with ``load`` on.

    Args:
        layers, groups: number of layers, and of groups of heads.
        aux_hidden, planes, memory: whether there are auxiliary hidden states, int8 matrices in two planes, or
            cross-attention.

    Attributes:
        embed: look tokens up.
        load: begin with the rows of ``hidden_in`` instead.
        hidden: return the residual stream after the last layer.
        lm: the model's final norm and LM head.
        heads: groups of heads, by number.
        aux_hidden: return the auxiliary hidden states, after the columns of ``hidden``.
        planes: also read the low planes: of sub-layers in the order of their gates, of the steps after the layers, and
            of the embedding's rows.
        head_plane, embedding_plane: those of the last two; -1 = there are none.
        fill: compute keys and values of cross-attention from the rows of ``hidden_in``, and nothing else; -1 = none.
        count: number of gates.
    """

    def __init__(
        self, layers: int, groups: int = 0, aux_hidden: bool = False, planes: bool = False, memory: bool = False
    ) -> None:
        self.embed, self.load, self.hidden, self.lm = range(2 * layers, 2 * layers + 4)
        self.heads = range(2 * layers + 4, 2 * layers + 4 + groups)
        self.aux_hidden = self.heads.stop
        first = self.aux_hidden + aux_hidden
        self.planes = range(first, first + (2 * layers + 2 if planes else 0))
        self.head_plane, self.embedding_plane = self.plane(-2), self.plane(-1)
        self.fill = self.planes.stop if memory else -1
        self.count = self.planes.stop + memory

    def plane(self, sublayer: int) -> int:
        """Find the gate of a sub-layer's low planes; -1 = there are none."""
        return self.planes[sublayer] if self.planes else -1


def grown(model: Model, tokens: int, capacity: int) -> tuple[int, int]:
    """Size a cache for ``tokens`` and the rows after them -> (rows to allocate, 0: they fit; capacity)."""
    headroom = model.part.extra_rows
    most = model.facts.context + headroom
    need = -(-min(most, tokens + headroom) // KV_BLOCK) * KV_BLOCK
    if min(need, most) <= capacity:
        return 0, capacity
    need = min(-(-most // KV_BLOCK) * KV_BLOCK, max(need, -(-capacity * 3 // 2 // KV_BLOCK) * KV_BLOCK))
    return need, min(need, most)  # the last block may reach beyond the table of angles


class NativeRunner(Slot):
    """The cache of a slot and running passes over it; ``NativeSlot`` chooses them.

    ``number``: index of the slot in its cache.  ``table_bits``: of the control, if blocks are in a pool: twice the
    entries of a slot's table.
    """

    number, table_bits = 0, 0

    def __init__(self, model: Model, *, context: int | None = None, reserve: int = 256) -> None:
        super().__init__(model, context)
        self.kv = model.kv
        self.planes = model.part.planes and not model.part.high_alone
        self._io = model.session.io_binding()
        self._bound: dict[str, Bound] = {}
        self.attends = "sources" in model.given  # over memories
        self.memory: CrossAttentionCache | None = None
        self.beside: bytes | None = None  # digest of the cross-attention cache that the tokens were read with
        part = model.part
        lacking = set() if part.aux_hidden_layers else {"aux_hidden"}
        lacking |= set() if part.decoder else {"fused", "block", "of"}
        lacking |= set() if model.adapters is not None else {"adapters"}
        self.can = frozenset(OPTIONAL) - lacking | {BEST}
        self._embeds = any(group.kind == EMBEDDING for group in part.heads)  # a drafter's own
        self._at = at = Gates(self.layers, len(part.heads), bool(part.aux_hidden_layers), part.planes, self.attends)
        self._columns_in = model.given["hidden_in"]  # columns of what a pass may begin with
        self._plain = np.zeros(at.count, bool)  # the gates of an ordinary pass
        self._plain[: 2 * self.layers] = self._plain[[at.embed, at.lm]] = True
        self._plain[at.planes] = not model.part.high_alone
        self._gates = self._bind("gates", Bound(self._plain.copy())).array  # ``_select``
        self._bind("hidden_in", Bound(np.zeros((0, self._columns_in), np.float32)))
        self._control = self._bind("control", Bound(np.array([0, *self.kv.controls()], np.int64))).array
        self._control[READ_CODES] = self.table_bits
        self._bind("tables", model.key_tables)
        self._inserts = "inserted" in model.given  # rows of images
        if self._inserts:
            self._bind("inserted", Bound(np.zeros((0, model.given["inserted"]), np.float32)))
        self._both_ways = bool(model.part.image and model.part.image.bidirectional)
        self._turns = MRopeOffsets(model.inserted) if "axes" in model.given else None
        self._offsets: Ids | int = 0  # of the rotary positions of the planned rows, [3, n]
        if self.attends:
            self._bind("memory", Bound(np.zeros((0, 8), np.uint8)))
        self._no_moves = self._bind("moves", Bound(np.zeros((0, 3), np.int64)))
        self._books = Books(model.facts, self.kv.ring)
        self._commits = model.facts.delta is not None  # every pass is given how many tokens states may hold
        self._may_wait = self._commits  # or rows were kept that have to be moved
        self._marks: set[int] = set()  # lengths of the text at which checkpoints are taken
        self.stateful = self._books.stateful  # exact recent keys, states: they are not kept
        self._cache: Bound | None = None
        self._head = np.zeros(0, np.uint8)  # states and exact recent keys, [bytes]
        self._ordinary = (at.embed, -1, None, None, True)  # arguments of ``_select``: the whole model
        self._selected: object = None  # its last arguments
        self._asked: object = None  # of ``_bind_results``, its last arguments
        self._cut = 0  # columns of the LM head that the gates' passes compute, the first ones; 0 = all
        self.reserve(reserve)

    # -- memory ------------------------------------------------------------------------------------------------------

    def reserve(self, tokens: int) -> None:
        need, capacity = grown(self.model, tokens, self.capacity)
        if not need:
            return
        # blocks of tokens are contiguous: the present ones are the beginning of the larger cache
        array = own_pages((1, self.kv.nbytes(self.model.facts, need)), np.uint8)
        if self._cache is not None:
            held = self._cache.array[:, : self.kv.nbytes(self.model.facts, self.high_water_mark)]
            array[:, : held.shape[1]] = held
        self._cache = self._bind("kv", Bound(array))
        self._head = array[0, : self.kv.header_bytes(self.model.facts)]
        self._books.attach(self._head)
        self.capacity = capacity

    @property
    def kv_bytes(self) -> int:
        return self._books.checkpoint_bytes + (0 if self._cache is None else self._cache.array.nbytes)

    def stand_in(self, tokens: int) -> None:
        self.reserve(tokens)
        self._own(0, tokens)
        for array in self._arrays(tokens):
            array[:] = 0  # untouched pages would cost no reading
        self._hold([0] * tokens, max(self.high_water_mark, tokens))
        self._books.set_held(tokens)

    def held(self) -> list[NDArray[Any]]:
        self._settle()
        return self._arrays(len(self.tokens))

    def take_up(self, tokens: Sequence[int], high_water_mark: int) -> list[NDArray[Any]]:
        self.reserve(len(tokens))
        self._own(common_prefix(self.tokens, tokens), len(tokens))  # their common prefix is already held
        self._hold(tokens, high_water_mark)
        return self._arrays(len(tokens))  # not ``held``: there is nothing yet that a pass could bring up to the tokens

    def _hold(self, tokens: Sequence[int], high_water_mark: int) -> None:
        """Say that the cache has these tokens."""
        self.tokens = list(tokens)
        if self._turns is not None:
            self._turns.crop(0)
        self._books.hold(len(tokens), high_water_mark)

    def _arrays(self, tokens: int) -> list[NDArray[np.uint8]]:  # [bytes] each
        """View the part of the cache that ``tokens`` tokens take: the head, then their blocks."""
        return [self._whole()[: self.kv.nbytes(self.model.facts, tokens)]]

    def _whole(self) -> NDArray[np.uint8]:  # [bytes]
        """View all of the cache, or copy it if it is not contiguous: the head, then at least one block."""
        assert self._cache is not None
        return self._cache.array[0]

    def _own(self, first: int, end: int) -> None:
        """Prepare tokens ``first`` to ``end`` for writing, so that no other slot reads the written blocks."""

    def part(self, start: int, stop: int) -> list[NDArray[Any]]:
        if self._moving:
            self._settle()
        return self._blocks(start // KV_BLOCK, -(-stop // KV_BLOCK))

    def _blocks(self, first: int, last: int) -> list[NDArray[np.uint8]]:  # [bytes] each
        """View blocks of the cache."""
        head, block = len(self._head), self.kv.block_bytes(self.model.facts)
        return [self._whole()[head + first * block : head + last * block]]

    def state(self) -> NDArray[np.uint8]:  # [bytes]
        facts = self.model.facts
        if not self.stateful:
            return super().state()
        self._settle()
        return np.concatenate([self._books.states().view(np.uint8), self._head[state_bytes(facts) :]])

    def put_state(self, state: NDArray[np.uint8]) -> bool:  # [bytes]
        facts = self.model.facts
        if not self.stateful:
            return super().put_state(state)
        recent = self._head[state_bytes(facts) :]
        cut = len(state) - len(recent)
        if cut < 0 or cut % 4 or (cut > 0) != bool(facts.convolutions):
            return False
        recent[:] = state[cut:]
        return self._books.put_states(state[:cut].view(np.float32))

    @property
    def high_water_mark(self) -> int:
        return self._books.high_water_mark

    def snapshot(self) -> dict[str, Rows]:
        self._settle()
        return read_cache(self._whole(), self.kv, self.model.facts, len(self.tokens))

    # -- one pass ----------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Carry out what ``keep`` left to the next pass; not between a pass and ``keep``."""
        behind = self._books.behind > 0
        if behind or self._moving:
            self._plan(np.zeros(int(behind), np.int64), how=DRAFT)  # a row that is forgotten
            self._select(self._at.embed)
            self._launch(int(behind), 0)

    @property
    def _moving(self) -> bool:
        """Whether rows are to be moved before the next pass."""
        return self._books.waiting > self._commits

    def _plan(self, tokens: Ids, parents: Ids | None = None, offset: int = 0, how: int = 0) -> Ids:  # [n] -> [6, n]
        """Bind the plan of rows after the text and ``offset`` rows more; callers change what differs.

        Args:
            tokens, parents: of a pass.
            how: see ``Books.plan``.
        """
        n, past = len(tokens), len(self.tokens) + offset
        if past + n > self.capacity:
            self._need_room(past + n)
        if n and self.table_bits:
            self._own(past, past + n)
        bound = self.model.buffer("plan", (6, n), np.int64)
        if self._bound.get("plan") is not bound:
            self._bind("plan", bound)
        sources = self._sources(n) if self.attends else None
        self._fill(bound, bound.array, 0, tokens, parents, offset, how)
        if sources is not None:
            self._see(n, *sources)
        return bound.array

    def _fill(
        self, bound: Bound, plan: Ids, first: int, tokens: Ids, parents: Ids | None, offset: int = 0, how: int = 0
    ) -> None:
        """Write the rows of a plan, ``plan`` [6, n] of ``bound`` from ``first`` on, as ``_plan`` does."""
        ids = tokens.tolist()
        if ids and max(ids) >= INSERTED:
            self._name(plan, tokens)
        else:
            plan[TOKEN] = tokens
        if parents is not None:
            plan[PARENT] = np.where(parents < 0, parents, parents + first) if first else parents
            how |= TREE
        books, number = self._books, self.number + ROW * self.adapter
        if books.try_plan(bound.address, bound.array.shape[1], first, len(ids), offset, how, number) < 0:
            raise books.refusal()
        if not how & DRAFT:
            self._pending = ids, None
        if self._turns is not None:
            self._offsets = self._turns.offsets(self.tokens, len(self.tokens) + offset, tokens)

    def _sources(self, n: int) -> tuple[int, int, Bound | None]:
        """Say which memory n rows see, how many rows of it, and the array of all memories."""
        memory = self.memory
        if memory is not None:
            return memory.number, memory.rows, memory.of.bound
        if n:
            raise InvalidRequest("this model attends over a source, and is given none", "use `attend` first")
        return 0, 0, None

    def _name(self, plan: Ids, tokens: Ids) -> None:  # [6, n], [n]
        """Set the inputs of rows: tokens, or rows of images."""
        plan[TOKEN] = tokens
        if not len(tokens) or int(tokens.max()) < INSERTED:
            return
        if not self._inserts:
            plan[TOKEN, tokens >= INSERTED] = self.model.inserted.instead
            return
        rows = [item.rows[row : row + count] for _, item, row, count in self.model.inserted.runs(tokens)]
        count = sum(map(len, rows))
        np.concatenate(rows, out=self._attach("inserted", (count, rows[0].shape[1]), np.float32))
        plan[TOKEN, tokens >= INSERTED] = -1 - np.arange(count)

    def _turn(self, n: int) -> None:
        """Bind the rotary positions of the rows of the next pass, [3, n]."""
        self._attach("axes", (3, n), np.int64)[:] = self._bound["plan"].array[POSITION] + self._offsets

    def _see(self, n: int, number: int | Ids, rows: int | Ids, bound: Bound | None) -> None:
        """Bind the memories of n rows, and how much of them they see or which row they fill; one for all, or [n]."""
        sources = self._attach("sources", (2, n), np.int64)
        sources[0], sources[1] = number, rows
        if bound is not None and self._bound["memory"] is not bound:
            self._bind("memory", bound)

    def _launch(
        self,
        n: int,
        scored: int,
        *,
        top: int = 0,
        hidden: bool = False,
        aux_hidden: bool = False,
        times: int = 1,
        columns: int | None = None,
        read: int = 0,
    ) -> Output:
        """Run the planned rows with the current gates.

        Args:
            n: rows of the plan.
            scored: how many of them, the last ones, reach the LM head.
            top: return this number of likeliest tokens of each row instead of all logits.
            hidden: return the residual stream after the last layer.
            aux_hidden: also return it after the layers that a drafter taps.
            times: rows of logits for each of them.
            columns: of the logits; None = those of the model's LM head.
            read: rows that belong to the text, a chain: states take them up immediately.

        Returns an output whose ``best`` are columns and logits [scored * times, top].
        """
        model = self.model
        if self._turns is not None:
            self._turn(n)
        taps = bool(model.part.aux_hidden_layers)
        self._gates[self._at.hidden] = hidden or (aux_hidden and taps)
        if taps:
            self._gates[self._at.aux_hidden] = aux_hidden
        waiting = self._bind_moves(read)
        self._control[TOP] = top + COLUMNS * self._cut
        asked = n, scored, top, hidden, aux_hidden, scored * times, self._cut or columns or self.columns
        if asked != self._asked:  # else as in the pass before
            self._results = self._bind_results(*asked)
            self._asked = asked
        logits, stream, best, found = self._results
        waited_ms, read_bytes = model.run_bound(self._io)
        if waiting:
            self._moved()
        return Output(logits, stream, best, aux_hidden=found, waited_ms=waited_ms, read=read_bytes)

    def _bind_results(
        self, n: int, scored: int, top: int, hidden: bool, aux_hidden: bool, wide: int, columns: int
    ) -> tuple[Rows, Rows | None, tuple[Ids, Rows] | None, Rows | None]:
        """Bind what a pass gives, and which rows are scored -> logits, hidden states, the best, auxiliary ones."""
        model, size = self.model, self.model.facts.hidden
        self._bind("rows", model.last_rows(n, scored))
        tapped = model.part.aux_hidden_layers if aux_hidden else ()
        logits = model.buffer("logits", (0 if top else wide, columns), np.float32)
        ids = model.buffer("ids", (wide, top), np.int64)
        values = model.buffer("values", (wide, top), np.float32)
        stream = model.buffer("hidden", (n if hidden or tapped else 0, (1 + len(tapped)) * size), np.float32)
        for name, bound in (("logits", logits), ("ids", ids), ("values", values), ("hidden", stream)):
            if self._bound.get(name) is not bound:
                self._io.bind_ortvalue_output(name, bound.value)
                self._bound[name] = bound
        best = (ids.array, values.array) if top else None
        found = stream.array[:, size:] if tapped else None
        return logits.array, stream.array[:, :size] if hidden else None, best, found

    def _bind_moves(self, read: int) -> int:
        """Bind what comes before the next pass, ``read`` rows of which are part of the text at once -> how much."""
        waiting = self._books.waiting if self._may_wait else 0
        if waiting:
            self._attach("moves", (waiting, 3), np.int64)
            self._books.moves(self._bound["moves"].address, self.number, read, self.revocable)
        elif self._bound["moves"] is not self._no_moves:
            self._bind("moves", self._no_moves)
        return waiting

    def _moved(self) -> None:
        """Say that what was bound is done."""
        self._books.moved()
        self._may_wait = self._commits

    def _borrow(self, other: Target) -> None:
        """Let passes read another slot's cache instead of this one's.

        Raises:
            InvalidRequest: it is not one of native operators.
        """
        if not isinstance(other, NativeRunner):
            raise InvalidRequest("this drafter reads keys and values of native operators alone", "use another method")
        other._settle()
        if self._bound["kv"] is not other._bound["kv"] or self.number != other.number:
            for name in ("kv", "tables"):
                self._bind(name, other._bound[name])
            self.number, self.table_bits = other.number, other.table_bits
            self._control[1:] = other._control[1:]

    def _read_codes(self, on: bool) -> None:
        """Let passes read the coarser copy of the keys, with a separate window."""
        kv = self.kv
        self._control[READ_CODES] = self.table_bits + on
        self._control[WINDOW] = kv.draft_window if on else kv.window
        self._control[SINKS] = kv.sinks if self._control[WINDOW] else 0

    def _select(
        self,
        begin: int,
        end: int = -1,
        layers: tuple[int, int] | None = None,
        skip: SkipSet | None = None,
        last_mlp: bool = True,
    ) -> None:
        """Choose the parts of the model that passes run, by their gates.

        Args:
            begin: where rows come from.
            end: what runs after the layers, -1: the LM head, -2: nothing.
            layers: the first one, and the one after the last; None = all.
            skip: what is left out of them.
            last_mlp: whether the last MLP runs.
        """
        wanted = begin, end, layers, skip, last_mlp
        if wanted == self._selected:  # as in the pass before
            return
        at, gates = self._at, self._gates
        first, last = layers or (0, self.layers)
        self._selected, self._cut = None, 0
        gates[:] = False
        gates[at.planes] = self._plain[at.planes]
        gates[2 * first : 2 * last] = True
        if not last_mlp:
            gates[2 * self.layers - 1] = False
        gates[begin] = True
        if end >= -1:
            gates[at.lm if end < 0 else end] = True
        if skip is not None:
            gates[[2 * layer for layer in skip.attention]] = False
            gates[[2 * layer + 1 for layer in skip.mlp]] = False
            if at.planes:
                high = [2 * layer for layer in skip.high_attention] + [2 * layer + 1 for layer in skip.high_mlp]
                gates[[at.planes[sublayer] for sublayer in high]] = False
                gates[at.head_plane] &= not skip.high_head
            self._cut = skip.head_rows if skip.head_rows < self.columns else 0
        self._selected = self._ordinary if wanted == self._ordinary else wanted

    def _bind(self, name: str, bound: Bound) -> Bound:
        self._io.bind_ortvalue_input(name, bound.value)
        self._bound[name] = bound
        return bound

    def _attach(self, name: str, shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
        bound = self.model.buffer(name, shape, dtype)
        if self._bound.get(name) is not bound:
            self._bind(name, bound)
        return bound.array

    def _load(self, hidden: Rows | Ids, n: int) -> None:
        """Let the next pass begin with these rows of the residual stream, [n, hidden]."""
        if hidden.shape != (n, self._columns_in):
            raise InvalidRequest(f"hidden states {list(hidden.shape)}: expected [{n}, {self._columns_in}]")
        self._attach("hidden_in", hidden.shape, np.float32)[:] = hidden
