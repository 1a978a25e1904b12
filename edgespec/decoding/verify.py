"""Which guesses are accepted: one function for chains and trees, deterministic and sampled guesses.

p is the target's distribution at a row, q the draft's.  The default rule is lossless: the emitted tokens have the
target's distribution, and where matching applies they are the tokens that plain decoding emits.  Rules that give that
away must be asked for (``Accept``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

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
from edgespec.extensions import ACCEPTANCE, Table

_RULES: Rules = {"min_block": ("an integer >= 0", whole)}


@dataclass(frozen=True, kw_only=True)
class Accept:
    """Rule for accepting draft tokens; this one keeps the distribution of plain decoding.

    Rules that do not are subclasses, found by entry points in the group ``edgespec.acceptance_rules``.

    Attributes:
        rule: its name.
        form: its text, with its numbers as names, such as ``top-k:K``.
        min_block: under any rule at least this many guesses of a chain are accepted (arXiv 1811.03115 section 5.3); 0 =
            off.  Trees are not affected.

    Raises:
        InvalidRequest: a value outside its range.
    """

    rule: ClassVar[str] = "exact"
    form: ClassVar[str] = "exact"
    min_block: int = 0

    def __post_init__(self) -> None:
        check_fields(self, {**self.ranges(), **_RULES})

    @classmethod
    def ranges(cls) -> Rules:
        """Return the range of each number of a subclass; see ``check_fields``."""
        return {}

    @staticmethod
    def parse(text: str, min_block: int = 0) -> Accept:
        """Read a rule as the command line writes it.

        Args:
            text: as ``exact``, or ``NAME`` or ``NAME:NUMBER,NUMBER`` of a plug-in.
            min_block: minimum number of accepted guesses of a chain, under any rule.

        Raises:
            InvalidRequest: an unknown rule, or numbers that it does not take.
        """
        name, colon, rest = text.partition(":")
        if name not in RULES:
            raise InvalidRequest(
                f"acceptance rule {text!r}: expected {_forms()}", RULES.refused("acceptance rule", name).hint
            )
        kind, numbers = RULES[name], rest.split(",") if colon else []
        kinds = {one.name: {"int": int, "float": float}[str(one.type)]
                 for one in fields(kind) if one.name != "min_block" and one.type in ("int", "float")}  # fmt: skip
        try:
            given = zip(kinds.items(), numbers, strict=True) if numbers else ()
            return kind(min_block=min_block, **{name: read(number) for (name, read), number in given})
        except (TypeError, ValueError):  # a number that is missing, or is not one
            raise InvalidRequest(f"acceptance rule {text!r}: expected {_forms()}") from None

    @property
    def lossless(self) -> bool:
        """Whether the text keeps the distribution of plain decoding."""
        return type(self) is Accept and self.min_block == 0

    @property
    def approximations(self) -> list[str]:
        """Describe the approximations of the rule; a lossless one has none."""
        return [*self.described(), *([f"at least {self.min_block} guesses accepted"] if self.min_block else [])]

    def described(self) -> list[str]:
        """Describe the approximation of a subclass."""
        return []

    def for_model(self, model: Any) -> Accept:
        """Return the rule for requests to a model.

        Args:
            model: the loaded bundle (``engine.loaded.LoadedBundle``).

        Raises:
            InvalidRequest: the rule needs what the model has not.
        """
        return self

    def relaxed(self, proposal: Proposal, rows: RowSampler, forced: int) -> Verdict | None:
        """Verify a proposal by this rule's own algorithm; None = by the functions below.

        Args:
            proposal: with at least one guess.
            rows: of the pass over it.
            forced: draft tokens of a chain that are accepted regardless of the rows.
        """
        return None

    def alike(self, rows: RowSampler, row: int, guess: int) -> NDArray[np.int64] | tuple[()]:
        """Return the tokens that stand for a guess too, int64 [n]; none under the lossless rule."""
        return ()


RULES: Table[type[Accept]] = Table(
    ACCEPTANCE, {"exact": Accept}, lambda made: isinstance(made, type) and issubclass(made, Accept)
)
"""The rules by name: the lossless one, then those of plug-ins."""


def _forms() -> str:
    return ", ".join(rule.form for rule in RULES.values())


EXACT = Accept()


class RowSampler:
    """Sampling results for each row of one pass.  Row 0 follows the pending token, row i + 1 node i.

    ``logits``: float32 [1 + nodes of the proposal, vocab].  ``tokens``: the committed ones; a ``Text`` keeps its
    counts.  ``best``: likeliest token [r] and its logit [r], if the pass returned only those: greedy requests need no
    more.  A row of NaN or infinite logits raises EdgespecError when it is read.
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
    if (relaxed := accept.relaxed(proposal, rows, forced)) is not None:
        return relaxed
    if proposal.probs is None or rows.matching:
        return _match(proposal, rows, forced, accept)
    if chain and rows.block and type(accept) is Accept:
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
    """Descend while plain decoding would have emitted the draft token, or one that it is equivalent to.

    For a one-hot q this equals rejection sampling: accepted with probability p(guess), and the residual is p without
    the guess.  With q sampled with the target's own Gumbel noise it is drafter-invariant speculative sampling (Daliri,
    Musco, Suresh, arXiv 2408.07978).
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
                continue  # cannot have been sampled from q: no evidence either way, so p stays the same
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
            if left > 0:  # all zero: p and q are equal up to rounding, and p itself is the right fallback
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
        # q cannot have sampled this token, so it proves nothing: the chain ends before it
        ends = i == length or probs[i, tokens[i]] <= 0
        residual, passes = None, chance
        if not ends:
            p = rows.distribution(i)  # float64 [vocab]
            q = np.asarray(probs[i], np.float64)  # [vocab]
            residual = np.maximum(chance * p - q, 0)
            mass = float(residual.sum())
            passes = mass / (mass + 1 - chance) if mass > 0 or chance < 1 else 1.0
            if mass <= 0:  # p and q are equal up to rounding: p is the right fallback
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
