"""What guessing gains: the formulas of cost.py and tree.py, with the control around them, for one or several sequences.

A round of B sequences is a pass over the rows of all of them, and their drafts run one after the other:

    speed-up = E / (B steps c / v(B) + v(B rows) / v(B))          E: tokens of a round of one of them

as control takes it to be (``Adaptive.set_width``).  Control drafts what it estimates to be fastest, and nothing where
nothing pays; then what remains is the price of looking now and then.  Its estimate of the acceptance is a running mean,
which chance moves by sqrt(a (1 - a) s / (2 - s)) with the step s of ``Record.learn``.  Where that brings it below the
acceptance at which drafting breaks even, control rests for some rounds: the nearer the two, the more of the gain is
lost.  ``tests/planning/speed/test_gains.py`` holds this against control itself, on dice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import erf, prod, sqrt

from edgespec.control.acceptance import LONGEST_WAIT, WAIT
from edgespec.formulas.cost import expected_tokens
from edgespec.formulas.tree import grow

Curve = Callable[[float], float]  # rows -> time; a mean of passes need not be of whole rows
PROBE = 2  # guesses of a look (control.adaptive)
STEP = 0.1  # of the running mean (control.acceptance)
REST = 2 * WAIT  # rounds of a rest, on average: the first lasts WAIT, those after failed probes longer


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
    """What control makes of a method.

    Args:
        guessing: what is guessed, and how often it is right.
        c: time of a draft step in rounds of plain decoding of one sequence.
        v: rows -> time of a round over them in the same unit; v(1) may be above 1 (padding).
        width: sequences whose rows share a pass.
    """
    plain = 1 / v(1)  # the graph of all methods may be slower than that of plain decoding
    look = looking(0.0 if guessing.fixed is not None else c, v, width, guessing.at_once)
    rest = Gain(plain / (1 + look))
    best = _best(guessing, c, v, width)
    if best.gamma == 0:
        return rest
    share = 1.0 if guessing.fixed is not None else drafting_share(guessing, c, v, width)
    # rounds that draft take tokens / speed-up, others 1 + look
    time = share * best.tokens / best.speedup + (1 - share) * (1 + look)
    found = replace(best, speedup=plain * (share * best.tokens + 1 - share) / time)
    return found if found.speedup > rest.speedup else rest


def drafting_share(guessing: Guessing, c: float, v: Curve, width: int = 1) -> float:
    """Share of the rounds in which control drafts, where drafting pays.

    Of as many estimates as are made, p are below the break-even; after one of these it rests before the next one.
    """
    sure = max(
        (tokens - time) / _spread(guessing, gamma, tokens) for gamma, tokens, time in _options(guessing, c, v, width)
    )
    below = (1 - erf(sure / sqrt(2))) / 2
    return (1 - below) / (1 - below + below * REST)


def looking(c: float, v: Curve, width: int = 1, at_once: bool = False) -> float:
    """What looking now and then costs where guesses are never right: 0.01 = 1 % of the time.

    It is what remains once control has learned: a probe after the longest wait.
    """
    whole = v(width)
    cost = (1 if at_once else PROBE) * c * width / whole + v(width * (1 + PROBE)) / whole - 1
    return max(cost, 0.0) / (1 + LONGEST_WAIT)


def _best(guessing: Guessing, c: float, v: Curve, width: int) -> Gain:
    """The best number of guesses, none among them, against plain rounds of the same graph."""
    found = [Gain(tokens / time, gamma, tokens) for gamma, tokens, time in _options(guessing, c, v, width)]
    return max([Gain(1.0), *found], key=lambda gain: gain.speedup)


def _options(guessing: Guessing, c: float, v: Curve, width: int) -> list[tuple[int, float, float]]:
    """(guesses, tokens, time in plain rounds) of the rounds that can be made."""
    whole = v(width)
    drafts = c * width / whole
    if guessing.fixed is not None:
        guesses, tokens = guessing.fixed
        return [(max(1, round(guesses)), tokens, v(width * (1 + guesses)) / whole)]
    if guessing.ranks:
        trees = _trees(guessing)
        return [(nodes, tokens, drafts + v(width * (1 + nodes)) / whole) for nodes, tokens in trees]
    found = []
    for gamma in range(1, guessing.most + 1):
        steps = 1 if guessing.at_once else gamma
        time = steps * drafts + v(width * (1 + gamma)) / whole
        found.append((gamma, expected_tokens(guessing.rates, gamma), time))
    return found


def _spread(guessing: Guessing, gamma: int, tokens: float) -> float:
    """Standard deviation of the tokens that control expects of a round, by chance alone; of a tree that of its root."""
    if guessing.ranks:
        return (tokens - 1) / guessing.ranks[0][0] * _deviation(guessing.ranks[0][0]) + 1e-9
    rates = [guessing.rates[min(at, len(guessing.rates) - 1)] for at in range(gamma)]
    variance = 0.0
    for at, rate in enumerate(rates):
        # what the guesses from here on bring, over this one's own rate
        slope = prod(rates[:at]) * expected_tokens(rates[at + 1 :] or [0.0], gamma - at - 1)
        variance += (slope * _deviation(rate)) ** 2
    return sqrt(variance) + 1e-9


def _deviation(rate: float) -> float:
    """Of a running mean."""
    return sqrt(rate * (1 - rate) * STEP / (2 - STEP))


def _trees(guessing: Guessing) -> list[tuple[int, float]]:
    """(nodes, tokens of a round) of the best trees of every size."""
    found, tokens = [], 1.0
    for nodes, (_, chance) in enumerate(grow(guessing.ranks, guessing.most), 1):
        tokens += chance
        found.append((nodes, tokens))
    return found
