"""A KV slot over a foreign graph: a pass returns all keys and values, the new rows after the old ones.

Graphs of optimum and of transformers' exporter are such graphs.  Two sets of buffers alternate: a pass reads the output
of the one before, so nothing is copied beyond the graph's own concatenation.  Rows that do not stay (rejected draft
tokens, a dummy row) are cropped before the next pass, which copies the others once.

Strict mode (docs/dev/runtime.md): attention of one row uses other kernels than that of several.  The strict graph
handles it.  A *padded* graph gets a dummy row after the real ones in every pass instead.  So does any strict graph on a
machine where a lone row still has other bits (``pairs.py``).  Whether a row then has the same bits in all passes
depends on the graph, and ``cpu.rows_exact`` tests it.

A graph of *single rows* runs a pass row by row: it was captured for one token, because its recurrent states change in
every row.  Those states are kept after each row of a pass, so that some rows can be taken back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.target import OPTIONAL, Ids, Output, Pass, Rows
from edgespec.errors import BundleError, InvalidRequest
from edgespec.runtimes.slots.pairs import needs_pairs
from edgespec.runtimes.slots.shared import Bound, Model
from edgespec.runtimes.slots.slot import PREFILL_CHUNK, Slot

STRICT = "strict"  # the graph whose rows are to have the same bits in every pass
INTEGER, FLOAT = "tensor(int64)", "tensor(float)"
_PAST = re.compile(r"past(?:_key_values)?[._](\d+)(?:[._](key|value))?")
_PRESENT = re.compile(r"present(?:_key_values)?[._](\d+)(?:[._](key|value))?")
_FED = ("input_ids", "attention_mask", "position_ids")  # [1, n], [1, past + n], [1, n]
LARGEST_LOGITS = 1 << 22  # values: the graph gives those of every row, of a prefill too


@dataclass(frozen=True)
class Port:
    """An input or output of a graph."""

    name: str  # as in the graph
    kind: str  # its type as ONNX Runtime writes it, such as ``tensor(float)``
    shape: tuple[int | str | None, ...]  # its dimensions; a name or None = any size


@dataclass(frozen=True)
class Cached:
    """A growing cache, or a state of fixed size, that a graph keeps of a text."""

    past: str  # its input
    present: str  # its output
    shape: tuple[int | None, ...]  # None = the tokens of the text; without one it is a state
    kind: str = FLOAT  # its type; a state may be integers, such as a count of tokens

    @property
    def grows(self) -> bool:
        """Whether it has rows for the tokens of the text."""
        return None in self.shape

    @property
    def dtype(self) -> type[np.generic]:
        """Return its numpy type."""
        return np.float32 if self.kind == FLOAT else np.int64

    def shaped(self, rows: int) -> tuple[int, ...]:
        """Return its shape for a text of ``rows`` tokens."""
        return tuple(rows if size is None else size for size in self.shape)

    def elements(self, rows: int) -> int:
        """Count its values for a text of ``rows`` tokens."""
        return int(np.prod(self.shaped(rows)))

    def first(self, array: Rows, rows: int) -> Rows:
        """View what it holds of the first ``rows`` tokens; all of a state."""
        at = self.shape.index(None) if self.grows else 0
        return array[(slice(None),) * at + (slice(rows),)] if self.grows else array


@dataclass(frozen=True)
class ConcatPorts:
    """The ports of a graph whose present keys and values are its past ones followed by the new rows."""

    fed: tuple[str, ...]  # which of input_ids, attention_mask and position_ids there are
    cache: tuple[Cached, ...]  # keys, values and states, in the order of the layers
    vocab: int | None  # columns of the logits; None = not in the graph
    single: bool = False  # a pass has one row

    @property
    def states(self) -> bool:
        """Whether something of it cannot be cut back to a shorter text."""
        return not all(one.grows for one in self.cache)

    @property
    def heads(self) -> tuple[int, int] | None:
        """Return (KV heads, head size) if all keys and values have the same; else None."""
        found = {one.shape for one in self.cache}
        shape = next(iter(found))
        if len(found) > 1 or len(shape) != 4 or shape[1] is None or shape[3] is None:
            return None
        return shape[1], shape[3]

    @property
    def values_per_token(self) -> int:
        """Count the values of all growing caches for a token."""
        return sum(one.elements(1) for one in self.cache if one.grows)

    @classmethod
    def match(cls, inputs: Sequence[Port], outputs: Sequence[Port]) -> ConcatPorts:
        """Read a graph's ports.

        Raises:
            ValueError: not such a graph; the message says what was expected and what came.
        """
        past, present = _by_layer(inputs, _PAST), _by_layer(outputs, _PRESENT)
        fed = {port.name: port for port in inputs if port not in past.values()}
        if unknown := [name for name in fed if name not in _FED]:
            raise ValueError(f"has an input {unknown[0]!r}; expected {', '.join(_FED)} and past_key_values alone")
        if "input_ids" not in fed:
            raise ValueError("has no input input_ids")
        if odd := [port for port in fed.values() if port.kind != INTEGER or len(port.shape) != 2]:
            raise ValueError(f"input {odd[0].name} is {_described(odd[0])}; expected {INTEGER} of two dimensions")
        if not past:
            raise ValueError("has no past_key_values: it was exported without a cache")
        if past.keys() != present.keys():
            raise ValueError(f"has {len(past)} past keys and values, but {len(present)} present ones that match")
        cache = tuple(_cached(past[key], present[key]) for key in sorted(past))
        logits = next((port for port in outputs if port.name == "logits"), None)
        if logits is None or logits.kind != FLOAT or len(logits.shape) != 3:
            got = "nothing" if logits is None else _described(logits)
            raise ValueError(f"output logits: expected {FLOAT} [batch, rows, vocabulary], got {got}")
        columns = logits.shape[2]
        named = tuple(name for name in _FED if name in fed)
        return cls(named, cache, columns if isinstance(columns, int) else None, fed["input_ids"].shape[1] == 1)

    @classmethod
    def of_session(cls, session: Any) -> ConcatPorts:
        """Read the ports of an ONNX Runtime session; raises the errors of ``match``."""

        def ports(arguments: Iterable[Any]) -> list[Port]:
            return [Port(one.name, one.type, tuple(one.shape)) for one in arguments]

        return cls.match(ports(session.get_inputs()), ports(session.get_outputs()))


def _by_layer(ports: Sequence[Port], pattern: re.Pattern[str]) -> dict[tuple[int, str], Port]:
    hits = ((pattern.fullmatch(port.name), port) for port in ports)
    return {(int(hit[1]), hit[2]): port for hit, port in hits if hit}


def _cached(past: Port, present: Port) -> Cached:
    """Describe a cache or a state by its two ports."""
    shape, other = _sizes(past), _sizes(present)
    for port in (past, present):
        if port.kind != FLOAT and (port.kind != INTEGER or None in shape):
            raise ValueError(f"{port.name} is {port.kind}; expected {FLOAT}: export it in float32")
    if shape.count(None) > (len(shape) > 1) or shape != other or past.kind != present.kind:
        raise ValueError(
            f"{past.name} is {_described(past)}, and {present.name} {_described(present)}; expected the same "
            "sizes, and one for the tokens at most"
        )
    return Cached(past.name, present.name, shape, past.kind)


def _sizes(port: Port) -> tuple[int | None, ...]:
    """Return the sizes of a port for one text; None = as long as the text."""
    batch = len(port.shape) > 1
    return tuple(
        1 if batch and not at else size if isinstance(size, int) else None for at, size in enumerate(port.shape)
    )


def _described(port: Port) -> str:
    return f"{port.kind} {[size if size is not None else '?' for size in port.shape]}"


class ConcatSlot(Slot):
    """A slot for foreign graphs; see ``open_slot``."""

    def __init__(self, model: Model, *, context: int | None = None, reserve: int = 256) -> None:
        super().__init__(model, context)
        try:
            self._ports = ports = ConcatPorts.of_session(model.session)
        except ValueError as error:
            raise BundleError(f"{model.folder / model.graph.file}: the graph {error}", "export it again") from error
        self.stateful = ports.states
        self.can = frozenset({"scored", "read", "draft", "visible"})
        self.chunk = max(1, min(PREFILL_CHUNK, LARGEST_LOGITS // self.columns))
        pairs = (
            model.graph_name == STRICT and not ports.single and needs_pairs(model, lambda: ConcatSlot(model, reserve=1))
        )
        self._extra = int(model.graph.padded or pairs)
        self._io = model.session.io_binding()
        self._halves: list[dict[str, Rows]] = [{}, {}]  # flat buffers, by the name of the past
        self._now = 0  # which half holds the slot's keys and values
        self._held: dict[str, Bound] = {}  # float32, ``Cached.shaped`` of the held rows, by the name of the past
        self._held_rows = 0  # the slot's tokens come first; rows after them are cropped before the next pass
        self._made: dict[str, Bound] = {}  # output of the last pass in the other half
        self._made_rows = 0
        self._after: list[dict[str, Rows]] = []  # of single rows: states before the last pass, and after each row
        self._ones = np.zeros(0, np.int64)  # [capacity]
        self._positions = np.zeros(0, np.int64)  # [capacity]
        self.reserve(reserve)

    # -- the Target contract ---------------------------------------------------------------------------------------

    def run(self, wanted: Pass) -> Output:
        tokens, parents = self._given(wanted), wanted.parents
        n = len(tokens)
        chain = np.arange(-1, n - 1)
        begins = chain < 0 if parents is None else parents < 0  # rows without earlier rows in the pass
        chains = parents is None or np.array_equal(parents[~begins], chain[~begins])
        if chains and (wanted.visible is not None or begins.sum() == 1):
            wanted = wanted._replace(parents=None)  # said as a tree
        self.check(wanted)
        if wanted.visible is not None:
            logits = self._score(tokens, wanted.visible, np.flatnonzero(begins))
        else:
            logits = self._run(tokens)
            if not wanted.draft:
                self._pending = (tokens.tolist(), None)
            elif self._ports.single:
                self._back(0)
        if wanted.read:
            self.keep(range(n))
        output = Output(logits[n - (n if wanted.scored is None else wanted.scored) :])
        if wanted.top:
            best = output.logits.argmax(-1)
            output.best = best, output.logits[np.arange(len(best)), best]
        return output

    def lacks(self, field: str) -> InvalidRequest:
        return self._cannot(f"run {OPTIONAL[field]}")

    def keep(self, rows: Sequence[int]) -> None:
        tokens, _ = self._pending
        count = len(rows)
        if count > len(tokens) or any(row != at for at, row in enumerate(rows)):
            raise self._cannot("keep rows that are not the first ones")
        if self._ports.single:
            self._back(count)
        elif count:
            self._commit()
        self.tokens.extend(tokens[:count])
        self._pending = ([], None)

    def crop(self, length: int) -> int:
        length = self.cropped(length)
        if self._after:
            self._back(0)
        if self._ports.states and length < len(self.tokens):
            self._forget_states()
        return super().crop(length)

    def cropped(self, length: int) -> int:
        """Count the tokens that ``crop`` would leave: none where a state would have to go back."""
        return 0 if self._ports.states and length < len(self.tokens) else super().cropped(length)

    def _score(self, tokens: Ids, visible: Ids, starts: Ids) -> Rows:  # [n], [n], [chains] -> [n, vocab]
        """Run chains that each continue some beginning of the text, one after the other."""
        ends = np.append(starts[1:], len(tokens))
        self._trim()
        held = list(self.tokens)
        saved = {name: bound.array.copy() for name, bound in self._held.items()}
        found = np.empty((len(tokens), self.columns), np.float32)
        chains = list(zip(starts.tolist(), ends.tolist(), strict=True))
        if self._ports.states:  # each beginning is read again, on from the one before
            chains.sort(key=lambda chain: int(visible[chain[0]]))
            self.crop(0)
        try:
            for start, end in chains:
                length = int(visible[start])
                if not self._ports.states:
                    self._load(saved, length)
                elif length > len(self.tokens):
                    self._run(np.array(held[len(self.tokens) : length], np.int64))
                    self._after = []
                self.tokens = held[:length]
                found[start:end] = self._run(tokens[start:end])
                if self._ports.states:
                    self._back(0)
        finally:
            self.tokens = held
            self._load(saved, len(held))
        return found

    # -- memory ------------------------------------------------------------------------------------------------------

    def reserve(self, tokens: int) -> None:
        need = self._grown(tokens)
        if need == self.capacity:
            return
        self._trim()
        held, rows = self._held, len(self.tokens)
        self._halves = [
            {one.past: np.zeros(one.elements(need), one.dtype) for one in self._ports.cache} for _ in range(2)
        ]
        self._load({past: bound.array for past, bound in held.items()}, rows)
        self._ones, self._positions = np.ones(need, np.int64), np.arange(need)
        self.capacity = need

    @property
    def kv_bytes(self) -> int:
        return sum(flat.nbytes for half in self._halves for flat in half.values())

    def held(self) -> list[NDArray[Any]]:
        self._trim()
        return [self._held[one.past].array for one in self._ports.cache if one.grows]

    def take_up(self, tokens: Sequence[int], high_water_mark: int) -> list[NDArray[Any]]:
        self.reserve(len(tokens))
        self.tokens, self._after = list(tokens), []
        self._held, self._held_rows = self._views(self._now, len(tokens)), len(tokens)
        return self.held()

    def state(self) -> NDArray[np.uint8]:
        self._trim()
        states = [self._held[one.past].array.ravel().view(np.uint8) for one in self._ports.cache if not one.grows]
        return np.concatenate(states) if states else super().state()

    def put_state(self, state: NDArray[np.uint8]) -> bool:
        states = [self._held[one.past].array for one in self._ports.cache if not one.grows]
        if len(state) != sum(one.nbytes for one in states):
            return False
        values = state.tobytes()
        for array in states:
            array[...] = np.frombuffer(values[: array.nbytes], array.dtype).reshape(array.shape)
            values = values[array.nbytes :]
        return True

    def copy_prefix_from(self, other: Slot, length: int) -> int:
        if self._ports.states:  # states of a prefix are gone
            return 0
        return super().copy_prefix_from(other, length)

    def snapshot(self) -> dict[str, Rows]:
        count = len(self.tokens)
        views = {one.past: one.first(self._held[one.past].array, count) for one in self._ports.cache}
        return {past: (view[0] if view.ndim > 1 else view).copy() for past, view in views.items()}

    # -- one pass ----------------------------------------------------------------------------------------------------

    def _run(self, tokens: Ids) -> Rows:
        """Run rows after the slot's tokens -> logits [n, vocab]."""
        self._need_room(len(self.tokens) + len(tokens) + self._extra)
        self._trim()
        if not self._ports.single:
            return self._pass(tokens, len(self.tokens))
        logits = np.empty((len(tokens), self.columns), np.float32)
        self._after = [self._copied_states()]
        for at in range(len(tokens)):
            logits[at] = self._pass(tokens[at : at + 1], len(self.tokens) + at)
            self._commit()
            self._after.append(self._copied_states())
        return logits

    def _pass(self, tokens: Ids, past: int) -> Rows:
        """Run rows after ``past`` held ones -> logits [n, vocab]; their keys and values are in ``_made``."""
        n = len(tokens)
        rows = n + self._extra
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
        for one in self._ports.cache:
            self._io.bind_ortvalue_input(one.past, self._held[one.past].value)
            self._io.bind_ortvalue_output(one.present, self._made[one.past].value)
        logits = self.model.buffer("logits", (1, rows, self.columns), np.float32)
        self._io.bind_ortvalue_output("logits", logits.value)
        self.model.run_bound(self._io)
        self._made_rows = past + rows
        found: Rows = logits.array[0, :n]
        return found

    def _commit(self) -> None:
        """Hold what the last pass wrote; rows that do not stay are cropped later."""
        self._now, self._held, self._held_rows = 1 - self._now, self._made, self._made_rows

    def _back(self, count: int) -> None:
        """Hold the states after the first ``count`` rows of the last pass; its other rows are cropped later."""
        for name, state in self._after[count].items() if count < len(self._after) else ():
            self._held[name].array[...] = state
        self._after = []

    def _copied_states(self) -> dict[str, Rows]:
        return {one.past: self._held[one.past].array.copy() for one in self._ports.cache if not one.grows}

    def _forget_states(self) -> None:
        for one in self._ports.cache:
            if not one.grows:
                self._held[one.past].array[...] = 0

    def _trim(self) -> None:
        """Forget rows after the slot's tokens."""
        if self._after:  # nothing of the last pass was kept
            self._back(0)
        if self._held_rows != len(self.tokens):
            self._load({name: bound.array for name, bound in self._held.items()}, len(self.tokens))

    def _load(self, source: Mapping[str, Rows], rows: int) -> None:
        """Hold the first ``rows`` rows of ``source``, by the name of the past, in the other half."""
        views = self._views(1 - self._now, rows)
        for one in self._ports.cache if source else ():
            if rows or not one.grows:
                views[one.past].array[...] = one.first(source[one.past], rows)
        self._now, self._held, self._held_rows = 1 - self._now, views, rows

    def _views(self, half: int, rows: int) -> dict[str, Bound]:
        """View the beginnings of a half's buffers as arrays for ``rows`` tokens."""
        flat = self._halves[half]
        return {
            one.past: Bound(flat[one.past][: one.elements(rows)].reshape(one.shaped(rows))) for one in self._ports.cache
        }

    def _cannot(self, what: str) -> InvalidRequest:
        return InvalidRequest(
            f"this model's graph was exported by {self.model.part.origin}: it cannot {what}, only chains of rows after "
            "the text",
            "that needs an architecture that edgespec emits itself: docs/architectures.md",
        )
