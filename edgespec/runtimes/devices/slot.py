"""A KV slot on a device: keys and values never leave its memory.

Buffers are of one size and bound as past and present of every graph, so that a pass writes in place; a rollback is a
smaller past, and the accepted path of a tree is moved on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.target import BEST, DRAFT_BEST, OPTIONAL, Ids, Output, Pass, Rows, SkipSet
from edgespec.errors import InvalidRequest
from edgespec.runtimes.devices.model import DeviceModel
from edgespec.runtimes.slots.slot import ROUND_CAPACITY, Slot, best_of, depths_of
from edgespec.runtimes.slots.stock import ALWAYS, HIDE

# Rows of a pass, and rows that reach the LM head: a device compiles its programs for each shape that it meets, which
# takes far longer than a pass.
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
MOST_BEST = 16  # likeliest tokens that the graphs choose
_NO_LOGITS = np.zeros((0, 0), np.float32)


class DeviceSlot(Slot):
    """A slot for the graphs of a device; see ``open_slot``."""

    model: DeviceModel
    can = ALWAYS - {"visible"} | {"hidden", "inputs", "skip", "group", BEST, DRAFT_BEST}

    def __init__(self, model: DeviceModel, *, context: int | None = None, reserve: int = 256) -> None:
        super().__init__(model, context)
        facts, part = model.facts, model.part
        if any(name.startswith(model.name("from/")) for name in part.graphs):
            self.can |= {"layers"}
        self.capacity = -(-(self.context + part.extra_rows) // ROUND_CAPACITY) * ROUND_CAPACITY
        self._last = facts.context + part.extra_rows - 1  # position of the tables
        shape = 1, facts.kv_heads, self.capacity, facts.head_dim
        self._kv = {
            (layer, kind): model.put(np.zeros(shape, model.number))
            for layer in range(facts.layers)
            for kind in ("key", "value")
        }
        self._places = model.put(np.arange(self.capacity, dtype=np.float32))
        self._made: dict[tuple[int, ...], Any] = {}  # by shape: a mask that hides nothing, or room for hidden states
        self.chunk = min(self.chunk, model.most_rows)

    # -- the Target contract ---------------------------------------------------------------------------------------

    def run(self, wanted: Pass) -> Output:
        self.check(wanted)
        if wanted.group:
            return self._ask(wanted)
        tokens = self._given(wanted)
        begin: NDArray[Any] = tokens if wanted.inputs is None else wanted.inputs
        past, n = len(self.tokens) + wanted.offset, len(begin)
        above = None if wanted.parents is None else wanted.parents.tolist()
        which = self._graph(wanted)
        if not wanted.draft:
            self._pending = (tokens.tolist(), above)
        if wanted.scored == 0:
            # a part of the layers gives its hidden states; a text that is read, its keys and values alone
            names, rows = (["hidden"], None) if wanted.hidden else ([], np.zeros(1, np.int64))
            found = self._launch(which, begin, past, above, rows, names)
            output = Output(_NO_LOGITS, found[0][0, :n] if found else None)
        else:
            rows = np.arange(n - (n if wanted.scored is None else wanted.scored), n)
            output = self._outcome(which, begin, past, above, rows, wanted.top > 0, wanted.hidden)
        if wanted.read:
            self.keep(range(n))
        if wanted.layers is not None:
            output.share = (wanted.layers[1] - wanted.layers[0]) / self.layers
        return output

    def _graph(self, wanted: Pass) -> str:
        """Name the graph of a pass that is none of heads."""
        if wanted.layers is not None:
            first, last = wanted.layers
            return f"layers/{first}-{last}" if wanted.scored == 0 else f"from/{first}"
        if wanted.skip is None:
            return ""
        graph = self.model.part.graphs.get(self.model.name("skip"))
        known = graph.skip if graph else None
        if known is None or SkipSet(tuple(known.attention), tuple(known.mlp)) != wanted.skip:
            raise InvalidRequest("this device has a graph for the bundle's own skip set only", "use device cpu")
        return "skip"

    def _ask(self, wanted: Pass) -> Output:
        """Run a group of heads."""
        if wanted.inputs is None:
            raise self.lacks("group")
        _, found = self._group(wanted.group)
        hidden, top = wanted.inputs, wanted.top
        r, only = len(hidden), 0 < top <= MOST_BEST
        names = ["best_values", "best_ids", "log_total"] if only else ["logits"]
        outputs = self.model.run(f"heads/{wanted.group}", {"hidden_in": hidden[None]}, {}, {}, names)
        if only:
            values, ids = (out[0, :, :top].reshape(found.count, r, top) for out in outputs[:2])
            chance = np.exp(values[..., 0] - outputs[2].reshape(found.count, r))
            return Output(_NO_LOGITS, None, (self._named(ids), values), chance, tokens=self.head_tokens)
        logits = outputs[0][0].reshape(found.count, r, -1)
        best = best_of(logits, self.head_tokens, top) if top else None
        return Output(logits, None, best, tokens=self.head_tokens)

    def lacks(self, field: str) -> InvalidRequest:
        return InvalidRequest(f"{OPTIONAL[field]} run on the CPU only", "use device cpu")

    # -- memory ------------------------------------------------------------------------------------------------------

    def reserve(self, tokens: int) -> None:
        if tokens > self.capacity:
            raise InvalidRequest(f"{tokens} tokens do not fit the cache of {self.capacity} on this device")

    @property
    def kv_bytes(self) -> int:
        facts = self.model.facts
        size = np.dtype(self.model.number).itemsize
        return 2 * size * facts.layers * facts.kv_heads * facts.head_dim * self.capacity

    def snapshot(self) -> dict[str, Rows]:
        return {
            f"past_key_values.{layer}.{kind}": value.numpy()[0, :, : len(self.tokens)].astype(np.float32)
            for (layer, kind), value in self._kv.items()
        }

    # -- one pass ----------------------------------------------------------------------------------------------------

    def _outcome(
        self,
        which: str,
        begin: NDArray[Any],
        past: int,
        parents: list[int] | None,
        rows: Ids,
        best: bool,
        hidden: bool,
    ) -> Output:
        """Run a pass that ends in the LM head."""
        r, n = len(rows), len(begin)
        rows = np.resize(rows, self._rounded(r, 0))
        names = ["best_values", "best_ids", "log_total"] if best else ["logits"]
        stream = self._zeros(1, self._rounded(n, past), self.model.facts.hidden) if hidden else None
        outputs = self._launch(which, begin, past, parents, rows, names, stream)
        states: Any = None if stream is None else DeviceHiddenStates(self.model, stream, n)
        if not best:
            return Output(outputs[0][0, :r], states)
        values, ids = outputs[0][0, :r, 0], outputs[1][0, :r, 0]
        best_of_row = self._named(ids, self.model.part.cut), values
        chance = np.exp(values - outputs[2][0, :r])
        return Output(np.zeros((0, self.columns), np.float32), states, best_of_row, chance)

    def _launch(
        self,
        which: str,
        begin: NDArray[Any],  # int64 [n] tokens, or float32 [n, hidden]
        past: int,
        parents: list[int] | None,
        rows: Ids | None,
        wanted: list[str],
        stream: Any = None,
    ) -> list[NDArray[Any]]:
        """Run a graph over rows from place ``past`` on; ``stream`` takes hidden states."""
        more = self._rounded(len(begin), past) - len(begin)
        if more > 0:  # what they write is overwritten by the next pass
            begin = np.concatenate([begin, np.repeat(begin[-1:], more, 0)])
            parents = None if parents is None else parents + [-1] * more
        n = len(begin)
        if n > self.model.most_rows:
            raise InvalidRequest(
                f"a pass of {n} rows: this device computes {self.model.most_rows} at most right", "use smaller trees"
            )
        if past + n > self.capacity:
            raise InvalidRequest(f"a pass up to row {past + n} does not fit the cache of {self.capacity} rows")
        positions = past + (np.arange(n) if parents is None else depths_of(parents))
        small: dict[str, NDArray[Any]] = {
            ("input_ids" if begin.ndim == 1 else "hidden_in"): begin[None],
            "position_ids": np.minimum(positions, self._last)[None],
            "position": positions[:, None].astype(np.float32),
            "index": np.arange(n, dtype=np.float32)[:, None],
            "past": np.array([past], np.float32),
            "seqlens_k": np.array([past + n - 1], np.int32),
            "total": np.array(self.capacity, np.int32),
        }
        if rows is not None:
            small["rows"] = rows
        held: dict[str, Any] = {"places": self._places}
        if parents is None:
            held["tree"] = self._zeros(n, n)
        else:
            small["tree"] = tree_mask(parents)
        kept: dict[str, Any] = {} if stream is None else {"hidden": stream}
        taken = self.model.inputs(which)
        for (layer, kind), value in self._kv.items():
            if (name := f"past_key_values.{layer}.{kind}") in taken:  # a graph has some of the layers
                held[name] = kept[f"present.{layer}.{kind}"] = value
        small = {taken[name]: value for name, value in small.items() if name in taken}
        held = {name: value for name, value in held.items() if name in taken}
        return self.model.run(which, small, held, kept, wanted)

    def _move(self, rows: list[tuple[int, int]]) -> None:
        if not rows:
            return
        kv_heads = self.model.facts.kv_heads
        heads = np.repeat(np.arange(kv_heads), len(rows))
        indices = [
            np.stack([np.zeros_like(heads), heads, np.tile([pair[end] for pair in rows], kv_heads)], 1)
            for end in (0, 1)
        ]
        small = {"from": indices[0].astype(np.int64), "to": indices[1].astype(np.int64)}
        held = {f"past_key_values.{layer}.{kind}": value for (layer, kind), value in self._kv.items()}
        kept = {f"present.{layer}.{kind}": value for (layer, kind), value in self._kv.items()}
        self.model.run("move", small, held, kept, [])

    def _rounded(self, n: int, past: int) -> int:
        """Count the rows that a pass of n has from place ``past`` on."""
        least = max(n, self.model.least_rows)
        wanted = next((size for size in ROWS if size >= least), least)
        return wanted if past + wanted <= self.capacity and wanted <= self.model.most_rows else least

    def _zeros(self, *shape: int) -> Any:
        if shape not in self._made:
            self._made[shape] = self.model.put(np.zeros(shape, np.float32))
        return self._made[shape]

    def _named(self, ids: Ids, cut: bool = True) -> Ids:
        """Name the tokens of the columns of a cut LM head."""
        return self.head_tokens[ids] if cut and self.head_tokens is not None else ids


class DeviceHiddenStates:
    """Hidden states [n, hidden] in the device's memory, until the next pass; rows cross when they are asked for."""

    def __init__(self, model: DeviceModel, value: Any, count: int) -> None:
        self._model, self._value, self._count = model, value, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, which: Any) -> Rows:
        rows = np.arange(self._count)[which]
        found = self._model.run("rows", {"rows": np.atleast_1d(rows)}, {"hidden_in": self._value}, {}, ["hidden"])[0][0]
        return found if np.ndim(rows) else found[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype)


def tree_mask(parents: Sequence[int]) -> Rows:
    """Make a mask [n, n]: 0 where a row sees another one, itself and its ancestors, and HIDE elsewhere."""
    n = len(parents)
    mask = np.full((n, n), HIDE, np.float32)
    for row, parent in enumerate(parents):
        if parent >= 0:
            mask[row] = mask[parent]
        mask[row, row] = 0
    return mask
