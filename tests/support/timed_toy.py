"""Requests over a toy target: its passes and drafts take the time of a given cost model, on a simulated clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.control.adaptive import Control
from edgespec.decoding.drafter import Drafter, DraftRequest
from edgespec.decoding.loop import DecodeOptions, decode, run_pass
from edgespec.decoding.policy import Policy
from edgespec.decoding.proposal import Proposal, Verdict
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.stats import Stats
from edgespec.decoding.target import Output, Pass, Target
from edgespec.formulas.cost import CostModel
from tests.support.reference import FunctionTarget

VOCAB, STEP_MS = 61, 10.0
INT4 = {1: 1.0, 2: 1.04, 4: 1.13, 8: 1.4, 17: 2.3}  # like native int4 rows
STOCK = {1: 1.0, 4: 1.7, 8: 2.6, 16: 4.0}  # like stock ones
DEAR = {1: 1.0, 2: 1.2, 4: 2.0, 8: 3.5}  # like stock int4 on Zen 4

Rates = Callable[[int], float]  # length of the text -> chance that a guess is right


def after(token: int, length: int) -> int:
    """Return the target's token after a text of ``length`` tokens that ends with ``token``."""
    return (31 * token + 7 * length + 3) % VOCAB


def logits(prefix: tuple[int, ...]) -> NDArray[np.float32]:
    """[vocab]: sure of ``after``, when sampled at temperature 1 not quite."""
    row = np.full(VOCAB, -3.0, np.float32)
    row[after(prefix[-1], len(prefix))] = 2.0
    return row


def text(prompt: Sequence[int], new: int) -> list[int]:
    """Greedy continuation, written down."""
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(after(tokens[-1], len(tokens)))
    return tokens[len(prompt) :]


class Clock:
    """Seconds that pass only where a test advances them."""

    ms: float

    def __init__(self) -> None:
        self.ms = 0.0

    def __call__(self) -> float:
        return self.ms / 1000


class BusyClock(Clock):
    """Seconds of a machine with other work: all takes ``factor`` times as long for a ``share`` of ``period`` steps."""

    def __init__(self, period: float = 40.0, share: float = 0.25, factor: float = 2.0) -> None:
        self._ms, self._period, self._share, self._factor = 0.0, period * STEP_MS, share, factor

    @property
    def ms(self) -> float:
        """Milliseconds until now."""
        return self._ms

    @ms.setter
    def ms(self, now: float) -> None:
        busy = self._ms % self._period < self._share * self._period
        self._ms += (now - self._ms) * (self._factor if busy else 1.0)


@dataclass(eq=False)
class Guesser(Drafter):
    """Guesses tokens that are right with a given chance, at a given cost.

    Attributes:
        rate: chance of a right guess, by the length of the text.
        c: time of a guess in plain steps.
        clock: that time passes on.
        cheap: it is asked before control decides.
        buckets: kinds of proposals, in turn.
        name: of the method.
        catch_up: time of a token that it has not seen, in plain steps.
        draws: draft tokens are offered with a sampling distribution.
        first: additional cost of a round with draft tokens.
    """

    rate: Rates
    c: float
    clock: Clock
    _: KW_ONLY
    cheap: bool = False
    buckets: int = 1
    name: str = "guesser"
    catch_up: float = 0.0
    draws: bool = False
    first: float = 0.0

    def __post_init__(self) -> None:
        self.begun: list[int] = []  # lengths of the text at its calls of begin
        self.asked: list[int] = []  # and at which it was asked
        self.observed = 0
        self._known = 0

    def begin(self, request: DraftRequest) -> None:
        self.begun.append(len(request.tokens))

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        self.asked.append(len(tokens))
        rng = np.random.default_rng([len(tokens), 7])
        guesses = [
            token if rng.random() < self.rate(len(tokens)) else (token + 1) % VOCAB for token in text(tokens, budget)
        ]
        probs = None
        if self.draws:
            probs = np.full((budget, VOCAB), 0.5 / (VOCAB - 1))  # [n, vocab]
            probs[np.arange(budget), guesses] = 0.5
        self.clock.ms += (
            self.first * (budget > 0) + self.c * len(guesses) + self.catch_up * (len(tokens) - self._known)
        ) * STEP_MS
        self._known = len(tokens)
        return Proposal(np.array(guesses, np.int64), None, probs, bucket=len(tokens) % self.buckets)

    def observe(self, proposal: Proposal, verdict: Verdict, output: Output) -> None:
        self.observed += 1


def controlled(inner: Drafter, curve: Mapping[int, float], c: float, prior: float = 0.5) -> Control:
    """Adaptive control with given times of passes and drafts, in milliseconds as it would have measured them."""
    cost = CostModel(curve, c)
    for rows, steps in curve.items():
        cost.observe_verify(rows, steps * STEP_MS, 3)
    cost.observe_draft(1, c * STEP_MS, 3)
    return Control(inner, cost, prior=prior)


@dataclass
class Run:
    """Results of a request.

    Attributes:
        tokens: the new ones.
        steps: time in plain steps.
        counted: the same from counters: rows through the curve, and guesses times what one costs.
        stats: its statistics.
    """

    tokens: list[int] = field(default_factory=list)
    steps: float = 0.0
    counted: float = 0.0
    stats: Stats = field(default_factory=Stats)

    @property
    def loss(self) -> float:
        """Time beyond plain decoding's, as a share of it; negative = it was faster."""
        return self.steps / len(self.tokens) - 1

    @property
    def switches(self) -> list[tuple[int, str, str]]:
        """(round, from, to)."""
        return [(at["round"], at["from"], at["to"]) for at in self.stats.switches]


def run(
    monkeypatch: pytest.MonkeyPatch,
    policy: Policy | Drafter,
    clock: Clock,
    curve: Mapping[int, float],
    new: int = 512,
    *,
    prompt: Sequence[int] = (1,),
    sampling: SamplingParams | None = None,
    costs: Mapping[str, float] | None = None,
) -> Run:
    """Decode ``new`` tokens; every pass takes what the curve says; ``costs``: of a guess by method, to be counted."""
    for module in ("decoding.drafting", "decoding.loop", "decoding.stats"):
        monkeypatch.setattr(f"edgespec.{module}.perf_counter", clock)
    target, verify, made = FunctionTarget(logits, VOCAB, 1 << 14), CostModel(curve, 0.0), Run()
    options = DecodeOptions(new, 8, sampling=sampling or SamplingParams())

    def timed(target: Target, wanted: Pass) -> Output:
        assert wanted.tokens is not None
        output, work, before = run_pass(target, wanted), verify.v(len(wanted.tokens)), clock.ms
        clock.ms += work * STEP_MS
        output.ms = clock.ms - before
        made.counted += work
        return output

    start = clock.ms
    for done in decode(target, policy, prompt, options, made.stats, timed):
        made.tokens += done.tokens
        if costs and done.drafted:
            made.counted += len(done.drafted) * costs[made.stats.recent[-1].method]
    made.steps = (clock.ms - start) / STEP_MS
    return made
