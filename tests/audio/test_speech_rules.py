"""The rules of transcripts are those of transformers' logits processors, and speculation keeps texts under them."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgespec.decoding.loop import DecodeOptions, decode
from edgespec.decoding.proposal import Proposal
from edgespec.decoding.sampling import SamplingParams, adjusted
from edgespec.decoding.speech_rules import SpeechRules
from edgespec.drafters.plain import Plain
from tests.support.reference import FunctionTarget
from tests.support.toy import Scripted, emitted, hash_logits

VOCAB, EOS, NO_TIMES = 60, 30, 34  # words 0..29, other special tokens, times 35..59
PROMPT = [31, 32, 33]
RULES: dict[str, Any] = {
    "eos": EOS,
    "first_time": NO_TIMES + 1,
    "no_timestamps": NO_TIMES,
    "suppress_tokens": (3, 31, 33),
    "begin_suppress_tokens": (5, EOS),
    "max_initial_timestamp_index": 6,
}


def rules(prompt: int = len(PROMPT), **changes: Any) -> SpeechRules:
    return SpeechRules(vocab=VOCAB, prompt=prompt, **{**RULES, **changes})


TEXTS = [
    [], [36], [36, 1], [36, 1, 2], [36, 1, 40], [36, 1, 40, 40], [36, 1, 40, 41, 7], [36, 1, 40, 40, 7, 59],
    [36, 1, 59, 59], [1, 2], [36, 36], [45, 1, 40],
]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("timestamps", [True, False])
def test_they_are_those_of_transformers(text: list[int], timestamps: bool) -> None:
    torch = pytest.importorskip("torch", reason="needs edgespec[train]")
    known = pytest.importorskip("transformers.generation.logits_process", reason="needs transformers")
    config: Any = SimpleNamespace(
        no_timestamps_token_id=NO_TIMES, eos_token_id=EOS, bos_token_id=EOS, max_initial_timestamp_index=6
    )
    begin = len(PROMPT)
    each = [
        known.SuppressTokensAtBeginLogitsProcessor([5, EOS], begin_index=begin),
        known.SuppressTokensLogitsProcessor([3, 31, 33]),
    ]
    if timestamps:
        each.append(known.WhisperTimeStampLogitsProcessor(config, begin_index=begin))
    rng = np.random.default_rng(len(text))
    for spread in (0.3, 3.0):  # times together are likelier than each word, and not
        row = (spread * rng.standard_normal(VOCAB)).astype(np.float32)
        expected = torch.from_numpy(row[None].copy())
        for one in each:
            expected = one(torch.tensor([[*PROMPT, *text]]), expected)
        params = SamplingParams(constraint=rules(timestamps=timestamps))
        assert (adjusted(row, params, [*PROMPT, *text]) == expected[0].numpy()).all()


def test_a_text_is_pairs_of_rising_times() -> None:
    for seed in range(8):
        target = FunctionTarget(hash_logits(seed, VOCAB), VOCAB)
        params = SamplingParams(temperature=1.0, seed=seed, constraint=rules())
        text = emitted(target, Plain(), PROMPT, DecodeOptions(80, sampling=params, eos=frozenset({EOS})))
        times = [token for token in text if token > NO_TIMES]
        assert times == sorted(times)
        assert text[0] > NO_TIMES
        runs = [len(list(run)) for time, run in itertools.groupby(text, lambda token: token > NO_TIMES) if time]
        assert set(runs[1:-1]) <= {1, 2}
        assert not {3, 31, 33, NO_TIMES} & set(text)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_guesses_change_neither_texts_nor_log_probabilities(temperature: float) -> None:
    """Guesses right and wrong, among them such as the rules forbid, in a chain and in a tree."""

    def guess(tokens: list[int], budget: int) -> Proposal:
        row = np.argsort(-hash_logits(1, VOCAB)(tuple(tokens)))[:4].astype(np.int64)
        return Proposal(row[:budget], np.full(min(4, budget), -1, np.int64))

    params = SamplingParams(temperature=temperature, seed=7, acceptance="coupled", constraint=rules())
    options = DecodeOptions(60, sampling=params, logprobs=True)
    texts = []
    for drafter in (Plain(), Scripted(guess)):
        rounds = list(decode(FunctionTarget(hash_logits(1, VOCAB), VOCAB), drafter, PROMPT, options))
        texts.append([pair for made in rounds for pair in zip(made.tokens, made.logprobs or (), strict=True)])
    assert texts[0] == texts[1]
    assert len(rounds) < 60
    row = adjusted(hash_logits(1, VOCAB)((*PROMPT,)), params, PROMPT)
    first, logprob = texts[0][0]
    assert logprob == pytest.approx(row[first] - np.log(np.exp(row[row > -np.inf]).sum()), abs=1e-5)
