"""Sampled texts of a server against the distribution that it, or another one, reports for the same beginnings.

Texts are sampled in rounds, and each continues with the half of the prompts that fit worst so far.  Three tests look at
them, and share the error that is allowed evenly between all their looks: the counts of one round, of all its prompts
together; all counts of each prompt so far; and whether all draws so far are as sharp as they should be.  How many are
sampled of a prompt does not depend on what is sampled of it, so its counts stay counts of independent draws.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from edgespec.formulas.agreement import Verdict
from edgespec.formulas.statistics import (
    Fit,
    normal_limit,
    normal_tail,
    pearson,
    smallest_distance,
    two_samples,
)
from edgespec.judge.client import Answer, Server, side_by_side
from edgespec.judge.rows import Row, next_row

ALPHA, POWER = (
    1e-6,
    0.95,
)  # chance to call an exact server wrong, of a whole run; chance to find the reported excess
OTHER = "\0other"  # cell of every token that is not in the row, and of an end
SEEN = 40  # draws after the same beginning that are worth a row
MOST_ROWS = 12  # beginnings of one prompt
CUT = 16.0  # draws expected, and none seen: the tail was cut off
ROUNDS = (0.05, 0.05, *[0.1] * 9)  # of the texts
Context = tuple[int, tuple[str, ...]]  # number of the prompt, texts of the tokens so far


@dataclass
class Test:
    """One test of one round: ``p`` below ``alpha`` means that the draws are not from the distribution."""

    name: str  # counts of a round, prompt (its counts so far), sharpness (temperature) or texts (two samples)
    round: int
    draws: int
    degrees: int
    p: float
    alpha: float


@dataclass
class Sampled:
    """The result of sampled texts.

    Attributes:
        temperature: that was asked for.
        reported: whether the log-probabilities are those ``before`` or ``after`` the temperature; ``same`` = it is 1.
        reference: what draws are compared with: ``rows`` (log-probabilities), ``draws`` of the reference, or ``none``.
        texts, draws: sampled texts; draws in the tests.
        cut: whether unlikely tokens are never sampled (top-k, top-p or min-p at work); then the rest is compared.
        tests: all of them.
        excess: smallest distance found with probability .95, as a share: .1 = half of the probability is sampled a
            tenth too often; None = no test of counts.
        temperature_error: smallest error of the temperature found with that probability, as a share; None = no test.
        notes: what else to know.
    """

    temperature: float = 1.0
    reported: str = "same"
    reference: str = "none"
    texts: int = 0
    draws: int = 0
    cut: bool = False
    tests: list[Test] = field(default_factory=list)
    excess: float | None = None
    temperature_error: float | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict:
        """Wrong if any test fails."""
        return "wrong" if any(test.p < test.alpha for test in self.tests) else "identical"

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the keys are stable."""
        return asdict(self) | {"verdict": self.verdict, "power": POWER}


@dataclass(frozen=True)
class Plan:
    """How much is sampled.

    Attributes:
        draws: texts at most, at each temperature.
        prompts: how many of the prompts, the first ones.
        seconds: for all of them at most, at each temperature.
        length: tokens of a text.
        temperatures: of the draws, one after the other.  Low ones show best whether guesses are accepted too often,
            and 1 whether the temperature is right.
        lanes: requests at once.
    """

    draws: int = 4000
    prompts: int = 8
    seconds: float = 60.0
    length: int = 3
    temperatures: tuple[float, ...] = (0.6, 1.0)
    lanes: int = 4


def cells(row: Row, temperature: float, before: bool) -> dict[str, float]:
    """Turn a row into probabilities of its tokens and of all others together.

    Where the row is from before the temperature, the share of all others is unknown: they have no cell.
    """
    special = {token for token in row if not token or (token[0] == "<" and token[-1] == ">")}  # ends have many names
    if before:
        top = max(row.values())
        weights = {token: math.exp((value - top) / temperature) for token, value in row.items()}
        found = {token: weight / sum(weights.values()) for token, weight in weights.items() if token not in special}
        rest = 1 - sum(found.values())
        return found | ({OTHER: rest} if special and rest > 1e-9 else {})
    found = {token: math.exp(value) for token, value in row.items() if token not in special}
    rest = 1 - sum(found.values())
    return found | ({OTHER: rest} if rest > 1e-6 else {})


