"""Statistics of a request: its work, its times, and the drafter's decisions and expectations.

Work is a proxy of energy: rows run through the target, and draft steps weighted by their cost against such a row, for
each emitted token.  Plain decoding runs one row per token: 1.0.  It excludes attention over the context, sampling and
the prefill, and the time that a pass over many rows saves by reading the weights once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

ENOUGH = 8  # plain rounds that make a plain step's time a measurement
TELLING = 100  # ms: in a shorter request one interruption by another program is a large part of the time
WINDOW = 64  # rounds that ``recent`` holds
PLAIN = "plain"


class RoundTime(NamedTuple):
    """Times and results of one round."""

    draft_ms: float  # time of proposing
    verify_ms: float  # time of the target's pass
    rows: int  # rows of that pass, the pending token's included; more than the proposal's where others had rows in it
    shared: bool = False  # whether other requests had rows in it
    method: str = PLAIN  # name of the drafter's method; ``PLAIN`` = none drafted
    tokens: int = 1  # tokens written
    drafted: int = 0  # guesses verified
    accepted: int = 0  # guesses written
    work: float = 1.0  # rows run through all of the target's layers, or their equivalent
    waited_ms: float = 0.0  # of the pass, for weights that it read from a disk
    read: float = 0.0  # bytes that those were

    @property
    def computed_ms(self) -> float:
        """Time of the pass without waiting for a disk."""
        return max(self.verify_ms - self.waited_ms, 0.0)


class Expected(NamedTuple):
    """Control's prediction for a round with draft tokens."""

    tokens: float
    steps: float  # time in plain steps
    plain_ms: float | None  # control's estimate of a plain step's time; None = not measured
    draft_work: float  # work of the round's draft steps in rows of the target


