"""Methods as they come, right beside plain decoding: what a calibration trusts most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

from edgespec.decoding.settings import Settings
from edgespec.drafters.registry import AR
from edgespec.engine.engine import Engine
from edgespec.engine.result import Result
from edgespec.planning.profile.record import Trial
from edgespec.reports.measuring import Clock

LEARN = 2  # texts that control learns from, before those that are timed
NEW, FEWEST_NEW = 56, 16  # tokens of a text; rounds of the last 64 are known one by one
TEXTS = 2  # times that every prompt is written at most
PLAIN = AR
EXITS = "paradecode"


@dataclass
class Counts:
    """Sums over the timed texts of one method."""

    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    times: dict[int, list[tuple[float, float]]] = field(default_factory=dict)  # by rows: (drafts, pass) of each round
    other_ms: list[float] = field(default_factory=list)  # a round, text by text
    deep: float = 0.0  # tokens before a pass, summed over rounds
    offered: Counter[int] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)

    def add(self, result: Result) -> None:
        """Count one text."""
        stats = result.stats
        self.rounds += stats.rounds
        self.tokens += stats.tokens
        self.drafted += stats.drafted
        self.accepted += stats.accepted
        self.other_ms.append(stats.other_ms / stats.rounds)
        depth = stats.prompt_tokens
        for seen in stats.monitor.recent:
            self.times.setdefault(1 + seen.drafted, []).append((seen.draft_ms, seen.verify_ms))
            self.deep += depth
            depth += seen.tokens
        self.offered.update(dict(enumerate(stats.offered)))
        self.accepted_at.update(dict(enumerate(stats.accepted_at)))

    def means(self, passes: Mapping[int, float]) -> tuple[float, float, float]:
        """(drafts, pass, rest) of a mean round, in milliseconds; ``passes``: what those of so many rows take.

        Of rounds with as many rows the median stands for all: one that the system interrupted says nothing.
        """
        drafts = sum(len(rounds) * median(draft for draft, _ in rounds) for rounds in self.times.values())
        verified = sum(len(rounds) * passes[rows] for rows, rounds in self.times.items())
        return drafts / self.rounds, verified / self.rounds, median(self.other_ms)

    def trial(self, passes: Mapping[int, float], plain: float) -> Trial:
        """What a profile keeps; ``plain``: milliseconds of a token of plain decoding."""
        positions = range(max(self.offered, default=-1) + 1)
        drafts, verified, rest = self.means(passes)
        return Trial(
            rounds=self.rounds,
            tokens=self.tokens,
            drafted=self.drafted,
            accepted=self.accepted,
            rows={rows: len(rounds) for rows, rounds in sorted(self.times.items())},
            draft_ms=drafts,
            verify_ms=verified,
            other_ms=rest,
            speedup=plain * self.tokens / self.rounds / (drafts + verified + rest),
            depth=self.deep / self.rounds,
            offered=[self.offered[at] for at in positions],
            accepted_at=[self.accepted_at[at] for at in positions],
        )


def pass_times(counts: Iterable[Counts]) -> dict[int, float]:
    """What passes of so many rows take, whoever asked for them: milliseconds, medians."""
    times: dict[int, list[float]] = {}
    for one in counts:
        for rows, rounds in one.times.items():
            times.setdefault(rows, []).extend(ms for _, ms in rounds)
    return {rows: median(taken) for rows, taken in times.items()}


def run_trials(
    engine: Engine,
    plain: Engine,
    methods: Sequence[str],
    prompts: Sequence[list[int]],
    seconds: float,
    step_ms: float,
    clock: Clock = perf_counter,
    tell: Callable[[int, int, str], None] = lambda done, of, what: None,
) -> tuple[dict[str, Trial], list[str]]:
    """Decode prompts plainly and by every method in turn; the first ones only for control to learn from.

    Args:
        engine: runs the methods.
        plain: the fastest plain decoding of the same bundle.
        methods: which, beside plain decoding.
        prompts: token ids.
        seconds: no text begins after so long, once each was timed on one.
        step_ms: of a plain step: decides how much is written.
        clock: seconds.
        tell: progress: prompts done, of how many, which method.

    Returns:
        trials by method, plain decoding's as ``ar``; what failed, in words.
    """
    new = _length(seconds, step_ms, len(methods) + 1, engine.context - max(map(len, prompts)))
    settings = Settings(max_new_tokens=new, ignore_eos=True)
    counts = {name: Counts() for name in (PLAIN, *methods)}
    failed: dict[str, str] = {}
    begun = clock()
    for number in range(LEARN + max(1, TEXTS * len(prompts) - LEARN)):
        if number > LEARN and clock() - begun > seconds:
            break
        prompt = prompts[number % len(prompts)]
        names = list(counts)
        turned = names[number % len(names) :] + names[: number % len(names)]
        for name in turned:
            if name in failed:
                continue
            tell(number, TEXTS * len(prompts), name)
            where = plain if name == PLAIN else engine
            result = where.generate(prompt, settings.changed(method=name))
            if result.stats.dropped_reason:
                failed[name] = f"{name} failed: {result.stats.dropped_reason}"
            elif number >= LEARN:
                counts[name].add(result)
    found = {name: sums for name, sums in counts.items() if name not in failed}
    return _trials(found, apart=plain.model is not engine.model), list(failed.values())


def _trials(counts: Mapping[str, Counts], apart: bool) -> dict[str, Trial]:
    """What a profile keeps; ``apart``: plain decoding has a graph of its own.

    Passes of as many rows over the same graph are the same, whatever the method: together they are timed best.  Those
    of early exits are not, because layers have run before.
    """
    own = {name for name in counts if name == EXITS or (apart and name == PLAIN)}
    shared = pass_times(sums for name, sums in counts.items() if name not in own)
    passes = {name: pass_times([sums]) if name in own else shared for name, sums in counts.items()}
    plain = counts[PLAIN]
    token = sum(plain.means(passes[PLAIN])) * plain.rounds / plain.tokens
    return {name: sums.trial(passes[name], token) for name, sums in counts.items()}


def _length(seconds: float, step_ms: float, runs: int, room: int) -> int:
    """Tokens to write so that some texts fit into the time: those to learn from, and two that are timed."""
    fitting = int(1000 * seconds / ((LEARN + 2) * runs * max(step_ms, 1e-3)))
    return max(1, min(NEW, max(FEWEST_NEW, fitting), room - 1))
