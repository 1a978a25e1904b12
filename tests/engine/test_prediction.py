"""Predicted outputs and penalties: the text is plain decoding's, and a good prediction saves rounds."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from edgespec.decoding.sampling import SamplingParams, adjusted
from edgespec.decoding.text import Prefix, Text
from edgespec.drafters.predicted import Predicted
from edgespec.errors import InvalidRequest
from tests.support.requests import NEW, PROMPT, Get, ask


def follow(text: list[int], expected: list[int], budget: int = 4) -> tuple[int, int]:
    """Write a text with a prediction -> rounds and guesses."""
    drafter, tokens, rounds, offered = Predicted(expected, 1), [0], 0, 0
    while len(tokens) - 1 < len(text):
        guesses = drafter.propose(tokens, budget).tokens.tolist()
        offered, rounds = offered + len(guesses), rounds + 1
        for guess in [*guesses, None]:  # the accepted ones, and the model's own
            if len(tokens) - 1 == len(text):
                break
            right = text[len(tokens) - 1]
            tokens.append(right)
            if guess != right:
                break
    return rounds, offered


@pytest.mark.parametrize(
    "expected, rounds",
    [
        (list(range(10, 50)), 8),  # all of it
        ([99, *range(10, 50)], 11),  # it begins later
        (list(range(20, 50)), 19),  # the text has a new beginning
        ([*range(10, 25), 7, 8, *range(25, 50)], 12),  # it leaves something out
        ([*range(10, 25), *range(30, 50)], 15),  # it inserts something
        ([1, 2, 3], 40),
        ([], 40),
    ],
)
def test_what_is_expected_is_found_again(expected: list[int], rounds: int) -> None:
    took, _ = follow(list(range(10, 50)), expected)
    assert took <= rounds
    assert took >= 8


def test_the_next_place_is_taken_where_a_text_repeats_itself() -> None:
    text = [1, 2, 3, 4, 5, 1, 2, 3, 4, 6, 7, 8, 9]
    assert follow(text, text)[0] == 3


@pytest.mark.parametrize("method", ["ngram", "speculative", "self-spec", None])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_prediction_changes_rounds_and_no_text(engine: Get, method: str | None, temperature: float) -> None:
    loaded = engine("int4")
    how = {"temperature": temperature, "seed": 5, "acceptance": "coupled"}
    plain = ask(loaded, **how)
    assert plain.stats.rounds == NEW
    for prediction in (plain.text, plain.text[12:], f"O, {plain.text}", "nothing of the kind " * 9):
        result = ask(loaded, method=method, prediction=prediction, **how)
        assert result.tokens == plain.tokens
        assert result.exact or (method is None and loaded.operators.kind == "stock")  # auto may choose trees there
        assert result.lossless
        assert "the prediction guessed in" in "; ".join(result.details)
    whole = ask(loaded, method="ngram", prediction=plain.text, **how)
    assert whole.stats.rounds < NEW / 2
    with pytest.raises(InvalidRequest, match="prediction"):
        ask(loaded, prediction=3)


def test_penalties_count_the_text_alone() -> None:
    logits = np.zeros(8, np.float32)
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, prompt=2)
    text = Text([1, 2, 3, 3, 4])
    for prefix in (list(text), text, Prefix(text[:3], [3, 4])):
        assert adjusted(logits, params, prefix).tolist() == [0, 0, 0, -1.0, -0.75, 0, 0, 0]
    assert adjusted(logits, params, [1, 2]).tolist() == [0] * 8
    for wrong in (3, float("nan"), "x"):
        with pytest.raises(InvalidRequest, match="presence_penalty"):
            SamplingParams(presence_penalty=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["ngram", "speculative"])
def test_a_penalized_text_is_plain_decodings_and_repeats_less(engine: Get, method: str) -> None:
    loaded = engine("int4")
    plain = ask(loaded, PROMPT, frequency_penalty=1.5, presence_penalty=0.5)
    result = ask(loaded, PROMPT, method=method, frequency_penalty=1.5, presence_penalty=0.5)
    assert result.tokens == plain.tokens
    assert result.exact
    free = ask(loaded, PROMPT)
    assert max(Counter(plain.tokens).values()) < max(Counter(free.tokens).values())
