"""Checkpoints as their authors' code writes them load, and guess in float32 what that code guesses, step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgespec.decoding.noise import Noise
from edgespec.decoding.sampling import SamplingParams
from edgespec.drafters.draft_cache import BlockCache, CorrectedBlockCache, draft_cache_of
from edgespec.drafters.draw import Draw
from edgespec.errors import ExportError
from edgespec.export.bundle.model_part import open_model
from edgespec.export.drafters.drafter import cut_drafter
from edgespec.export.drafters.read import read_drafter
from edgespec.export.drafters.vocabulary import with_tokens
from tests.support.any_drafter import Pair
from tests.support.published import CHAIN, CUT, REFERENCES, VOCAB, Published, contexts, known_keys, write_target

NAMES = sorted(path.stem for path in REFERENCES.glob("*.npz"))
GREEDY = SamplingParams(temperature=0)
# keys of config.json that another value of changes guesses, or is refused
SWITCHES: dict[str, list[dict[str, Any]]] = {
    "dflash_speculators": [
        {"sample_from_anchor": True}, {"aux_hidden_state_layer_ids": [1]}, {"mask_token_id": 7}, {"block_size": 5},
    ],
    "dspark_speculators": [{"sample_from_anchor": False}, {"markov_rank": 0}, {"markov_head_type": "gated"}],
    "eagle31_speculators": [
        {"fc_norm": False}, {"norm_output": False}, {"norm_before_residual": True},
        {"eagle_aux_hidden_state_layer_ids": [1, 2]},
    ],
    "peagle_speculators": [{"mask_token_id": 7}, {"norm_before_residual": False}, {"mask_token_id": None}],
    "dspark_deepspec": [{"mask_token_id": 7}, {"markov_rank": 16}, {"target_layer_ids": [0, 1, 2]}],
}  # fmt: skip


class Made:
    """A checkpoint of an archive, read and opened.

    Args:
        changed: keys of its config.json.
        tokens: what its LM head is made to score; None = what the checkpoint's does.
        mistaken: a tensor that another takes the place of.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        changed: Mapping[str, Any] | None = None,
        tokens: Any = None,
        mistaken: str | None = None,
    ) -> None:
        self.published, target = Published.read(name), write_target(folder / "target")
        arch = open_model(target, 96)
        checkpoint = self.published.write(folder / "checkpoint", target, changed)
        if mistaken:
            mistake(checkpoint / "model.safetensors", mistaken)
        self.drafter = read_drafter(checkpoint, arch)
        if tokens is not None:
            self.drafter = (
                with_tokens(self.drafter, arch, tokens) if self.drafter.own_head else cut_drafter(self.drafter, tokens)
            )
        recorder = Pair(folder, arch, self.drafter).recorder()
        self.cache = draft_cache_of(recorder.target, recorder.slot)
        self.taps = self.cache.no_states.shape[1]

    def guesses(self, most: int = 64) -> list[list[int]]:
        """Greedy guesses after each context."""
        found, block = [], isinstance(self.cache, BlockCache)
        for tokens, taps in contexts(self.taps):
            self._absorb(tokens, taps)
            how = Draw(tokens, VOCAB, GREEDY, Noise(0))
            made = self.cache.draw(taps[len(self.cache) :], how, most if block else CHAIN)
            found.append(made.tokens.tolist())
        return found

    def _absorb(self, tokens: list[int], taps: Any) -> None:
        self.cache.crop(0)
        rows = len(taps) - self.cache.deferred_rows
        if rows:
            self.cache.absorb(tokens[1 : 1 + rows], taps[:rows])

    def confidence(self) -> list[Any]:
        """Chances of the code's own guesses after each context."""
        assert isinstance(self.cache, CorrectedBlockCache)
        found = []
        for (tokens, taps), guesses in zip(contexts(self.taps), self.published.found["guesses"], strict=True):
            self._absorb(tokens, taps)
            inputs = self.cache._masked(tokens[-1], self.cache.guesses)
            found.append(self.cache.confidence(inputs, [tokens[-1], *guesses[:-1].tolist()]))
        return found


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    return cache(lambda name: Made(tmp_path_factory.mktemp("published"), name))


