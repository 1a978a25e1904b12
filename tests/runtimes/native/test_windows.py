"""Windows and caps of native attention against numpy: chains, trees, hypotheses, several slots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.runtimes.files.kv import KvFormat
from tests.support.native_graph import ROOT, Floats, Node, Rows, Weights, beside, kv_bytes

pytestmark = pytest.mark.usefixtures("native")

HEADS, KV, DIM = 4, 2, 24
WINDOWS = (1, 5, 64, 127, 128, 130, 256, 300, 650)  # a block is 128, a split 256
LENGTH = 700
F32 = KvFormat("f32", "f32")


def width_of(heads: int, kv: int, dim: int) -> int:
    """Return the width of rows [q | k | v]."""
    return (heads + 2 * kv) * dim


def program_of(
    weights: Weights,
    shape: tuple[int, int, int],
    window: int,
    cap: float,
    scale: float,
    after: int | None = None,
    sinks: Floats | None = None,
) -> str:
    """Write the steps of nothing but attention: hidden_in [n, q | k | v] -> logits [n, heads * dim]."""
    heads, kv_heads, dim = shape
    sink = -1 if sinks is None else weights.vector(sinks)
    width, steps, seen = width_of(*shape), [], "" if after is None else f" after={after}"
    eye, at = np.eye(width, dtype=np.float32), 0
    for number, n in enumerate((heads * dim, kv_heads * dim, kv_heads * dim)):
        w = weights.matrix(eye[at : at + n])
        steps.append(f"linear act=0 w={w} kind=f32 n={n} k={width} out={number + 1}")
        at += n
    n = heads * dim
    last = weights.matrix(eye[:n, :n])
    return "\n".join(
        [
            f"floats 0 {width}\nfloats 1 {n}\nfloats 2 {kv_heads * dim}\nfloats 3 {kv_heads * dim}\nfloats 4 {n}",
            f"acts 0 {width}\nacts 1 {n}\nload out=0 k={width}\nquantize x=0 k={width} kind=f32 out=0",
            *steps,
            f"heads qx=1 kx=2 vx=3 dim={dim} heads={heads} kv={kv_heads} layer=0 scale={scale}",
            f"attend out=4 layer=0 heads={heads} kv={kv_heads} dim={dim} window={window} cap={cap} sinks={sink}{seen}",
            f"quantize x=4 k={n} kind=f32 out=1 rows=1\nlogits act=1 w={last} kind=f32 n={n} k={n}",
        ]
    )


def attention(
    folder: Path,
    *,
    window: int = 0,
    after: int | None = None,
    cap: float = 0,
    shape: tuple[int, int, int] = (HEADS, KV, DIM),
    scale: float = 1.0,
    tokens: int = 1024,
    sinks: Floats | None = None,
    **more: Any,
) -> Node:
    """Make a node of nothing but attention in ``folder``; ``more``: of ``Node`` and its cache."""
    weights = Weights()
    program = program_of(weights, shape, window, cap, scale, after, sinks)
    return Node(folder, program, weights, width_of(*shape), head=shape[1:], tokens=tokens, **more)


class Expected:
    """Attention in numpy: every row sees the tokens before its root, its ancestors and itself, by their positions."""

    def __init__(self, window: int = 0, cap: float = 0, scale: float = 1.0, sinks: Floats | None = None) -> None:
        self.window, self.cap, self.scale = window, cap, scale
        self.sinks = np.full(HEADS, -np.inf) if sinks is None else sinks.astype(np.float64)
        self.keys: dict[tuple[int, int], NDArray[np.float64]] = {}  # (slot, place) -> [kv, 2, dim]

    def run(self, rows: Rows, x: Floats) -> NDArray[np.float64]:  # [n, q | k | v] -> [n, heads * dim]
        q = x[:, : HEADS * DIM].astype(np.float64).reshape(-1, HEADS, DIM)
        kv = x[:, HEADS * DIM :].astype(np.float64).reshape(-1, 2, KV, DIM).transpose(0, 2, 1, 3)
        for row, (slot, place) in enumerate(zip(rows.slot, rows.place, strict=True)):
            self.keys[slot, place] = kv[row]
        return np.stack([self._row(rows, row, q[row]) for row in range(len(rows))])

    def _row(self, rows: Rows, row: int, q: NDArray[np.float64]) -> NDArray[np.float64]:
        path = [row]
        while rows.parent[path[-1]] != ROOT:
            path.append(rows.parent[path[-1]])
        seen = [(place, place) for place in range(rows.visible[path[-1]])]
        seen += [(rows.position[one], rows.place[one]) for one in path]
        oldest = rows.position[row] - self.window if self.window else -1
        kept = np.stack([self.keys[rows.slot[row], place] for position, place in seen if position > oldest])
        k, v = (np.repeat(kept[:, :, i], HEADS // KV, 1) for i in (0, 1))  # [tokens, heads, dim]
        scores = np.einsum("hd,thd->ht", q, k) * self.scale
        if self.cap:
            scores = self.cap * np.tanh(scores / self.cap)
        most = np.maximum(scores.max(1), self.sinks)[:, None]
        p = np.exp(scores - most)
        share = p / (p.sum(1, keepdims=True) + np.exp(self.sinks[:, None] - most))
        out: NDArray[np.float64] = np.einsum("ht,thd->hd", share, v).reshape(-1)
        return out


def text(n: int, seed: int = 0) -> Floats:  # [n, q | k | v]
    return np.random.default_rng(seed).standard_normal((n, width_of(HEADS, KV, DIM))).astype(np.float32)


def close(found: NDArray[Any], expected: NDArray[np.float64]) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def fill(node: Node, x: Floats, sizes: Sequence[int] = (100,), past: int = 0, slot: int = 0) -> Floats:
    """Run ``x`` as a chain in passes of ``sizes`` rows in turn; return what each row gives, [n, heads * dim]."""
    found, at, turn = [], 0, 0
    while at < len(x):
        rows = x[at : at + sizes[turn % len(sizes)]]
        found.append(node.run(Rows.chain(len(rows), past + at, slot), rows)[0])
        at, turn = at + len(rows), turn + 1
    return np.concatenate(found)


@pytest.mark.parametrize("window", [0, *WINDOWS])
def test_chains(tmp_path: Path, window: int) -> None:
    x, scale = text(LENGTH), 0.4
    found = fill(attention(tmp_path, window=window, scale=scale), x, [1, 128, 3, 17, 64])
    close(found, Expected(window, scale=scale).run(Rows.chain(LENGTH), x))
    for threads in (1, 2):  # bit for bit the same, with any other rows
        node = attention(tmp_path, window=window, scale=scale, threads=threads)
        np.testing.assert_array_equal(fill(node, x, [1] if threads == 1 else [40, 3]), found)


@pytest.mark.parametrize("cap", [0.7, 5.0])
@pytest.mark.parametrize("window", [0, 64, 300])
def test_caps_of_chains(tmp_path: Path, window: int, cap: float) -> None:
    x = text(400, 1)
    found = fill(attention(tmp_path, window=window, cap=cap, scale=0.8), x, [1, 128, 3, 17, 64])
    close(found, Expected(window, cap, 0.8).run(Rows.chain(400), x))
    assert np.abs(found - Expected(window, 0, 0.8).run(Rows.chain(400), x)).max() > 0.01


@pytest.mark.parametrize("window, scale", [(0, 0.4), (0, 0.02), (3, 0.4), (300, 0.02)])
def test_sinks_count_in_the_softmax_alone(tmp_path: Path, window: int, scale: float) -> None:
    """Each head has a score without a value: from far below all others to far above."""
    n, sinks = 560, np.linspace(-90, 30, HEADS, dtype=np.float32)
    x, sinks[:2] = text(n), (0.5, -1)
    found = fill(attention(tmp_path, window=window, scale=scale, sinks=sinks), x, [1, 128, 3, 17, 64])
    close(found, Expected(window, scale=scale, sinks=sinks).run(Rows.chain(n), x))
    assert np.abs(found - Expected(window, scale=scale).run(Rows.chain(n), x)).max() > 0.1
    node = attention(tmp_path, window=window, scale=scale, sinks=sinks, threads=2)
    np.testing.assert_array_equal(fill(node, x, [40, 3]), found)


@pytest.mark.parametrize(
    "window, after", [(12, 0), (2, 1), (5, 64), (65, 64), (128, 127), (129, 3), (300, 200), (9, 690)]
)
def test_rows_that_see_each_other(tmp_path: Path, window: int, after: int) -> None:
    """As an encoder's: each sees positions on both sides, and has the same bits with any threads."""
    n = 500
    x, at = text(n, 5), list(range(n))
    rows = Rows(at, [n] * n, [ROOT] * n, at, [0] * n, [0] * n)
    found = [attention(tmp_path, window=window, after=after, threads=threads).run(rows, x)[0] for threads in (1, 2)]
    np.testing.assert_array_equal(found[0], found[1])
    q, k, v = np.split(x.astype(np.float64), [HEADS * DIM, (HEADS + KV) * DIM], 1)
    keys, values = (np.repeat(one.reshape(n, KV, DIM), HEADS // KV, 1) for one in (k, v))
    scores = np.einsum("qhd,khd->hqk", q.reshape(n, HEADS, DIM), keys)
    away = np.arange(n) - np.arange(n)[:, None]
    scores[:, (away <= -window) | (away > after)] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    close(found[0], np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), values).reshape(n, -1))


