"""Choose the fastest draft tree, from the acceptance of each rank of each head and the cost of rows.

A node is the path of ranks that leads to it: (0, 1) is the second token of head 1 after the first token of head 0.
Heads are assumed to be independent, so a path is right with the product of its ranks' shares (Medusa,
arXiv 2401.10774, section 2.3.3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

Path = tuple[int, ...]  # rank of each head's guess, from the root down
Ranks = Sequence[Sequence[float]]  # [head][rank]: share of positions where that guess is right


def grow(ranks: Ranks, most: int) -> list[tuple[Path, float]]:
    """Find the ``most`` nodes that are accepted most often, the best first, each with its chance.

    Every prefix of the result is a tree, and the best one of its size.
    """
    best: list[tuple[float, Path]] = []
    found: list[tuple[Path, float]] = []
    # guesses of a head by their shares: those of few positions need not fall with the rank
    orders = [np.argsort(-np.asarray(head), kind="stable").tolist() for head in ranks]
    shares = [[head[rank] for rank in order] for head, order in zip(ranks, orders, strict=True)]
    if not shares or not shares[0]:
        return found
    heappush(best, (-shares[0][0], (0,)))
    while best and len(found) < most:
        negative, places = heappop(best)  # places of a path's guesses in those orders
        if negative >= 0:  # never right: no more of these
            break
        found.append((tuple(order[place] for order, place in zip(orders, places, strict=False)), -negative))
        depth, place = len(places), places[-1]
        above = -negative / shares[depth - 1][place]
        if place + 1 < len(shares[depth - 1]):  # the next guess of the same head
            heappush(best, (-above * shares[depth - 1][place + 1], (*places[:-1], place + 1)))
        if depth < len(shares) and shares[depth]:  # the first guess of the next head
            heappush(best, (negative * shares[depth][0], (*places, 0)))
    return found


def best_tree(ranks: Ranks, v: Callable[[int], float], heads: float, most: int) -> tuple[list[Path], float]:
    """Find the tree of the highest predicted speed: (1 + sum of chances) / (v(1 + nodes) + heads).

    ``v``: time of a pass over n rows over that of one row; ``heads``: that of computing the heads, in the same unit.
    Returns (paths, predicted speed over plain decoding); no paths and 1.0 where no tree helps.
    """
    nodes = grow(ranks, most)
    tokens, size, gain = 1.0, 0, 1.0
    for count, (_, chance) in enumerate(nodes, 1):
        tokens += chance
        speed = tokens / (v(1 + count) + heads)
        if speed > gain:
            size, gain = count, speed
    return [path for path, _ in nodes[:size]], gain


def chain(ranks: Ranks, length: int) -> list[Path]:
    """Return a chain of the heads' first tokens."""
    return [(0,) * depth for depth in range(1, min(length, len(ranks)) + 1)]


def layout(paths: Sequence[Path]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Order the tree: parents before children, and the likelier sibling first.

    Returns:
        (parents, heads, ranks), int64 [n] each: the parent of every node (-1 = the root), and the head and rank of
        its token.
    """
    ordered = sorted(paths, key=lambda path: (len(path), path))
    index = {path: at for at, path in enumerate(ordered)}
    parents = np.array([index[path[:-1]] if len(path) > 1 else -1 for path in ordered], np.int64)
    heads = np.array([len(path) - 1 for path in ordered], np.int64)
    ranks = np.array([path[-1] for path in ordered], np.int64)
    return parents, heads, ranks
