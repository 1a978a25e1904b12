"""What a request did and where its time went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from edgespec.decoding.monitor import Monitor


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
        offered: ``offered[i]`` = rounds that put a guess at position i to the test: all before it were accepted.
        accepted_at: ``accepted_at[i]`` = those of them that accepted it.
        prefill_ms: time of the prefill.
        draft_ms: time of the drafter.
        verify_ms: time of the target passes over proposals (plain ones included).
        other_ms: the rest: sampling, acceptance, keeping the cache.
        dropped_reason: why the drafter was dropped for the rest of the request; None = it was not.
        exact: every guess verified so far was matched with the tokens that plain decoding emits there.
        lossless: every guess verified so far was judged by a rule that keeps plain decoding's distribution.
        monitor: acceptance of late, prediction against the clock, work per token, fall-backs, drops, checks.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    histogram: list[int] = field(default_factory=lambda: [0])
    offered: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    prefill_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    other_ms: float = 0.0
    dropped_reason: str | None = None
    exact: bool = True
    lossless: bool = True
    monitor: Monitor = field(default_factory=Monitor)

    def record(self, emitted: int, drafted: int, accepted: int, reached: int) -> None:
        """Count one round.

        Args:
            emitted: tokens emitted.
            drafted: guesses verified.
            accepted: guesses emitted.
            reached: positions whose guess was put to the test (``Proposal.tested``).
        """
        self.rounds += 1
        self.tokens += emitted
        if not drafted:
            self.histogram[0] += 1
            return
        self.drafted += drafted
        self.accepted += accepted
        _widen(self.histogram, accepted + 1)
        self.histogram[accepted] += 1
        _widen(self.offered, reached)
        _widen(self.accepted_at, reached)
        for i in range(reached):
            self.offered[i] += 1
        for i in range(min(accepted, reached)):
            self.accepted_at[i] += 1

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
        return [a / o if o else 0.0 for a, o in zip(self.accepted_at, self.offered, strict=True)]

    @property
    def decode_ms(self) -> float:
        """Time of all rounds, without prefill."""
        return self.draft_ms + self.verify_ms + self.other_ms

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens over the time of the rounds; 0 before the first."""
        return 1000 * self.tokens / self.decode_ms if self.decode_ms else 0.0

    @property
    def request_speedup(self) -> float | None:
        """Speed over plain decoding, by the plain steps of this very request; None = it had too few to tell."""
        step_ms = self.monitor.step_ms
        return self.tokens * step_ms / self.decode_ms if step_ms and self.decode_ms else None

    def as_dict(self) -> dict[str, object]:
        """For JSON; the keys are stable."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "tokens": self.tokens,
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_rate": self.acceptance_rate,
            "tokens_per_round": self.tokens_per_round,
            "histogram": list(self.histogram),
            "offered": list(self.offered),
            "accepted_at": list(self.accepted_at),
            "prefill_ms": self.prefill_ms,
            "draft_ms": self.draft_ms,
            "verify_ms": self.verify_ms,
            "other_ms": self.other_ms,
            "tokens_per_second": self.tokens_per_second,
            "dropped_reason": self.dropped_reason,
            **self.monitor.as_dict(),
        }


def _widen(counts: list[int], size: int) -> None:
    """Append zeros until ``counts`` has ``size`` entries."""
    counts.extend([0] * (size - len(counts)))