# twelve deep, with siblings in between: row 1 to 4 are neighbours of the cache, the others are not
TREE = [ROOT, 0, 1, 2, 0, 4, 3, 6, 7, 8, 5, 9, 10, 11, 12, 13, 15, ROOT, 17]


@pytest.mark.parametrize("past", [0, 3, 126, 255, 520])
@pytest.mark.parametrize("window", [1, 2, 3, 5, 64, 128, 300])
def test_trees(tmp_path: Path, window: int, past: int) -> None:
    before, nodes = text(past, 2), text(len(TREE), 3)
    node, expected = attention(tmp_path, window=window), Expected(window)
    if past:
        fill(node, before)
        expected.run(Rows.chain(past), before)
    rows = Rows.tree(TREE, past)
    close(node.run(rows, nodes)[0], expected.run(rows, nodes))
    # a row per pass, each over the earlier ones
    for row in range(len(TREE)):
        path = [row]
        while TREE[path[0]] != ROOT:
            path.insert(0, TREE[path[0]])
        places = [past + one for one in path]
        n = len(path)
        one = Rows([past + i for i in range(n)], [past] * n, list(range(-1, n - 1)), places, [0] * n, [0] * n)
        np.testing.assert_array_equal(node.run(one, nodes[path])[0][-1], node.run(rows, nodes)[0][row])


