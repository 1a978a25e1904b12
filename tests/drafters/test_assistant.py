"""An assistant that reads the target's keys and values guesses what its arithmetic says, whatever happened before."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.decoding.drafter import Drafter
from edgespec.decoding.policy import Policy
from edgespec.decoding.proposal import EMPTY, Proposal
from edgespec.decoding.target import Output, Pass
from edgespec.errors import ExportError
from edgespec.export.bundle.drafter import check_drafter
from edgespec.export.bundle.model_part import open_model
from edgespec.export.drafters.drafter import cut_drafter
from edgespec.export.drafters.read import read_drafter
from edgespec.runtimes.files.formats import Attention
from edgespec.runtimes.files.kv import ATTENTION
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.native_batch import NativeBatch
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot
from tests.support.any_drafter import AnyDrafter, Pair, Recorder, prompt
from tests.support.assistant import (
    STEP,
    AssistantReference,
    check_assistant,
    step_inputs,
    write_assistant,
    write_target,
)
from tests.support.mtp import write_mtp
from tests.support.zoo import GEMMA_4

CUT = np.array([3, *range(9, 120), 150])
KINDS: dict[str, dict[str, Any]] = {"random": {}, "cut": {"tokens": CUT}, "accepted": {"agrees": True}}


class Made(Pair):
    """A target and an assistant of a kind, opened."""

    def __init__(self, folder: Path, tokens: Any = None, **how: Any) -> None:
        self.arch = arch = open_model(write_target(folder / "target"), 96)
        self.checkpoint = write_assistant(folder / "checkpoint", arch, **how)
        drafter = read_drafter(self.checkpoint, arch)
        self.ids = np.arange(arch.facts.vocab) if tokens is None else tokens
        self.folder = folder
        super().__init__(folder, arch, drafter if tokens is None else cut_drafter(drafter, tokens))

    def check(self, made: Recorder, least: int = 1, **broken: Any) -> None:
        norm = self.arch.source.read(self.arch.final_norm.weight).astype(np.float64)
        reference = AssistantReference(self.checkpoint, norm, **broken)
        check_assistant(made, reference, self.fresh, self.arch, self.ids, least)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    return cache(lambda kind: Made(tmp_path_factory.mktemp("assistant"), **KINDS[kind]))


@pytest.mark.parametrize("kind", KINDS)
def test_guesses_are_the_arithmetics(native: None, opened: Callable[[str], Made], kind: str) -> None:
    """Also past the window, of text and of draft tokens."""
    made = opened(kind)
    recorder = made.recorder()
    _, stats = made.write(recorder, prompt(9), 14)
    made.check(recorder, 16)
    assert KINDS[kind].get("agrees", False) <= (0 < stats.accepted < stats.drafted)


class TestAgain(AnyDrafter):
    mistakes = tuple({name: True} for name in ("raw", "swapped", "advances", "stale", "short", "scored", "unscaled",
                                               "unnormed", "halves"))  # fmt: skip

    @pytest.fixture
    def made(self, native: None, opened: Callable[[str], Made]) -> Made:
        return opened("accepted")

    @pytest.fixture
    def drawn(self, native: None, opened: Callable[[str], Made]) -> Made:
        return opened("random")


def test_rounds_that_others_won(native: None, opened: Callable[[str], Made]) -> None:
    """The second branch of a tree is accepted: the target's next pass moves its keys."""
    made = opened("accepted")
    text, _ = made.write(made.recorder(), prompt(12), 24)
    recorder = made.recorder()
    chain = Policy([Fork(text), recorder])
    assert made.write(recorder, prompt(12), 24, around=chain)[0] == text
    assert min(chain.won.values()) > 2
    made.check(recorder, 8)


