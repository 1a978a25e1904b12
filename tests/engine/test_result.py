"""Fields of a result."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgespec.export.bundle.model_part import open_model
from edgespec.export.quantization.reference import reference_logits
from edgespec.export.source.source import resolve
from edgespec.runtimes.files.manifest import Operators
from tests.conftest import TARGET
from tests.support.requests import METHODS, NEW, PROMPT, Get, ask


def test_the_keys_of_a_result_are_stable(engine: Get) -> None:
    made = engine()
    keys = ["text", "tokens", "finish", "method_requested", "method_used", "reason", "details", "lossless", "exact",
            "unverified", "approximations", "operators", "device", "stats"]  # fmt: skip
    found = ask(made, method="speculative", max_new_tokens=5).as_dict()
    assert list(found) == keys
    assert list(ask(made, logprobs=True, max_new_tokens=5).as_dict()) == [*keys, "logprobs"]
    assert list(found["stats"]) == [
        "prompt_tokens", "reused_tokens", "tokens", "rounds", "drafted", "accepted", "acceptance_rate",
        "tokens_per_round", "histogram", "drafted_at", "accepted_at", "setup_ms", "prefill_ms", "draft_ms", "verify_ms",
        "other_ms", "tokens_per_second", "dropped_reason", "recent", "predicted_speedup", "measured_speedup",
        "work_per_token", "plain_rounds", "drafted_rounds", "probes", "fallbacks", "recoveries", "drops", "switches",
        "shadow", "peak_bytes", "predicted_bytes",
    ]  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_statistics_add_up(engine: Get, method: str) -> None:
    result = ask(engine(), method=method, fallback=False)
    stats = result.stats
    assert stats.tokens == len(result.tokens) == NEW
    assert stats.tokens == stats.rounds + stats.accepted
    assert sum(stats.histogram) == stats.rounds
    assert sum(at * count for at, count in enumerate(stats.histogram)) == stats.accepted == sum(stats.accepted_at)
    assert stats.accepted <= sum(stats.drafted_at) <= stats.drafted
    assert all(ms >= 0 for ms in (stats.prefill_ms, stats.draft_ms, stats.verify_ms, stats.other_ms))
    assert (stats.drafted > 0) == (method != "ar")
    assert result.peak_bytes > 1 << 20


@pytest.mark.parametrize("method", METHODS)
def test_logprobs_are_those_of_the_source_model(engine: Get, method: str) -> None:
    made = engine("fp32")
    prompt = made.codec.encode(PROMPT)
    for settings in ({}, {"temperature": 0.7, "top_k": 5, "seed": 3}):
        result = ask(made, method=method, logprobs=True, fallback=False, **settings)
        assert result.logprobs is not None
        assert len(result.logprobs) == len(result.tokens)
        text = [*prompt, *result.tokens]
        arch = open_model(resolve(TARGET), None)
        logits = reference_logits(arch, text, list(range(len(prompt) - 1, len(text) - 1))).astype(np.float64)
        log_softmax = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        log_softmax -= logits.max(-1, keepdims=True)
        expected = log_softmax[np.arange(NEW), result.tokens]
        np.testing.assert_allclose(result.logprobs, expected, rtol=0, atol=2e-4)
    assert ask(made, method=method).logprobs is None


def test_exact_is_claimed_only_where_it_holds(engine: Get, fresh: Get) -> None:
    made, loose = engine("int4"), fresh("int4", strict=False)
    assert ask(made, method="speculative").exact
    assert ask(made, method="ngram", temperature=1.0, max_new_tokens=4).exact
    assert ask(made, method="speculative", temperature=1.0, acceptance="coupled", max_new_tokens=4).exact
    drawn = ask(made, method="speculative", temperature=1.0, max_new_tokens=4, adaptive=False)
    assert drawn.stats.drafted
    assert not drawn.exact
    assert not ask(loose, method="ar", max_new_tokens=4).exact
    assert not ask(loose, method="speculative", max_new_tokens=4).exact
    assert ask(loose, method="speculative", max_new_tokens=4).lossless


def test_exact_is_not_claimed_where_the_probe_fails(
    fresh: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path))  # without what earlier engines proved
    for probe in ("rows_exact", "stock_rows_exact"):
        monkeypatch.setattr(f"edgespec.engine.loaded.{probe}", lambda *given: False)
    made = fresh("int4")
    assert not ask(made, method="ngram", max_new_tokens=4).exact
    assert ask(made, method="ar", max_new_tokens=4).exact


def test_approximations_are_named(engine: Get, operators: Operators) -> None:
    cache = ["float16 keys", "float16 values"] if operators == "native" else []
    assert engine("fp32").approximations == []
    for form in ("int4", "int8", "w8a8"):
        result = ask(engine(form), max_new_tokens=2)
        assert result.approximations == [f"{form} weights", "8-bit activations", *cache]
