"""A KV slot over a graph that optimum exported: a pass returns all keys and values, the new rows after the old ones.

Two sets of buffers alternate: a pass reads the output of the one before, so nothing is copied beyond the graph's own
concatenation.  Rows that do not stay (rejected draft tokens, a dummy row) are cropped before the next pass, which
copies the others once.

Strict mode (docs/dev/runtime.md): attention of one row uses other kernels than that of several.  The strict graph
handles it.  A *padded* graph gets a dummy row after the real ones in every pass instead.  So does any strict graph on a
machine where a lone row still has other bits (``pairs.py``).  Whether a row then has the same bits in all passes
depends on the graph, and ``cpu.rows_exact`` tests it.
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
_PAST = re.compile(r"past(?:_key_values)?[._](\d+)[._](key|value)")
_PRESENT = re.compile(r"present(?:_key_values)?[._](\d+)[._](key|value)")
_FED = ("input_ids", "attention_mask", "position_ids")  # [1, n], [1, past + n], [1, n]
LARGEST_LOGITS = 1 << 22  # values: the graph gives those of every row, of a prefill too


@dataclass(frozen=True)
class Port:
    """An input or output of a graph."""

    name: str  # as in the graph
    kind: str  # its type as ONNX Runtime writes it, such as ``tensor(float)``
    shape: tuple[int | str | None, ...]  # its dimensions; a name or None = any size


@dataclass(frozen=True)
class ConcatPorts:
    """The ports of a graph whose present keys and values are its past ones followed by the new rows."""

    fed: tuple[str, ...]  # which of input_ids, attention_mask and position_ids there are
    cache: tuple[tuple[str, str], ...]  # (past, present) of every key and value, by layer
    kv_heads: int  # of each
    head_dim: int  # of each
    vocab: int | None  # columns of the logits; None = not in the graph

    @property
    def layers(self) -> int:
        """Layers with a cache."""
        return len(self.cache) // 2

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
        if past.keys() != present.keys() or len(past) % 2:
            raise ValueError(f"has {len(past)} past keys and values, but {len(present)} present ones that match")
        sizes = {_cache_size(port) for port in (*past.values(), *present.values())}
        if len(sizes) > 1:
            raise ValueError(f"has keys and values of several shapes: {sorted(sizes)}; expected one [heads, head size]")
        logits = next((port for port in outputs if port.name == "logits"), None)
        if logits is None or logits.kind != FLOAT or len(logits.shape) != 3:
            got = "nothing" if logits is None else _described(logits)
            raise ValueError(f"output logits: expected {FLOAT} [batch, rows, vocabulary], got {got}")
        ((kv_heads, head_dim),) = sizes
        columns = logits.shape[2]
        pairs = tuple((past[key].name, present[key].name) for key in sorted(past))
        named = tuple(name for name in _FED if name in fed)
        return cls(named, pairs, kv_heads, head_dim, columns if isinstance(columns, int) else None)

    @classmethod
    def of_session(cls, session: Any) -> ConcatPorts:
        """Read the ports of an ONNX Runtime session; raises the errors of ``match``."""

        def ports(arguments: Iterable[Any]) -> list[Port]:
            return [Port(one.name, one.type, tuple(one.shape)) for one in arguments]

        return cls.match(ports(session.get_inputs()), ports(session.get_outputs()))


def _by_layer(ports: Sequence[Port], pattern: re.Pattern[str]) -> dict[tuple[int, str], Port]:
    hits = ((pattern.fullmatch(port.name), port) for port in ports)
    return {(int(hit[1]), hit[2]): port for hit, port in hits if hit}


def _cache_size(port: Port) -> tuple[int, int]:
    """(heads, head size) of a key or value [1, heads, tokens, head size]."""
    shape = port.shape
    if port.kind != FLOAT:
        raise ValueError(f"{port.name} is {port.kind}; expected {FLOAT}: export it in float32")
    fixed = len(shape) == 4 and isinstance(shape[1], int) and isinstance(shape[3], int)
    if not fixed or isinstance(shape[2], int):
        raise ValueError(f"{port.name} is {_described(port)}; expected [batch, heads, tokens, head size]")
    return int(shape[1] or 0), int(shape[3] or 0)


def _described(port: Port) -> str:
    return f"{port.kind} {[size if size is not None else '?' for size in port.shape]}"


class ConcatSlot(Slot):
    """A slot for graphs of optimum; see ``open_slot``."""

    can = frozenset({"scored", "read", "draft", "visible"})

    def __init__(self, model: Model, *, context: int | None = None, reserve: int = 256) -> None:
        super().__init__(model, context)
        try:
            self._ports = ConcatPorts.of_session(model.session)
        except ValueError as error:
            raise BundleError(f"{model.folder / model.graph.file}: the graph {error}", "export it again") from error
        self.chunk = max(1, min(PREFILL_CHUNK, LARGEST_LOGITS // self.columns))
        pairs = model.graph_name == STRICT and needs_pairs(model, lambda: ConcatSlot(model, reserve=1))
        self._extra = int(model.graph.padded or pairs)
        self._io = model.session.io_binding()
        self._halves: list[dict[str, Rows]] = [{}, {}]  # flat buffers, by the name of the past
        self._now = 0  # which half holds the slot's keys and values
        self._held: dict[str, Bound] = {}  # float32 [1, kv_heads, held rows, head_dim], by the name of the past
        self._held_rows = 0  # the slot's tokens come first; rows after them are cropped before the next pass
        self._made: dict[str, Bound] = {}  # output of the last pass in the other half
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
        if count:
            self._commit()
            self.tokens.extend(tokens[:count])
        self._pending = ([], None)

    def _score(self, tokens: Ids, visible: Ids, starts: Ids) -> Rows:  # [n], [n], [chains] -> [n, vocab]
        """Run chains that each continue some beginning of the text, one after the other."""
        ends = np.append(starts[1:], len(tokens))
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
        return found

    # -- memory ------------------------------------------------------------------------------------------------------

    def reserve(self, tokens: int) -> None:
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
        return sum(flat.nbytes for half in self._halves for flat in half.values())

    def held(self) -> list[NDArray[Any]]:
        self._trim()
        return [bound.array for bound in self._held.values()]

    def take_up(self, tokens: Sequence[int], high_water_mark: int) -> list[NDArray[Any]]:
        self.reserve(len(tokens))
        self.tokens = list(tokens)
        self._held, self._held_rows = self._views(self._now, len(tokens)), len(tokens)
        return self.held()

    def snapshot(self) -> dict[str, Rows]:
        return {name: bound.array[0, :, : len(self.tokens)].copy() for name, bound in self._held.items()}

    # -- one pass ----------------------------------------------------------------------------------------------------

    def _run(self, tokens: Ids) -> Rows:
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
        found: Rows = logits.array[0, :n]
        return found

    def _commit(self) -> None:
        """Hold what the last pass wrote; rows that do not stay are cropped later."""
        self._now, self._held = 1 - self._now, self._made
        self._held_rows = next(iter(self._made.values())).array.shape[2]

    def _trim(self) -> None:
        """Forget rows after the slot's tokens."""
        if self._held_rows != len(self.tokens):
            self._load({name: bound.array for name, bound in self._held.items()}, len(self.tokens))

    def _load(self, source: Mapping[str, Rows], rows: int) -> None:
        """Hold the first ``rows`` rows of ``source``, [1, kv_heads, .., head_dim] by name, in the other half."""
        views = self._views(1 - self._now, rows)
        if rows:
            for name, bound in views.items():
                bound.array[...] = source[name][:, :, :rows]
        self._now, self._held, self._held_rows = 1 - self._now, views, rows

    def _views(self, half: int, rows: int) -> dict[str, Bound]:
        """View the beginnings of a half's buffers as [1, kv_heads, rows, head_dim]."""
        shape = (1, self._ports.kv_heads, rows, self._ports.head_dim)
        size = int(np.prod(shape))
        return {name: Bound(flat[:size].reshape(shape)) for name, flat in self._halves[half].items()}

    @staticmethod
    def _cannot(what: str) -> InvalidRequest:
        return InvalidRequest(
            f"this model's graph was exported by optimum: it cannot {what}, only chains of rows after the text",
            "that needs an architecture that edgespec emits itself: docs/architectures.md",
        )
