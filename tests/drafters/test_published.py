"""Checkpoints as their authors' code writes them load, and guess in float32 what that code guesses, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
from edgespec.drafters.sampling_drafts import Draw
from edgespec.errors import ExportError
from edgespec.export.bundle.model import write_model
from edgespec.export.bundle.model_part import ModelSpec, open_model
from edgespec.export.drafters.drafter import cut_drafter
from edgespec.export.drafters.head_choice import HeadChoice
from edgespec.export.drafters.heads import read_heads
from edgespec.export.drafters.read import read_drafter
from edgespec.export.drafters.vocabulary import with_tokens
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.shared import Model
from tests.support.any_drafter import Pair
from tests.support.passes import run_heads, states
from tests.support.published import CHAIN, CUT, REFERENCES, VOCAB, Published, contexts, known_keys, write_target

EVERY = sorted(path.stem for path in REFERENCES.glob("*.npz"))
NAMES = [name for name in EVERY if not name.startswith("medusa")]
# they differ in one switch
VARIANTS = ("dflash_speculators_anchor", "dspark_speculators_no_anchor", "eagle3_speculators")
GREEDY = SamplingParams(temperature=0)
# words of a config.json that change no guess: who wrote it, how it was trained, how guesses are asked for; sizes that
# the tensors say; windows and caches of which none is used
UNREAD = {
    "architectures", "auto_map", "dtype", "speculators_version", "transformers_version", "model_type", "name_or_path",
    "attention_dropout", "initializer_range", "embed_requires_grad", "num_anchors", "pretraining_tp", "bos_token_id",
    "eos_token_id", "pad_token_id", "algorithm", "default_proposal_method", "proposal_methods",
    "draft_vocab_size", "vocab_size", "target_hidden_size", "num_target_layers", "num_nextn_predict_layers",
    "tie_word_embeddings", "max_position_embeddings", "use_cache", "max_window_layers", "sliding_window",
    "use_sliding_window", "sliding_window_non_causal",
}  # fmt: skip
UNREAD_BY = {
    "eagle3_speculators": {"head_dim", "num_hidden_layers"},
    "eagle31_speculators": {"head_dim", "num_hidden_layers"},
    "peagle_speculators": {"head_dim", "num_hidden_layers", "norm_output"},  # its own state is never read again
    "mtp_speculators": {"num_hidden_layers"},
}
READ_BY = {"mtp_speculators": {"model_type"}, "dspark_deepspec": {"architectures"}}


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
            own = self.drafter.spec.own_head
            self.drafter = with_tokens(self.drafter, arch, tokens) if own else cut_drafter(self.drafter, tokens)
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
            self.cache.append(tokens[1 : 1 + rows], taps[:rows])

    def seen(self) -> tuple[Any, ...]:
        """All that a mistake could change."""
        guesses, sure = self.guesses(), getattr(self.cache, "_sure", None) is not None
        as_many = len(guesses[0]) == len(self.published.found["guesses"][0])
        return self.drafter.tapped, guesses, [each.tolist() for each in self.confidence()] if sure and as_many else None

    def confidence(self) -> list[Any]:
        """Return the confidence of the reference code's draft tokens after each context."""
        assert isinstance(self.cache, CorrectedBlockCache)
        found = []
        for (tokens, taps), guesses in zip(contexts(self.taps), self.published.found["guesses"], strict=True):
            self._absorb(tokens, taps)
            inputs = self.cache._masked(tokens[-1], self.cache.guesses)
            found.append(self.cache.confidence(inputs, [tokens[-1], *guesses[:-1].tolist()]))
        return found


class MadeHeads:
    """Medusa's heads of an archive, with the target."""

    def __init__(self, folder: Path, name: str, mistaken: str | None = None) -> None:
        self.published, target = Published.read(name), write_target(folder / "target")
        checkpoint = self.published.write(folder / "checkpoint", target)
        if mistaken:
            mistake(checkpoint / self.published.file, mistaken)
        arch, heads = open_model(target, 96), HeadChoice({"medusa": read_heads(checkpoint)})
        heads.extend(arch)
        part = write_model(folder, arch, ModelSpec("fp32", gated=True, plan=heads.plan, layout="native")).part
        self.slot = open_slot(Model(folder, part, "native", 1))

    def seen(self) -> list[list[list[float]]]:
        """Logits of each head after each context."""
        found = []
        for tokens, _ in contexts(1):
            self.slot.follow([])
            hidden = states(self.slot, np.array(tokens, np.int64)).hidden
            assert hidden is not None
            logits = run_heads(self.slot, "medusa", hidden[-1:].copy()).logits
            found.append(logits[:, 0].tolist())
        return found


