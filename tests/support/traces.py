"""Recorded accept/reject traces of real models, and their replay: no clock and no model.

``tools/record_traces.py`` made the files; its docstring describes them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.control.adaptive import Control
from edgespec.control.learned import Learned
from edgespec.decoding.drafter import Drafter
from edgespec.decoding.policy import Policy
from edgespec.decoding.proposal import Proposal, Verdict
from edgespec.decoding.stats import RoundTime
from edgespec.decoding.target import Output
from edgespec.formulas.confidence import BOUNDS, Confidence
from tests.support.rounds import Rounds
from tests.support.toy import FixedCosts

FOLDER = Path(__file__).parents[1] / "data" / "traces"
LONGEST = 8
STEP_MS = 50.0  # of a plain step, where control reads a clock
MIDDLES = [(low + high) / 2 for low, high in zip((0.0, *BOUNDS), (*BOUNDS, 1.0), strict=True)]


@dataclass(frozen=True)
class Text:
    """One greedy text: ``right[i]`` guesses after its first ``len(prompt) + i`` tokens would be accepted."""

    kind: str
    prompt: list[int]
    tokens: list[int]
    right: list[int]
    sure: list[list[float]]  # the drafter's probability of each guess; empty for one that does not stop early

    @cached_property
    def all(self) -> list[int]:
        return [*self.prompt, *self.tokens]


class KnownCosts(FixedCosts):
    """Costs that no clock corrects, and a plain step's time."""

    @property
    def plain_ms(self) -> float:
        return STEP_MS


@dataclass(frozen=True)
class Trace:
    """Texts of one pair of models, and the time of passes and draft steps in plain steps."""

    pair: str
    verify: dict[int, float]
    draft: float
    acceptance: list[float]  # as the export measured it
    positions: int
    confidence: list[float]
    texts: list[Text]

    @property
    def stops(self) -> bool:
        return bool(self.texts[0].sure)

    def costs(self) -> KnownCosts:
        return KnownCosts(self.verify, self.draft)

    def steps(self, guesses: int) -> float:
        """Count the plain steps of a round over ``guesses`` draft tokens."""
        return self.price[guesses]

    @cached_property
    def price(self) -> list[float]:
        costs = self.costs()
        return [costs.d(n) + costs.v(n + 1) for n in range(LONGEST + 1)]


@cache
def traces() -> dict[str, Trace]:
    """Read all recorded pairs, by the names of their files."""
    return {file.stem: _read(json.loads(file.read_text())) for file in sorted(FOLDER.glob("*.json"))}


def _read(raw: dict[str, Any]) -> Trace:
    texts = []
    for one in raw["texts"]:
        sure = [[MIDDLES[int(digit)] for digit in chain] for chain in one.get("sure", "").split()]
        texts.append(Text(one["kind"], one["prompt"], one["tokens"], list(map(int, one["right"])), sure))
    verify = {int(rows): ms for rows, ms in raw["prices"]["verify"].items()}
    one_row = verify[1]
    return Trace(
        raw["pair"],
        {rows: ms / one_row for rows, ms in verify.items()},
        raw["prices"]["draft"] / one_row,
        raw["acceptance"] or [],
        raw["positions"] or 0,
        raw["confidence"] or [],
        texts,
    )


class Recorded(Drafter):
    """Offers as many guesses as it may; how many of them are right is known from the trace."""

    name = "recorded"

    def __init__(self, trace: Trace) -> None:
        self.trace, self.stops = trace, trace.stops
        self.confidence = Confidence(trace.confidence, trace.acceptance[0] if trace.acceptance else None)
        self.text = trace.texts[0]
        self._sure: list[float] = []

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        return Proposal(np.zeros(budget, np.int64))

    def propose_until(self, tokens: list[int], budget: int, least_gain: Callable[[int], float]) -> Proposal:
        said, count, reach = self.text.sure[len(tokens) - len(self.text.prompt)], budget, 1.0
        self._sure = (said + said[-1:] * LONGEST)[:budget]  # after the end of the record, as sure as before
        for depth, chance in enumerate(self._sure[:-1], 1):
            reach *= self.confidence.chance(chance)
            if reach * self.confidence.mean < least_gain(depth):
                count = depth
                break
        return Proposal(np.zeros(count, np.int64))

    def observe(self, proposal: Proposal, verdict: Verdict, output: Output) -> None:
        right, tested = len(verdict.path), proposal.tested(verdict.path)
        for depth, probability in enumerate(self._sure[:tested]):
            self.confidence.learn(probability, depth < right)


@dataclass
class Outcome:
    """Tokens and time of a text."""

    tokens: int = 0
    steps: float = 0.0
    lengths: list[int] | None = None
    switches: int = 0

    @property
    def speed(self) -> float:
        return self.tokens / self.steps


Right = Callable[[int, Proposal], int]  # index of the pending token among the new ones, a proposal -> accepted guesses


def run(
    text: Text, drafts: Policy | Control | Drafter, steps: Callable[[int], float], right: Right, first: int = 0
) -> Outcome:
    """Decode a recorded text; ``first``: tokens that do not count."""
    rounds = Rounds(drafts, text.prompt)
    made = Outcome(lengths=[])
    at, end = 0, len(text.tokens)
    while at < end:
        budget = min(LONGEST, end - at - 1)
        tokens = text.all[: len(text.prompt) + at]
        proposal = rounds.propose(tokens, budget)
        count = len(proposal)
        accepted = min(right(at, proposal), count)
        took = steps(count)
        time = RoundTime(0.0, STEP_MS * took, count + 1, tokens=accepted + 1, drafted=count, accepted=accepted)
        rounds.learn(proposal, range(accepted), time)
        if at >= first:
            made.tokens, made.steps = made.tokens + accepted + 1, made.steps + took
        assert made.lengths is not None
        made.lengths.append(count)
        at += accepted + 1
    made.switches = len(rounds.stats.switches)
    return made


def fixed(trace: Trace, text: Text, guesses: int, first: int = 0) -> Outcome:
    """Decode a recorded text with a fixed number of guesses; 0 = plainly."""

    class Fixed(Drafter):
        def propose(self, tokens: list[int], budget: int) -> Proposal:
            return Proposal(np.zeros(min(guesses, budget), np.int64))

    return run(text, Fixed(), trace.steps, lambda at, _: text.right[at], first)


def controlled(trace: Trace, text: Text, learned: Learned, prior: Sequence[float], inner: Recorded) -> Outcome:
    """Decode a recorded text under control, which begins with what the engine has ``learned``."""
    inner.text = text
    return run(text, Control(inner, learned, LONGEST, prior=prior), trace.steps, lambda at, _: text.right[at])


def ngram_right(text: Text) -> Right:
    """Compare guesses with the recorded text itself."""

    def right(at: int, proposal: Proposal) -> int:
        count = 0
        for guess, token in zip(proposal.tokens.tolist(), text.tokens[at:], strict=False):
            if guess != token:
                break
            count += 1
        return count

    return right


def cheap_costs(trace: Trace) -> KnownCosts:
    """Give the costs of a drafter that takes no time."""
    return KnownCosts(trace.verify, 0.0)