@dataclass
class Stats:
    """Counters of one request (or of several, if handed to several).

    Attributes:
        prompt_tokens: tokens of the prompt.
        reused_tokens: tokens of the prompt whose KV was still in the slot.
        tokens: tokens emitted.
        rounds: target passes after the prefill.
        drafted: guesses verified (every node of a tree counts).
        accepted: guesses emitted.
        histogram: ``histogram[j]`` = rounds that accepted j guesses.
        drafted_at: ``drafted_at[i]`` = rounds that tested a guess at position i: all before it were accepted.
        accepted_at: ``accepted_at[i]`` = those of them that accepted it.
        source_rows: for an encoder-decoder: tokens, or rows of features, that its encoder read.
        image_rows: rows of the prompt that are those of images.
        encode_ms: time of encoders, and of computing cross-attention caches from their output.
        setup_ms: time of making the drafter: loading a draft model, and timing a few passes without a calibration.
        prefill_ms: time of the prefill.
        draft_ms: time of the drafter.
        verify_ms: time of the target passes over proposals (plain ones included).
        other_ms: the rest: sampling, acceptance, keeping the cache.
        dropped_reason: why the drafter was dropped for the rest of the request; None = it was not.
        exact: every guess verified so far was matched with the tokens that plain decoding emits there.
        lossless: every guess verified so far was judged by a rule that keeps plain decoding's distribution.
        plain_rounds: rounds without a guess.
        drafted_rounds: rounds with guesses.
        work: rows of the target, and draft steps in such rows.
        recent: the last ``WINDOW`` rounds.
        drops: drafters that failed: method, where, error.
        probes: rounds that drafted only to look again.
        fallbacks: times a kind of proposal that was drafted stopped being worth it.
        recoveries: times one that had stopped being worth it is drafted again.
        switches: what method auto changed, in order: round, from, to, why; ``PLAIN`` = plain decoding.
        shadow_every: one of this many rounds is compared with plain decoding; 0 = none.
        shadow_checked: written tokens compared.
        shadow_agreeing: those of them that are plain decoding's.
        shadow_first: (index among the new tokens, plain decoding's token, the written one) of the first that is not.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    histogram: list[int] = field(default_factory=lambda: [0])
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    source_rows: int = 0
    image_rows: int = 0
    encode_ms: float = 0.0
    setup_ms: float = 0.0
    prefill_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    other_ms: float = 0.0
    dropped_reason: str | None = None
    exact: bool = True
    lossless: bool = True
    plain_rounds: int = 0
    drafted_rounds: int = 0
    work: float = 0.0
    recent: deque[RoundTime] = field(default_factory=lambda: deque(maxlen=WINDOW), repr=False)
    drops: list[dict[str, str]] = field(default_factory=list)
    probes: int = 0
    fallbacks: int = 0
    recoveries: int = 0
    switches: list[dict[str, Any]] = field(default_factory=list)
    shadow_every: int = 0
    shadow_checked: int = 0
    shadow_agreeing: int = 0
    shadow_first: tuple[int, int, int] | None = None
    _plain_ms: float = 0.0  # of plain rounds whose pass ran all layers
    _plain_steps: int = 0  # how many they are
    _predicted: tuple[float, float] = (0.0, 0.0)  # tokens and plain steps of drafted rounds, as control expected them
    _measured: tuple[float, float] = (0.0, 0.0)  # the same by the clock

    # -- counting ------------------------------------------------------------------------------------------------------

    def compare(self, position: int, pairs: Iterable[tuple[int, int]]) -> None:
        """Count (plain decoding's token, the written one) of a round, the first of index ``position``."""
        for index, (expected, got) in enumerate(pairs, position):
            self.shadow_checked += 1
            self.shadow_agreeing += expected == got
            if expected != got and self.shadow_first is None:
                self.shadow_first = index, expected, got

    def add(self, time: RoundTime, passed: float) -> None:
        """Count a round; its pass was over at ``passed``, by ``perf_counter``."""
        self.rounds += 1
        self.tokens += time.tokens
        self.work += time.work
        self.verify_ms += time.verify_ms
        self.recent.append(time)
        if not time.drafted:
            self.histogram[0] += 1
            self.plain_rounds += 1
            if time.work >= 1:  # else the pass ran the layers that drafting had left
                self._plain_steps += 1
                self._plain_ms += time.verify_ms
        self.other_ms += 1000 * (perf_counter() - passed)

    def add_guesses(
        self, time: RoundTime, tested: int, exact: bool, lossless: bool, expected: Expected | None = None
    ) -> None:
        """Count the guesses of a round that was added, ``tested`` of whose positions were put to the test.

        ``exact``: the written tokens are plain decoding's very tokens; ``lossless``: the rule keeps its distribution;
        ``expected``: what control predicted.
        """
        self.exact &= exact
        self.lossless &= lossless
        self.drafted += time.drafted
        self.accepted += time.accepted
        for counts, size in (
            (self.histogram, time.accepted + 1),
            (self.drafted_at, tested),
            (self.accepted_at, tested),
        ):
            counts.extend([0] * (size - len(counts)))
        self.histogram[time.accepted] += 1
        for i in range(tested):
            self.drafted_at[i] += 1
        for i in range(min(time.accepted, tested)):
            self.accepted_at[i] += 1
        self.drafted_rounds += 1
        if expected is not None:
            self.work += expected.draft_work
        elif time.verify_ms and time.work:
            # without control nothing has measured a draft step: drafting is weighed by its time against that of a row
            self.work += time.draft_ms / (time.verify_ms / time.work)
        # the time of a pass that other requests share is not this request's
        plain_ms = self.step_ms or (expected and expected.plain_ms)
        if not time.shared and expected is not None and plain_ms:
            self._predicted = self._predicted[0] + expected.tokens, self._predicted[1] + expected.steps
            taken = (time.draft_ms + time.verify_ms) / plain_ms
            self._measured = self._measured[0] + time.tokens, self._measured[1] + taken

    def drop(self, method: str, where: str, error: str) -> str:
        """Note a drafter that failed -> the failure as a sentence."""
        self.drops.append({"method": method, "where": where, "error": error})
        return f"{method} failed in {where}: {error}"

    # -- figures -------------------------------------------------------------------------------------------------------

    @property
    def tokens_per_round(self) -> float:
        """Tokens emitted by one target pass; 0 before the first."""
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted guesses; 0 if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_at(self) -> Sequence[float]:
        """P(accepted | put to the test) of each position."""
        return [a / o if o else 0.0 for a, o in zip(self.accepted_at, self.drafted_at, strict=True)]

    @property
    def decode_ms(self) -> float:
        """Time of all rounds, without prefill."""
        return self.draft_ms + self.verify_ms + self.other_ms

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens over the time of the rounds; 0 before the first."""
        return 1000 * self.tokens / self.decode_ms if self.decode_ms else 0.0

    @property
    def step_ms(self) -> float | None:
        """Time of a plain step in this request; None = it had too few to tell."""
        return self._plain_ms / self._plain_steps if self._plain_steps >= ENOUGH else None

    @property
    def request_speedup(self) -> float | None:
        """Speed over plain decoding, by the plain steps of this very request; None = it was too short to tell."""
        return self.tokens * self.step_ms / self.decode_ms if self.step_ms and self.decode_ms >= TELLING else None

    @property
    def work_per_token(self) -> float:
        """Work of a token against plain decoding's, 1.0; 0 before the first."""
        return self.work / self.tokens if self.tokens else 0.0

    @property
    def predicted_speedup(self) -> float | None:
        """Speed over plain decoding that control expected of the rounds that it drafted; None = it expected nothing."""
        return self._predicted[0] / self._predicted[1] if self._predicted[1] else None

    @property
    def measured_speedup(self) -> float | None:
        """Speed of the same rounds by the clock, against the measured plain step."""
        return self._measured[0] / self._measured[1] if self._measured[1] else None

    @property
    def shadow_agreement(self) -> float:
        """Share of the compared tokens that are plain decoding's; 1 before the first."""
        return self.shadow_agreeing / self.shadow_checked if self.shadow_checked else 1.0

    def recently(self) -> dict[str, dict[str, float]]:
        """Count rounds, acceptance rate and tokens per round of ``recent``, by who guessed."""
        found: dict[str, dict[str, float]] = {}
        for method in sorted({seen.method for seen in self.recent}):
            rounds = [seen for seen in self.recent if seen.method == method]
            drafted = sum(seen.drafted for seen in rounds)
            found[method] = {
                "rounds": len(rounds),
                "acceptance_rate": sum(seen.accepted for seen in rounds) / drafted if drafted else 0.0,
                "tokens_per_round": sum(seen.tokens for seen in rounds) / len(rounds),
            }
        return found

    def as_dict(self) -> dict[str, object]:
        """Return everything for JSON; the keys are stable."""
        names = ("prompt_tokens", "reused_tokens", "tokens", "rounds", "drafted", "accepted", "acceptance_rate",
                 "tokens_per_round", "histogram", "drafted_at", "accepted_at", "setup_ms", "prefill_ms", "draft_ms",
                 "verify_ms", "other_ms", "tokens_per_second", "dropped_reason", "recent", "predicted_speedup",
                 "measured_speedup", "work_per_token", "plain_rounds", "drafted_rounds", "probes", "fallbacks",
                 "recoveries", "drops", "switches")  # fmt: skip
        found = {name: getattr(self, name) for name in names}
        found |= {name: list(value) for name, value in found.items() if isinstance(value, list)}
        first = None
        if self.shadow_first is not None:
            first = dict(zip(("position", "expected", "got"), self.shadow_first, strict=True))
        shadow = {
            "every": self.shadow_every,
            "checked": self.shadow_checked,
            "agreeing": self.shadow_agreeing,
            "agreement": self.shadow_agreement,
            "first_disagreement": first,
        }
        if self.source_rows:
            found |= {"source_rows": self.source_rows, "encode_ms": self.encode_ms}
        if self.image_rows:
            found |= {"image_rows": self.image_rows, "encode_ms": self.encode_ms}
        return found | {"recent": self.recently(), "shadow": shadow}