@pytest.mark.parametrize("window", [1, 3, 64, 200])
def test_hypotheses(tmp_path: Path, window: int) -> None:
    """Rows that see less than the whole text have cache slots different from their positions."""
    past = 300
    before = text(past, 4)
    node, expected = attention(tmp_path, window=window), Expected(window)
    fill(node, before)
    expected.run(Rows.chain(past), before)
    visible: list[int] = []
    position: list[int] = []
    parent: list[int] = []
    for root in (300, 299, 1, 0, 128, 257, 300):
        for depth in range(5):
            visible.append(root)
            position.append(root + depth)
            parent.append(len(parent) - 1 if depth else ROOT)
    n = len(visible)
    rows = Rows(position, visible, parent, list(range(past, past + n)), [0] * n, [0] * n)
    x = text(n, 5)
    close(node.run(rows, x)[0], expected.run(rows, x))
    # a place right after what is visible, but of another position: out of the window, though its neighbours are in it
    moved = Rows([500, 501, 502], [300, 300, 300], [ROOT, 0, 1], [300, 301, 302], [0] * 3, [0] * 3)
    x = text(3, 6)
    close(node.run(moved, x)[0], expected.run(moved, x))


@pytest.mark.parametrize("window", [1, 64, 200, 300])
def test_several_slots(tmp_path: Path, window: int) -> None:
    lengths, kinds = (3, 600, 130, 40), (TREE[:9], [ROOT], TREE, list(range(-1, 39)))
    together = attention(tmp_path / "a", window=window, slots=len(lengths))
    alone = attention(tmp_path / "b", window=window, slots=len(lengths))
    expected = Expected(window)
    for slot, length in enumerate(lengths):
        x = text(length, slot)
        for node in (together, alone):
            fill(node, x, slot=slot)
        expected.run(Rows.chain(length, 0, slot), x)
    parts = [Rows.tree(tree, length, slot) for slot, (tree, length) in enumerate(zip(kinds, lengths, strict=True))]
    x = text(sum(map(len, parts)), 9)
    rows = beside(*parts)
    found = together.run(rows, x)[0]
    close(found, expected.run(rows, x))
    at = 0
    for part in parts:
        np.testing.assert_array_equal(found[at : at + len(part)], alone.run(part, x[at : at + len(part)])[0])
        at += len(part)


@pytest.mark.parametrize("window", [1, 64, 129, 300])
def test_what_lies_before_the_window_is_not_read(tmp_path: Path, window: int) -> None:
    x, more = text(LENGTH, 1), text(20, 2)
    rows = Rows.tree([ROOT, 0, 0, *[2] * 17], LENGTH)
    clean, spoilt = (attention(tmp_path, window=window) for _ in range(2))
    for node in (clean, spoilt):
        fill(node, x)
    expected = clean.run(rows, more)[0]
    block = kv_bytes(F32, (KV, DIM), 128)
    whole = (LENGTH - window + 1) // 128  # blocks that no row sees anything of
    assert whole >= 3
    spoilt.kv.array[0, : whole * block] = 255  # no numbers
    np.testing.assert_array_equal(spoilt.run(rows, more)[0], expected)
    spoilt.kv.array[0, : (whole + 1) * block] = 255
    assert not np.array_equal(spoilt.run(rows, more)[0], expected)
