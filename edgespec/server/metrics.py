"""Figures of a server for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from edgespec.engine.result import Result
from edgespec.runtimes.process import peak_bytes
from edgespec.server.errors import Busy, ClientDisconnected, Stopped
from edgespec.server.scheduler import Event

TOKENS_PER_SECOND = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
FIGURES = {  # of each model
    "running_requests": "Texts that are being decoded.",
    "waiting_requests": "Texts in the queue.",
    "kv_bytes": "Bytes of keys and values in use, idle texts included.",
    "grammar_bytes": "Bytes of compiled grammars that are kept, about.",
    "loaded": "Whether the model is loaded.",
}


class Metrics:
    """Counters of one server, separate from those of other servers in the process.

    Args:
        models: names of the server's models; a request that failed before its model was known counts for "".
        read: returns one of ``FIGURES`` of a model.
    """

    def __init__(self, models: Sequence[str], read: Callable[[str, str], float]) -> None:
        self._registry = own = CollectorRegistry()

        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(f"edgespec_{name}", text, ["model", *more], registry=own)

        self._requests = counter("requests", "Texts and refused requests, by how they ended.", "end")
        self._prompt = counter("prompt_tokens", "Tokens of prompts.")
        reused = "Tokens of prompts that were not read: another text in memory, or the disk, had them."
        self._reused = counter("reused_prompt_tokens", reused)
        self._tokens = counter("tokens", "Tokens written, by method.", "method")
        self._drafted = counter("drafted_tokens", "Guesses that were verified.", "method")
        self._accepted = counter("accepted_tokens", "Accepted guesses.", "method")
        self._speed = Histogram(
            "edgespec_tokens_per_second",
            "Speed of each request, from its first round to its last.",
            ["model"],
            buckets=TOKENS_PER_SECOND,
            registry=own,
        )
        for figure, text in FIGURES.items():
            gauge = Gauge(f"edgespec_{figure}", text, ["model"], registry=own)
            for model in models:
                gauge.labels(model).set_function(partial(read, model, figure))
        peak = "Largest resident memory of the process so far."
        Gauge("edgespec_peak_resident_bytes", peak, registry=own).set_function(peak_bytes)

    def ended(self, model: str, event: Event) -> None:
        """Count a text by its last event, even if its client has disconnected."""
        if event.result is not None:
            self._written(model, event.result, event.timed_out)
            return
        kinds = ((Busy, "refused"), (Stopped, "stopped"), (ClientDisconnected, "cancelled"))
        self.refused(model, next((end for kind, end in kinds if isinstance(event.error, kind)), "failed"))

    def refused(self, model: str, why: str) -> None:
        """Count a request that gave no text."""
        self._requests.labels(model, why).inc()

    def embedded(self, model: str, tokens: int) -> None:
        """Count a request for embeddings."""
        self._requests.labels(model, "embedded").inc()
        self._prompt.labels(model).inc(tokens)

    def transcribed(self, model: str, how: Mapping[str, Any]) -> None:
        """Count a recording; ``how`` is that of ``Transcript``."""
        self._requests.labels(model, "transcribed").inc()
        self._decoded(model, how["method_used"], how["tokens"], how["drafted"], how["accepted"])

    def text(self) -> bytes:
        """All figures in Prometheus' text format."""
        return generate_latest(self._registry)

    def _written(self, model: str, result: Result, timed_out: bool) -> None:
        stats = result.stats
        self._requests.labels(model, "timed_out" if timed_out else result.finish).inc()
        self._prompt.labels(model).inc(stats.prompt_tokens)
        self._reused.labels(model).inc(stats.reused_tokens)
        self._decoded(model, result.method_used, len(result.tokens), stats.drafted, stats.accepted)
        spent = stats.draft_ms + stats.verify_ms + stats.other_ms
        if spent:
            self._speed.labels(model).observe(1000 * len(result.tokens) / spent)

    def _decoded(self, model: str, method: str, *counts: int) -> None:
        for counter, count in zip((self._tokens, self._drafted, self._accepted), counts, strict=True):
            counter.labels(model, method).inc(count)
