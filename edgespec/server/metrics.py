"""Figures of a server for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from edgespec.engine.engine import Engine
from edgespec.engine.result import Result
from edgespec.runtimes.process import peak_bytes
from edgespec.server.errors import Busy, Gone, Stopped
from edgespec.server.scheduler import Event, Scheduler

TOKENS_PER_SECOND = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)


class Metrics:
    """Counters of one server, apart from those of any other in the process."""

    def __init__(self, engine: Engine, scheduler: Scheduler) -> None:
        self._registry = own = CollectorRegistry()
        self._requests = Counter(
            "edgespec_requests", "Texts and refused requests, by how they ended.", ["end"], registry=own
        )
        self._prompt = Counter("edgespec_prompt_tokens", "Tokens of prompts.", registry=own)
        self._tokens = Counter("edgespec_tokens", "Tokens written, by method.", ["method"], registry=own)
        self._drafted = Counter("edgespec_drafted_tokens", "Guesses that were verified.", ["method"], registry=own)
        self._accepted = Counter("edgespec_accepted_tokens", "Accepted guesses.", ["method"], registry=own)
        self._speed = Histogram(
            "edgespec_tokens_per_second",
            "Speed of each request, from its first round to its last.",
            buckets=TOKENS_PER_SECOND,
            registry=own,
        )
        for name, text, read in (
            ("edgespec_running_requests", "Texts that are being decoded.", lambda: scheduler.running),
            ("edgespec_waiting_requests", "Texts in the queue.", lambda: scheduler.waiting),
            ("edgespec_kv_bytes", "Bytes of keys and values in use, idle texts included.", engine.kv_bytes),
            (
                "edgespec_grammar_bytes",
                "Bytes of compiled grammars that are kept, about.",
                lambda: engine.grammar_bytes,
            ),
            ("edgespec_peak_resident_bytes", "Largest resident memory of the process so far.", peak_bytes),
        ):
            Gauge(name, text, registry=own).set_function(read)

    def ended(self, event: Event) -> None:
        """Count a text by its last event, whoever still waits for it."""
        if event.result is not None:
            self._written(event.result, event.late)
            return
        kinds = ((Busy, "refused"), (Stopped, "stopped"), (Gone, "cancelled"))
        self.refused(next((end for kind, end in kinds if isinstance(event.error, kind)), "failed"))

    def refused(self, why: str) -> None:
        """Count a request that gave no text."""
        self._requests.labels(why).inc()

    def text(self) -> bytes:
        """All figures in Prometheus' text format."""
        return generate_latest(self._registry)

    def _written(self, result: Result, late: bool) -> None:
        stats, method = result.stats, result.method_used
        self._requests.labels("late" if late else result.finish).inc()
        self._prompt.inc(stats.prompt_tokens)
        self._tokens.labels(method).inc(len(result.tokens))
        self._drafted.labels(method).inc(stats.drafted)
        self._accepted.labels(method).inc(stats.accepted)
        spent = stats.draft_ms + stats.verify_ms + stats.other_ms
        if spent:
            self._speed.observe(1000 * len(result.tokens) / spent)
