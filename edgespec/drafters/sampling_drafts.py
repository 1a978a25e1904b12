"""Sample draft tokens from draft logits: a chain, a chain whose nodes have siblings, or a tree.

A tree has one of two shapes.  The first is a chain of first choices whose every node has equally many children, of
which only the first continues.  The second is a full tree, in which every node of a depth has equally many.  First
choices are the tokens that the chain would have had.

Siblings in SWIFT's sense (arXiv 2410.06916) are the first shape with a different width at each depth.  In the paper the
width follows only the draft's confidence.  On a CPU a row is expensive, so a sibling is offered only if it is expected
to gain more than its row costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.drafter import Drafter, DraftRequest
from edgespec.decoding.noise import DRAFT, TARGET, Noise
from edgespec.decoding.proposal import EMPTY, Proposal
from edgespec.decoding.sampling import SamplingParams, adjusted, best_of, log_softmax_at, support
from edgespec.decoding.settings import MOST_NODES
from edgespec.decoding.text import Prefix
from edgespec.errors import EdgespecError

Rows = NDArray[np.float32]
# (nodes to expand, guesses so far, their parents) -> draft logits float32 [nodes, any]; node -1 is the pending token
Level = Callable[[Sequence[int], Sequence[int], Sequence[int]], Rows]
Weak = Callable[[float], bool]  # the draft probability of a guess -> whether none should follow it
MOST_SIBLING_NODES = 32
_ABOVE = (0.95, 0.8, 0.5)  # confidence, and the paper's guesses per node above it, above the next, ...
_GREEDY, _SAMPLED = (3, 5, 8, 10), (1, 3, 5, 10)


class Draw(NamedTuple):
    """Position of the draft tokens, and how they are sampled.

    Greedy draft tokens are deterministic.  ``rejection`` samples from q, the draft's adjusted distribution, with
    separate noise, and reports q.  Several tokens below one node are sampled without replacement, by the order of the
    noisy logits (Gumbel top-k, Kool et al., arXiv 1903.06059).  ``coupled`` samples with the target's noise (arXiv
    2408.07978) and needs no q: verification is by matching.
    """

    tokens: Sequence[int]  # committed tokens
    vocab: int  # the target's vocabulary: draft logits beyond it are padding and ignored, missing ones have q = 0
    params: SamplingParams  # how the request samples
    noise: Noise  # its randomness

    @property
    def stream(self) -> int:
        """Name the noise that draft tokens are sampled with.

        A draft has its own noise for each round, because earlier rounds may depend on theirs.
        """
        return DRAFT + len(self.tokens) if self.params.rejects else TARGET


def spread(logits: Rows, columns: NDArray[np.int64] | slice, vocab: int) -> Rows:
    """Spread logits [n, any] over a vocabulary -> [n, vocab]: no token without a column can be guessed."""
    whole = np.full((len(logits), vocab), -np.inf, np.float32)
    whole[:, columns] = logits
    return whole


class DrawingDrafter(Drafter):
    """A drafter that draws its guesses, over the target's ``vocab``, as the request samples."""

    vocab: int
    params, noise = SamplingParams(), Noise(0)

    def begin(self, request: DraftRequest) -> int | None:
        self.params, self.noise = request.params, request.noise
        return None

    def how(self, tokens: Sequence[int]) -> Draw:
        """Describe how draft tokens after ``tokens`` are sampled."""
        return Draw(tokens, self.vocab, self.params, self.noise)


def _not_finite() -> EdgespecError:
    return EdgespecError("expected finite draft logits, got NaN or infinity")


def draw_chain(
    step: Callable[[int | None], Rows],
    draw: Draw,
    length: int,
    weak: Weak | None = None,
    choose: Callable[[int | None], tuple[int, float]] | None = None,
    worth: Callable[[int | None], bool] | None = None,
) -> Proposal:
    """Sample up to ``length`` draft tokens, one after the other.

    Args:
        step: draft logits float32 [any] after one more draft token (None = after the committed tokens); not called for
            the last one, which needs no continuation.
        draw: where and how.
        length: maximum number of draft tokens.
        weak: called with the unadjusted draft probability of each draft token except the last; returns whether to stop
            AFTER it.
        choose: instead of ``step`` for greedy requests: the likeliest token and its probability; its logit is enough if
            ``weak`` is None.
        worth: whether to offer one more draft token; called before it is sampled, with the token before it.

    Raises:
        EdgespecError: the draft's logits are not finite.
    """
    if length < 1:
        return EMPTY
    params = draw.params
    guesses: list[int] = []
    prefix = Prefix(draw.tokens, guesses) if params.reads_prefix else ()
    probs = np.zeros((length, draw.vocab)) if params.rejects else None  # float64 [length, vocab]
    ended = False
    while len(guesses) < length and not ended:
        last = guesses[-1] if guesses else None
        if worth is not None and not worth(last):
            break
        if choose is not None and params.plain_greedy:
            guess, chance = choose(last)
            if not math.isfinite(chance):
                raise _not_finite()
            ended = weak is not None and len(guesses) + 1 < length and weak(chance)
        else:
            logits = step(last)[: draw.vocab]
            if params.plain_greedy:
                guess = int(logits.argmax())
                if not math.isfinite(logits[guess]):
                    raise _not_finite()
            else:
                found = support(logits, params, prefix)
                guess = found.draw(draw.noise, len(draw.tokens) + len(guesses), draw.stream)
                if probs is not None:
                    probs[len(guesses), found.ids] = found.probs()
            if weak is not None and len(guesses) + 1 < length:
                ended = weak(math.exp(log_softmax_at(logits, guess)))
        guesses.append(guess)
    return Proposal(np.array(guesses, np.int64), None, None if probs is None else probs[: len(guesses)])


