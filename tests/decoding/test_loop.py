"""The loop: for any draft tokens the text is that of plain decoding, and every limit is kept exactly."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from edgespec.decoding.drafter import Drafter
from edgespec.decoding.loop import DecodeOptions, Round, decode
from edgespec.decoding.proposal import EMPTY, Proposal
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.stats import Stats
from edgespec.decoding.target import Output, Pass
from edgespec.drafters.plain import Plain
from edgespec.errors import InvalidRequest
from tests.support.reference import FunctionTarget
from tests.support.toy import Scripted, chain, emitted, hash_logits, hash_target, plain, random_tree

VOCAB = 11
Truth = Callable[[list[int], int], list[int]]  # (tokens, count) -> the target's next tokens


def truth_of(seed: int) -> Truth:
    function = hash_logits(seed, VOCAB)
    return lambda tokens, count: plain(function, VOCAB, tokens, count)


def adversaries(seed: int, truth: Truth, eos: int) -> dict[str, Drafter]:
    """Drafters that are right, wrong, and wrong in every way a proposal can be."""
    rng = np.random.default_rng(seed)

    def wrong_at(k: int) -> Callable[[list[int], int], Proposal]:
        def guess(tokens: list[int], budget: int) -> Proposal:
            out = truth(tokens, budget)
            if k < len(out):
                out[k] = (out[k] + 1) % VOCAB
            return chain(out)

        return guess

    def eos_inside(tokens: list[int], budget: int) -> Proposal:
        out = truth(tokens, budget)
        out[int(rng.integers(len(out)))] = eos
        return chain(out)

    def tree(tokens: list[int], budget: int) -> Proposal:
        return random_tree(rng, int(rng.integers(1, 9)), VOCAB, lambda path: truth([*tokens, *path], 1)[0])

    def too_long(tokens: list[int], budget: int) -> Proposal:
        return chain(truth(tokens, budget + 5))

    return {
        "right": Scripted(lambda tokens, budget: chain(truth(tokens, budget))),
        "wrong": Scripted(wrong_at(0)),
        "wrong later": Scripted(wrong_at(int(rng.integers(1, 5)))),
        "same token": Scripted(lambda tokens, budget: chain(truth(tokens, 1) * budget)),
        "random": Scripted(lambda tokens, budget: chain(rng.integers(VOCAB, size=int(rng.integers(budget + 1))))),
        "eos inside": Scripted(eos_inside),
        "tree": Scripted(tree),
        "too long": Scripted(too_long),
    }


@pytest.mark.parametrize("block", range(10))
def test_greedy_text_is_plain_text_for_every_adversary(block: int) -> None:
    """1000 seeds, gamma 1..16, EOS at random places; ties in every row."""
    for seed in range(100 * block, 100 * block + 100):
        rng = np.random.default_rng(seed)
        truth, eos, gamma = truth_of(seed), int(rng.integers(VOCAB)), 1 + seed % 16
        prompt = rng.integers(VOCAB, size=int(rng.integers(1, 5))).tolist()
        new = int(rng.integers(1, 18))
        wanted = plain(hash_logits(seed, VOCAB), VOCAB, prompt, new, [eos])
        drafters = adversaries(seed, truth, eos)
        for name in ("right", "tree", list(drafters)[1 + seed % (len(drafters) - 1)]):
            target = hash_target(seed)
            options = DecodeOptions(new, gamma, frozenset([eos]))
            assert emitted(target, drafters[name], prompt, options) == wanted, (seed, name)
            assert target.tokens == [*prompt, *wanted][:-1]


@pytest.mark.parametrize("params", [{}, {"top_k": 4}, {"top_p": 0.8, "repetition_penalty": 1.3}, {"min_p": 0.1}])
@pytest.mark.parametrize("name", ["right", "wrong later", "tree", "random", "eos inside"])
def test_sampled_text_of_deterministic_guesses_is_plain_sampled_text(name: str, params: dict[str, float]) -> None:
    for seed in range(25):
        sampling = SamplingParams(0.8, seed=seed, **params)  # type: ignore[arg-type]
        options = DecodeOptions(12, 1 + seed % 5, frozenset([3]), sampling)
        wanted = emitted(hash_target(seed), Plain(), [1, 2], options)
        drafter = adversaries(seed, truth_of(seed), 3)[name]
        assert emitted(hash_target(seed), drafter, [1, 2], options) == wanted


def test_a_right_drafter_saves_rounds() -> None:
    stats = Stats()
    rounds = list(decode(hash_target(1), adversaries(1, truth_of(1), 99)["right"], [1], DecodeOptions(20, 4), stats))
    assert [len(r.tokens) for r in rounds] == [5, 5, 5, 5]
    assert (stats.rounds, stats.tokens, stats.drafted, stats.accepted) == (4, 20, 16, 16)
    assert stats.histogram == [0, 0, 0, 0, 4]
    assert stats.tokens_per_round == 5


@pytest.mark.parametrize("gamma", [1, 3, 16])
@pytest.mark.parametrize("new", [1, 2, 5, 17])
def test_length_is_exact_and_said(gamma: int, new: int) -> None:
    target = hash_target(2)
    drafter = adversaries(2, truth_of(2), 99)["too long"]
    rounds = list(decode(target, drafter, [4], DecodeOptions(new, gamma)))
    assert sum(len(r.tokens) for r in rounds) == new
    assert [r.finish for r in rounds[:-1]] == [None] * (len(rounds) - 1)
    assert rounds[-1].finish == "length"
    assert max(target.passes) <= min(gamma, new - 1) + 1


@pytest.mark.parametrize("gamma", [1, 3, 16])
@pytest.mark.parametrize("context", [4, 5, 9])
def test_the_context_is_filled_exactly_and_never_overrun(gamma: int, context: int) -> None:
    for name in ("right", "tree", "too long", "wrong"):
        target = hash_target(3, context=context)
        rounds = list(decode(target, adversaries(3, truth_of(3), 99)[name], [4, 5, 6], DecodeOptions(50, gamma)))
        assert 3 + sum(len(r.tokens) for r in rounds) == context
        assert rounds[-1].finish == "context"


def test_eos_wins_over_length_and_cuts_an_accepted_block() -> None:
    function = hash_logits(5, VOCAB)
    text = plain(function, VOCAB, [1], 6)
    eos = next(t for t in text[1:] if t != text[0])
    new = text.index(eos) + 1
    # A drafter that does not know EOS continues after it; the loop cuts what it offers.
    drafter = adversaries(5, truth_of(5), 99)["right"]
    target = FunctionTarget(function, VOCAB)
    rounds = list(decode(target, drafter, [1], DecodeOptions(new, 16, frozenset([eos]))))
    assert [t for r in rounds for t in r.tokens] == text[:new]
    assert rounds[-1].finish == "eos"
    assert target.tokens == [1, *text[: new - 1]]


def test_a_guess_below_an_eos_is_never_verified() -> None:
    asked: list[list[int]] = []
    tree = Proposal(np.array([1, 7, 2, 3, 4]), np.array([-1, -1, 1, 0, 2]))

    class Spy(FunctionTarget):
        def run(self, wanted: Pass) -> Output:
            assert wanted.tokens is not None
            asked.append(wanted.tokens.tolist())
            return super().run(wanted)

    for proposal in (tree, chain([1, 7, 2])):
        target = Spy(hash_logits(0, VOCAB), VOCAB)
        next(decode(target, Scripted(lambda *_, p=proposal: p), [5], DecodeOptions(9, 8, frozenset([7]))))
    assert asked == [[5, 1, 7, 3], [5, 1, 7]]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "at least one token"), ([1] * 20, "context"), ([1] * 21, "context"), ([1, VOCAB], "vocab"), ([-1], "vocab")],
)
def test_a_prompt_that_cannot_be_served_is_refused(prompt: Sequence[int], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        next(decode(hash_target(0, context=20), Plain(), prompt, DecodeOptions(4)))


def test_options_that_cannot_be_served_are_refused() -> None:
    for bad in ({"max_new_tokens": 0}, {"gamma": 0}, {"max_new_tokens": -3, "gamma": 2}):
        with pytest.raises(InvalidRequest, match=r"max_new_tokens.*gamma") as caught:
            DecodeOptions(**bad)  # type: ignore[arg-type]
        assert str(next(iter(bad.values()))) in str(caught.value)
    with pytest.raises(InvalidRequest, match="logit_bias"):
        next(decode(hash_target(0), Plain(), [1], DecodeOptions(4, sampling=SamplingParams(logit_bias={VOCAB: 1.0}))))


@pytest.mark.parametrize("rounds", range(6))
def test_a_closed_request_leaves_a_prefix_and_the_next_one_reuses_it(rounds: int) -> None:
    target, truth = hash_target(6), truth_of(6)
    drafter = adversaries(6, truth, 99)["wrong later"]
    running = decode(target, drafter, [1, 2, 3], DecodeOptions(40, 3))
    text = [t for _ in range(rounds) for t in next(running).tokens]
    running.close()
    whole = [1, 2, 3, *text]
    assert target.tokens == (whole[:-1] if rounds else [])
    stats = Stats()
    followed = [t for r in decode(target, drafter, [*whole, 5], DecodeOptions(10, 3), stats) for t in r.tokens]
    assert followed == truth([*whole, 5], 10)
    assert stats.reused_tokens == (len(whole) - 1 if rounds else 0)


def test_a_shared_prefix_is_reused_and_only_the_rest_prefilled() -> None:
    target, truth, stats = hash_target(7), truth_of(7), [Stats(), Stats(), Stats()]
    prompts = [[1, 2, 3, 4, 5], [1, 2, 3, 9, 9, 9], [1, 2]]
    for prompt, counted in zip(prompts, stats, strict=True):
        text = [t for r in decode(target, Plain(), prompt, DecodeOptions(3), counted) for t in r.tokens]
        assert text == truth(prompt, 3)
    assert [s.reused_tokens for s in stats] == [0, 3, 1]
    assert [s.prompt_tokens for s in stats] == [5, 6, 2]


def test_a_round_says_what_was_drafted_and_refused() -> None:
    truth = truth_of(8)([1], 3)
    wrong = (truth[1] + 1) % VOCAB
    guesses = [truth[0], wrong, 4, 5]
    first = next(decode(hash_target(8), Scripted(lambda *_: chain(guesses)), [1], DecodeOptions(9)))
    assert first == Round(truth[:2], guesses, 1, range(1), [wrong, 4, 5], None, None)
    # Node 0 is wrong with a child below it, node 1 right, nodes 3 and 4 wrong guesses below node 1.
    miss = (truth[0] + 1) % VOCAB
    tree = Proposal(np.array([miss, truth[0], 4, wrong, wrong]), np.array([-1, -1, 0, 1, 3]))
    first = next(decode(hash_target(8), Scripted(lambda *_: tree), [1], DecodeOptions(9)))
    assert (first.tokens, list(first.path), first.rejected) == (truth[:2], [1], [wrong, wrong])


@pytest.mark.parametrize("name", ["right", "wrong later", "tree"])
def test_logprobs_are_those_of_the_unadjusted_model(name: str) -> None:
    options = DecodeOptions(12, 3, sampling=SamplingParams(0.5, top_k=3, seed=1), logprobs=True)
    tokens, function = [1, 2], hash_logits(9, VOCAB)
    for round_ in decode(hash_target(9), adversaries(9, truth_of(9), 99)[name], [1, 2], options):
        assert round_.logprobs is not None
        assert len(round_.logprobs) == len(round_.tokens)
        for token, logprob in zip(round_.tokens, round_.logprobs, strict=True):
            weights = np.exp(function(tuple(tokens)).astype(np.float64))
            assert logprob == pytest.approx(np.log(weights[token] / weights.sum()), abs=1e-5)
            tokens.append(token)


def test_stats_add_up_and_serialise() -> None:
    for name in ("right", "wrong later", "tree", "random", "eos inside"):
        stats = Stats()
        rounds = list(
            decode(
                hash_target(10),
                adversaries(10, truth_of(10), 3)[name],
                [1],
                DecodeOptions(30, 4, frozenset([3])),
                stats,
            )
        )
        assert stats.rounds == len(rounds) == sum(stats.histogram)
        assert stats.tokens == sum(len(r.tokens) for r in rounds)
        assert stats.accepted == sum(r.accepted for r in rounds) == sum(i * n for i, n in enumerate(stats.histogram))
        assert stats.accepted == sum(stats.accepted_at)
        assert stats.drafted == sum(len(r.drafted) for r in rounds)
        assert all(a <= o for a, o in zip(stats.accepted_at, stats.drafted_at, strict=True))
        assert min(stats.prefill_ms, stats.draft_ms, stats.verify_ms, stats.other_ms) >= 0
        read = json.loads(json.dumps(stats.as_dict()))
        assert read["tokens"] == stats.tokens
        assert read["acceptance_rate"] == pytest.approx(stats.acceptance_rate)


def test_a_drafter_sees_the_truth_and_its_own_cut_proposal() -> None:
    seen: list[tuple[list[int], int]] = []

    def guess(tokens: list[int], budget: int) -> Proposal:
        seen.append((list(tokens), budget))
        return chain([1, 2, 3, 4, 5, 6])

    drafter = Scripted(guess)
    rounds = list(decode(hash_target(11), drafter, [1, 2], DecodeOptions(6, 4)))
    text = [1, 2]
    for round_, (tokens, budget) in zip(rounds, seen, strict=False):
        assert tokens == text
        assert budget == min(4, 6 - (len(text) - 2) - 1)
        text += round_.tokens
    assert [len(p) for p, _ in drafter.seen[: len(seen)]] == [b for _, b in seen]
    assert len(drafter.seen) == len(rounds)  # rounds without a budget are observed too, as empty proposals
    assert all(p is EMPTY for p, _ in drafter.seen[len(seen) :])


def test_an_unseeded_request_differs_and_a_seeded_one_does_not() -> None:
    def text(seed: int | None) -> list[int]:
        return emitted(hash_target(1), Plain(), [1], DecodeOptions(30, sampling=SamplingParams(2.0, seed=seed)))

    assert text(3) == text(3)
    assert text(None) != text(None)
    assert text(3) != text(4)
