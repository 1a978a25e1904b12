"""A draft model scores the first tokens of its vocabulary while the text consists of them."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.decoding.drafter import DraftRequest
from edgespec.decoding.noise import Noise
from edgespec.decoding.sampling import SamplingParams
from edgespec.drafters.speculative import Speculative
from tests.support.reference import TableTarget
from tests.support.toy import ShortTarget, hash_target, same_texts

VOCAB, ROWS = 11, 7
TABLE = np.random.default_rng(3).normal(size=(VOCAB, VOCAB)) * 2
BRANCHES = (None, (2,), (3, 2))
PARAMS = (
    SamplingParams(),
    SamplingParams(repetition_penalty=1.4, logit_bias={1: 1.0, 9: 5.0}),
    SamplingParams(0.9, seed=3, acceptance="coupled"),
    SamplingParams(1.0, seed=1),
)


def short(branch: tuple[int, ...] | None = None) -> tuple[Speculative, ShortTarget]:
    model = ShortTarget(TABLE)
    return Speculative(model, VOCAB, branch, ROWS), model


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("params", PARAMS)
def test_usual_texts_get_the_first_tokens_and_others_any(
    params: SamplingParams, branch: tuple[int, ...] | None
) -> None:
    drafter, model = short(branch)
    guessed: dict[bool, set[int]] = {True: set(), False: set()}
    for usual in (True, False):
        for seed in range(40):
            rng = np.random.default_rng(seed)
            drafter.begin(DraftRequest([], params, Noise(seed)))
            model.scored.clear()
            tokens = rng.integers(0, ROWS, 9).tolist() + [VOCAB - 1, VOCAB - 2] * (not usual)
            proposal = drafter.propose(tokens, 3)
            guessed[usual] |= set(proposal.tokens.tolist())
            assert set(model.scored) == {ROWS if usual else VOCAB}
            if proposal.probs is not None:
                assert proposal.probs.shape == (len(proposal), VOCAB)
                np.testing.assert_allclose(proposal.probs.sum(1), 1)
                assert not usual or (proposal.probs[:, ROWS:] == 0).all()
    assert max(guessed[True]) < ROWS <= max(guessed[False])


@pytest.mark.parametrize(
    ("tokens", "usual"),
    [
        ([0] * 8, True),
        ([0] * 7 + [ROWS], True),  # one in eight
        ([0] * 6 + [ROWS], False),
        ([0] * 112 + [VOCAB - 1] * 16, True),
        ([0] * 111 + [VOCAB - 1] * 17, False),
        ([VOCAB - 1] * 200 + [0] * 128, True),  # of a long text its end
        ([VOCAB - 1] * 17 + [0] * 111, False),
    ],
)
def test_one_in_eight_of_the_last_tokens_may_be_another(tokens: list[int], usual: bool) -> None:
    drafter, model = short()
    drafter.begin(DraftRequest([], SamplingParams(), Noise(1)))
    model.follow([])
    model.tokens = list(tokens[:-1])  # already read
    drafter.propose(tokens, 2)
    assert set(model.scored) == {ROWS if usual else VOCAB}


@pytest.mark.parametrize("branch", BRANCHES)
def test_no_text_changes(branch: tuple[int, ...] | None) -> None:
    assert same_texts(lambda seed: (hash_target(seed), short(branch)[0]), 30, [1, 2]) > 50


@pytest.mark.parametrize("rows", [0, VOCAB, VOCAB + 1])
def test_a_head_that_is_not_shorter_is_whole(rows: int) -> None:
    model = ShortTarget(TABLE)
    Speculative(model, VOCAB, None, rows).propose([1, 2], 2)
    assert set(model.scored) == {VOCAB}


def test_a_draft_that_scores_all_tokens_or_none_does_so() -> None:
    drafter = Speculative(TableTarget(TABLE), VOCAB, None, ROWS)
    found = {token for first in range(VOCAB) for token in drafter.propose([0, first], 3).tokens.tolist()}
    assert max(found) >= ROWS


def test_a_step_is_timed_with_the_short_head() -> None:
    drafter, model = short()
    assert drafter.benchmark_step()
    assert model.scored == [ROWS]
