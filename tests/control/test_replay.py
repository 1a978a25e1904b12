"""Control on recorded texts of real models, against the best single fixed number of guesses: no clock, no model."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from edgespec.control.adaptive import Adaptive, Control
from edgespec.control.auto import Auto, Candidate
from edgespec.control.learned import Learned
from edgespec.decoding.proposal import Proposal
from edgespec.drafters.ngram import NGram
from edgespec.engine.known import known_rates
from edgespec.runtimes.files.manifest import Measured, MethodPart
from tests.support.traces import (
    LONGEST,
    Recorded,
    Text,
    Trace,
    cheap_costs,
    controlled,
    fixed,
    ngram_right,
    run,
    traces,
)

PAIRS = sorted(traces())
FEW = 56  # tokens: a shorter text has a handful of rounds, and chance decides
SHA = "0" * 64


def prior(trace: Trace) -> list[float]:
    """Give the rates that a bundle of this pair makes control start from."""
    seen = Measured(acceptance=trace.acceptance, positions=trace.positions, text="", text_sha256=SHA)
    return known_rates("self-spec" if trace.stops else "speculative", MethodPart(measured=[seen]))


def best_fixed(trace: Trace) -> int:
    """Find the number of guesses that is fastest over all texts; 0 = plain decoding."""

    def speed(guesses: int) -> float:
        made = [fixed(trace, text, guesses) for text in trace.texts]
        return sum(one.tokens for one in made) / sum(one.steps for one in made)

    return max(range(LONGEST + 1), key=speed)


def in_a_row(trace: Trace, texts: list[Text]) -> list[float]:
    """Speeds of texts that one engine decodes one after the other."""
    learned, inner = Learned(trace.costs()), Recorded(trace)
    return [controlled(trace, text, learned, prior(trace), inner).speed for text in texts]


def shares(trace: Trace, decode: Callable[[Trace, list[Text]], list[float]]) -> np.ndarray:
    """Speeds of all texts over those of the best single fixed number of guesses."""
    best = best_fixed(trace)
    return np.array(decode(trace, trace.texts)) / [fixed(trace, text, best).speed for text in trace.texts]


@pytest.mark.parametrize("pair", PAIRS)
def test_it_keeps_what_the_best_fixed_length_gives(pair: str) -> None:
    trace = traces()[pair]
    found = shares(trace, in_a_row)
    assert len(found) == 40
    assert found.mean() >= 0.97
    assert found[[len(text.tokens) >= FEW for text in trace.texts]].min() >= 0.92


@pytest.mark.parametrize("pair", PAIRS)
def test_the_first_request_of_an_engine_does_too(pair: str) -> None:
    found = shares(traces()[pair], lambda trace, texts: [in_a_row(trace, [text])[0] for text in texts])
    assert found.mean() >= 0.94


@pytest.mark.parametrize("pair", PAIRS)
def test_no_kind_of_text_is_slower_than_plain_decoding(pair: str) -> None:
    trace = traces()[pair]
    speeds = np.array(in_a_row(trace, trace.texts))
    for kind in {text.kind for text in trace.texts}:
        assert speeds[[text.kind == kind for text in trace.texts]].mean() >= 0.97


TAIL = 64  # tokens before the tail


@pytest.mark.parametrize("pair", PAIRS)
def test_auto_is_as_fast_as_the_best_method(pair: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From token 65 on, over the method that is fastest on all texts; n-grams take no time."""
    monkeypatch.setattr("edgespec.decoding.drafting.perf_counter", lambda: 0.0)
    trace = traces()[pair]
    texts = [text for text in trace.texts if len(text.tokens) > TAIL + 12]
    inner, learned, cheap = Recorded(trace), Learned(trace.costs()), Learned(cheap_costs(trace))

    changes = list[int]()

    def draft() -> Control:
        return Control(inner, learned, LONGEST, prior=prior(trace))

    def ngram() -> Control:
        return Control(NGram(), cheap, LONGEST)

    switch = Auto([Candidate("recorded", draft().speed(LONGEST), draft), Candidate("ngram", 1.0, ngram, cheap=True)])

    def steps(count: int, by: str) -> float:
        return trace.steps(count) if by == "recorded" else cheap_costs(trace).v(count + 1)

    def decode(text: Text, policy: Adaptive) -> float:
        inner.text = text
        by_text = ngram_right(text)

        def right(at: int, proposal: Proposal) -> int:
            return text.right[at] if policy.in_use == "recorded" else by_text(at, proposal)

        made = run(text, policy, lambda count: steps(count, policy.in_use), right, TAIL)
        changes.append(made.switches)
        return made.speed

    speeds = {name: np.array([decode(text, made) for text in texts]) for name, made in
              (("auto", switch), ("recorded", Adaptive([draft()])), ("ngram", Adaptive([ngram()])))}  # fmt: skip
    best = max(speeds["recorded"].mean(), speeds["ngram"].mean())
    assert speeds["auto"].mean() >= 0.95 * best
    assert max(changes) <= 3
