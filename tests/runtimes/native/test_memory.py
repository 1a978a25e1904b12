"""Cross-attention over caches and biases by distance, by hand: against numpy, and bit for bit in any batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.runtimes.files.formats import KeyFormat, ValueFormat
from edgespec.runtimes.files.kv import KvFormat
from tests.support.native_graph import Floats, Node, Rows, Weights, beside

pytestmark = pytest.mark.usefixtures("native")

HEADS, DIM, REACH, ROOM = 4, 16, 20, 1152
WIDTH = HEADS * DIM
FILL, READ = (True, False), (False, True)  # gates
FORMATS: list[tuple[KeyFormat, ValueFormat, float]] = [
    ("f32", "f32", 1e-5),
    ("f16", "f16", 3e-3),
    ("int8", "int8", 3e-2),
]


def random(rows: int, columns: int = WIDTH, seed: int = 0, scale: float = 1) -> Floats:
    return np.random.default_rng(seed).standard_normal((rows, columns), np.float32) * np.float32(scale)


def softmax(x: Any) -> Any:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


class Stack:
    """Self-attention with a bias by distance, then cross-attention, both added to the rows that a pass is given."""

    def __init__(self, folder: Path, keys: KeyFormat, values: ValueFormat, both: bool, threads: int = 2) -> None:
        self.both, weights = both, Weights()
        self.own, self.out, self.cross, self.back = (
            random(n * WIDTH, seed=at, scale=1 / 8) for at, n in enumerate((3, 1, 3, 1))
        )
        self.bias = random(HEADS, columns=2 * REACH + 1 if both else REACH + 1, seed=9)
        own, out, back = (weights.matrix(matrix) for matrix in (self.own, self.out, self.back))
        queries, filled = weights.matrix(self.cross[:WIDTH]), weights.matrix(self.cross[WIDTH:])
        quantize, head = f"quantize x={{}} k={WIDTH} kind=f32 out=0", f"heads={HEADS} kv={HEADS} dim={DIM}"
        linear = f"linear act=0 w={{}} kind=f32 n={WIDTH} k={WIDTH} out=0 add=1"
        steps = [
            f"gate index=0 skip=3\nload out=0 k={WIDTH}", quantize.format(0),
            f"heads act=0 w={filled} kind=f32 k={WIDTH} {head} memory=1",
            f"gate index=1 skip=12\nload out=0 k={WIDTH}", quantize.format(0),
            f"heads act=0 w={own} kind=f32 k={WIDTH} {head} scale=0.5",
            f"attend out=1 {head} relative={weights.vector(self.bias)} n={self.bias.shape[1]} at={REACH}",
            quantize.format(1), linear.format(out), quantize.format(0),
            f"heads act=0 w={queries} kind=f32 k={WIDTH} {head} scale=0.5 memory=1 shared=1",
            f"attend out=1 {head} memory=1", quantize.format(1), linear.format(back), f"store x=0 k={WIDTH}",
        ]  # fmt: skip
        program = f"floats 0 {WIDTH}\nfloats 1 {WIDTH}\nacts 0 {WIDTH}\n" + "\n".join(steps)
        self.node = Node(folder, program, weights, WIDTH, threads, kv=KvFormat(keys, values), head=(HEADS, DIM),
                         tokens=ROOM, slots=3, memories=3)  # fmt: skip

    def fill(self, number: int, rows: Floats, chunk: int = 100) -> None:
        """Fill a memory from rows [S, WIDTH]."""
        for first in range(0, len(rows), chunk):
            some = rows[first : first + chunk]
            places = np.arange(first, first + len(some))
            nowhere = Rows.chain(1)
            plan = Rows(*([each[0]] * len(some) for each in (nowhere.position, [0], [-1], [0], [0], [0])))
            self.node.run(plan, some, reach=[], gates=FILL, sources=np.stack([np.full(len(some), number), places]))

    def run(self, rows: Rows, x: Floats, number: Any, seen: Any) -> Floats:
        """Run rows over memories ``number`` of which ``seen`` rows are seen, each one number or [n]."""
        sources = np.zeros((2, len(rows)), np.int64)
        sources[0], sources[1] = number, seen
        found: Floats = self.node.run(rows, x, reach=[], gates=READ, sources=sources)[3]
        return found

    def expected(self, x: Floats, memory: Floats) -> NDArray[np.float64]:
        """Compute a whole text [n, WIDTH] by numpy."""
        rows, n = x.astype(np.float64), len(x)
        distance = np.arange(n)[None] - np.arange(n)[:, None]
        bias = self.bias[:, np.clip(distance + REACH, 0, self.bias.shape[1] - 1)]
        if not self.both:
            bias = np.where(distance > 0, -np.inf, bias)
        q, k, v = np.split(rows @ self.own.T, 3, -1)
        rows = rows + attention(q, k, v, bias) @ self.out.T
        q, (k, v) = rows @ self.cross[:WIDTH].T, np.split(memory @ self.cross[WIDTH:].T.astype(np.float64), 2, -1)
        return rows + attention(q, k, v, 0.0) @ self.back.T


def attention(q: Any, k: Any, v: Any, bias: Any) -> Any:
    q, k, v = (x.reshape(len(x), HEADS, DIM).transpose(1, 0, 2) for x in (q, k, v))
    found = softmax(q @ k.transpose(0, 2, 1) * 0.5 + bias) @ v
    return found.transpose(1, 0, 2).reshape(-1, WIDTH)


def whole(n: int) -> Rows:
    """Give rows that all see each other."""
    at = list(range(n))
    return Rows(at, [n] * n, [-1] * n, at, [0] * n, [0] * n)


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("keys, values, tolerance", FORMATS)
def test_against_numpy(tmp_path: Path, keys: KeyFormat, values: ValueFormat, tolerance: float, both: bool) -> None:
    stack = Stack(tmp_path, keys, values, both)
    for n, seen in ((1, 1), (7, 33), (150, 700)) if not both else ((1, 3), (170, 129), (600, 1100)):
        x, memory = random(n, seed=n), random(seen, seed=seen)
        stack.fill(1, random(ROOM, seed=5, scale=9))  # the old contents are not seen
        stack.fill(1, memory)
        found = stack.run(whole(n) if both else Rows.chain(n), x, 1, seen)
        expected = stack.expected(x, memory)
        assert np.abs(found - expected).max() < tolerance * np.abs(expected).max()


@pytest.mark.parametrize("keys, values", [each[:2] for each in FORMATS])
def test_bits_do_not_depend_on_what_stands_beside(tmp_path: Path, keys: KeyFormat, values: ValueFormat) -> None:
    """One row at a time is what everything is compared with: chunks, several slots and memories, trees, one thread."""
    stack, alone = Stack(tmp_path / "a", keys, values, False), Stack(tmp_path / "b", keys, values, False, threads=1)
    x, lengths = random(40, seed=1), (17, 129, 600)
    for number, length in enumerate(lengths):
        stack.fill(number, random(length, seed=length))
        alone.fill(number, random(length, seed=length), chunk=1 + 60 * number)
    assert np.array_equal(stack.node.memory, alone.node.memory)
    one = [
        np.concatenate([alone.run(Rows.chain(1, at, slot), x[at : at + 1], slot, lengths[slot]) for at in range(40)])
        for slot in range(3)
    ]
    assert not np.array_equal(one[0], one[1])
    together = beside(*(Rows.chain(40, 0, slot) for slot in range(3)))
    numbers = np.repeat(np.arange(3), 40)
    found = stack.run(together, np.tile(x, (3, 1)), numbers, np.array(lengths)[numbers])
    np.testing.assert_array_equal(found, np.concatenate(one))
    # a tree, whose rows are stored out of order: 30 to 33 is the path 0, 2, 3, 5
    parents, path = [-1, 0, 0, 2, 1, 3], [0, 2, 3, 5]
    rows = random(6, seed=2)
    rows[path] = x[30:34]
    found = stack.run(Rows.tree(parents, 30, 1), rows, 1, lengths[1])
    np.testing.assert_array_equal(found[path], one[1][30:34])


def test_memories_out_of_range(tmp_path: Path) -> None:
    stack = Stack(tmp_path, "f32", "f32", False)
    x = random(2)
    for number, seen, message in (
        (-1, 1, "memory -1 does not exist"), (3, 1, "memory 3 does not exist"), (1 << 40, 1, "does not exist"),
        (0, 0, "row 0 sees 0 rows of a memory of 1152: expected 1 to 1152"), (0, ROOM + 1, "row 0 sees 1153 rows"),
        (0, -1, "row 0 sees -1 rows"), (0, 1 << 62, "row 0 sees"),
    ):  # fmt: skip
        with pytest.raises(Exception, match=message):
            stack.run(Rows.chain(2), x, number, seen)
    for place in (-1, ROOM):
        with pytest.raises(Exception, match=f"row 1 goes to place {place} of a memory of 1152: expected 0 to 1151"):
            stack.node.run(Rows.chain(2), x, reach=[], gates=FILL, sources=np.array([[0, 0], [0, place]]))
    with pytest.raises(Exception, match="a pass that fills memories cannot read them"):
        stack.node.run(Rows.chain(2), x, reach=[], gates=(True, True), sources=np.ones((2, 2), np.int64))
    for sources in (np.ones((2, 3), np.int64), np.ones(4, np.int64)):
        with pytest.raises(Exception, match="sources"):
            stack.node.run(Rows.chain(2), x, reach=[], gates=READ, sources=sources)
