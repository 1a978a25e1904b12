"""A row of a tree has the bits of the chain of its ancestors, decoded one by one: in every format, at every depth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.runtimes.files.kv import KvFormat
from tests.runtimes.native.test_windows import attention, width_of
from tests.support.native_graph import Floats, Node, Rows
from tests.support.slots import depth_first, path_to, random_tree

pytestmark = pytest.mark.usefixtures("native")

SHAPE = 6, 2, 24  # heads, KV heads, dimensions
FORMATS = {
    "f32": KvFormat("f32", "f32"),
    "f16": KvFormat("f16", "f16"),
    "int8": KvFormat("int8", "int8"),
    "int8 keys": KvFormat("int8", "f16"),
    "int4": KvFormat("int4", "int8", window=64, sinks=4),
    "int4 alone": KvFormat("int4", "f16"),
    "nomad1": KvFormat("nomad1", "int8", window=64, sinks=4),
    "nomad2": KvFormat("nomad2", "f32", window=128, sinks=16),
    "codes beside": KvFormat("f16", "f16", codes="int4", draft_window=64, sinks=4),
    "codes of nomad": KvFormat("f32", "int8", codes="nomad2"),
}
# before, on and after a block of 128; of 32 values that share a step; of 512 tokens that are summed separately
DEPTHS = (0, 1, 3, 15, 30, 31, 32, 33, 62, 95, 110, 120, 125, 127, 128, 129, 150, 200, 255, 383, 508, 511, 512, 513)


def tables_of(kv: KvFormat, dim: int, heads: int) -> Floats | None:
    """Random tables for the coded format of a cache."""
    name, random = kv.codes or kv.keys, np.random.default_rng(3)
    padded = -(-dim // 16) * 16
    if name == "int4":
        scale, zero = random.uniform(0.1, 0.4, (heads, 1, padded)), random.uniform(-3, -1, (heads, 1, padded))
        return np.concatenate([scale, zero], 1).astype(np.float32)
    if name in ("nomad1", "nomad2"):
        return random.standard_normal((heads, padded, 16)).astype(np.float32)
    return None


def pair(folder: Path, kv: KvFormat, tokens: int, shape: tuple[int, int, int] = SHAPE, **more: Any) -> list[Node]:
    """Two nodes of the same attention, for trees with two threads and for chains with one."""
    tables = tables_of(kv, shape[2], shape[1])
    return [
        attention(folder / str(threads), kv=kv, tables=tables, tokens=tokens, threads=threads, shape=shape,
                  scale=shape[2] ** -0.5, **more)
        for threads in (2, 1)
    ]  # fmt: skip


class Beside:
    """A text whose next rows come as trees and, in another cache, one by one."""

    def __init__(self, nodes: Sequence[Node], width: int, read_codes: bool = False, seed: int = 0) -> None:
        self.trees, self.chains = nodes
        self.width, self.read_codes = width, read_codes
        self.random, self.past = np.random.default_rng(seed), 0
        self.moves: list[tuple[int, int, int]] = []

    def rows(self, n: int) -> Floats:
        return self.random.standard_normal((n, self.width)).astype(np.float32)

    def one(self, x: Floats, at: int) -> NDArray[Any]:
        return self.chains.run(Rows.chain(1, at), x[None], read_codes=self.read_codes)[0][0]

    def fill(self, to: int) -> None:
        """Extend the text to ``to`` tokens in both caches, and compare them."""
        while self.past < to:
            n = min(100, to - self.past)
            x, rows = self.rows(n), Rows.chain(n, self.past)
            found = self.trees.run(rows, x, read_codes=self.read_codes, moves=self.moves)[0]
            np.testing.assert_array_equal(found, self.chains.run(rows, x, read_codes=self.read_codes)[0])
            self.past, self.moves = self.past + n, []

    def tree(self, parents: Sequence[int]) -> None:
        """Run the tree of ``parents``, compare each row with its path as a chain, and keep a random path."""
        x, rows = self.rows(len(parents)), Rows.tree(parents, self.past)
        found = self.trees.run(rows, x, read_codes=self.read_codes, moves=self.moves)[0]
        for row in depth_first(parents):
            expected = self.one(x[row], rows.position[row])
            np.testing.assert_array_equal(found[row], expected, f"row {row} of {list(parents)} after {self.past}")
        kept = path_to(parents, int(self.random.integers(len(parents))))
        for at, row in enumerate(kept):
            self.one(x[row], self.past + at)
        self.moves = [(0, self.past + row, self.past + at) for at, row in enumerate(kept) if row != at]
        self.past += len(kept)

    def same_caches(self) -> None:
        """Bytes and all; rows that were not kept are overwritten first, and exact keys that they took the place of."""
        self.fill(self.past + 128)
        np.testing.assert_array_equal(self.trees.kv.array, self.chains.kv.array)


@pytest.mark.parametrize("window, cap", [(0, 0.0), (0, 2.0), (1, 0.0), (5, 2.0), (130, 0.0), (600, 0.0)])
@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_trees_are_those_of_chains(tmp_path: Path, name: str, window: int, cap: float) -> None:
    kv = FORMATS[name]
    reading = (False, True) if kv.codes else (False,)
    for read_codes in reading:
        nodes = pair(tmp_path / str(read_codes), kv, 1024, window=window, cap=cap)
        beside = Beside(nodes, width_of(*SHAPE), read_codes, seed=window)
        for depth in DEPTHS:
            beside.fill(depth)
            beside.tree(random_tree(beside.random, int(beside.random.integers(2, 33))))
        beside.same_caches()


@pytest.mark.parametrize("name", ["f16", "int8", "int4", "nomad1"])
def test_tree_upon_tree(tmp_path: Path, name: str) -> None:
    """The next tree sees the kept rows of the one before; nothing else is written, from the first token on."""
    beside = Beside(pair(tmp_path, FORMATS[name], 1024), width_of(*SHAPE), seed=7)
    while beside.past < 400:
        beside.tree(random_tree(beside.random, int(beside.random.integers(1, 17))))
    beside.same_caches()


@pytest.mark.parametrize("shape", [(1, 1, 16), (5, 5, 64), (40, 1, 8), (14, 2, 64), (4, 4, 256)])
@pytest.mark.parametrize("name", ["f32", "int8", "nomad2"])
def test_heads_of_any_number_and_size(tmp_path: Path, name: str, shape: tuple[int, int, int]) -> None:
    """Rows of one path that attention processes in different groups, and queries of one row in different calls."""
    beside = Beside(pair(tmp_path, FORMATS[name], 640, shape), width_of(*shape), seed=sum(shape))
    for depth in (0, 28, 124, 130, 250, 380):
        beside.fill(depth)
        for rows in (8, 33):
            beside.tree(random_tree(beside.random, rows))
    beside.same_caches()


@pytest.mark.parametrize("name", FORMATS)
def test_long_texts(tmp_path: Path, name: str) -> None:
    """Parts of the text that are summed separately, all KV heads by one thread."""
    kv = FORMATS[name]
    beside = Beside(pair(tmp_path, kv, 2432), width_of(*SHAPE), kv.codes is not None, seed=1)
    for depth in (1990, 2040, 2047, 2048, 2100):
        beside.fill(depth)
        for rows in (8, 16, 32):
            beside.tree(random_tree(beside.random, rows))
    beside.same_caches()


def test_hypotheses_are_chains_where_they_belong(tmp_path: Path) -> None:
    """Rows that see a part of the text and are stored after it, in any order."""
    beside = Beside(pair(tmp_path, FORMATS["int8"], 640), width_of(*SHAPE))
    beside.fill(300)
    random = np.random.default_rng(5)
    for _ in range(20):
        n, parents = 12, random_tree(random, 12)
        roots = {row: int(random.choice([0, 1, 31, 100, 125, 127, 128, 250, 255, 256, 299, 300])) for row in range(n)}
        visible = [roots[path_to(parents, row)[0]] for row in range(n)]
        position = [visible[row] + len(path_to(parents, row)) - 1 for row in range(n)]
        places = random.permutation(np.arange(310, 500))[:n].tolist()
        x, rows = beside.rows(n), Rows(position, visible, parents, places, [0] * n, [0] * n)
        found = beside.trees.run(rows, x)[0]
        whole = beside.chains.kv.array.copy()
        for row in range(n):
            beside.chains.kv.array[:] = whole
            for one in path_to(parents, row):
                expected = beside.one(x[one], position[one])
            np.testing.assert_array_equal(found[row], expected)
        beside.chains.kv.array[:] = whole
