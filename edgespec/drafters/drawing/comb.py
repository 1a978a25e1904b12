"""Drawing a comb: a chain of guesses whose every node may have siblings, which have no children.

The tree of SWIFT (arXiv 2410.06916).  There the number of siblings follows the confidence alone; on a CPU a row is
dear, so that a sibling is offered only where it is expected to gain more than its row costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.noise import DRAFT, TARGET, Noise
from edgespec.decoding.proposal import EMPTY, Proposal
from edgespec.decoding.sampling import SamplingParams, adjusted, support
from edgespec.decoding.text import Prefix
from edgespec.errors import EdgespecError

MOST_NODES = 32
_ABOVE = (0.95, 0.8, 0.5)  # confidence, and the paper's guesses per node above it, above the next, ...
_GREEDY, _SAMPLED = (3, 5, 8, 10), (1, 3, 5, 10)


def paper_width(confidence: float, greedy: bool) -> int:
    """Guesses per node that the paper takes at this confidence of the draft."""
    at = next((i for i, bound in enumerate(_ABOVE) if confidence > bound), len(_ABOVE))
    return (_GREEDY if greedy else _SAMPLED)[at]


@dataclass(frozen=True)
class SiblingPolicy:
    """How many siblings to offer.

    Attributes:
        most: most guesses per node by depth, the last number for all depths after it.
        price: (depth, expected tokens of the chain, rows) -> expected tokens that one row more must gain; None = every
            sibling that ``most`` and the paper allow is offered.
        least: no row is cheaper than this.
    """

    most: Sequence[int]
    price: Callable[[int, float, int], float] | None = None
    least: float = 0.0


@dataclass
class _Level:
    """Guesses at one depth, the chain's own first.

    ``chances``: what the draft gives the guess of each rank; ``q``: float64 [vocab], what they were drawn from.
    """

    tokens: list[int]
    chances: list[float]
    sure: float
    q: NDArray[np.float64] | None


def draw_comb(
    step: Callable[[int | None], NDArray[np.float32]],
    tokens: Sequence[int],
    length: int,
    vocab: int,
    params: SamplingParams,
    noise: Noise,
    stop: float,
    policy: SiblingPolicy,
    bucket: int = 0,
) -> Proposal:
    """Draw a chain of up to ``length`` guesses with siblings; arguments as for ``chain.draw_chain``.

    Siblings are drawn without replacement: by the order of the noisy logits (Gumbel top-k, Kool et al., arXiv
    1903.06059).  How many are offered depends on the chain and the draft's distributions, never on their own draws.

    Args:
        policy: how many siblings.
        bucket: of the proposal.

    Raises:
        EdgespecError: the draft's logits are not finite.
    """
    if length < 1:
        return EMPTY
    stream = DRAFT + len(tokens) if params.rejects else TARGET
    levels, chain = list[_Level](), list[int]()
    prefix = Prefix(tokens, chain)
    reach = 1.0  # chance that the chain so far is accepted
    while len(levels) < length:
        logits = step(levels[-1].tokens[0] if levels else None)[:vocab]
        most = _most(logits, len(levels), reach, params, policy)
        if params.greedy:
            level = _ranked(logits, params, prefix, most)
        else:
            level = _drawn(logits, params, prefix, noise, stream, most, params.rejects)
        levels.append(level)
        chain.append(level.tokens[0])
        reach *= level.sure
        if level.sure < stop:
            break
    return _assemble(levels, _siblings(levels, policy), bucket)


@dataclass(frozen=True)
class _Most:
    """Most guesses at one depth, and what the draft gives a token: ``top`` and ``spread`` normalise its logits."""

    width: int
    top: float
    spread: float

    def chance(self, logit: float) -> float:
        return math.exp(logit - self.top - self.spread)


def _most(
    logits: NDArray[np.float32],  # [vocab]
    depth: int,
    reach: float,
    params: SamplingParams,
    policy: SiblingPolicy,
) -> _Most:
    top, spread = _log_mass(logits)
    confidence = math.exp(-spread)
    width = policy.most[min(depth, len(policy.most) - 1)]
    width = max(1, min(width, paper_width(confidence, params.greedy), len(logits)))
    if policy.price is not None and reach * (1 - confidence) <= policy.least:
        width = 1  # not even all that is left would pay for a row
    return _Most(width, top, spread)


def _log_mass(logits: NDArray[np.float32]) -> tuple[float, float]:  # [vocab]
    """The largest logit, and the logarithm of all exponentials shifted by it.

    Raises:
        EdgespecError: logits that are not finite.
    """
    top = float(logits.max())
    if not math.isfinite(top):
        raise EdgespecError("expected finite draft logits, got NaN or infinity")
    return top, math.log(float(np.exp(logits - top).sum(dtype=np.float64)))


def _ranked(logits: NDArray[np.float32], params: SamplingParams, prefix: Sequence[int], most: _Most) -> _Level:
    """Greedy: the likeliest tokens; [vocab]."""
    row = adjusted(logits, params, prefix)
    found = [int(row.argmax())]
    if most.width > 1:
        row = row.copy()
    for _ in range(most.width - 1):  # a few scans are cheaper than a selection among a large vocabulary
        row[found[-1]] = -np.inf
        found.append(int(row.argmax()))
    chances = [most.chance(float(logits[token])) for token in found]
    return _Level(found, chances, chances[0], None)


def _drawn(
    logits: NDArray[np.float32],  # [vocab]
    params: SamplingParams,
    prefix: Sequence[int],
    noise: Noise,
    stream: int,
    most: _Most,
    keep_q: bool,
) -> _Level:
    """Sampled: different tokens, as if drawn one after the other without replacement."""
    drawable = support(logits, params, prefix)
    if most.width == 1:
        found, chances = [drawable.draw(noise, len(prefix), stream)], [1.0]
    else:
        noisy = drawable.logits + noise.gumbel(len(prefix), drawable.ids, stream)  # float64 [k]
        width = min(most.width, len(noisy))
        best = np.argpartition(-noisy, width - 1)[:width]
        found = drawable.ids[best[np.argsort(-noisy[best], kind="stable")]].tolist()
        chances = np.sort(drawable.probs())[::-1][:width].tolist()  # by rank, whatever was drawn
    q = None
    if keep_q:
        q = np.zeros(len(logits))
        q[drawable.ids] = drawable.probs()
    return _Level(found, chances, most.chance(float(logits[found[0]])), q)


def _siblings(levels: list[_Level], policy: SiblingPolicy) -> list[int]:
    """How many siblings the node at each depth gets."""
    counts = [0] * len(levels)
    reach, expected = 1.0, 1.0
    offers: list[tuple[float, int]] = []
    for depth, level in enumerate(levels):
        offers += [(-reach * chance, depth) for chance in level.chances[1:]]
        reach *= level.sure
        expected += reach
    rows = 1 + len(levels)
    for gain, depth in sorted(offers):
        if rows > MOST_NODES or (policy.price is not None and -gain <= policy.price(len(levels), expected, rows)):
            break
        counts[depth] += 1
        rows += 1
    return counts


def _assemble(levels: list[_Level], siblings: list[int], bucket: int) -> Proposal:
    """The chain first, so that its rows stand in the cache where plain decoding's would, then all siblings."""
    depths = [*range(len(levels)), *(depth for depth, count in enumerate(siblings) for _ in range(count))]
    ranks = [0] * len(levels) + [rank + 1 for count in siblings for rank in range(count)]
    tokens = np.array([levels[depth].tokens[rank] for depth, rank in zip(depths, ranks, strict=True)], np.int64)
    drawn = [q for depth in depths if (q := levels[depth].q) is not None]
    probs = np.stack(drawn) if drawn else None  # float64 [n, vocab]
    chain = not any(siblings)
    return Proposal(tokens, None if chain else np.array(depths, np.int64) - 1, probs, chain, bucket)
