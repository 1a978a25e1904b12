"""The layer inside a checkpoint guesses what its arithmetic says, whatever has happened before."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgespec.errors import ExportError
from edgespec.export.bundle.model_part import open_model
from edgespec.export.drafters.drafter import cut_drafter
from edgespec.export.drafters.mtp import read_mtp
from edgespec.export.source.source import Checkpoint
from edgespec.runtimes.files.manifest import Operators
from edgespec.runtimes.slots.slot import Slot
from tests.support import hf
from tests.support.any_drafter import AnyDrafter, Pair, Recorder, check_guesses, prompt, same_entries
from tests.support.mtp import MtpReference, write_mtp

CUT = np.array([3, *range(9, 120), 150])
KINDS: dict[str, dict[str, Any]] = {
    "gated": {"name": "qwen3_5_delta"},
    "with biases, cut": {"name": "qwen3_5_biases", "tokens": CUT},
    "gated, cut": {"name": "qwen3_5_delta", "tokens": CUT, "agrees": True},
    "of a dense model": {"name": "qwen3_tied"},
    "hidden state first": {"name": "qwen3_tied", "mimo": True, "agrees": True},
}


class Made(Pair):
    """A target with such a layer, opened."""

    def __init__(self, folder: Path, operators: Operators, name: str, tokens: Any = None, **how: Any) -> None:
        self.checkpoint, self.tokens = write_mtp(folder / "checkpoint", name, **how), tokens
        arch = open_model(self.checkpoint, 96)
        drafter = read_mtp(Checkpoint.open(self.checkpoint), arch)
        super().__init__(folder, arch, drafter if tokens is None else cut_drafter(drafter, tokens), operators)

    def check(self, made: Recorder, least: int = 1, **broken: Any) -> None:
        tapped = broken.pop("tapped", self.tapped)
        check_guesses(made, MtpReference(self.checkpoint, self.tokens, **broken), self.fresh, tapped, least)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Made]:
    return cache(lambda kind, operators="native": Made(tmp_path_factory.mktemp("mtp"), operators, **KINDS[kind]))


@pytest.mark.parametrize("kind", KINDS)
def test_guesses_are_the_arithmetics(native: None, opened: Callable[..., Made], kind: str) -> None:
    made = opened(kind)
    recorder = made.recorder()
    _, stats = made.write(recorder, prompt(11), 12)
    made.check(recorder, 12)
    assert bool(KINDS[kind].get("agrees")) <= (stats.accepted > 0)


def test_stock_operators_guess_the_same(opened: Callable[..., Made]) -> None:
    made = opened("of a dense model", "stock")
    recorder = made.recorder()
    made.write(recorder, prompt(11), 8)
    made.check(recorder, 12)


@pytest.mark.parametrize("branch", [(2,), (2, 2, 1)])
def test_trees(native: None, opened: Callable[..., Made], branch: tuple[int, ...]) -> None:
    made = opened("gated, cut")
    recorder = made.recorder(branch)
    text, _ = made.write(recorder, prompt(11), 12)
    made.check(recorder, 20)
    assert text == made.write(made.recorder(), prompt(11), 12)[0]


class TestAgain(AnyDrafter):
    mistakes = ({"swapped": True}, {"late": True}, {"raw": True}, {"unnormed": True}, {"closed": True}, {"turned": 0.5},
                {"plain": True}, {"tapped": (3,)})  # fmt: skip

    @pytest.fixture
    def drawn(self, native: None, opened: Callable[..., Made]) -> Made:
        return opened("gated")

    @pytest.fixture
    def made(self, native: None, opened: Callable[..., Made]) -> Made:
        return opened("gated, cut")


def test_entries_are_those_of_a_fresh_drafter(native: None, opened: Callable[..., Made]) -> None:
    """So are the target's states, after rounds with accepted and with rejected draft tokens."""
    made = opened("gated, cut")
    recorder, other = made.recorder(), made.recorder()
    text, stats = made.write(recorder, prompt(10), 24)
    assert 0 < stats.accepted < stats.drafted
    made.write(other, text, 2)
    assert isinstance(recorder.target, Slot)
    made.fresh.follow([])
    made.fresh.prefill(recorder.target.tokens)
    same_entries(recorder.slot, other.slot)
    same_entries(recorder.target, made.fresh)


def test_layers_of_other_families_are_refused_by_name(tmp_path: Path) -> None:
    """DeepSeek's and GLM-4.5's names; their models, and MiMo's, are refused before that."""
    checkpoint = hf.write_reference_checkpoint(tmp_path / "model", "llama_tied_gqa")
    weights = checkpoint / "model.safetensors"
    save_file({**load_file(weights), "model.layers.2.eh_proj.weight": np.zeros((4, 8), np.float32)}, weights)
    with pytest.raises(ExportError, match="as DeepSeek and GLM"):
        read_mtp(Checkpoint.open(checkpoint), open_model(checkpoint, None))
    config = json.loads((checkpoint / "config.json").read_text("utf-8"))
    reasons = {"mimo": "code of its own", "mimo_v2_flash": "mixtures of experts", "glm4_moe": "mixtures of experts",
               "deepseek_v3": "mixtures of experts"}  # fmt: skip
    for kind, reason in reasons.items():
        (checkpoint / "config.json").write_text(json.dumps(config | {"model_type": kind}), "utf-8")
        with pytest.raises(ExportError, match=f"'{kind}' is not supported .{reason}"):
            open_model(checkpoint, None)
