"""Drawing a tree of guesses from draft logits: several candidates where ``chain`` has one.

Two shapes: a comb, whose nodes along the chain of first choices have several children each, and a full tree, in which
every node of a depth has equally many.  First choices are the guesses that the chain would have had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.noise import DRAFT, TARGET, Noise
from edgespec.decoding.proposal import EMPTY, Proposal
from edgespec.decoding.sampling import SamplingParams, adjusted, best_of, support
from edgespec.decoding.settings import MOST_NODES
from edgespec.decoding.text import Prefix
from edgespec.errors import EdgespecError

# (nodes to expand, guesses so far, their parents) -> draft logits float32 [nodes, any]; node -1 is the pending token
Level = Callable[[Sequence[int], Sequence[int], Sequence[int]], NDArray[np.float32]]


def widths_of(branch: Sequence[int], length: int) -> list[int]:
    """Children of each expanded node by depth, for a tree of at most ``length`` levels and ``MOST_NODES`` nodes.

    Args:
        branch: one number is a comb of so many children a node, several are those of a full tree by depth.
        length: most levels.
    """
    if len(branch) == 1:
        return [branch[0]] * min(length, MOST_NODES // branch[0])
    return list(branch[:length])


def rows_of(branch: Sequence[int], length: int) -> list[int]:
    """[length + 1]: rows of the pass that verifies the tree cut at each depth."""
    rows, level = [1], 1
    for width in widths_of(branch, length):
        level = width if len(branch) == 1 else level * width
        rows.append(rows[-1] + level)
    return rows + rows[-1:] * (length + 1 - len(rows))


def draw_tree(
    level: Level,
    tokens: Sequence[int],
    branch: Sequence[int],
    length: int,
    vocab: int,
    params: SamplingParams,
    noise: Noise,
) -> Proposal:
    """Draw a tree of up to ``length`` levels.

    Greedy children are the likeliest tokens.  ``rejection`` draws them from q, the draft's adjusted distribution, with
    noise of its own and reports q: without replacement by the largest noisy logits (Gumbel top-k, Kool et al. arXiv
    1903.06059), which come in the order of drawing.  ``coupled`` takes the largest under the target's own noise.

    Args:
        level: runs the draft over nodes of one depth.
        tokens: committed tokens.
        branch: see ``widths_of``.
        length: most levels.
        vocab: the target's vocabulary, as for ``chain.draw_chain``.
        params: how the request samples.
        noise: its randomness.

    Raises:
        EdgespecError: the draft's logits are not finite.
    """
    if length < 1:
        return EMPTY
    sampled = params.rejects
    stream = DRAFT + len(tokens) if sampled else TARGET  # see draw_chain
    guesses: list[int] = []
    parents: list[int] = []
    drawn_from: list[tuple[NDArray[np.int64], NDArray[np.float64]]] = []  # (ids [k], q [k]) of each guess
    expanded = [-1]
    for depth, width in enumerate(widths_of(branch, length)):
        rows = level(expanded, guesses, parents)
        below: list[int] = []
        for node, row in zip(expanded, rows, strict=True):
            logits = row[:vocab]
            prefix = Prefix(tokens, _path(node, guesses, parents) if params.reads_prefix else ())
            if params.greedy:
                scores = adjusted(logits, params, prefix)
                chosen = best_of(scores, width)
                # a NaN is never among the best, but wins every max
                if not len(chosen) or not np.isfinite(scores.max()):
                    raise EdgespecError("expected finite draft logits, got NaN or infinity")
            else:
                found = support(logits, params, prefix)
                position = len(tokens) + depth
                chosen = found.ids[best_of(found.logits + noise.gumbel(position, found.ids, stream), width)]
                if sampled:
                    drawn_from += [(found.ids, found.probs())] * len(chosen)
            below += range(len(guesses), len(guesses) + len(chosen))
            guesses += chosen.tolist()
            parents += [node] * len(chosen)
        expanded = below[:1] if len(branch) == 1 else below
    probs = None
    if sampled:
        probs = np.zeros((len(guesses), vocab))  # float64 [n, vocab]
        for q, (ids, chances) in zip(probs, drawn_from, strict=True):
            q[ids] = chances
    return Proposal(np.array(guesses, np.int64), np.array(parents, np.int64), probs, replacement=False)


def _path(node: int, guesses: Sequence[int], parents: Sequence[int]) -> list[int]:
    """The guesses down to ``node``."""
    path: list[int] = []
    while node >= 0:
        path.append(guesses[node])
        node = parents[node]
    return path[::-1]