def test_the_step_that_is_timed_is_that_of_rounds(
    native: None, opened: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row after all that the target holds, with the drafter's hidden state, and only the best token."""
    made = opened("accepted")
    recorder, seen = made.recorder(), list[tuple[int, tuple[int, ...], bool, bool]]()
    target, run = recorder.target, recorder.slot.run
    assert isinstance(target, Slot)

    def spied(wanted: Pass) -> Output:
        assert wanted.of is target
        assert wanted.visible is not None
        assert wanted.inputs is not None
        seen.append((int(wanted.visible[0]), wanted.inputs.shape, not wanted.fused, wanted.top == 1))
        return run(wanted)

    monkeypatch.setattr(recorder.slot, "run", spied)
    text, _ = made.write(recorder, prompt(9), 8)
    of_rounds, rows = {each[1:] for each in seen}, len(target.tokens)
    assert {rows for rows, *_ in seen} <= set(range(8, len(text) - 1))
    seen.clear()
    assert recorder.benchmark_step()
    assert not recorder.benchmark_step(first=True)  # it reads as much as any other
    assert [each[0] for each in seen] == [rows]
    assert {each[1:] for each in seen} <= of_rounds
    assert seen[0][2:] == (True, True)
    target.follow([])
    assert recorder.benchmark_step()
    assert seen[-1][0] == 1  # of nothing, before the first request


class Fork(Drafter):
    """Drafts a wrong token and the right one as siblings, in every second round."""

    name = "fork"

    def __init__(self, text: list[int]) -> None:
        self.text, self.round = text, 0

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        self.round += 1
        if self.round % 2:
            return EMPTY
        right = self.text[len(tokens)]
        return Proposal(np.array([right - 1, right]), np.array([-1, -1]))


def test_two_lanes(native: None, opened: Callable[[str], Made]) -> None:
    """Caches whose blocks are in one pool."""
    made = opened("accepted")
    lanes = NativeBatch(made.model, 2)
    first, second = (Recorder(slot, open_slot(made.drafter, reserve=1)) for slot in lanes.slots)
    text, _ = made.write(first, prompt(12), 6)
    made.write(second, prompt(70, 3), 6)
    made.write(first, text, 6)
    for recorder in (first, second):
        made.check(recorder, 6)


@pytest.mark.parametrize("name", ["f16", "int8"])
def test_keys_that_are_kept_in_other_formats(native: None, opened: Callable[[str], Made], name: Attention) -> None:
    made = opened("accepted")
    model = Model(made.folder, made.model.part, "native", 1, ATTENTION[name])
    recorder = Recorder(open_slot(model, reserve=1), open_slot(made.drafter, reserve=1))
    _, stats = made.write(recorder, prompt(20), 14)
    assert stats.accepted > 0
    norm = made.arch.source.read(made.arch.final_norm.weight).astype(np.float64)
    check_assistant(recorder, AssistantReference(made.checkpoint, norm), open_slot(model), made.arch, made.ids, 10)


@pytest.mark.parametrize(
    "change, text, message",
    [
        ({"backbone_hidden_size": 96}, {}, "hidden size 96"),
        ({}, {"vocab_size": 99}, "vocabulary 99"),
        ({}, {"num_key_value_heads": 4}, "key heads 4"),
        ({}, {"global_head_dim": 64}, "head sizes"),
        ({}, {"sliding_window": 9}, "window 9"),
        ({}, {"hidden_size": 80}, "expected at most 64"),
        ({}, {"rope_parameters": GEMMA_4 | {"sliding_attention": {"rope_theta": 500.0}}}, "rope_parameters"),
        ({}, {"intermediate_size": 40}, "config.json implies"),
    ],
    ids=str,
)
def test_what_is_not_for_this_model_is_refused(
    tmp_path: Path, change: dict[str, Any], text: dict[str, Any], message: str
) -> None:
    arch = open_model(write_target(tmp_path / "target"), 96)
    folder = write_assistant(tmp_path / "drafter", arch)
    config = json.loads((folder / "config.json").read_text("utf-8")) | change
    config["text_config"] |= text
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(ExportError, match=message):
        read_drafter(folder, arch)


@pytest.mark.usefixtures("native")
def test_another_model_method_and_operators_are_refused(tmp_path: Path, opened: Callable[[str], Made]) -> None:
    made = opened("random")
    with pytest.raises(ExportError, match="an assistant of Gemma 4"):
        read_drafter(made.checkpoint, open_model(write_mtp(tmp_path / "other", "qwen3_tied"), 96))
    drafter = read_drafter(made.checkpoint, made.arch)
    with pytest.raises(ExportError, match="--method assistant"):
        check_drafter(drafter, ["eagle"], "auto")
    with pytest.raises(ExportError, match="only native operators"):
        check_drafter(drafter, ["assistant"], "stock")


def test_the_reference_is_transformers(tmp_path: Path) -> None:
    """Logits and the next step's hidden state, of one step over random keys and values."""
    arch = open_model(write_target(tmp_path / "target"), 96)
    reference = AssistantReference(write_assistant(tmp_path / "drafter", arch), np.ones(arch.facts.hidden))
    _, y = reference.step(*step_inputs(arch.facts.hidden))
    with np.load(STEP) as found:
        for name, key in (("model.embed_tokens", "logits"), ("post_projection", "state")):
            np.testing.assert_allclose(reference.tensors[f"{name}.weight"] @ y, found[key], rtol=0, atol=1e-4)
