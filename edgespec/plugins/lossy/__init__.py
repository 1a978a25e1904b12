"""Lossy acceptance rules: they accept more draft tokens, and change the text's distribution."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from edgespec.decoding.proposal import Proposal, Verdict
from edgespec.decoding.sampling import Rules, whole
from edgespec.decoding.verify import Accept, RowSampler

Judge = Callable[[int], float | None]  # a guess -> its merit, the larger the better; None = rejected
POSITIVE = ("a number > 0", lambda value: 0 < value < math.inf)


@dataclass(frozen=True, kw_only=True)
class Lossy(Accept):
    """A rule that judges each draft token by the row before it."""

    def judge(self, rows: RowSampler, row: int) -> Judge:
        """Return the judge of the draft tokens at a row."""
        raise NotImplementedError

    def relaxed(self, proposal: Proposal, rows: RowSampler, forced: int) -> Verdict:
        """Accept the longest path that the rule allows; among equal lengths, the one of the largest merit.

        Only rows of accepted guesses are read.
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
            judge = self.judge(rows, node + 1)
            for child in reversed(below):
                gained = judge(int(proposal.tokens[child]))
                if gained is not None:
                    open_paths.append(([*path, child], merit + gained))
        return Verdict(best, rows.choose(best[-1] + 1 if best else 0))


@dataclass(frozen=True, kw_only=True)
class Typical(Lossy):
    """Accept p(guess) > min(epsilon, delta exp(-H(p))), H the entropy (Medusa, arXiv 2401.10774 section 2.3.1)."""

    rule: ClassVar[str] = "typical"
    form: ClassVar[str] = "typical, typical:EPSILON,DELTA"
    epsilon: float = 0.09
    delta: float = 0.3

    @classmethod
    def ranges(cls) -> Rules:
        return {"epsilon": POSITIVE, "delta": POSITIVE}

    def described(self) -> list[str]:
        return [f"typical acceptance (epsilon {self.epsilon:g}, delta {self.delta:g})"]

    def judge(self, rows: RowSampler, row: int) -> Judge:
        p = rows.distribution(row)  # float64 [vocab]
        likely = p[p > 0]
        entropy = -float((likely * np.log(likely)).sum())
        least = min(self.epsilon, self.delta * math.exp(-entropy))
        return lambda token: math.log(p[token]) if p[token] > least else None


@dataclass(frozen=True, kw_only=True)
class TopK(Lossy):
    """Accept a token among the k likeliest (blockwise parallel decoding, arXiv 1811.03115 section 5)."""

    rule: ClassVar[str] = "top-k"
    form: ClassVar[str] = "top-k:K"
    k: int

    @classmethod
    def ranges(cls) -> Rules:
        return {"k": ("an integer >= 1", lambda value: whole(value, 1))}

    def described(self) -> list[str]:
        return [f"guesses accepted among the {self.k} likeliest tokens"]

    def judge(self, rows: RowSampler, row: int) -> Judge:
        return lambda token: -float(place) if (place := rows.rank(row, token)) < self.k else None


@dataclass(frozen=True, kw_only=True)
class Distance(Lossy):
    """Accept a guess at most ``distance`` ids from the likeliest token, for vocabularies whose order has a meaning
    (blockwise parallel decoding, arXiv 1811.03115 section 5)."""

    rule: ClassVar[str] = "distance"
    form: ClassVar[str] = "distance:D"
    distance: int

    @classmethod
    def ranges(cls) -> Rules:
        return {"distance": ("an integer >= 0", whole)}

    def described(self) -> list[str]:
        return [f"guesses accepted within {self.distance} of the likeliest token"]

    def judge(self, rows: RowSampler, row: int) -> Judge:
        best = rows.likeliest(row)
        return lambda token: -float(abs(token - best)) if abs(token - best) <= self.distance else None


@dataclass(frozen=True, kw_only=True)
class All(Lossy):
    """Accept every draft token."""

    rule: ClassVar[str] = "all"
    form: ClassVar[str] = "all"

    def described(self) -> list[str]:
        return ["every guess accepted"]

    def judge(self, rows: RowSampler, row: int) -> Judge:
        return lambda token: 0.0
