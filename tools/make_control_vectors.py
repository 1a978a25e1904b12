"""Vectors of control: what a chain, method auto and the guard make of scripted drafters and clocks."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from edgespec.control.adaptive import Adaptive
from edgespec.control.auto import Auto, Candidate
from edgespec.control.chain import Chain
from edgespec.decoding.drafter import Drafter, DraftRequest, Guard, Proposal, Verdict, Wrapper
from edgespec.decoding.noise import Noise
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.stats import RoundTime, Stats
from edgespec.decoding.target import Pass
from edgespec.formulas.cost import CostModel

CURVE = {1: 1.0, 2: 1.2, 8: 2.1}  # of a pass by its rows
COST = 0.15  # of a draft step that is not cheap
PLAIN_MS, ROW_MS, STEP_MS = 5.0, 0.3, 0.8  # of a pass over one row, of a row more, of a draft step
ROUNDS, BUDGET, VOCAB = 240, 8, 10
NOTHING = Pass(np.zeros((1, 1), np.float32))


class _Scripted(Drafter):
    """Offers as many guesses as a script says in each round; -1 = it fails."""

    def __init__(self, name: str, cheap: bool, script: list[int]) -> None:
        self.name, self.cheap, self.script, self.round, self.seen = name, cheap, script, 0, [0, 0]

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        count = self.script[self.round]
        if count < 0:
            raise ValueError("no idea")
        return Proposal(np.zeros(min(count, budget), np.int64))

    def observe(self, proposal: Proposal, verdict: Verdict, output: Pass) -> None:
        self.seen = [self.seen[0] + len(proposal), self.seen[1] + len(verdict.path)]


def _target() -> Any:
    return SimpleNamespace(vocab_size=VOCAB, trees=True)


def _drive(control: Wrapper, inside: list[_Scripted], stand: list[list[int]], params: SamplingParams) -> dict[str, Any]:
    """Run scripted rounds; ``stand[d][r]``: how many guesses of drafter d would be accepted in round r."""
    stats, names = Stats(), [one.name for one in inside]
    guard = Guard(control, _target(), frozenset(), stats)
    guard.begin(DraftRequest([1], params, Noise(1), stats))
    who, counts = [], []
    for at in range(len(stand[0])):
        for one in inside:
            one.round = at
        proposal = guard.propose([1] * (at + 1), BUDGET)
        count = len(proposal)
        by = names.index(guard.proposer) if count else -1
        right = min(count, stand[by][at]) if count else 0
        draft = 0.0 if not count or inside[by].cheap else STEP_MS * count
        time = RoundTime(draft, PLAIN_MS + ROW_MS * count, count + 1)
        guard.learn(proposal, Verdict(range(right), 0), NOTHING, time)
        who.append(by)
        counts.append(count)
    return {
        "who": who,
        "counts": counts,
        "seen": [one.seen for one in inside],
        "reason": control.reason,
        "dropped": stats.dropped_reason is not None,
        "switches": [[one["round"], one["from"], one["to"]] for one in stats.switches],
    }


def _script(rng: np.random.Generator, most: int, share: float, fails: int) -> list[int]:
    """Guesses of each round: up to ``most`` in a ``share`` of the rounds; it fails from round ``fails`` on."""
    found = [int(rng.integers(1, most + 1)) if rng.random() < share else 0 for _ in range(ROUNDS)]
    return [-1 if 0 <= fails <= at else count for at, count in enumerate(found)]


def _candidate(made: Adaptive, promise: float) -> Candidate:
    return Candidate(made.name, promise, lambda: made, made.inner.cheap)


def controls() -> Iterator[dict[str, Any]]:
    """Chains and method auto over two scripted drafters, a cheap one and one that is not."""
    cases = [("chain", False, -1, -1), ("chain", True, -1, -1), ("chain", True, 90, -1), ("chain", True, 90, 200),
             ("auto", True, -1, -1), ("auto", True, -1, 120), ("auto", True, 60, 120),
             ("auto", False, -1, -1)]  # fmt: skip
    for number, (kind, adaptive, first, second) in enumerate(cases):
        for seeded in (True, False) if kind == "auto" else (True,):  # a chain has a clock of its own
            rng = np.random.default_rng(number)
            good = [(0.3, 0.8), (0.05, 0.1), (0.6, 0.7), (0.7, 0.3)][number % 4]
            scripts = [_script(rng, 4, 0.4, first), _script(rng, 6, 1.0, second)]
            stand = [(rng.geometric(1 - rate, ROUNDS) - 1).tolist() for rate in good]
            inside = [_Scripted("ngram", True, scripts[0]), _Scripted("draft", False, scripts[1])]
            made = [Adaptive(one, CostModel(CURVE, 0.0 if one.cheap else COST)) for one in inside]
            control: Wrapper
            if kind == "chain":
                control = Chain(made if adaptive else inside)
            else:
                control = Auto([_candidate(made[1], 1.3), _candidate(made[0], 1.0)], adaptive)
            params = SamplingParams(temperature=float(seeded), seed=1)
            yield {"kind": kind, "adaptive": adaptive, "seeded": seeded, "scripts": scripts, "stand": stand,
                   **_drive(control, inside, stand, params)}  # fmt: skip


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
        made = Guard(Given(), target, frozenset({9}), stats).propose([1], case.get("budget", BUDGET))
        yield {**case, "dropped": stats.dropped_reason is not None, "made": made.tokens.tolist(),
               "above": None if made.parents is None else made.parents.tolist()}  # fmt: skip
