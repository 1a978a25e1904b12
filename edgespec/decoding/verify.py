"""Which guesses are accepted: one function for chains and trees, deterministic and sampled guesses.

p is the target's distribution at a row, q the draft's.  The default rule is lossless: the emitted tokens have the
target's distribution, and where matching applies they are the tokens that plain decoding emits.  Rules that give that
away must be asked for (``Accept``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.noise import ACCEPT, BLOCK, RESIDUAL, Noise
from edgespec.decoding.proposal import Proposal, Verdict
from edgespec.decoding.sampling import (
    Rules,
    SamplingParams,
    adjusted,
    check_fields,
    distribution,
    draw,
    likely_tokens,
    log_softmax_at,
    not_finite,
    support,
    whole,
)
from edgespec.decoding.target import Target
from edgespec.decoding.text import Prefix
from edgespec.errors import InvalidRequest

Rule = Literal["exact", "typical", "top-k", "distance", "lantern", "all"]
FORMS = "exact, typical, typical:EPSILON,DELTA, top-k:K, distance:D, lantern, lantern:K,DELTA or all"
_LANTERN = ("100", "0.2")  # of a rule that says no more
# what is written behind each rule's name
_WRITTEN: dict[str, dict[str, type]] = {
    "exact": {},
    "typical": {"epsilon": float, "delta": float},
    "top-k": {"k": int},
    "distance": {"distance": int},
    "lantern": {"k": int, "delta": float},
    "all": {},
}
_RULES: Rules = {
    "rule": (f"one of {', '.join(get_args(Rule))}", lambda value: value in get_args(Rule)),
    "epsilon": ("a number > 0", lambda value: 0 < value < math.inf),
    "delta": ("a number > 0", lambda value: 0 < value < math.inf),
    "k": ("an integer >= 1", lambda value: whole(value, 1)),
    "distance": ("an integer >= 0", whole),
    "min_block": ("an integer >= 0", whole),
}


@dataclass(frozen=True)
class Accept:
    """Which guesses are accepted.

    Attributes:
        rule: ``exact``: those that leave the distribution of plain decoding as it is.  No other rule does:
            ``typical``: p(guess) > min(epsilon, delta exp(-H(p))), H the entropy (Medusa, arXiv 2401.10774 section
            2.3.1); ``top-k``: a guess among the k likeliest; ``distance``: a guess at most ``distance`` ids from the
            likeliest token, for vocabularies whose order means something (both blockwise parallel decoding, arXiv
            1811.03115 section 5); ``lantern``: of codes of pictures, a guess stands for the ``k`` codes that look most
            like it, as long as their probability is at most ``delta`` (LANTERN, arXiv 2410.03355 section 4); ``all``:
            every guess, whatever the model says.
        epsilon: of ``typical``.
        delta: of ``typical`` and ``lantern``.
        k: of ``top-k`` and ``lantern``.
        distance: of ``distance``.
        min_block: under any rule at least so many guesses of a chain are accepted (arXiv 1811.03115 section 5.3);
            0 = off.  Trees are not affected.
        near: of ``lantern``: the codes most like one, int64 [n], the nearest first; a request sets it.

    Raises:
        InvalidRequest: an unknown rule, or a value outside its range.
    """

    rule: Rule = "exact"
    epsilon: float = 0.09
    delta: float = 0.3
    k: int = 1
    distance: int = 0
    min_block: int = 0
    near: Callable[[int], NDArray[np.int64]] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_fields(self, _RULES)

    @classmethod
    def parse(cls, text: str, min_block: int = 0) -> Accept:
        """Read a rule as the command line writes it.

        Args:
            text: as ``typical``, ``typical:0.09,0.3`` or ``top-k:3``.
            min_block: so many guesses of a chain are accepted under any rule.
        """
        rule, _, rest = text.partition(":")
        numbers = rest.split(",") if rest else _LANTERN if rule == "lantern" else ()
        try:
            kinds = {} if text == "typical" else _WRITTEN[rule]
            values = {name: kind(number) for (name, kind), number in zip(kinds.items(), numbers, strict=True)}
        except (KeyError, ValueError):
            raise InvalidRequest(f"acceptance rule {text!r}: expected {FORMS}") from None
        return cls(rule, min_block=min_block, **values)  # type: ignore[arg-type]

    @property
    def lossless(self) -> bool:
        """Whether the text keeps the distribution of plain decoding."""
        return self.rule == "exact" and self.min_block == 0

    @property
    def approximations(self) -> list[str]:
        """Say in words what is given away; nothing by a lossless rule."""
        words = {
            "exact": [],
            "typical": [f"typical acceptance (epsilon {self.epsilon:g}, delta {self.delta:g})"],
            "top-k": [f"guesses accepted among the {self.k} likeliest tokens"],
            "distance": [f"guesses accepted within {self.distance} of the likeliest token"],
            "lantern": [f"guesses stand for the {self.k} codes most like them, up to {self.delta:g} (LANTERN)"],
            "all": ["every guess accepted"],
        }
        return words[self.rule] + ([f"at least {self.min_block} guesses accepted"] if self.min_block else [])

    def judge(self, rows: RowSampler, row: int) -> Callable[[int], float | None]:
        """Judge guesses at a row by a rule other than ``exact``: a merit, the larger the better, or None = refused."""
        if self.rule == "all":
            return lambda token: 0.0
        if self.rule == "top-k":
            return lambda token: -float(place) if (place := rows.rank(row, token)) < self.k else None
        if self.rule == "distance":
            best = rows.likeliest(row)
            return lambda token: -float(abs(token - best)) if abs(token - best) <= self.distance else None
        p = rows.distribution(row)  # float64 [vocab]
        likely = p[p > 0]
        entropy = -float((likely * np.log(likely)).sum())
        least = min(self.epsilon, self.delta * math.exp(-entropy))
        return lambda token: math.log(p[token]) if p[token] > least else None

    def alike(self, rows: RowSampler, row: int, guess: int) -> NDArray[np.int64] | tuple[()]:
        """Tokens that a guess stands for beside itself: the nearest ones of at most ``delta`` together; no other rule
        has any.
        """
        if self.rule != "lantern" or self.near is None:
            return ()  # a round of every rule asks, and looks for a token in it
        found = self.near(guess)[: self.k]
        return found[np.cumsum(rows.chances(row)[found]) <= self.delta]


EXACT = Accept()


class RowSampler:
    """What sampling says about each row of one pass.  Row 0 follows the pending token, row i + 1 node i.

    ``logits``: float32 [1 + nodes of the proposal, vocab]; ``tokens``: the committed ones; what was counted of a
    ``Text`` is not counted again; ``best``: likeliest token [r] and its logit [r], where the pass gave only those:
    greedy requests need no more.  A row of NaN or infinite logits is an ``EdgespecError`` wherever it is looked at.
    """

    __slots__ = ("_best", "_plain", "block", "logits", "matching", "noise", "params", "proposal", "tokens")

    def __init__(
        self,
        logits: NDArray[np.float32],
        tokens: Sequence[int],
        proposal: Proposal,
        params: SamplingParams,
        noise: Noise,
        best: tuple[NDArray[np.int64], NDArray[np.float32]] | None = None,
    ) -> None:
        self.logits = logits
        self._best = best
        self.tokens = tokens
        self.proposal = proposal
        self.params = params
        self.noise = noise
        self._plain = params.plain_greedy
        self.matching = not params.rejects
        self.block = params.verification == "block"

    def prefix(self, row: int) -> Prefix:
        """Return committed tokens and the guesses on the path to ``row``, without a copy."""
        path: list[int] = []
        node = row - 1
        while node >= 0:
            path.append(int(self.proposal.tokens[node]))
            node = self.proposal.parent(node)
        return Prefix(self.tokens, path[::-1])

    def position(self, row: int) -> int:
        """Return the index, in the sequence, of the token that ``row`` predicts."""
        proposal = self.proposal
        return len(self.tokens) + (row if proposal.parents is None else proposal.depth(row - 1))

    def _seen(self, row: int) -> Sequence[int]:
        # mostly nothing reads the prefix
        return self.prefix(row) if self.params.reads_prefix else ()

    def choose(self, row: int) -> int:
        """Return the token that plain decoding emits at ``row``."""
        if self._plain:
            return self.likeliest(row)
        return support(self.logits[row], self.params, self._seen(row)).draw(self.noise, self.position(row))

    def distribution(self, row: int) -> NDArray[np.float64]:
        """float64 [vocab]: p at ``row``, after temperature and truncation; one-hot where greedy."""
        return distribution(self.logits[row], self.params, self._seen(row))

    def chances(self, row: int) -> NDArray[np.float64]:
        """float64 [vocab]: as ``distribution``; where decoding is greedy, before the likeliest is taken."""
        if not self.params.greedy:
            return self.distribution(row)
        logits = adjusted(self.logits[row], self.params, self._seen(row)).astype(np.float64)
        weights = np.exp(logits - logits.max())
        return np.asarray(weights / weights.sum())

    def likeliest(self, row: int) -> int:
        """Return the token of the largest logit, the lowest on a tie, after bias and penalty."""
        if self._best is not None:
            best, logit = int(self._best[0][row]), float(self._best[1][row])
        else:
            logits = self.logits[row] if self._plain else adjusted(self.logits[row], self.params, self._seen(row))
            best = int(logits.argmax())
            logit = float(logits[best])
        if not math.isfinite(logit):
            raise not_finite(self.position(row))
        return best

    def rank(self, row: int, token: int) -> int:
        """Count the tokens before ``token`` by logit after bias and penalty, by id on a tie; forbidden: all."""
        logits = adjusted(self.logits[row], self.params, self._seen(row))
        if not math.isfinite(logits.max()):
            raise not_finite(self.position(row))
        mine = logits[token]
        if mine == -math.inf:
            return len(logits)
        return int((logits > mine).sum() + (logits[:token] == mine).sum())

    def logprob(self, row: int, token: int) -> float:
        """Return the log-probability of ``token`` at ``row`` before truncation and, mostly, bias and penalty."""
        constraint, logits = self.params.constraint, self.logits[row]
        if constraint is not None and constraint.scored:
            logits = adjusted(logits, self.params, self._seen(row))
        return log_softmax_at(logits, token)

    def top_logprobs(self, row: int, count: int) -> list[tuple[int, float]]:
        """List the likeliest tokens at ``row`` with their log-probabilities, as ``logprob`` gives them."""
        return likely_tokens(self.logits[row], count)


def verify(proposal: Proposal, rows: RowSampler, noise: Noise, accept: Accept = EXACT) -> Verdict:
    """Verify ``proposal`` against the rows of the target's pass over it -> the accepted path, from the pending token
    down, and the token after it.

    Raises:
        EdgespecError: a row that was needed has NaN or infinite logits.
    """
    if not len(proposal.tokens):
        return Verdict((), rows.choose(0))
    chain = proposal.parents is None
    # guesses that are accepted unseen
    forced = min(accept.min_block, len(proposal)) if chain and accept.min_block else 0
    if accept.rule not in ("exact", "lantern"):
        return relax(proposal, rows, accept, forced)
    if proposal.probs is None or rows.matching:
        return _match(proposal, rows, forced, accept)
    if chain and rows.block and accept.rule == "exact":
        return _block(proposal.tokens, proposal.probs, rows, noise, forced)
    return _reject(proposal, proposal.probs, rows, noise, forced, accept)


def keeps_text(proposal: Proposal, rows: RowSampler, accept: Accept, target: Target) -> bool:
    """Say whether the tokens of a round are plain decoding's very tokens, not only of its distribution.

    With ``exact_trees`` the target's rows of trees have the bits of chains.  Where attention adds them up in another
    order, near-ties may differ.
    """
    same_rows = proposal.parents is None or target.exact_trees
    return accept.lossless and same_rows and (proposal.probs is None or rows.matching)


def _match(proposal: Proposal, rows: RowSampler, forced: int, accept: Accept) -> Verdict:
    """Descend while plain decoding would have emitted the guess, or what it stands for.

    For a one-hot q this equals rejection sampling: accepted with probability p(guess), and the residual is p without
    the guess.  With q drawn by the target's own Gumbel noise it is drafter-invariant speculative sampling
    (Daliri, Musco, Suresh, arXiv 2408.07978).
    """
    if proposal.parents is None:
        path = forced
        for guess in proposal.tokens[forced:].tolist():
            token = rows.choose(path)
            if token != guess and token not in accept.alike(rows, path, guess):
                return Verdict(range(path), token)
            path += 1
        return Verdict(range(path), rows.choose(path))
    nodes: list[int] = []
    node = -1
    while True:
        token = rows.choose(node + 1)
        row, below = node + 1, proposal.children(node)
        node = next((i for i in below if proposal.tokens[i] == token), -1)
        if node < 0:
            node = next((i for i in below if token in accept.alike(rows, row, int(proposal.tokens[i]))), -1)
        if node < 0:
            return Verdict(nodes, token)
        nodes.append(node)


def _reject(
    proposal: Proposal, probs: NDArray[np.floating], rows: RowSampler, noise: Noise, forced: int, accept: Accept
) -> Verdict:
    """Speculative sampling: Leviathan et al. arXiv 2211.17192 Algorithm 1, Chen et al. arXiv 2302.01318 Algorithm 2.

    Several children of one node are tried in turn against what is left of p: recursive rejection sampling (SpecInfer
    arXiv 2305.09781 with replacement, Sequoia arXiv 2402.12374 without).  They are tried in the order of drawing, as
    their q given the earlier ones is known in that order only.
    """
    path = list(range(forced))
    node = forced - 1
    while True:
        row = node + 1
        below = proposal.children(node)
        if not below:
            return Verdict(path, rows.choose(row))  # bonus
        position = rows.position(row)
        p = rows.distribution(row)  # float64 [vocab]
        tried: list[int] = []
        node = -1
        for sibling, child in enumerate(below):
            token = int(proposal.tokens[child])
            q = np.asarray(probs[child], np.float64)  # [vocab]
            if tried and not proposal.replacement:
                q = q.copy()
                q[tried] = 0
                total = q.sum()
                q = q / total if total > 0 else q
            if q[token] <= 0:
                continue  # cannot have been drawn from q: no evidence either way, so p is left as it is
            if len(alike := accept.alike(rows, row, token)):
                p = p.copy()
                p[token], p[alike] = p[token] + p[alike].sum(), 0
            # u q < p instead of u < p / q: q may be tiny; strict, because u may be 0 and p = 0 must never pass.
            if noise.uniform(position, ACCEPT + sibling) * q[token] < p[token]:
                node = child
                break
            tried.append(token)
            residual = np.maximum(p - q, 0)
            left = residual.sum()
            if left > 0:  # all zero: p and q are equal but for rounding, and p itself is the right fall-back
                p = residual / left
        if node < 0:
            return Verdict(path, draw(p, noise.uniform(position, RESIDUAL)))
        path.append(node)


def _block(
    tokens: NDArray[np.int64],  # [n]
    probs: NDArray[np.floating],  # [n, vocab]
    rows: RowSampler,
    noise: Noise,
    forced: int,
) -> Verdict:
    """Block verification of a chain: Sun et al. arXiv 2403.10444, Algorithm 2.

    The guesses are judged together: the longest beginning that passes is accepted, even where one before it did
    not pass.  On average no fewer are accepted than by judging them one after the other.
    """
    start, length = rows.position(0), len(tokens)
    accepted = forced
    chance = 1.0  # p_i of the paper: that at least the first i guesses are accepted
    left: NDArray[np.float64] | None = None  # [vocab], not normalised: what follows exactly `accepted` guesses
    for i in range(forced, length + 1):
        # a guess that q cannot have drawn is no evidence: the chain ends before it
        ends = i == length or probs[i, tokens[i]] <= 0
        residual, passes = None, chance
        if not ends:
            p = rows.distribution(i)  # float64 [vocab]
            q = np.asarray(probs[i], np.float64)  # [vocab]
            residual = np.maximum(chance * p - q, 0)
            mass = float(residual.sum())
            passes = mass / (mass + 1 - chance) if mass > 0 or chance < 1 else 1.0
            if mass <= 0:  # p and q are equal but for rounding: p is the right fall-back
                residual = p
        if i == forced or noise.uniform(rows.position(i - 1), BLOCK + start) < passes:
            accepted, left = i, residual
        if ends:
            break
        mine, drafts = chance * float(p[tokens[i]]), float(q[tokens[i]])
        chance = 1.0 if mine >= drafts else mine / drafts
        if chance <= 0:
            break  # nothing longer can be accepted, and its rows are not looked at
    if left is None:
        return Verdict(range(accepted), rows.choose(accepted))
    return Verdict(range(accepted), draw(left, noise.uniform(rows.position(accepted), RESIDUAL)))


def relax(proposal: Proposal, rows: RowSampler, accept: Accept, forced: int) -> Verdict:
    """Accept the longest path that a rule other than ``exact`` allows, of equally long ones that of most merit.

    Only rows of accepted guesses are looked at.
    """
    best, best_merit = list(range(forced)), 0.0
    open_paths = [(best, 0.0)]  # depth first, the drafter's first choices first
    while open_paths:
        path, merit = open_paths.pop()
        if (len(path), merit) > (len(best), best_merit):
            best, best_merit = path, merit
        node = path[-1] if path else -1
        if not (below := proposal.children(node)):
            continue
        judge = accept.judge(rows, node + 1)
        for child in reversed(below):
            gained = judge(int(proposal.tokens[child]))
            if gained is not None:
                open_paths.append(([*path, child], merit + gained))
    return Verdict(best, rows.choose(best[-1] + 1 if best else 0))
