"""Drafts with another tokenizer: the text stays the target's, and the draft's cache follows it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.decoding.drafter import DraftRequest
from edgespec.decoding.loop import DecodeOptions, decode
from edgespec.decoding.noise import Noise
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.stats import Stats
from edgespec.decoding.target import Pass
from edgespec.decoding.text import Text
from edgespec.drafters.other_tokenizer import OtherTokenizer
from edgespec.formulas.statistics import chi_square
from edgespec.runtimes.text.translation import Translation, translate
from tests.support.reference import FunctionTarget
from tests.support.toy import exact, hash_logits, same_texts, sample_texts
from tests.support.two_tokenizers import letters

# 11 tokens each, of which the target has 2 of padding; the same letters have other numbers
TARGET = ["<e>", "a", "b", "c", "d", "ab", "cd", "abc", "<x>"]
DRAFT = ["<e>", "d", "c", "<b>", "bc", "b", "a", "da", "ab", "abcd", "bcd"]
SIZES = len(TARGET) + 2, len(DRAFT)


@pytest.fixture(scope="module")
def translation(tmp_path_factory: pytest.TempPathFactory) -> Translation:
    folder: Path = tmp_path_factory.mktemp("letters")
    target = letters(folder / "target", TARGET, [("a", "b"), ("c", "d"), ("ab", "c")])
    draft = letters(
        folder / "draft", DRAFT, [("b", "c"), ("d", "a"), ("a", "b"), ("bc", "d"), ("a", "bcd")], begin="<b>"
    )
    return translate(target, draft, SIZES, end=0, ends=[0])


def drafter(translation: Translation, seed: int, matching: str, **how: Any) -> OtherTokenizer:
    model = FunctionTarget(hash_logits(seed, SIZES[1]), SIZES[1])
    return OtherTokenizer(model, replace(translation, matching=matching), **how)  # type: ignore[arg-type]


def known(translation: Translation, function: Any) -> Any:
    """Make a draft that agrees with the target where it can: logits of shared tokens are the target's."""

    def logits(prefix: tuple[int, ...]) -> np.ndarray:
        ids = translation.target.encode(translation.draft.joined(prefix[1:]).decode())
        row = function(tuple(ids))
        found = np.full(SIZES[1], -9.0, np.float32)
        shared = translation.targets >= 0
        found[shared] = row[translation.targets[shared]]
        return found

    return logits


@pytest.mark.parametrize("matching", ["strings", "tokens"])
def test_greedy_and_coupled_text_is_plain_text(translation: Translation, matching: str) -> None:
    def make(seed: int) -> Any:
        function = hash_logits(seed, SIZES[0])
        model = FunctionTarget(known(translation, function), SIZES[1])
        return FunctionTarget(function, SIZES[0]), OtherTokenizer(model, replace(translation, matching=matching))  # type: ignore[arg-type]

    assert same_texts(make, 60, prompt=(1, 3)) > 60
    assert same_texts(lambda seed: (make(seed)[0], drafter(translation, seed + 1, matching)), 60) >= 0


@pytest.mark.parametrize("branch", [(1,), (2,), (2, 2)])
@pytest.mark.parametrize("matching", ["strings", "tokens"])
def test_rejection_sampling_keeps_the_distribution(
    translation: Translation, matching: str, branch: tuple[int, ...]
) -> None:
    function, params = hash_logits(5, SIZES[0]), SamplingParams(1.1, top_k=5)
    wanted = exact(function, SIZES[0], [1, 3], 2, params)
    seen = sample_texts(
        FunctionTarget(function, SIZES[0]),
        drafter(translation, 9, matching, branch=branch),
        [1, 3],
        2,
        lambda at: replace(params, seed=at),
        4000,
    )
    assert chi_square(seen, wanted) > 1e-3


def test_q_is_over_the_shared_tokens(translation: Translation) -> None:
    made = drafter(translation, 3, "strings")
    made.begin(DraftRequest(Text([1, 2]), SamplingParams(1.0, seed=1), Noise(1)))
    proposal = made.propose(Text([1, 2]), 4)
    assert proposal.probs is not None
    np.testing.assert_allclose(proposal.probs.sum(1), 1)
    others = np.setdiff1d(np.arange(SIZES[0]), translation.targets)
    assert len(others)
    assert (proposal.probs[:, others] == 0).all()
    assert not set(proposal.tokens.tolist()) & set(others.tolist())


def test_the_cache_of_the_draft_goes_back_to_the_common_prefix(translation: Translation) -> None:
    """The draft's tokens at a text's end change as it grows; only those that changed are read again."""
    made = drafter(translation, 2, "strings")
    model = made.model
    assert isinstance(model, FunctionTarget)
    text = Text([1, 3, 4, 2, 1])
    made.begin(DraftRequest(text))
    rng = np.random.default_rng(1)
    for _ in range(60):
        made.propose(text, 3)
        held = list(model.tokens)
        text += rng.integers(1, 8, rng.integers(1, 4)).tolist()
        own = made.own(text)
        same = next((at for at, (a, b) in enumerate(zip(held, own, strict=False)) if a != b), min(len(held), len(own)))
        model.passes.clear()
        made.propose(text, 1)
        assert model.tokens == own[: len(model.tokens)]
        assert sum(model.passes) <= len(own) - min(same, len(own) - 1)
        assert own == [3, *translation.draft.encode(translation.target.joined(text).decode())]


def test_the_end_of_a_text_is_guessed_and_ends_the_draft(translation: Translation) -> None:
    row = np.zeros(SIZES[1], np.float32)
    row[0] = 5.0
    for matching in ("strings", "tokens"):
        model = FunctionTarget(lambda prefix: row, SIZES[1])
        made = OtherTokenizer(model, replace(translation, matching=matching))
        made.begin(DraftRequest(Text([1])))
        assert made.propose(Text([1]), 3).tokens.tolist()[:1] == [0]
    assert len(model.passes) >= 1


def test_a_token_without_a_text_ends_the_draft(translation: Translation) -> None:
    row = np.zeros(SIZES[1], np.float32)
    row[3] = 5.0  # the draft's begin, which the target lacks
    model = FunctionTarget(lambda prefix: row, SIZES[1])
    model.can |= {"best"}
    made = drafter(translation, 1, "strings")
    made.model, made._best_of_strings = model, True
    model.run = lambda wanted: _best(model, wanted, row)  # type: ignore[method-assign]
    made.begin(DraftRequest(Text([1, 2])))
    assert len(made.propose(Text([1, 2]), 3)) == 0


def _best(model: FunctionTarget, wanted: Pass, row: np.ndarray) -> Any:
    output = FunctionTarget.run(model, wanted)
    token = np.array([int(row.argmax())])
    return replace(output, best=(token, row[token]))


def test_a_longer_token_of_the_draft_becomes_several_guesses(translation: Translation) -> None:
    """The draft writes abcd at once; the target's tokenizer makes ab, cd of it."""
    row = np.zeros(SIZES[1], np.float32)
    row[DRAFT.index("abcd")] = 5.0
    stats, target = Stats(), FunctionTarget(hash_logits(1, SIZES[0]), SIZES[0])
    made = OtherTokenizer(FunctionTarget(lambda prefix: row, SIZES[1]), translation)
    made.begin(DraftRequest(Text([4])))
    assert made.propose(Text([4]), 4).tokens.tolist() == [5, 6, 5, 6]
    list(decode(target, made, [4], DecodeOptions(12, 4), stats))
    assert stats.dropped_reason is None
