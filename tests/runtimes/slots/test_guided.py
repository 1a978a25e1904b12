"""Guidance: whatever guesses, the text and the distribution are those of plain decoding of mixed logits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.decoding.drafter import Drafter
from edgespec.decoding.loop import DecodeOptions
from edgespec.decoding.policy import Policy
from edgespec.decoding.sampling import SamplingParams
from edgespec.drafters.plain import Plain
from edgespec.formulas.statistics import chi_square
from edgespec.runtimes.audio.spoken import FrameRule
from edgespec.runtimes.files.codes import CodesPart, SoundCodes
from edgespec.runtimes.slots.guided import Guided
from tests.decoding.test_distribution import DRAFT, DRAFTERS, NEW, PROMPT, TABLE, VOCAB
from tests.support.passes import run_layers, run_rest
from tests.support.reference import LayeredFunctionTarget, TableTarget
from tests.support.toy import emitted, exact, sample_texts

SCALE, INSTEAD = 2.5, [3, 0]
FLAT = np.random.default_rng(9).normal(size=TABLE.shape)  # table of the other slot, which may differ


def guided(both: bool = False) -> Guided:
    asked, other = TableTarget(TABLE, draft_table=DRAFT), TableTarget(FLAT)
    joint = (lambda one, another: (asked.run(one), other.run(another))) if both else None
    return Guided(asked, other, len(PROMPT), INSTEAD, SCALE, joint)


def drafter_of(name: str, target: Guided) -> Policy | Drafter:
    assert isinstance(target.asked, TableTarget)
    return DRAFTERS[name](target.asked)


def mixed(prefix: tuple[int, ...]) -> NDArray[np.float32]:
    """Say the logits after a text by the definition."""
    asked, other = TableTarget(TABLE).function(prefix), TableTarget(FLAT).function((*INSTEAD, *prefix[len(PROMPT) :]))
    return np.asarray(other + SCALE * (asked - other), np.float32)


@pytest.mark.parametrize("name", ["ngram", "draft model", "swift with siblings"])
def test_texts_and_distributions_are_those_of_plain_guided_decoding(name: str) -> None:
    target = guided()
    greedy = DecodeOptions(40, 3)
    text = list(PROMPT)
    for _ in range(40):
        text.append(int(mixed(tuple(text)).argmax()))
    for one in (target, guided(both=True)):
        assert emitted(one, drafter_of(name, one), PROMPT, greedy) == text[len(PROMPT) :]
    params = SamplingParams(1.0)
    drafter = drafter_of(name, target)
    counts = sample_texts(target, drafter, PROMPT, NEW, lambda i: replace(params, seed=i), 2500)
    assert chi_square(counts, exact(mixed, VOCAB, PROMPT, NEW, params)) > 1e-3
    unguided = exact(TableTarget(TABLE).function, VOCAB, PROMPT, NEW, params)
    assert chi_square(counts, unguided) < 1e-6


@pytest.mark.parametrize("name", ["ngram", "draft model", "swift with siblings"])
def test_codes_of_speech_have_the_guided_distribution_of_their_places(name: str) -> None:
    """Two places of two codes each: a token's place is that of its position."""
    sound = SoundCodes(rate=8000, places=2, begin=[], end=[], stop=0, voices=["tara"])
    rule = FrameRule(CodesPart(graph="codes.onnx", first=0, size=VOCAB, sound=sound), VOCAB, (), len(PROMPT))

    def placed(prefix: tuple[int, ...]) -> NDArray[np.float32]:
        place = (len(prefix) - len(PROMPT)) % 2
        return np.where(np.arange(VOCAB) // 2 == place, mixed(prefix), np.float32(-1e4))

    target, params = guided(), SamplingParams(4.0, constraint=rule)
    counts = sample_texts(target, drafter_of(name, target), PROMPT, NEW, lambda i: replace(params, seed=i), 1000)
    assert chi_square(counts, exact(placed, VOCAB, PROMPT, NEW, SamplingParams(4.0))) > 1e-3
    assert len(counts) == 2**NEW


def test_a_pass_whose_first_layers_have_run_is_mixed_as_well() -> None:
    asked = LayeredFunctionTarget(TableTarget(TABLE).function, VOCAB)
    target = Guided(asked, TableTarget(FLAT), len(PROMPT), INSTEAD, SCALE)
    target.prefill(PROMPT[:-1])
    rows = np.array([PROMPT[-1], 2], np.int64)
    found = run_rest(target, rows, run_layers(target, rows, 0, 0, 2), 2).logits
    wanted = [mixed(tuple(PROMPT)), mixed((*PROMPT, 2))]
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    target.keep([0, 1])
    assert target.other.tokens == [*INSTEAD, 2]
    assert emitted(target, Plain(), [*PROMPT, 2], DecodeOptions(1)) == [int(mixed((*PROMPT, 2)).argmax())]
