"""The front door: every way to ask, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.settings import Settings
from edgespec.engine.result import Chunk
from edgespec.errors import InvalidRequest
from tests.support.requests import METHODS, NEW, PROMPT, Get, ask


def test_text_and_ids_are_the_same_prompt(engine: Get) -> None:
    made = engine()
    tokens = made.codec.encode(PROMPT)
    by_text, by_ids, by_array = ask(made), ask(made, tokens), ask(made, np.array(tokens))
    assert by_text.tokens == by_ids.tokens == by_array.tokens
    assert by_text.text == made.codec.decode([*tokens, *by_text.tokens])[len(made.codec.decode(tokens)) :]


@pytest.mark.parametrize("method", METHODS)
def test_a_stream_gives_the_text_piece_by_piece(engine: Get, method: str) -> None:
    made = engine()
    whole = ask(made, method=method)
    stream = made.stream(PROMPT, Settings(method=method, max_new_tokens=NEW, ignore_eos=True))
    chunks = list(stream)
    assert "".join(chunk.text for chunk in chunks) == stream.result.text == whole.text
    rounds = [chunk.round for chunk in chunks if chunk.round is not None]
    assert [token for item in rounds for token in item.tokens] == stream.result.tokens == whole.tokens
    assert len(rounds) == stream.result.stats.rounds
    assert rounds[-1].finish == "length"
    heard: list[Chunk] = []
    made.generate(PROMPT, method=method, max_new_tokens=NEW, ignore_eos=True, on_chunk=heard.append)
    assert "".join(chunk.text for chunk in heard) == whole.text


@pytest.mark.parametrize(
    "prompt, settings, message",
    [
        ("", {}, "empty"),
        ("  \n", {}, "empty"),
        ([], {}, "at least one token"),
        ([-1], {}, "outside the vocabulary"),
        ([10**9], {}, "outside the vocabulary"),
        ([5] * 5000, {}, "no room"),
        (PROMPT, {"method": "eagle"}, "'eagle' is not in this bundle; it has: ar, ngram, speculative, self-spec"),
        (PROMPT, {"gamma": 0}, "gamma is 0"),
        (PROMPT, {"gamma": -3}, "gamma is -3"),
        (PROMPT, {"max_new_tokens": 0}, "max_new_tokens"),
        (PROMPT, {"temprature": 1.0}, "unknown setting 'temprature'"),
        (PROMPT, {"temperature": -1.0}, "temperature"),
        (PROMPT, {"top_p": 0.0}, "top_p"),
        (PROMPT, {"acceptance": "perhaps"}, "acceptance"),
        (PROMPT, {"logit_bias": {10**9: 1.0}}, "logit_bias"),
    ],
)  # fmt: skip
def test_nonsense_is_refused_and_breaks_nothing(
    engine: Get, prompt: Any, settings: dict[str, Any], message: str
) -> None:
    made = engine()
    with pytest.raises(InvalidRequest) as caught:
        made.generate(prompt, **settings)
    assert message in str(caught.value)
    assert not made.sessions._busy
    assert len(ask(made, max_new_tokens=3).tokens) == 3


@pytest.mark.parametrize("context", [0, 1, -5, 10**6])
def test_a_context_the_bundle_does_not_have_is_refused(fresh: Get, context: int) -> None:
    with pytest.raises(InvalidRequest, match=f"context {context}: expected 2 to"):
        fresh(context=context)


def test_a_result_says_which_method_and_why(engine: Get) -> None:
    made = engine()
    chosen = made.choose(None)
    result = made.generate(PROMPT, max_new_tokens=4)
    assert result.method_requested is None
    assert result.method_used in made.methods
    assert f"chosen: {chosen.reason}" in result.details
    assert made.generate(PROMPT, method="auto", max_new_tokens=4).method_requested == "auto"
    asked = ask(made, method="speculative")
    assert (asked.method_requested, asked.method_used) == ("speculative", "speculative")
    assert asked.reason.startswith("asked for; draft")
    assert made.methods[:4] == ["ar", "ngram", "speculative", "self-spec"]


def test_settings_may_be_given_once_and_changed_by_name(engine: Get) -> None:
    made = engine()
    settings = Settings(method="ar", max_new_tokens=9, ignore_eos=True, sampling=SamplingParams(1.0, seed=4))
    base = made.generate(PROMPT, settings)
    assert len(base.tokens) == 9
    assert made.generate(PROMPT, settings, max_new_tokens=4).tokens == base.tokens[:4]
    other = made.generate(PROMPT, settings, top_k=1)
    assert other.tokens == ask(made, max_new_tokens=9).tokens  # the other sampling settings stayed, top_k is on top
    assert made.generate(PROMPT, replace(settings, sampling=SamplingParams()), seed=4).tokens == other.tokens


def test_wrong_types_are_named(engine: Get) -> None:
    with pytest.raises(InvalidRequest, match="max_new_tokens is '5'"):
        engine().generate(PROMPT, max_new_tokens="5")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"gamma is 2\.5"):
        engine().generate(PROMPT, gamma=2.5)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="expected a list of prompts"):
        engine().generate_batch("ROMEO")


def test_costs_are_measured_once_for_all_sessions(engine: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adaptive control starts from this machine, not from the exporting one."""
    import edgespec.engine.sessions

    made = engine()
    made.experience.times.clear()
    made.sessions.clear()
    calls: list[tuple[int, ...]] = []
    from edgespec.formulas.cost import time_turns as real

    def counted(runs: dict[int, Callable[[], object]], *how: Any, **more: Any) -> dict[int, list[float]]:
        calls.append(tuple(runs))
        return real(runs, *how, **more)

    monkeypatch.setattr(edgespec.engine.sessions, "time_turns", counted)
    made.experience.methods.clear()
    made.generate_batch([PROMPT, "The"], method="ngram", max_new_tokens=4)
    assert calls == [edgespec.engine.sessions.VERIFY_SIZES]
    made.generate(PROMPT, method="self-spec", max_new_tokens=4)
    assert calls == [edgespec.engine.sessions.VERIFY_SIZES, (1,)]
