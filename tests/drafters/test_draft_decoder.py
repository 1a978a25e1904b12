"""A drafter that is conditioned on hidden states drafts the tokens of the reference arithmetic, after any history.

Known mistakes, and the test that finds each (a wrong drafter's texts are right: draft tokens must be compared):

- tap one off; order of embedding and hidden state; own state raw or normed; first entry: ``what_others_got_wrong``
- d2t as tokens, or not ascending: ``offsets_are_not_tokens``; guesses outside its vocabulary: every test of guesses
- prompts of 1, 2 and more tokens, in one chunk or many: ``prompts_of_any_length``
- none, some or all guesses accepted, entries of guesses kept: ``guesses_are_the_arithmetics``, ``fresh_drafter``
- a slot used again with nothing, some, all or one less in common; EOS and length inside accepted guesses; the context's
  end: ``a_slot_is_used_again``
- plain rounds between, other drafters' rounds: ``plain_rounds_between``, ``more_plain_rounds``, ``others_won``
- sampling over a cut vocabulary: ``drawn_from_what_it_says``, ``drawing_keeps`` in tests/lossless/test_eagle.py
- positions and masks of trees: ``trees_are_the_arithmetics``
- several requests at once: ``texts_are_plain_decodings`` in tests/lossless/test_eagle.py
- the target's bits with taps and without: ``taps_change_no_bit``; NaN in taps: ``fails_costs_no_text``
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.decoding.drafter import Drafter
from edgespec.decoding.loop import DecodeOptions, decode
from edgespec.decoding.policy import Ask, Policy
from edgespec.decoding.proposal import EMPTY
from edgespec.decoding.sampling import SamplingParams, distribution
from edgespec.decoding.stats import Stats
from edgespec.decoding.target import Pass
from edgespec.drafters.ngram import NGram
from edgespec.export.bundle.model_part import open_model
from edgespec.export.drafters.read import read_drafter
from edgespec.export.source.source import resolve
from edgespec.runtimes.files.manifest import Operators
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.slot import Slot
from tests.conftest import OPERATORS, TARGET, use_operators
from tests.support.any_drafter import AnyDrafter, Pair, Recorder, check_guesses
from tests.support.eagle import Reference, write_random
from tests.support.passes import run_layers

IDS = "eagle_aux_hidden_state_layer_ids"
KINDS: dict[str, tuple[dict[str, Any], list[int] | None, int]] = {
    "original": ({IDS: [2, 3, 4]}, None, 1),
    "cut, not ascending": ({IDS: [1, 3, 5]}, [900, 3, *range(20, 500), 7, 1023, 8], 1),
    "speculators": ({IDS: [0, 3, 6], "speculators_model_type": "eagle3", "norm_before_residual": True}, None, 1),
    "3.1": ({IDS: [2, 4], "norm_output": True, "norm_before_fc": True}, list(range(5, 700)), 1),
    "two layers": ({IDS: [2, 3, 4]}, None, 2),
}


class Made(Pair):
    """A target and a drafter of a kind, opened."""

    def __init__(self, folder: Path, kind: str, operators: Operators) -> None:
        config, tokens, layers = KINDS[kind]
        arch = open_model(resolve(TARGET), 96)
        self.checkpoint = write_random(folder / "checkpoint", arch, config, tokens, layers)
        super().__init__(folder, arch, read_drafter(self.checkpoint, arch), operators)

    def check(self, made: Recorder, least: int = 1, **broken: Any) -> None:
        tapped = broken.pop("tapped", self.tapped)
        check_guesses(made, Reference(self.checkpoint, **broken), self.fresh, tapped, least)


Open = Callable[[str], Made]


@pytest.fixture(params=OPERATORS)
def operators(request: pytest.FixtureRequest) -> Operators:
    return use_operators(request)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Operators], Made]:
    return cache(lambda kind, operators: Made(tmp_path_factory.mktemp("eagle"), kind, operators))


@pytest.fixture
def original(opened: Callable[[str, Operators], Made], operators: Operators) -> Made:
    return opened("original", operators)


def prompt(count: int, seed: int = 0) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(2, 1024, count).tolist()
    return found


class Sometimes(Policy):
    """Asks the first drafter in one of ``every`` rounds."""

    def __init__(self, drafters: Sequence[Drafter], every: int) -> None:
        super().__init__(drafters)
        self.every, self.round = every, 0

    def choose(self, tokens: list[int], budget: int) -> Sequence[Ask]:
        self.round += 1
        return list(super().choose(tokens, budget))[1 if self.round % self.every else 0 :]


@pytest.mark.parametrize("kind", KINDS)
def test_guesses_are_the_arithmetics(opened: Callable[[str, Operators], Made], operators: Operators, kind: str) -> None:
    made = opened(kind, operators)
    recorder = made.recorder()
    made.write(recorder, prompt(11), 9)
    made.check(recorder, 20)


@pytest.mark.parametrize("branch", [(2,), (3, 2, 1, 1)])
@pytest.mark.parametrize("kind", ["cut, not ascending", "two layers"])
def test_trees_are_the_arithmetics(
    opened: Callable[[str, Operators], Made], operators: Operators, kind: str, branch: tuple[int, ...]
) -> None:
    """Every node continues only its own path; the chain of first choices is the same as without siblings."""
    made = opened(kind, operators)
    recorder, chain = made.recorder(branch), made.recorder()
    assert made.write(recorder, prompt(11), 5)[0] == made.write(chain, prompt(11), 5)[0]
    assert any(proposal.parents is not None for _, proposal in recorder.made)
    made.check(recorder, 20)
    tree, first = recorder.made[0][1], chain.made[0][1]
    assert tree.parents is not None
    at, path = -1, list[int]()
    while (below := np.flatnonzero(tree.parents == at)).size:
        at = int(below[0])
        path.append(int(tree.tokens[at]))
    assert path == first.tokens.tolist()


def test_offsets_are_not_tokens(opened: Callable[[str, Operators], Made]) -> None:
    made = opened("cut, not ascending", "stock")
    recorder = made.recorder()
    made.write(recorder, prompt(11), 6)
    with pytest.raises(AssertionError):
        made.check(recorder, as_ids=True)


class TestAgain(AnyDrafter):
    prompt = staticmethod(prompt)
    mistakes = ({"tapped": (1, 3, 4)}, {"tapped": (3, 4, 5)}, {"swapped": True}, {"late": True},
                {"flags": {"norm_output": True}}, {"flags": {"norm_before_residual": True}},
                {"flags": {"norm_before_fc": False, "rope_theta": 500.0}})  # fmt: skip

    @pytest.fixture
    def drawn(self, opened: Callable[[str, Operators], Made]) -> Made:
        return opened("original", "stock")

    @pytest.fixture
    def made(self, original: Made) -> Made:
        return original


@pytest.mark.parametrize("every", [2, 5])
def test_plain_rounds_between(original: Made, every: int) -> None:
    recorder = original.recorder()
    original.write(recorder, prompt(6), 20, around=Sometimes([recorder], every))
    original.check(recorder, 8)


def test_more_plain_rounds_than_taps_are_kept(original: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.drafters.hidden_state.MOST_OWED", 4)
    recorder = original.recorder()
    original.write(recorder, prompt(6), 30, around=Sometimes([recorder], 13))
    original.check(recorder, 4)


def test_rounds_that_others_won(original: Made) -> None:
    """Guesses of n-grams that were accepted: all of their rows count."""
    recorder = original.recorder()
    ngram, phrase = NGram(), prompt(5, 3)
    chain = Sometimes([ngram, recorder], 2)
    original.write(recorder, phrase * 4, 16, around=chain)
    assert chain.won[recorder] > 2
    original.check(recorder, 8)


@pytest.mark.parametrize("branch", [None, (2, 2)])
def test_entries_are_those_of_a_fresh_drafter(original: Made, branch: tuple[int, ...] | None) -> None:
    """After every round: nothing of its guesses is kept, of accepted ones neither."""
    recorder, other = original.recorder(branch), original.recorder()
    text, found = prompt(10), list[tuple[int, dict[str, NDArray[np.float32]]]]()
    for done in decode(recorder.target, recorder, prompt(10), DecodeOptions(max_new_tokens=15, gamma=4), Stats()):
        text += done.tokens
        found.append((len(recorder.slot.tokens), recorder.slot.snapshot()))
    original.write(other, text, 2)
    expected = other.slot.snapshot()
    assert found[-1][0] > 20
    for count, held in found:
        for name, values in held.items():
            np.testing.assert_allclose(values[:, :count], expected[name][:, :count], rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["original", "cut, not ascending"])
def test_guesses_are_drawn_from_what_it_says(
    opened: Callable[[str, Operators], Made], operators: Operators, kind: str
) -> None:
    """q is the arithmetic's distribution over the tokens of its LM head, nothing for others."""
    made = opened(kind, operators)
    recorder, reference = made.recorder(), Reference(made.checkpoint)
    sampling = SamplingParams(temperature=1.3, top_p=0.9, seed=4)
    made.write(recorder, prompt(11), 5, sampling=sampling)
    tokens, proposal = recorder.made[0]
    assert proposal.probs is not None
    ids, slot = np.array(tokens, np.int64), made.fresh
    slot.follow([])
    taps = np.concatenate([run_layers(slot, ids, 0, 0, at) for at in made.tapped], -1).astype(np.float64)
    guesses = slot.embed(proposal.tokens[:-1]).astype(np.float64)
    logits = reference.logits(slot.embed(ids).astype(np.float64), taps[:-1], guesses)
    for row, q in zip(logits, proposal.probs, strict=True):
        whole = np.full(1024, -np.inf, np.float32)
        whole[reference.ids] = row
        np.testing.assert_allclose(q, distribution(whole, sampling, tokens), atol=2e-3)
    assert (proposal.probs[np.arange(len(proposal)), proposal.tokens] > 0).all()


