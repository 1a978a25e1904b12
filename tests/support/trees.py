"""Random trees of rows, as parents: an earlier row, or ``ROOT``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

ROOT = -1


def random_tree(random: np.random.Generator, rows: int) -> list[int]:
    """Parents: of one root or several, some deep, some wide."""
    reach = int(random.integers(1, rows + 1))  # how far back parents lie
    roots = random.random() < 0.2
    return [ROOT] + [
        ROOT if roots and random.random() < 0.2 else int(random.integers(max(0, row - reach), row))
        for row in range(1, rows)
    ]


def depth_first(parents: Sequence[int], row: int = ROOT) -> list[int]:
    """Every row after its ancestors, and before the next child of any of them."""
    below = [child for child, parent in enumerate(parents) if parent == row]
    return [one for child in below for one in (child, *depth_first(parents, child))]


def path_to(parents: Sequence[int], row: int) -> list[int]:
    path = [row]
    while parents[path[0]] != ROOT:
        path.insert(0, parents[path[0]])
    return path
