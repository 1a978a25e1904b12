"""Trees of guesses."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edgespec.formulas.tree import best_tree, chain, grow, layout

SHARES = st.lists(st.floats(0.01, 0.6), min_size=1, max_size=3)  # measured ones need not fall with the rank
RANKS = st.lists(SHARES, min_size=1, max_size=3)


def value(ranks: list[list[float]], path: tuple[int, ...]) -> float:
    return float(np.prod([ranks[depth][rank] for depth, rank in enumerate(path)]))


def all_paths(ranks: list[list[float]]) -> list[tuple[int, ...]]:
    level: list[tuple[int, ...]] = [()]
    found = []
    for head in ranks:
        level = [(*path, rank) for path in level for rank in range(len(head))]
        found += level
    return found


@given(RANKS, st.integers(1, 6))
def test_every_prefix_is_the_best_tree_of_its_size(ranks: list[list[float]], most: int) -> None:
    nodes = grow(ranks, most)
    paths = [path for path, _ in nodes]
    assert len(set(paths)) == len(paths) == min(most, len(all_paths(ranks)))
    for count in range(1, len(paths) + 1):
        assert all(len(path) == 1 or path[:-1] in paths[:count] for path in paths[:count])
    # chances of children never exceed their parents': the best set of nodes is automatically a tree
    best = sorted((value(ranks, path) for path in all_paths(ranks)), reverse=True)[: len(paths)]
    np.testing.assert_allclose([chance for _, chance in nodes], best, rtol=1e-9)


def test_the_fastest_tree() -> None:
    ranks = [[0.5, 0.2, 0.1], [0.4, 0.1]]
    nodes = all_paths(ranks)

    def v(rows: int) -> float:
        return 1 + 0.12 * (rows - 1)

    def speed(tree: tuple[tuple[int, ...], ...]) -> float:
        return (1 + sum(value(ranks, path) for path in tree)) / (v(1 + len(tree)) + 0.05)

    trees = [
        tree
        for size in range(len(nodes) + 1)
        for tree in combinations(nodes, size)
        if all(len(path) == 1 or path[:-1] in tree for path in tree)
    ]
    paths, gain = best_tree(ranks, v, 0.05, 16)
    assert gain == max(max(speed(tree) for tree in trees), 1.0)
    assert set(paths) == {(0,), (0, 0), (1,)}


def test_guesses_that_are_never_right() -> None:
    assert best_tree([[0.1]], lambda rows: float(rows), 0.3, 16) == ([], 1.0)
    assert grow([], 4) == grow([[0.0, 0.0]], 4) == []
    # a first guess hides no other
    assert [path for path, _ in grow([[0.0, 0.3, 0.1], [0.0, 0.5]], 4)] == [(1,), (1, 1), (2,), (2, 1)]


def test_parents_come_first() -> None:
    parents, heads, ranks = layout([(0, 0), (1,), (0,), (0, 1)])
    assert parents.tolist() == [-1, -1, 0, 0]
    assert heads.tolist() == [0, 0, 1, 1]
    assert ranks.tolist() == [0, 1, 0, 1]
    parents, _, _ = layout(chain([[1.0]] * 3, 5))
    assert parents.tolist() == [-1, 0, 1]