def test_taps_change_no_bit_of_the_target(original: Made) -> None:
    slot, tokens = open_slot(original.model), np.array(prompt(9), np.int64)
    slot.prefill(prompt(30, 4))
    plain = slot.forward(tokens).logits.copy()
    output = slot.run(Pass(tokens, aux_hidden=True))
    np.testing.assert_array_equal(output.logits, plain)
    assert output.aux_hidden is not None
    assert output.aux_hidden.shape == (9, 3 * 128)
    assert slot.forward(tokens).aux_hidden is None or original.model.graph.operators == "stock"


def test_a_drafter_that_fails_costs_no_text(original: Made) -> None:
    """NaN in the taps: decoding continues plainly, and the next request drafts again."""
    recorder = original.recorder()
    expected = original.write(recorder, prompt(8), 12)[0]
    recorder._states = np.full_like(recorder._states, np.nan)
    spoiled, whole = original.recorder(), original.recorder()
    absorb = spoiled.absorb
    spoiled.absorb = lambda first, aux_hidden: absorb(first, aux_hidden * np.nan)  # type: ignore[method-assign]
    stats, text = Stats(), prompt(8)
    for done in decode(spoiled.target, spoiled, prompt(8), DecodeOptions(max_new_tokens=12), stats):
        text += done.tokens
    assert text == expected
    assert "finite" in str(stats.dropped_reason)
    del spoiled.absorb
    spoiled.made.clear()
    assert original.write(spoiled, prompt(8), 12)[0] == expected == original.write(whole, prompt(8), 12)[0]
    original.check(spoiled, 8)


def test_a_text_that_it_was_not_shown(original: Made) -> None:
    recorder = original.recorder()
    assert isinstance(recorder.target, Slot)
    recorder.target.prefill(prompt(9))
    assert recorder.propose(prompt(10), 4) is EMPTY
    assert "not shown" in recorder.reason
