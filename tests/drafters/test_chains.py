"""The draft model and self-speculation: what they run, when they stop, and that their caches follow."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.decoding.drafter import Drafter, DraftRequest
from edgespec.decoding.loop import DecodeOptions, decode
from edgespec.decoding.noise import Noise
from edgespec.decoding.proposal import EMPTY, Verdict
from edgespec.decoding.sampling import SamplingParams, distribution
from edgespec.decoding.stats import Stats
from edgespec.decoding.target import Output, SkipSet
from edgespec.drafters.plain import Plain
from edgespec.drafters.sampling_drafts import Draw, draw_chain
from edgespec.drafters.self_spec import SelfSpec
from edgespec.drafters.speculative import Speculative
from edgespec.errors import EdgespecError
from edgespec.formulas.confidence import Confidence
from tests.support.reference import FunctionTarget
from tests.support.toy import emitted, hash_logits, hash_target, plain, same_texts

VOCAB = 11
NOTHING = Output(np.zeros((1, VOCAB), np.float32))


def pair(kind: str, seed: int, draft_seed: int | None = None) -> tuple[FunctionTarget, Drafter]:
    """Build a target and a drafter of ``kind`` that always agrees (``draft_seed`` None), or for some prefixes only."""
    function, other = hash_logits(seed, VOCAB), hash_logits(seed if draft_seed is None else draft_seed, VOCAB)

    def draft(prefix: tuple[int, ...]) -> np.ndarray:
        return function(prefix) if draft_seed is None or sum(prefix) % 3 else other(prefix)

    target = FunctionTarget(function, VOCAB, draft=draft)
    if kind == "draft model":
        return target, Speculative(FunctionTarget(draft, VOCAB), VOCAB)
    return target, SelfSpec(target, SkipSet((0,), ()))


@pytest.mark.parametrize("kind", ["draft model", "self-spec"])
def test_greedy_and_coupled_text_is_plain_text(kind: str) -> None:
    assert same_texts(lambda seed: pair(kind, seed, seed + 1000), 60) > 100


@pytest.mark.parametrize("kind", ["draft model", "self-spec"])
@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_equal_draft_is_always_accepted(kind: str, acceptance: str, temperature: float) -> None:
    target, drafter = pair(kind, 3)
    stats = Stats()
    sampling = SamplingParams(temperature, top_p=0.9, seed=1, acceptance=acceptance)  # type: ignore[arg-type]
    list(decode(target, drafter, [1], DecodeOptions(40, 4, sampling=sampling), stats))
    assert stats.acceptance_rate == 1
    assert stats.rounds == 8


def test_coupled_drafts_are_accepted_more_often_than_chance() -> None:
    accepted = 0.0
    for seed in range(30):
        stats = Stats()
        target, drafter = pair("draft model", seed, seed + 1)
        sampling = SamplingParams(1.0, seed=seed, acceptance="coupled")
        list(decode(target, drafter, [1], DecodeOptions(30, 2, sampling=sampling), stats))
        accepted += stats.acceptance_rate / 30
    assert accepted > 0.4


def test_the_draft_runs_no_guess_that_nobody_needs_and_catches_up_in_one_pass() -> None:
    model = FunctionTarget(hash_logits(1, VOCAB), VOCAB)
    drafter = Speculative(model, VOCAB)
    tokens = [1, 2, 3, 4, 5, 6, 7]
    guesses = drafter.propose(tokens, 3).tokens.tolist()
    assert guesses == plain(hash_logits(1, VOCAB), VOCAB, tokens, 3)
    assert model.tokens == [*tokens, *guesses[:2]]  # the last guess was not run
    assert model.passes == [1, 1, 1]  # the prompt was prefilled
    model.passes.clear()
    everything = [*tokens, *guesses, 9]  # all accepted, and a bonus
    drafter.propose(everything, 2)
    assert model.passes == [2, 1]  # the last guess and the bonus together
    model.passes.clear()
    drafter.propose([*tokens, guesses[0], 9], 2)  # the first accepted, the second refused
    assert model.passes == [1, 1]
    assert model.tokens[:9] == [*tokens, guesses[0], 9]


@pytest.mark.parametrize("padding", [-2, 0, 5])
@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_a_vocabulary_that_differs_by_padding_is_cropped_or_padded(padding: int, acceptance: str) -> None:
    size = VOCAB + padding
    model = FunctionTarget(lambda prefix: np.arange(size, dtype=np.float32), size)
    drafter = Speculative(model, VOCAB)
    params = SamplingParams(1.0, seed=1, acceptance=acceptance)  # type: ignore[arg-type]
    drafter.begin(DraftRequest([], params, Noise(1)))
    proposal = drafter.propose([1, 2], 4)
    assert proposal.tokens.max() < min(size, VOCAB)
    if proposal.probs is not None:
        assert proposal.probs.shape == (4, VOCAB)
        np.testing.assert_allclose(proposal.probs.sum(1), 1)
        assert (proposal.probs[:, size:] == 0).all()
    assert (proposal.probs is None) is (acceptance == "coupled")
    drafter.begin(DraftRequest([], SamplingParams(), Noise(1)))
    assert drafter.propose([1, 2], 2).tokens.tolist() == [min(size, VOCAB) - 1] * 2


def test_q_is_what_the_guess_was_drawn_from_with_its_prefix() -> None:
    function = hash_logits(4, VOCAB)
    drafter = Speculative(FunctionTarget(function, VOCAB), VOCAB)
    params = SamplingParams(0.7, top_k=5, repetition_penalty=1.5, seed=2)
    drafter.begin(DraftRequest([], params, Noise(2)))
    proposal = drafter.propose([1, 2, 3], 4)
    prefix = [1, 2, 3]
    assert proposal.probs is not None
    for token, q in zip(proposal.tokens.tolist(), proposal.probs, strict=True):
        np.testing.assert_array_equal(q, distribution(function(tuple(prefix)), params, prefix))
        assert q[token] > 0
        prefix.append(token)


def test_a_position_drafted_again_gets_new_noise() -> None:
    flat = FunctionTarget(lambda prefix: np.zeros(VOCAB, np.float32), VOCAB)
    drafter = Speculative(flat, VOCAB)
    drafter.begin(DraftRequest([], SamplingParams(1.0, seed=1), Noise(1)))
    first = drafter.propose([1, 2], 8).tokens.tolist()
    assert drafter.propose([1, 2], 8).tokens.tolist() == first
    assert drafter.propose([1, 2, first[0]], 7).tokens.tolist() != first[1:]


def test_a_draft_that_yields_nan_is_dropped() -> None:
    broken = FunctionTarget(lambda prefix: np.full(VOCAB, np.nan, np.float32), VOCAB)
    for sampling in (SamplingParams(), SamplingParams(1.0, seed=1)):
        stats = Stats()
        options = DecodeOptions(6, 3, sampling=sampling)
        text = [t for r in decode(hash_target(1), Speculative(broken, VOCAB), [1], options, stats) for t in r.tokens]
        assert text == emitted(hash_target(1), Plain(), [1], options)
        assert "finite" in str(stats.dropped_reason)


def confident(prefix: tuple[int, ...]) -> np.ndarray:
    """Return logits that are confident of every token except the one at index 6."""
    logits = np.zeros(VOCAB, np.float32)
    logits[len(prefix) % VOCAB] = 0.5 if len(prefix) == 6 else 12
    return logits


def test_a_self_draft_stops_where_the_next_guess_is_not_worth_it() -> None:
    """After the guess whose chance, times that of all before and that of a guess, is below what must be gained."""
    target = FunctionTarget(confident, VOCAB)
    target.prefill([1, 1, 1])
    drafter = SelfSpec(target, SkipSet(), Confidence([0.1] * 7 + [0.9], 0.8))
    assert len(drafter.propose([1, 1, 1, 1], 8)) == 8  # no required gain was given
    assert target.skipped == 8  # one pass a guess, none for the last guess
    for least, length in ((0.0, 8), (0.07, 3), (0.6, 3), (0.65, 2), (0.73, 1)):  # .9 .81 .081 times .8
        made = drafter.propose_until([1, 1, 1, 1], 8, dict.fromkeys(range(9), least).__getitem__)
        assert made.tokens.tolist()[:3] == [4, 5, 6][:length]
        assert len(made) == length, least
    assert len(drafter.propose_until([1, 1, 1, 1], 8, lambda depth: 0.1 * depth)) == 3
    assert len(drafter.propose([1, 1, 1, 1], 8)) == 8
    assert target.tokens == [1, 1, 1]


def test_confidence_is_counted_from_what_was_tested() -> None:
    target = FunctionTarget(confident, VOCAB)
    target.prefill([1, 1, 1])
    drafter = SelfSpec(target, SkipSet())
    sure, unsure = 0.999, 0.1  # as ``confident`` is
    for _ in range(40):  # right, right, then wrong; nothing after it was tested
        proposal = drafter.propose_until([1, 1, 1, 1], 6, lambda depth: 0.0)
        drafter.observe(proposal, Verdict(range(2), 0), NOTHING)
    assert drafter.confidence.chance(sure) > 0.97
    assert drafter.confidence.chance(unsure) < 0.1
    assert drafter.confidence.mean == pytest.approx(2 / 3, abs=0.05)
    drafter.observe(EMPTY, Verdict((), 0), NOTHING)
    known = drafter.confidence.rates
    for params in (SamplingParams(), SamplingParams(1.0), SamplingParams(1.0, seed=1, acceptance="coupled")):
        drafter.begin(DraftRequest([], params, Noise(1)))
        assert drafter.confidence.rates == known
    drafter.begin(DraftRequest([], SamplingParams(1.0, seed=1), Noise(1)))  # its text follows from the lengths
    assert drafter.confidence.rates == Confidence().rates != known


def test_greedy_guesses_come_from_the_likeliest_token_or_its_probability() -> None:
    asked: list[int | None] = []

    def ask(last: int | None, value: float) -> tuple[int, float]:  # one more than the token before
        asked.append(last)
        return (last or 0) + 1, value

    def step(last: int | None) -> np.ndarray:
        raise AssertionError("no logits are needed")

    how = Draw([5], VOCAB, SamplingParams(), Noise(0)), 3
    assert draw_chain(step, *how, choose=lambda last: ask(last, 0.5)).tokens.tolist() == [1, 2, 3]
    assert asked == [None, 1, 2]
    assert draw_chain(
        step, *how, weak=lambda chance: chance < 0.4, choose=lambda last: ask(last, 0.5)
    ).tokens.tolist() == [1, 2, 3]
    assert draw_chain(
        step, *how, weak=lambda chance: chance < 0.6, choose=lambda last: ask(last, 0.5)
    ).tokens.tolist() == [1]
    with pytest.raises(EdgespecError, match="finite"):
        draw_chain(step, *how, choose=lambda last: ask(last, np.nan))