def make(folder: Path, name: str, **wrong: Any) -> Made | MadeHeads:
    """Open an archive of either kind."""
    return MadeHeads(folder, name, **wrong) if name.startswith("medusa") else Made(folder, name, **wrong)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    return cache(lambda name: make(tmp_path_factory.mktemp("published"), name))


@pytest.mark.parametrize("own", ["", "_own"])
def test_guesses_of_heads_are_the_authors(native: None, opened: Callable[[str], MadeHeads], own: str) -> None:
    """Which share the target's LM head, or each have one; config.json says nothing that the tensors do not say."""
    made = opened(f"medusa1{own}")
    assert np.array(made.seen()).argmax(-1).tolist() == made.published.found["guesses"].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_guesses_are_the_authors(native: None, opened: Callable[[str], Made], name: str) -> None:
    """Every tensor counts: the unused ones are copies of the target's, and t2d, which is redundant with d2t."""
    made = opened(name)
    expected = made.published.found["guesses"].tolist()
    assert made.guesses() == expected
    assert len({guess for row in expected for guess in row}) > 10
    unread = {key for key in made.published.shapes if not key.startswith("candidate_selector.")}  # in their own file
    unread -= known_keys(made.drafter.arch)
    assert unread <= {"d2t", "t2d", "mask_hidden", "confidence_head.proj.weight", "confidence_head.proj.bias"} | (
        set() if name.startswith("peagle") else {"embed_tokens.weight"}
    ) or name.startswith("mtp")  # under other names


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("dspark")])
def test_confidence_is_the_authors(native: None, opened: Callable[[str], Made], name: str) -> None:
    made = opened(name)
    np.testing.assert_allclose(made.confidence(), made.published.found["confidence"], atol=1e-5)


@pytest.mark.parametrize("name", [name for name in NAMES if "logits" in Published.read(name).found])
def test_logits_are_as_large_as_the_authors(native: None, opened: Callable[[str], Made], name: str) -> None:
    """EAGLE-1 has no norm before its LM head, and its draft tokens are sampled from the result."""
    made = opened(name)
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


def switches(config: Mapping[str, Any], unread: set[str]) -> Iterator[dict[str, Any]]:
    """For each word of a configuration, at any depth: a configuration with another value of it."""
    for key, value in config.items():
        if key in unread or value is None:
            continue
        if isinstance(value, dict):
            yield from ({**config, key: changed} for changed in switches(value, unread))
        elif key == "layer_types":
            yield {**config, key: ["sliding_attention"] * len(value), "sliding_window": 3, "use_sliding_window": True}
        else:
            yield {**config, key: another(value)}


def another(value: Any) -> Any:
    """Return another value of a word, of the same type and as far as can be a possible one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, list):
        return [another(each) for each in value]
    if isinstance(value, float):
        return 100 * value if value > 1 else 1.0
    return "other" if isinstance(value, str) else value - 1


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if name in VARIANTS else ()) for name in NAMES]
)
def test_another_value_of_each_switch_is_noticed(
    native: None, opened: Callable[[str], Made], tmp_path: Path, name: str
) -> None:
    unread = (UNREAD | UNREAD_BY.get(name, set())) - READ_BY.get(name, set())
    changes = list(switches(opened(name).published.config, unread))
    assert len(changes) > 5
    unnoticed = [
        changed
        for number, changed in enumerate(changes)
        if not noticed(opened(name), tmp_path / str(number), changed=changed)
    ]
    assert not unnoticed


def noticed(right: Made | MadeHeads, folder: Path, **wrong: Any) -> bool:
    """Whether a mistake changes draft tokens, confidence or taps, or raises an error."""
    with suppress(ExportError):
        return make(folder, right.published.name, **wrong).seen() != right.seen()
    return True


def mistake(file: Path, key: str) -> None:
    """Replace a tensor by another one of the same shape, or otherwise by its own numbers, moved by one."""
    tensors = load_file(file)
    value = tensors[key]
    others = [each for each in tensors.values() if each.shape == value.shape and not np.array_equal(each, value)]
    moved = np.roll(value, 1) if value.size > 1 else value + 1
    save_file({**tensors, key: np.ascontiguousarray(others[0] if others else moved)}, file)


@pytest.mark.nightly
@pytest.mark.parametrize("name", EVERY)
def test_a_mistake_in_each_key_is_noticed(
    native: None, opened: Callable[[str], Made], tmp_path: Path, name: str
) -> None:
    keys = opened(name).published.shapes
    unnoticed = {key for at, key in enumerate(keys) if not noticed(opened(name), tmp_path / str(at), mistaken=key)}
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
        ({"speculators_model_type": "xpress"}, "'xpress': passes that refine all guesses"),
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
