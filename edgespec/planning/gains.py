"""What guessing gains: the formulas of cost.py and tree.py, with the control around them, for one or several sequences.

A round of B sequences is a pass over the rows of all of them, and their drafts run one after the other:

    speed-up = E / (B steps c / v(B) + v(B rows) / v(B))          E: tokens of a round of one of them

as control takes it to be (``Adaptive.share``).  Control drafts what is predicted to be fastest, nothing among it; where
nothing pays, what remains is the price of looking now and then whether something does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from edgespec.cost import expected_tokens
from edgespec.drafters.record import LONGEST_WAIT, WAIT
from edgespec.tree import grow

Curve = Callable[[float], float]  # rows -> time; a mean of passes need not be of whole rows
REQUEST = 128  # rounds over which the price of looking is spread: the default of --max-new-tokens
PROBE = 2  # guesses of a look (drafters.adaptive)


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


def best_gain(guessing: Guessing, c: float, v: Curve, width: int = 1) -> Gain:
    """The best number of guesses, none among them.

    Args:
        guessing: what is guessed, and how often it is right.
        c: time of a draft step in rounds of plain decoding of one sequence.
        v: rows -> time of a round over them in the same unit; v(1) may be above 1 (padding).
        width: sequences whose rows share a pass.
    """
    whole = v(width)
    drafts = c * width / whole
    plain = 1 / v(1)  # the graph of all methods may be slower than that of plain decoding
    if guessing.fixed is not None:
        guesses, tokens = guessing.fixed
        options = [Gain(plain * tokens * whole / v(width * (1 + guesses)), max(1, round(guesses)), tokens)]
    elif guessing.ranks:
        options = [
            Gain(plain * tokens / (drafts + v(width * (1 + nodes)) / whole), nodes, tokens)
            for nodes, tokens in _trees(guessing)
        ]
    else:
        options = []
        for gamma in range(1, guessing.most + 1):
            tokens = expected_tokens(guessing.rates, gamma)
            steps = 1 if guessing.at_once else gamma
            options.append(Gain(plain * tokens / (steps * drafts + v(width * (1 + gamma)) / whole), gamma, tokens))
    rest = Gain(plain / (1 + looking(drafts if guessing.fixed is None else 0.0, v, width, guessing.at_once)))
    return max([rest, *options], key=lambda gain: gain.speedup)


def looking(drafts: float, v: Curve, width: int = 1, at_once: bool = False) -> float:
    """What looking now and then costs of a request whose guesses are never right: 0.01 = 1 %.

    Control probes at once, and then after 16, 32, 64 and 128 rounds (``Record.wait``).
    """
    probes, wait, at = 0, WAIT, 0
    while at < REQUEST:
        probes, at = probes + 1, at + wait + 1
        wait = min(2 * wait, LONGEST_WAIT)
    cost = (1 if at_once else PROBE) * drafts + v(width * (1 + PROBE)) / v(width) - 1
    return probes * max(cost, 0.0) / REQUEST


def _trees(guessing: Guessing) -> list[tuple[int, float]]:
    """(nodes, tokens of a round) of the best trees of every size."""
    found, tokens = [], 1.0
    for nodes, (_, chance) in enumerate(grow(guessing.ranks, guessing.most), 1):
        tokens += chance
        found.append((nodes, tokens))
    return found
