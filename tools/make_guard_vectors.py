"""Vectors of the guard: proposals, right and wrong, and what of them the loop gets."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from edgespec.decoding.drafter import Drafter, DraftRequest
from edgespec.decoding.drafting import Drafting
from edgespec.decoding.policy import Policy
from edgespec.decoding.proposal import Proposal
from edgespec.decoding.stats import Stats

BUDGET, VOCAB = 8, 10


def _target() -> Any:
    return SimpleNamespace(vocab_size=VOCAB, trees=True, can=frozenset())


def guards() -> Iterator[dict[str, Any]]:
    """Proposals, right and wrong, and what the guard lets through; ``q``: what each guess's row of q sums to."""
    cases: list[dict[str, Any]] = [
        {"tokens": [3, 4, 5]},
        {"tokens": [3, 4, 5], "budget": 2},
        {"tokens": [3, 9, 5]},
        {"tokens": [9]},
        {"tokens": []},
        {"tokens": [10]},
        {"tokens": [-1, 2]},
        {"tokens": [1, 2, 3, 4], "parents": [-1, 0, 0, 2]},
        {"tokens": [1, 9, 3, 4], "parents": [-1, 0, 1, 2]},
        {"tokens": [9, 9, 3, 4], "parents": [-1, -1, 1, 0]},
        {"tokens": [1, 2, 3, 4], "parents": [-1, 0, 1, 2], "budget": 2},
        {"tokens": [1, 2], "parents": [1, 0]},
        {"tokens": [1, 2], "parents": [-1, -2]},
        {"tokens": [1, 2], "parents": [-1]},
        {"tokens": [1, 2], "parents": [-1, -1], "trees": False},
        {"tokens": [1, 2], "q": [1.0, 1.0]},
        {"tokens": [1, 2], "q": [1.0, 0.5]},
        {"tokens": [1, 2], "q": [1.0]},
    ]
    for case in cases:
        parents, q = case.get("parents"), case.get("q")
        probs = None if q is None else np.outer(np.array(q), np.full(VOCAB, 1 / VOCAB))
        above = None if parents is None else np.array(parents, np.int64)
        given = Proposal(np.array(case["tokens"], np.int64), above, probs)

        class Given(Drafter):
            name = "given"

            def propose(self, tokens: list[int], budget: int, made: Proposal = given) -> Proposal:
                return made

        stats, target = Stats(), _target()
        target.trees = case.get("trees", True)
        drafting = Drafting(Policy([Given()]), target, frozenset({9}), stats)
        drafting.begin(DraftRequest([1]))
        drafting.choose([1], case.get("budget", BUDGET))
        made = drafting.propose([1])
        yield {**case, "dropped": stats.dropped_reason is not None, "made": made.tokens.tolist(),
               "above": None if made.parents is None else made.parents.tolist()}  # fmt: skip