@pytest.mark.parametrize("name", NAMES)
def test_guesses_are_the_authors(native: None, opened: Callable[[str], Made], name: str) -> None:
    """Every tensor counts: those that nothing reads are copies of the target's, and t2d, which d2t says again."""
    made = opened(name)
    expected = made.published.found["guesses"].tolist()
    assert made.guesses() == expected
    assert len({guess for row in expected for guess in row}) > 10
    unread = set(made.published.shapes) - known_keys(made.drafter.arch)
    assert unread <= {"d2t", "t2d", "mask_hidden", "confidence_head.proj.weight", "confidence_head.proj.bias"} | (
        set() if name.startswith("peagle") else {"embed_tokens.weight"}
    ) or name.startswith("mtp")  # under other names


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("dspark")])
def test_confidence_is_the_authors(native: None, opened: Callable[[str], Made], name: str) -> None:
    made = opened(name)
    np.testing.assert_allclose(made.confidence(), made.published.found["confidence"], atol=1e-5)


def test_logits_are_as_large_as_the_authors(native: None, opened: Callable[[str], Made]) -> None:
    """EAGLE-1 norms nothing before its LM head: guesses are drawn from what that gives."""
    made = opened("eagle1")
    for (tokens, taps), logits in zip(contexts(made.taps), made.published.found["logits"], strict=True):
        made._absorb(tokens, taps)
        output = made.cache._forward(tokens[-1:], taps[-1:], False)
        np.testing.assert_allclose(made.cache._unnormed(output)[0], logits, rtol=0, atol=2e-4 * np.abs(logits).max())


def test_guesses_end_where_the_authors_code_ends_them(native: None, opened: Callable[[str], Made]) -> None:
    """At a threshold; by what rows cost they end earlier the more a row costs."""
    made = opened("dspark_deepspec")
    assert isinstance(made.cache, CorrectedBlockCache)
    found = made.published.found
    made.cache.threshold = 0.5
    try:
        assert [len(guesses) for guesses in made.guesses()] == found["counts"].tolist()
        assert 0 < found["counts"].sum() < found["guesses"].size
    finally:
        made.cache.threshold = None


@pytest.mark.parametrize("name, changed", [(name, each) for name, all_ in SWITCHES.items() for each in all_], ids=str)
def test_another_value_of_a_switch_is_noticed(native: None, tmp_path: Path, name: str, changed: dict[str, Any]) -> None:
    expected = Published.read(name).found["guesses"].tolist()
    with suppress(ExportError):
        assert Made(tmp_path, name, changed).guesses() != expected


def mistake(file: Path, key: str) -> None:
    """Put another tensor of the same shape in the place of one; where there is none, its own numbers, moved by one."""
    tensors = load_file(file)
    value = tensors[key]
    others = [each for each in tensors.values() if each.shape == value.shape and not np.array_equal(each, value)]
    moved = np.roll(value, 1) if value.size > 1 else value + 1
    save_file({**tensors, key: np.ascontiguousarray(others[0] if others else moved)}, file)


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_a_mistake_in_each_key_is_noticed(native: None, tmp_path: Path, name: str) -> None:
    """By other guesses, by another confidence, or because it is refused; but where nothing is read."""
    found = Published.read(name)
    unnoticed = set()
    for number, key in enumerate(found.shapes):
        with suppress(ExportError):
            made = Made(tmp_path / str(number), name, mistaken=key)
            sure = made.confidence() if name.startswith("dspark") else found.found.get("confidence")
            same = sure is None or np.allclose(sure, found.found["confidence"], atol=1e-5)
            if same and made.guesses() == found.found["guesses"].tolist():
                unnoticed.add(key)
    assert unnoticed <= {"t2d", "verifier_lm_head.weight"}


@pytest.mark.parametrize("name", ["dspark_speculators", "dspark_deepspec"])
def test_a_head_that_is_cut_guesses_the_best_of_what_is_left(
    native: None, opened: Callable[[str], Made], tmp_path: Path, name: str
) -> None:
    """With the rows of the Markov head that belong to them: all tokens that were guessed stay."""
    expected = Published.read(name).found["guesses"]
    left = np.union1d(np.unique(expected), np.array(CUT[::2]))
    assert Made(tmp_path, name, tokens=left).guesses() == expected.tolist()


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"dflash_config": {"projector_type": "domino"}}, "a recurrent head corrects its guesses"),
        ({"speculators_model_type": "dflash2"}, "convolutions and a selector"),
        ({"conv_kernel_size": 2}, "convolutions of DFlash 2"),
        ({"architectures": ["HydraModel"], "speculators_model_type": None}, "read each other's guesses"),
        ({"transformer_layer_config": {"layer_types": ["sliding_attention"] * 2}}, "layers with a window"),
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused_by_name(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    target = write_target(tmp_path / "target")
    folder = Published.read("dflash_speculators").write(tmp_path / "drafter", target, changed)
    with pytest.raises(ExportError, match=message):
        read_drafter(folder, open_model(target, None))
