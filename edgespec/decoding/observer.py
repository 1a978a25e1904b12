"""The clocks and counters of a request, kept out of the loop's way: they fill its ``Stats``."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from edgespec.decoding.drafter import Drafter, RoundTime
from edgespec.decoding.monitor import PLAIN, RoundRecord
from edgespec.decoding.proposal import Proposal
from edgespec.decoding.request import DecodeOptions, PassRequest, Round
from edgespec.decoding.rows import RowSampler
from edgespec.decoding.stats import Stats
from edgespec.decoding.target import Target


class Observer:
    """Is told where a request stands; the time since it was told last is what that step took.

    Args:
        stats: filled round by round.
        options: of the request.
        target: its model.
    """

    def __init__(self, stats: Stats, options: DecodeOptions, target: Target) -> None:
        self._stats, self._accept = stats, options.accept
        self._layers: int = getattr(target, "layers", 0)
        stats.monitor.shadow.every = options.shadow
        self._first = stats.tokens
        self._at = perf_counter()

    def _lap(self) -> float:
        """Milliseconds since the last lap."""
        before, self._at = self._at, perf_counter()
        return 1000 * (self._at - before)

    def prefilled(self, prompt: int, reused: int) -> None:
        """The slot holds the prompt's tokens, of which ``reused`` were there."""
        self._stats.prompt_tokens += prompt
        self._stats.reused_tokens += reused
        self._stats.prefill_ms += self._lap()

    def begun(self) -> None:
        """The drafter knows of the request."""
        self._stats.draft_ms += self._lap()

    def start(self) -> None:
        """A round begins."""
        self._at = perf_counter()

    def proposed(self, proposal: Proposal, guesses: int, drafter: Drafter) -> None:
        """The drafter has proposed."""
        self._draft_ms = 1000 * (perf_counter() - self._at)
        self._proposer, self._rows = PLAIN, 1.0
        if guesses:
            self._proposer, self._rows = drafter.proposer, 1.0 + guesses
        if proposal.resume is not None:
            self._rows *= 1 - proposal.resume.layer / self._layers

    def passed(self, request: PassRequest) -> None:
        """The pass was run, and timed, by whoever drives the request."""
        self._at = perf_counter()
        self._time = RoundTime(self._draft_ms, request.ms, len(request.tokens) + request.beside, request.beside > 0)

    def compare(self, sampler: RowSampler, rows: Sequence[int], emitted: Sequence[int]) -> None:
        """Now and then: what plain decoding would have written, which the rows of this very pass say."""
        shadow, stats = self._stats.monitor.shadow, self._stats
        if stats.rounds % shadow.every == 0:
            shadow.compare(stats.tokens - self._first, zip(map(sampler.choose, rows), emitted, strict=True))

    def verified(self, made: Round, proposal: Proposal, keeps_text: bool) -> None:
        """The round was made of ``proposal``; ``keeps_text``: its tokens are plain decoding's very tokens."""
        stats, guesses, tested = self._stats, len(made.drafted), 0
        if guesses:
            tested = proposal.tested(made.path)
            stats.exact &= keeps_text
            stats.lossless &= self._accept.lossless
        stats.record(len(made.tokens), guesses, made.accepted, tested)
        stats.other_ms += self._lap()

    def observed(self) -> RoundTime:
        """The drafter has learned from the round; returns what the round took."""
        stats, time, before = self._stats, self._time, self._at
        self._at = perf_counter()
        stats.draft_ms += time.draft_ms + 1000 * (self._at - before)
        stats.verify_ms += time.verify_ms
        return time

    def ended(self, made: Round) -> None:
        """The round is over."""
        time, drafted = self._time, len(made.drafted)
        self._stats.monitor.add(
            RoundRecord(
                self._proposer,
                len(made.tokens),
                drafted,
                made.accepted,
                self._rows,
                time.draft_ms,
                time.verify_ms,
                not time.shared,
            )
        )
        self._stats.other_ms += 1000 * (perf_counter() - self._at)
