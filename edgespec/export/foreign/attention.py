"""Find the attention of a graph over its caches: which queries, keys and values, and by which rule.

The nodes between a softmax and its products are followed one by one.  Masks, angles and repeated heads are written in
many ways: they are not read but computed, with random numbers and for many lengths of a text, and compared with what
native operators would compute.  Anything else is not recognized, and then no attention of the graph is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray

from edgespec.export.foreign.values import Values, attributes
from edgespec.runtimes.slots.concat import Cached

Floats = NDArray[np.float32]
_HIDDEN = -1e9  # a mask's number for what is not seen: at most this
_MOVES = {"Add", "Cast", "Concat", "Div", "Expand", "Identity", "Mul", "Neg", "Reshape", "Slice", "Split", "Squeeze",
          "Sub", "Transpose", "Unsqueeze"}  # fmt: skip
_LEAST = 24  # positions: with fewer, different masks may be equal
_PIECE = 256  # positions of a table that are computed at once
_CLOSE = 1e-4, 1e-5  # relative and absolute


@dataclass(frozen=True)
class Norm:
    """A root-mean-square norm, or a layer norm where it is ``centered``."""

    x: str  # what is normed
    weight: str
    eps: float
    bias: str | None = None
    centered: bool = False


@dataclass(frozen=True)
class Table:
    """Cosines and sines of all positions, float32 [P, half] each."""

    cos: Floats
    sin: Floats


Turned = Callable[[Floats, int], "Floats | None"]
"""Computes heads [rows, heads, dim] from their source, for rows after a number of tokens."""


@dataclass(frozen=True)
class Heads:
    """Queries, or new keys or values, of all heads."""

    source: str  # the value [1, rows, heads * dim]
    norm: Norm | None  # of each head, before it is turned
    table: int | None  # it is turned by, index of ``Attentions.tables``; None = it is not
    scale: float


@dataclass(frozen=True)
class Attention:
    """One attention."""

    out: str  # the value [1, rows, heads * dim] that it makes
    layer: int
    query: Heads
    key: Heads
    value: str  # [1, rows, kv * dim]
    heads: int
    kv: int
    dim: int
    scale: float
    window: int = 0  # 0 = every earlier token is seen
    cap: float = 0.0


class Attentions:
    """All attentions of a graph.

    Args:
        cache: what the graph keeps of a text.
        norms: the norms of the graph, by what they make.
        positions: how many there are.

    Attributes:
        tables: that queries and keys are turned by.
    """

    def __init__(self, values: Values, cache: Sequence[Cached], norms: Mapping[str, Norm], positions: int) -> None:
        self._values, self._norms, self._positions = values, norms, positions
        self._presents = {one.present: at for at, one in enumerate(cache)}
        self._pasts = [one.past for one in cache]
        self._shape = cache[0].shape
        self._random = np.random.default_rng(11)
        self.tables: list[Table] = []

    def find(self) -> list[Attention] | None:
        """Return one for each pair of caches; None = some are something else."""
        if len(self._shape) != 4 or len(self._pasts) % 2 or self._positions < _LEAST:
            return None
        found: list[Attention] = []
        held: set[int] = set()
        layers = len(self._pasts) // 2
        for node in self._values.graph.node:
            if node.op_type != "Softmax" or self._values.places(node.input[0]):
                continue
            if (one := self._match(node, len(found))) is None:  # perhaps a router of experts
                continue
            attention, caches = one
            if held & caches:
                return None
            held |= caches
            found.append(attention)
        return found if len(found) == layers and len(held) == 2 * layers else None

    # -- one of them ---------------------------------------------------------------------------------------------------

    def _match(self, softmax: onnx.NodeProto, layer: int) -> tuple[Attention, set[int]] | None:
        if attributes(softmax).get("axis", -1) not in (-1, 3):
            return None
        scored = self._scores(softmax.input[0])
        product = self._reader(softmax.output[0], "MatMul")
        if scored is None or product is None or product.input[0] not in self._same(softmax.output[0]):
            return None
        scores, scale, cap, masks = scored
        key, value = self._cached(scores.input[1], True), self._cached(product.input[1], False)
        window = self._window(masks)
        if key is None or value is None or window is None or value[1] != 1:
            return None
        (key_at, key_scale, heads), (value_at, _, other) = key, value
        _, kv, _, dim = self._shape
        if heads != other or kv is None or dim is None:
            return None
        query = self._heads(scores.input[0], heads, dim)
        own = [self._new(at, kv, dim) for at in (key_at, value_at)]
        out = self._joined(product.output[0], heads, dim)
        keys, new = own
        if query is None or keys is None or new is None or out is None:
            return None
        if query.table != keys.table or new.norm or new.table is not None or not np.isclose(new.scale, 1):
            return None
        if query.norm and keys.norm and query.norm.eps != keys.norm.eps:
            return None
        if not self._read_by(key_at, scores) or not self._read_by(value_at, product):
            return None
        total = scale * key_scale * query.scale * keys.scale
        found = Attention(out, layer, query, keys, new.source, heads, kv, dim, float(total), window, cap)
        return found, {key_at, value_at}

    def _scores(self, name: str) -> tuple[onnx.NodeProto, float, float, list[str]] | None:
        """Follow scores back to their product -> it, its factor, its cap, and the masks that are added."""
        values, scale, cap = self._values, 1.0, 0.0
        masks: list[str] = []
        for _ in range(16):
            node = values.made.get(name)
            if node is None:
                return None
            if node.op_type == "MatMul":
                return node, scale, cap, masks
            if node.op_type in ("Identity", "Cast"):
                if name not in values.floats or node.input[0] not in values.floats:
                    return None
                name = node.input[0]
            elif node.op_type == "Add" and (places := [one for one in node.input if values.places(one)]):
                if len(places) != 1 or cap:
                    return None
                masks += places
                name = next(one for one in node.input if one not in places)
            elif node.op_type in ("Mul", "Div") and (found := self._scaled(node)):
                name, factor = found
                if (inner := values.made.get(name)) is not None and inner.op_type == "Tanh" and factor > 0:
                    below = values.made.get(inner.input[0])
                    within = self._scaled(below) if below is not None and below.op_type in ("Mul", "Div") else None
                    if scale != 1 or cap or within is None or not np.isclose(within[1] * factor, 1, rtol=1e-5):
                        return None
                    name, cap = within[0], factor
                    continue
                scale *= factor
            else:
                return None
        return None

    def _scaled(self, node: onnx.NodeProto) -> tuple[str, float] | None:
        """Return what a node multiplies by a number, and the number."""
        first, second = node.input
        if (number := self._values.number(second)) is not None:
            return (first, 1 / number if node.op_type == "Div" else number) if number else None
        if node.op_type == "Mul" and (number := self._values.number(first)) is not None:
            return second, number
        return None

    def _window(self, masks: Sequence[str]) -> int | None:
        """Return the window of masks that only hide later tokens and those beyond it, 0 = without one."""
        if not masks:
            return None
        most = self._positions
        seen = self._seen(masks, most - 2, 2)
        if seen is None:
            return None
        count = int(seen[-1].sum())
        window = 0 if count == most else count
        lengths = {0, 1, 5, most // 3 + 1, most // 2 + 7, most - 3, window - 1, window, window + 1}
        lengths |= set(self._random.integers(0, most - 3, 4).tolist())
        sizes = [(0, min(most, 40)), *((past, 3) for past in sorted(lengths) if 0 <= past <= most - 3)]
        for past, rows in sizes:
            seen = self._seen(masks, past, rows)
            row, column = np.arange(past, past + rows)[:, None], np.arange(past + rows)
            if seen is None or not np.array_equal(seen, (column <= row) & (not window or row - column < window)):
                return None
        return window

    def _seen(self, masks: Sequence[str], past: int, rows: int) -> NDArray[np.bool_] | None:
        """Compute which tokens rows see, [rows, past + rows]; None = a mask says something else."""
        total = np.zeros((1, 1, rows, past + rows))
        for name in masks:
            mask = self._values.compute(name, past, rows)
            if mask is None or mask.dtype != np.float32:
                return None
            try:
                total = total + mask
            except ValueError:
                return None
        if total.shape[-2:] != (rows, past + rows) or not np.isin(total == 0, total > _HIDDEN).all():
            return None
        flat = total.reshape(-1, rows, past + rows)
        seen: NDArray[np.bool_] = flat[0] == 0
        return seen if np.array_equal(seen, flat[0] > _HIDDEN) and (flat == flat[:1]).all() else None

    # -- keys and values in the cache ----------------------------------------------------------------------------------

    def _cached(self, name: str, turned: bool) -> tuple[int, float, int] | None:
        """Recognize a cache, each head of which is repeated -> which one, its factor, and the heads.

        ``turned``: its last axes are exchanged.
        """
        leaves = self._leaves(name, {*self._presents})
        if len(leaves) != 1:
            return None
        (leaf,) = leaves
        if (at := self._presents.get(leaf)) is None:
            return None
        _, kv, _, dim = self._shape
        assert kv is not None
        assert dim is not None
        factor, heads = 0.0, 0
        for past, rows in ((4, 3), (0, 5)):
            held = self._random.standard_normal((1, kv, past + rows, dim)).astype(np.float32)
            got = self._values.compute(name, past, rows, {leaf: held})
            if got is None or got.ndim != 4:
                return None
            got = got.swapaxes(2, 3) if turned else got
            if got.shape[1] % kv or got.shape[2:] != held.shape[2:]:
                return None
            expected = held.repeat(got.shape[1] // kv, 1)
            ratio = got / expected
            if not np.allclose(ratio, ratio.flat[0], rtol=1e-5) or (heads and not np.isclose(factor, ratio.flat[0])):
                return None
            factor, heads = float(ratio.flat[0]), got.shape[1]
        return at, (1.0 if np.isclose(factor, 1, rtol=1e-6) else factor), heads

    def _read_by(self, at: int, product: onnx.NodeProto) -> bool:
        """Whether a cache is read only on the way to a product, and holds the old rows and then the new ones."""
        present = next(name for name, number in self._presents.items() if number == at)
        values, joined = self._values, self._values.made.get(present)
        if joined is None or joined.op_type != "Concat" or joined.input[0] != self._pasts[at]:
            return False
        if len(joined.input) != 2 or attributes(joined)["axis"] not in (2, -2):
            return False
        if any(node is not joined and node.op_type != "Shape" for node in values.readers[self._pasts[at]]):
            return False
        inside, stack = {product.output[0]}, [product.input[1]]
        while stack:
            if (name := stack.pop()) != present and name not in inside and not values.places(name):
                inside.add(name)
                stack += values.made[name].input
        return all(set(node.output) <= inside for node in values.readers[present])

    def _new(self, at: int, kv: int, dim: int) -> Heads | None:
        present = next(name for name, number in self._presents.items() if number == at)
        joined = self._values.made.get(present)
        if joined is None or joined.op_type != "Concat" or len(joined.input) != 2:
            return None
        return self._heads(joined.input[1], kv, dim)

    # -- heads ---------------------------------------------------------------------------------------------------------

    def _heads(self, name: str, heads: int, dim: int) -> Heads | None:
        """Recognize heads [1, heads, rows, dim]: columns of rows, perhaps normed, turned and times a number."""
        leaves = self._leaves(name, {*self._norms})
        if len(leaves) != 1:
            return None
        (leaf,) = leaves
        source: str | None = leaf
        if (norm := self._norms.get(leaf)) is not None:
            source = self._normed(leaf, norm, heads, dim)
        if source is None or self._values.width(source) != heads * dim:
            return None

        def turned(x: Floats, past: int) -> Floats | None:
            got = self._moved(name, leaf, x, past)
            return got[0].swapaxes(0, 1) if got is not None and got.shape == (1, heads, len(x), dim) else None

        found = self._rotation(turned, heads, dim)
        return None if found is None else Heads(source, norm, *found)

    def _normed(self, leaf: str, norm: Norm, heads: int, dim: int) -> str | None:
        """Return the rows whose heads a norm takes; None = it is another norm."""
        sources = self._leaves(norm.x, set())
        if norm.centered or norm.bias or not self._values.vector(norm.weight, dim) or len(sources) != 1:
            return None
        (source,) = sources
        for past in (0, 5):
            x = self._drawn(3, heads, dim)
            got, same = self._moved(norm.x, source, x, past), self._moved(leaf, leaf, x, past)
            if got is None or same is None or not np.array_equal(got, same):
                return None
        return source

    def _moved(self, name: str, leaf: str, x: Floats, past: int) -> Floats | None:  # x [rows, heads, dim]
        """Compute a value from another one, which has these heads, in whichever of three forms."""
        _, heads, dim = x.shape
        dims = [one.dim_value for one in self._values.dims.get(leaf, ())]
        if len(dims) == 3 and dims[2] == heads * dim:
            given = x.reshape(1, len(x), heads * dim)
        elif len(dims) == 4 and dims[2:] == [heads, dim]:
            given = x[None]
        elif len(dims) == 4 and dims[1] == heads and dims[3] == dim:
            given = x.swapaxes(0, 1)[None]
        else:
            return None
        return self._values.compute(name, past, len(x), {leaf: np.ascontiguousarray(given)})

    def _drawn(self, rows: int, heads: int, dim: int) -> Floats:
        return self._random.standard_normal((rows, heads, dim)).astype(np.float32)

    def _rotation(self, turned: Turned, heads: int, dim: int) -> tuple[int | None, float] | None:
        """Find the table and the factor of heads, pairs of whose first channels may be turned: j and half + j."""
        most = self._positions
        ratios = []
        for past in (0, most // 2, most - 4):
            x = self._drawn(4, heads, dim)
            if (got := turned(x, past)) is None:
                return None
            ratios.append(got / x)
        ratio = np.concatenate(ratios)
        scale = float(ratio[0, 0, -1])
        if not np.isfinite(scale) or not scale:
            return None
        scale = 1.0 if np.isclose(scale, 1, rtol=1e-6) else scale
        same: NDArray[np.bool_] = np.all(np.abs(ratio - scale) < 1e-5 * abs(scale), axis=(0, 1))  # [dim]
        if same.all():
            return None, scale
        # channels after the last one that changes may be turned too little to be seen
        least = -(-(dim - int(np.argmin(same[::-1]))) // 2) * 2
        for size in dict.fromkeys((least, dim, dim // 2, dim // 4, 3 * dim // 4)):
            if least <= size <= dim and not size % 2:
                factor = 1.0 if size == dim else scale
                if (number := self._table(turned, heads, dim, size, factor)) is not None:
                    return number, factor
        return None

    def _table(self, turned: Turned, heads: int, dim: int, size: int, scale: float) -> int | None:
        """Return the number of the table that heads are turned by in their first ``size`` channels; None = by none."""
        half, most = size // 2, self._positions
        probe = np.zeros((1, heads, dim), np.float32)
        probe[..., :half] = probe[..., size:] = 1

        def angles(past: int, rows: int) -> Table | None:
            got = turned(probe.repeat(rows, 0), past)
            if got is None or not np.array_equal(got, got[:, :1].repeat(heads, 1)):
                return None
            got = got[:, 0] / np.float32(scale)
            return Table(got[:, :half], got[:, half:size])

        samples = []
        for past, rows in ((0, 9), (most - 4, 4), (most // 2, 3), (most // 3 + 1, 5)):
            x, found = self._drawn(rows, heads, dim), angles(past, rows)
            got, expected = turned(x, past), x * np.float32(scale)
            if got is None or found is None:
                return None
            cos, sin = (part[:, None] * np.float32(scale) for part in (found.cos, found.sin))
            first, second = x[..., :half], x[..., half:size]
            expected[..., :half], expected[..., half:size] = first * cos - second * sin, second * cos + first * sin
            if not np.allclose(got, expected, rtol=_CLOSE[0], atol=_CLOSE[1]):
                return None
            samples.append((past, rows, found))
        number = next((at for at, table in enumerate(self.tables) if _agree(table, samples)), None)
        if number is None:
            pieces = [angles(past, min(_PIECE, most - past)) for past in range(0, most, _PIECE)]
            there = [one for one in pieces if one is not None]
            table = Table(*(np.concatenate([getattr(one, name) for one in there]) for name in ("cos", "sin")))
            if len(there) < len(pieces) or not _agree(table, samples):  # angles that change with the text's length
                return None
            number = len(self.tables)
            self.tables.append(table)
        return number

    def _joined(self, name: str, heads: int, dim: int) -> str | None:
        """Find the value [1, rows, heads * dim] that heads [1, heads, rows, dim] are put together as."""
        first = name
        for _ in range(5):
            if self._values.width(name) == heads * dim:
                for past, rows in ((0, 3), (4, 2)):
                    x = self._random.standard_normal((1, heads, rows, dim)).astype(np.float32)
                    got = self._values.compute(name, past, rows, {first: x})
                    expected = x.swapaxes(1, 2).reshape(1, rows, heads * dim)
                    if got is None or not np.array_equal(got.reshape(expected.shape), expected):
                        return None
                return name
            node = self._reader(name, "Transpose", "Reshape", "Identity", "Squeeze")
            if node is None:
                return None
            name = node.output[0]
        return None

    # -- the graph -----------------------------------------------------------------------------------------------------

    def _leaves(self, name: str, stop: set[str]) -> set[str]:
        """Name the values that one is computed from by moving and adding: rows of a pass, or ``stop``."""
        values, found, seen, stack = self._values, set(), {name}, [name]
        while stack:
            at = stack.pop()
            node = values.made.get(at)
            if values.places(at):
                continue
            scaled = node is not None and node.op_type in ("Mul", "Div") and self._scaled(node) is not None
            rows = values.width(at) is not None and not scaled
            if at in stop or node is None or node.op_type not in _MOVES or node.domain or rows:
                found.add(at)
                continue
            new = [one for one in node.input if one and one not in seen]
            seen.update(new)
            stack += new
        return found

    def _reader(self, name: str, *kinds: str) -> onnx.NodeProto | None:
        """Return the only node that reads a value or what is the same, if it is of these kinds."""
        while self._values.only(name):
            (node,) = self._values.readers[name]
            if node.op_type in kinds:
                return node
            if node.op_type not in ("Identity", "Cast") or node.output[0] not in self._values.floats:
                return None
            name = node.output[0]
        return None

    def _same(self, name: str) -> set[str]:
        """Name a value and what is the same."""
        found = {name}
        while len(readers := self._values.readers[name]) == 1 and readers[0].op_type in ("Identity", "Cast"):
            name = readers[0].output[0]
            found.add(name)
        return found


def _agree(table: Table, samples: Sequence[tuple[int, int, Table]]) -> bool:
    """Whether a table has the angles that were found at some positions."""
    for past, rows, found in samples:
        if found.cos.shape[1] != table.cos.shape[1]:
            return False
        for one, own in ((found.cos, table.cos), (found.sin, table.sin)):
            if not np.allclose(one, own[past : past + rows], rtol=1e-5, atol=1e-6):
                return False
    return True