class Draws:
    """Counts of the next token after every beginning that was sampled."""

    def __init__(self) -> None:
        self.counts: dict[Context, Counter[str]] = defaultdict(Counter)
        self.texts: dict[int, Counter[str]] = defaultdict(Counter)

    def update(self, other: Draws) -> None:
        """Add the counts of others."""
        for context, counter in other.counts.items():
            self.counts[context].update(counter)

    def of(self, prompts: Sequence[int]) -> dict[Context, Counter[str]]:
        """Give those of some prompts."""
        return {context: counter for context, counter in self.counts.items() if context[0] in prompts}

    def add(self, prompt: int, answer: Answer, length: int) -> None:
        """Count a text."""
        self.texts[prompt][answer.text] += 1
        so_far: tuple[str, ...] = ()
        for token in answer.tokens:
            self.counts[prompt, so_far][token.text] += 1
            so_far += (token.text,)
        if answer.ended and len(answer.tokens) < length and (answer.tokens or not answer.text):
            self.counts[prompt, so_far][OTHER] += 1


class Judge:
    """Draws and tests: a reference that reports rows, or draws as well."""

    def __init__(
        self, server: Server, reference: Server, prompts: Sequence[str], plan: Plan, temperature: float,
        tolerated: float, report: Callable[[int, int, str], None],
    ) -> None:  # fmt: skip
        self.server, self.reference = server, reference
        self.plan, self.tolerated, self.report = plan, tolerated, report
        self.prompts = prompts[: plan.prompts]
        self.rows: dict[Context, dict[str, float]] = {}
        self.counted: dict[int, int | None] = {}
        self.found, self.temperature = Sampled(temperature), temperature
        self.alpha = ALPHA / len(plan.temperatures)
        self.before = False
        self.end = math.inf  # no rows are asked for after it
        self.done = 0
        self.drawn = Draws()  # so far
        self.spread = (0.0, 0.0)  # of the sharpness: sums of variances, of standard deviations

    def run(self) -> Sampled:
        """Draw until something is found, or the plan's draws or seconds are used up."""
        found = self.found
        self._detect()
        end = time.monotonic() + self.plan.seconds
        self.end = end + self.plan.seconds / 2
        own = self.server.abilities.likeliest > 0
        if self.reference is not self.server:
            half = time.monotonic() + self.plan.seconds / 4
            plain = self._draw(self.reference, range(min(2, len(self.prompts))), self.plan.draws // 8, half)
            if own and self._usable(plain):
                found.reference = "rows"
            else:
                return self._two_samples(end)
        elif own and self.server.abilities.api == "completions":
            found.reference = "rows"
        else:
            found.notes.append(
                "one server that tells no log-probabilities of texts: draws have nothing to be compared with"
            )
            return found
        kept = list(range(len(self.prompts)))
        start, fit = time.monotonic(), Fit()
        for number, share in enumerate(ROUNDS):
            until = start + (end - start) * sum(ROUNDS[: number + 1])
            draws = self._draw(self.server, kept, int(self.plan.draws * share), until)
            self.drawn.update(draws)
            fits = self._test(draws, number + 1, kept)
            fit = max(fit, *fits.values(), key=lambda one: one.draws)
            if found.verdict == "wrong":
                break
            kept.sort(key=lambda one: _strangeness(fits[one]), reverse=True)
            kept = kept[: max(1, (len(kept) + 1) // 2)]
        self._tell_power(fit)
        return found

    def _detect(self) -> None:
        """Find out whether rows are those before or after the temperature, from two rows of the same text."""
        if self.temperature == 1 or not self.reference.abilities.likeliest:
            return
        one, two = (
            self.reference.ask(self.prompts[0], 1, temperature)[0].tokens for temperature in (1.0, self.temperature)
        )
        if not (one and two):
            return
        first, second = one[0].top, two[0].top
        shared = sorted((token for token in first if token in second), key=lambda token: -first[token])
        if len(shared) < 2:
            return
        slope = (second[shared[0]] - second[shared[-1]]) / max(first[shared[0]] - first[shared[-1]], 1e-9)
        self.before = abs(slope - 1) < abs(slope - 1 / self.temperature)
        self.found.reported = "before" if self.before else "after"

    def _draw(self, server: Server, prompts: Sequence[int], texts: int, end: float) -> Draws:
        """Sample texts of each prompt in turn, several requests at once."""
        draws, choices = Draws(), server.abilities.choices
        length, left = self.plan.length, max(texts, choices)
        numbers = list(prompts)
        while left > 0 and time.monotonic() < end:
            batch = [numbers[at % len(numbers)] for at in range(max(self.plan.lanes, len(numbers)))]
            batch = batch[: max(1, -(-left // choices))]
            asked = side_by_side(
                lambda at: server.ask(self.prompts[at], length, self.temperature, choices, 1),
                batch,
                self.plan.lanes,
            )
            for prompt, answers in zip(batch, asked, strict=True):
                for answer in answers:
                    self.counted.setdefault(prompt, answer.prompt_tokens)
                    draws.add(prompt, answer, length)
                    left -= 1
                    if server is self.server:
                        self.done += 1
            numbers = numbers[len(batch) % len(numbers) :] + numbers[: len(batch) % len(numbers)]
            self.report(self.done, self.plan.draws, "sampled")
        if server is self.server:
            self.found.texts = self.done
        return draws

    def _rows_of(self, drawn: Mapping[Context, Counter[str]]) -> dict[Context, tuple[Counter[str], dict[str, float]]]:
        """Find the reference's rows after the beginnings that were sampled most often."""
        by_prompt: dict[int, list[Context]] = defaultdict(list)
        for context, counter in drawn.items():
            if sum(counter.values()) >= SEEN:
                by_prompt[context[0]].append(context)
        found = {}
        for prompt, contexts in by_prompt.items():
            contexts.sort(key=lambda one: -sum(drawn[one].values()))
            for context in contexts[:MOST_ROWS]:
                if context not in self.rows and time.monotonic() < self.end:
                    row = next_row(self.reference, self.prompts[prompt], context[1], self.counted.get(prompt))
                    self.rows[context] = cells(row, self.temperature, self.before) if row else {}
                if self.rows.get(context):
                    found[context] = (drawn[context], self.rows[context])
        return found

    def _usable(self, draws: Draws) -> bool:
        """Whether the reference's own draws are of the rows that it reports, perhaps with the tail cut off."""
        together = self._rows_of(draws.counts)
        if not together:
            return False
        for counter, row in together.values():
            self.found.cut |= _cut(_told(counter, row), row)[1]
        fit = sum((pearson(*self._counts(*one)) for one in together.values()), Fit())
        if fit.p() < self.alpha:
            self.found.notes.append(
                "the reference's draws are not of the rows that it reports, so draws are compared with draws"
            )
            return False
        return True

    def _counts(self, counter: Mapping[str, int], row: Mapping[str, float]) -> tuple[dict[str, int], dict[str, float]]:
        """Put tokens that are not in the row into one cell, and cut the tail off where that is the server's habit."""
        counts = _told(counter, row)
        if self.found.cut or self.reference is self.server:
            row, cut = _cut(counts, row)
            self.found.cut |= cut
        return counts, dict(row)

    def _test(self, draws: Draws, number: int, prompts: Sequence[int]) -> dict[int, Fit]:
        """Look at the draws of a round, and at all so far -> how well those of each prompt fit."""
        alpha = self.alpha / (3 * len(ROUNDS))
        fresh = [pearson(*self._counts(*one)) for one in self._rows_of(draws.counts).values()]
        self._add("counts", number, sum(fresh, Fit()), alpha)
        fits = {}
        for prompt in prompts:
            parts = [self._counts(*one) for one in self._rows_of(self.drawn.of([prompt])).values()]
            fits[prompt] = sum((pearson(*part) for part in parts), Fit())
        worst = max(fits.values(), key=lambda fit: -fit.p(self.tolerated))
        self._add("prompt", number, worst, alpha / len(self.prompts))
        shift = variance = deviation = 0.0
        drawn = 0
        for counter, row in self._rows_of(self.drawn.counts).values():
            counts, chances = self._counts(counter, row)
            size = sum(counts.values())
            logs = {token: math.log(chance) for token, chance in chances.items()}
            mean = sum(chances[token] * value for token, value in logs.items())
            own = sum(chances[token] * (value - mean) ** 2 for token, value in logs.items())
            shift += sum(count * (logs.get(token, mean) - mean) for token, count in counts.items())
            variance, deviation, drawn = variance + size * own, deviation + size * math.sqrt(own), drawn + size
        self.found.draws = drawn
        if variance > 0:
            beyond = max(0.0, abs(shift) - self.tolerated * deviation)
            p = normal_tail(beyond / math.sqrt(variance))
            self.found.tests.append(Test("sharpness", number, drawn, 1, p, alpha))
            self.spread = (variance, deviation)
        return fits

    def _add(self, name: str, number: int, fit: Fit, alpha: float) -> None:
        if fit.degrees:
            self.found.tests.append(Test(name, number, fit.draws, fit.degrees, fit.p(self.tolerated), alpha))

    def _tell_power(self, fit: Fit) -> None:
        alpha = self.alpha / (3 * len(ROUNDS))
        if fit.degrees:
            distance = smallest_distance(fit.draws, fit.degrees, alpha / len(self.prompts), POWER, self.tolerated)
            self.found.excess = distance
        variance, deviation = self.spread
        if variance > 0:
            needed = normal_limit(alpha) + normal_limit(2 * (1 - POWER))
            self.found.temperature_error = (needed * math.sqrt(variance) + self.tolerated * deviation) / variance

    def _two_samples(self, end: float) -> Sampled:
        """Compare whole texts of both servers."""
        found = self.found
        found.reference = "draws"
        half = time.monotonic() + (end - time.monotonic()) / 2
        prompts = range(min(2, len(self.prompts)))
        plain = self._draw(self.reference, prompts, self.plan.draws // 2, half)
        drawn = self._draw(self.server, prompts, self.plan.draws // 2, end)
        fit = sum((two_samples(plain.texts[at], drawn.texts[at]) for at in prompts), Fit())
        self.tolerated *= math.sqrt(self.plan.length)  # of whole texts
        found.draws = fit.draws
        if fit.degrees:
            found.tests.append(Test("texts", 1, fit.draws, fit.degrees, fit.p(self.tolerated), self.alpha))
            found.excess = smallest_distance(fit.draws, fit.degrees, self.alpha, POWER, self.tolerated)
        return found


def _strangeness(fit: Fit) -> float:
    """Say how far a fit is from what chance gives, in standard deviations."""
    return (fit.statistic - fit.degrees) / math.sqrt(2 * fit.degrees) if fit.degrees else 0.0


def _told(counter: Mapping[str, int], row: Mapping[str, float]) -> dict[str, int]:
    """Count what a row has a cell for: tokens that are not in it are one cell, or left out where it has none."""
    counts: dict[str, int] = defaultdict(int)
    for token, count in counter.items():
        if token in row:
            counts[token] += count
        elif OTHER in row:
            counts[OTHER] += count
    return dict(counts)


def _cut(counts: Mapping[str, int], row: Mapping[str, float]) -> tuple[dict[str, float], bool]:
    """Leave out unlikely tokens that are never sampled -> the rest, in sum one, and whether there are any."""
    ranked = sorted(row, key=lambda token: (token != OTHER, row[token]), reverse=True)
    ranked = [token for token in ranked if token != OTHER] + [OTHER] * (OTHER in row)
    last = max((at for at, token in enumerate(ranked) if counts.get(token)), default=len(ranked) - 1)
    kept = {token: row[token] for token in ranked[: last + 1]}
    mass = sum(kept.values())
    if (1 - mass) * sum(counts.values()) < CUT:
        return dict(row), False
    return {token: chance / mass for token, chance in kept.items()}, True
