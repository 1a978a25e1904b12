"""What guessing gains: the formulas of cost.py and tree.py, with the control around them, for one or several sequences.

A round of B sequences is a pass over the rows of all of them, and their drafts run one after the other:

    speed-up = E / (B (f + (steps - 1) c) / v(B) + v(B rows) / v(B))          E: tokens of a round of one of them

f being the first step of a round, as control takes it to be (``Adaptive.set_width``).  Control drafts what it estimates
to be fastest, and nothing where nothing pays.  That it estimates by chance, and looks now and then, is left out: it
moves no pick (docs/project/log.md).  ``tests/planning/speed/test_gains.py`` holds this against control itself, on dice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from edgespec.formulas.cost import expected_tokens
from edgespec.formulas.tree import grow

Curve = Callable[[float], float]  # rows -> time; a mean of passes need not be of whole rows


@dataclass(frozen=True)
class Guessing:
    """How a method guesses.

    Attributes:
        rates: P(accepted | put to the test) by position; the last one goes on.
        ranks: of trees, [head][rank]; empty = chains.
        at_once: whether a look at heads makes all guesses, so that their number costs nothing.
        most: most guesses.
        fixed: (guesses, tokens) of a round of a drafter that stops by itself; None = control decides.
    """

    rates: Sequence[float]
    most: int
    ranks: Sequence[Sequence[float]] = field(default_factory=list)
    at_once: bool = False
    fixed: tuple[float, float] | None = None


@dataclass(frozen=True)
class Gain:
    """What is predicted: speed over plain decoding, guesses and tokens of a round."""

    speedup: float
    gamma: int = 0
    tokens: float = 1.0


def best_gain(guessing: Guessing, c: float, v: Curve, width: int = 1, first: float | None = None) -> Gain:
    """What control makes of a method.

    Args:
        guessing: what is guessed, and how often it is right.
        c: time of a draft step in rounds of plain decoding of one sequence.
        v: rows -> time of a round over them in the same unit; v(1) may be above 1 (padding).
        width: sequences whose rows share a pass.
        first: time of a round's first draft step; None = ``c``.
    """
    options = _options(guessing, c, v, width, c if first is None else first)
    found = [Gain(tokens / time, gamma, tokens) for gamma, tokens, time in options]
    best = max([Gain(1.0), *found], key=lambda gain: gain.speedup)
    return replace(best, speedup=best.speedup / v(1))  # the graph of all methods may be slower than plain decoding's


def _options(guessing: Guessing, c: float, v: Curve, width: int, first: float) -> list[tuple[int, float, float]]:
    """(guesses, tokens, time in plain rounds) of the rounds that can be made."""
    whole = v(width)
    begin, further = first * width / whole, c * width / whole
    if guessing.fixed is not None:
        guesses, tokens = guessing.fixed
        return [(max(1, round(guesses)), tokens, v(width * (1 + guesses)) / whole)]
    if guessing.ranks:
        trees = _trees(guessing)
        return [(nodes, tokens, begin + v(width * (1 + nodes)) / whole) for nodes, tokens in trees]
    found = []
    for gamma in range(1, guessing.most + 1):
        more = 0 if guessing.at_once else gamma - 1
        time = begin + more * further + v(width * (1 + gamma)) / whole
        found.append((gamma, expected_tokens(guessing.rates, gamma), time))
    return found


def _trees(guessing: Guessing) -> list[tuple[int, float]]:
    """(nodes, tokens of a round) of the best trees of every size."""
    found, tokens = [], 1.0
    for nodes, (_, chance) in enumerate(grow(guessing.ranks, guessing.most), 1):
        tokens += chance
        found.append((nodes, tokens))
    return found