# -- trees -------------------------------------------------------------------------------------------------------------


def widths_of(branch: Sequence[int], length: int) -> list[int]:
    """Count children of each expanded node by depth, for at most ``length`` levels and ``MOST_NODES`` nodes.

    One number of ``branch`` is the children of each first choice, several are those of a full tree by depth.
    """
    if len(branch) == 1:
        return [branch[0]] * min(length, MOST_NODES // branch[0])
    return list(branch[:length])


def rows_of(branch: Sequence[int], length: int) -> list[int]:
    """Count rows of the pass that verifies the tree cut at each depth -> [length + 1]."""
    rows, level = [1], 1
    for width in widths_of(branch, length):
        level = width if len(branch) == 1 else level * width
        rows.append(rows[-1] + level)
    return rows + rows[-1:] * (length + 1 - len(rows))


def draw_tree(level: Level, draw: Draw, branch: Sequence[int], length: int) -> Proposal:
    """Draw a tree of the shape ``branch`` (``widths_of``), ``length`` levels at most; ``level`` runs the draft.

    Raises:
        EdgespecError: the draft's logits are not finite.
    """
    if length < 1:
        return EMPTY
    params = draw.params
    guesses: list[int] = []
    parents: list[int] = []
    drawn_from: list[tuple[NDArray[np.int64], NDArray[np.float64]]] = []  # (ids [k], q [k]) of each guess
    expanded = [-1]
    for depth, width in enumerate(widths_of(branch, length)):
        rows = level(expanded, guesses, parents)
        below: list[int] = []
        for node, row in zip(expanded, rows, strict=True):
            logits = row[: draw.vocab]
            prefix = Prefix(draw.tokens, _path(node, guesses, parents) if params.reads_prefix else ())
            if params.greedy:
                scores = adjusted(logits, params, prefix)
                chosen = best_of(scores, width)
                # a NaN is never among the best, but wins every max
                if not len(chosen) or not np.isfinite(scores.max()):
                    raise _not_finite()
            else:
                found = support(logits, params, prefix)
                noisy = found.logits + draw.noise.gumbel(len(draw.tokens) + depth, found.ids, draw.stream)
                chosen = found.ids[best_of(noisy, width)]
                if params.rejects:
                    drawn_from += [(found.ids, found.probs())] * len(chosen)
            below += range(len(guesses), len(guesses) + len(chosen))
            guesses += chosen.tolist()
            parents += [node] * len(chosen)
        expanded = below[:1] if len(branch) == 1 else below
    probs = np.zeros((len(guesses), draw.vocab)) if params.rejects else None  # float64 [n, vocab]
    if probs is not None:
        for q, (ids, chances) in zip(probs, drawn_from, strict=True):
            q[ids] = chances
    return Proposal(np.array(guesses, np.int64), np.array(parents, np.int64), probs, replacement=False)


def _path(node: int, guesses: Sequence[int], parents: Sequence[int]) -> list[int]:
    """List the guesses down to ``node``."""
    path: list[int] = []
    while node >= 0:
        path.append(guesses[node])
        node = parents[node]
    return path[::-1]


# -- siblings ----------------------------------------------------------------------------------------------------------


def paper_width(confidence: float, greedy: bool) -> int:
    """Count the guesses per node that the paper takes at this confidence of the draft."""
    at = next((i for i, bound in enumerate(_ABOVE) if confidence > bound), len(_ABOVE))
    return (_GREEDY if greedy else _SAMPLED)[at]


@dataclass(frozen=True)
class SiblingPolicy:
    """How many siblings to offer."""

    most: Sequence[int]  # maximum draft tokens per node by depth, the last number for all depths after it
    # (depth, expected tokens of the chain, rows) -> expected tokens that one row more must gain; None = every
    # sibling that ``most`` and the paper allow is offered
    price: Callable[[int, float, int], float] | None = None
    least: float = 0.0  # no row is cheaper than this


@dataclass
class _Level:
    """Draft tokens at one depth, the chain's own first.

    ``chances``: draft probability of the token of each rank, ``sure`` the chain's own; ``q``: float64 [vocab], the
    distribution that they were sampled from.
    """

    tokens: list[int]
    chances: list[float]
    sure: float
    q: NDArray[np.float64] | None


def draw_siblings(
    step: Callable[[int | None], Rows],
    draw: Draw,
    length: int,
    weak: Weak | None,
    policy: SiblingPolicy,
    bucket: int = 0,
) -> Proposal:
    """Draw a chain of up to ``length`` guesses whose nodes may have siblings, which have no children.

    How many are offered depends on the chain and the draft's distributions, never on their own draws.  As
    ``draw_chain``.
    """
    if length < 1:
        return EMPTY
    levels, chain = list[_Level](), list[int]()
    prefix = Prefix(draw.tokens, chain)
    reach = 1.0  # chance that the chain so far is accepted
    while len(levels) < length:
        logits = step(chain[-1] if chain else None)[: draw.vocab]
        top = float(logits.max())
        if not math.isfinite(top):
            raise _not_finite()
        spread = math.log(float(np.exp(logits - top).sum(dtype=np.float64)))
        confidence = math.exp(-spread)
        width = policy.most[min(len(levels), len(policy.most) - 1)]
        width = max(1, min(width, paper_width(confidence, draw.params.greedy), len(logits)))
        if policy.price is not None and reach * (1 - confidence) <= policy.least:
            width = 1  # not even all that is left would be worth a row
        level = (_ranked if draw.params.greedy else _drawn)(logits, draw, prefix, width, top, spread)
        levels.append(level)
        chain.append(level.tokens[0])
        reach *= level.sure
        if weak is not None and len(levels) < length and weak(level.sure):
            break
    return _assemble(levels, _siblings(levels, policy), bucket)


def _ranked(logits: Rows, draw: Draw, prefix: Sequence[int], width: int, top: float, spread: float) -> _Level:
    """Take the likeliest tokens of logits [vocab], whose exponentials sum to exp(``top`` + ``spread``)."""
    row = adjusted(logits, draw.params, prefix)
    found = [int(row.argmax())]
    if width > 1:
        row = row.copy()
    for _ in range(width - 1):  # a few scans are cheaper than a selection among a large vocabulary
        row[found[-1]] = -np.inf
        found.append(int(row.argmax()))
    chances = [math.exp(float(logits[token]) - top - spread) for token in found]
    return _Level(found, chances, chances[0], None)


def _drawn(logits: Rows, draw: Draw, prefix: Sequence[int], width: int, top: float, spread: float) -> _Level:
    """Draw different tokens, as if one after the other without replacement; as ``_ranked``."""
    drawable = support(logits, draw.params, prefix)
    if width == 1:
        found, chances = [drawable.draw(draw.noise, len(prefix), draw.stream)], [1.0]
    else:
        noisy = drawable.logits + draw.noise.gumbel(len(prefix), drawable.ids, draw.stream)  # float64 [k]
        width = min(width, len(noisy))
        best = np.argpartition(-noisy, width - 1)[:width]
        found = drawable.ids[best[np.argsort(-noisy[best], kind="stable")]].tolist()
        chances = np.sort(drawable.probs())[::-1][:width].tolist()  # by rank, independent of the sampled tokens
    q = None
    if draw.params.rejects:
        q = np.zeros(len(logits))
        q[drawable.ids] = drawable.probs()
    return _Level(found, chances, math.exp(float(logits[found[0]]) - top - spread), q)


def _siblings(levels: list[_Level], policy: SiblingPolicy) -> list[int]:
    """Decide how many siblings the node at each depth gets."""
    counts = [0] * len(levels)
    reach, expected = 1.0, 1.0
    offers: list[tuple[float, int]] = []
    for depth, level in enumerate(levels):
        offers += [(-reach * chance, depth) for chance in level.chances[1:]]
        reach *= level.sure
        expected += reach
    rows = 1 + len(levels)
    for gain, depth in sorted(offers):
        if rows > MOST_SIBLING_NODES:
            break
        if policy.price is not None and -gain <= policy.price(len(levels), expected, rows):
            break
        counts[depth] += 1
        rows += 1
    return counts


def _assemble(levels: list[_Level], siblings: list[int], bucket: int) -> Proposal:
    """Join the chain, so that its rows have plain decoding's cache slots, and all siblings after it."""
    depths = [*range(len(levels)), *(depth for depth, count in enumerate(siblings) for _ in range(count))]
    ranks = [0] * len(levels) + [rank + 1 for count in siblings for rank in range(count)]
    tokens = np.array([levels[depth].tokens[rank] for depth, rank in zip(depths, ranks, strict=True)], np.int64)
    drawn = [q for depth in depths if (q := levels[depth].q) is not None]
    probs = np.stack(drawn) if drawn else None  # float64 [n, vocab]
    chain = not any(siblings)
    return Proposal(tokens, None if chain else np.array(depths, np.int64) - 1, probs, chain, bucket)
