"""Acceptance rules that give losslessness away on purpose; the default gives nothing away."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from edgespec.decoding.proposal import Proposal, Verdict
from edgespec.decoding.rows import Rows
from edgespec.errors import InvalidRequest

Rule = Literal["exact", "typical", "top-k", "distance", "all"]
FORMS = "exact, typical, typical:EPSILON,DELTA, top-k:K, distance:D or all"


@dataclass(frozen=True)
class Accept:
    """Which guesses stand.

    Attributes:
        rule: ``exact``: those that leave the distribution of plain decoding as it is.  All others are lossy:
            ``typical``: p(guess) > min(epsilon, delta exp(-H(p))), H the entropy (Medusa, arXiv 2401.10774 section
            2.3.1); ``top-k``: a guess among the k likeliest; ``distance``: a guess at most ``distance`` ids from the
            likeliest token, for vocabularies whose order means something (both blockwise parallel decoding, arXiv
            1811.03115 section 5); ``all``: every guess, whatever the model says.
        epsilon: of ``typical``.
        delta: of ``typical``.
        k: of ``top-k``.
        distance: of ``distance``.
        min_block: at least so many guesses of a chain stand under any rule (arXiv 1811.03115 section 5.3); 0 = off.
            Trees are not affected.

    Raises:
        InvalidRequest: an unknown rule, or a value outside its range.
    """

    rule: Rule = "exact"
    epsilon: float = 0.09
    delta: float = 0.3
    k: int = 1
    distance: int = 0
    min_block: int = 0

    def __post_init__(self) -> None:
        if self.rule not in get_args(Rule):
            raise InvalidRequest(f"acceptance rule {self.rule!r}: expected one of {', '.join(get_args(Rule))}")
        for name, least in (("epsilon", 0), ("delta", 0)):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > least):
                raise InvalidRequest(f"{name} of typical acceptance is {value!r}: expected a number > {least}")
        for name, least in (("k", 1), ("distance", 0), ("min_block", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise InvalidRequest(f"{name} of the acceptance rule is {value!r}: expected an integer >= {least}")

    @classmethod
    def parse(cls, text: str, min_block: int = 0) -> Accept:
        """A rule as the command line writes it: ``typical``, ``typical:0.09,0.3``, ``top-k:3``, ``distance:2``, ...

        Raises:
            InvalidRequest: not of such a form.
        """
        rule, _, rest = text.partition(":")
        try:
            if rule == "typical" and rest:
                epsilon, delta = map(float, rest.split(","))
                return cls("typical", epsilon=epsilon, delta=delta, min_block=min_block)
            if rule == "top-k":
                return cls("top-k", k=int(rest), min_block=min_block)
            if rule == "distance":
                return cls("distance", distance=int(rest), min_block=min_block)
        except ValueError:
            raise InvalidRequest(f"acceptance rule {text!r}: expected {FORMS}") from None
        if rest or rule not in ("exact", "typical", "all"):
            raise InvalidRequest(f"acceptance rule {text!r}: expected {FORMS}")
        return cls(rule, min_block=min_block)  # type: ignore[arg-type]

    @property
    def lossless(self) -> bool:
        """Whether the text keeps the distribution of plain decoding."""
        return self.rule == "exact" and self.min_block == 0

    @property
    def approximations(self) -> list[str]:
        """What is given away, in words; nothing by a lossless rule."""
        words = {
            "exact": [],
            "typical": [f"typical acceptance (epsilon {self.epsilon:g}, delta {self.delta:g})"],
            "top-k": [f"guesses accepted among the {self.k} likeliest tokens"],
            "distance": [f"guesses accepted within {self.distance} of the likeliest token"],
            "all": ["every guess accepted"],
        }
        return words[self.rule] + ([f"at least {self.min_block} guesses accepted"] if self.min_block else [])

    def judge(self, rows: Rows, row: int) -> Callable[[int], float | None]:
        """What a lossy rule says of guesses at a row: a merit, the larger the better, or None = refused.

        Raises:
            EdgespecError: from the returned function or here: the row has NaN or infinite logits.
        """
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


EXACT = Accept()


def relax(proposal: Proposal, rows: Rows, accept: Accept, forced: int) -> Verdict:
    """The longest path of guesses that a lossy rule accepts, the one of most merit among equally long ones.

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
