"""The drafter of whole blocks guesses what the arithmetic says, whatever has happened before."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.errors import ExportError
from edgespec.export.bundle.drafter import check_drafter
from edgespec.export.bundle.model_part import open_model
from edgespec.export.drafters.drafter import cut_drafter
from edgespec.export.drafters.read import read_drafter
from tests.support.any_drafter import AnyDrafter, Pair, Recorder, prompt, same_entries
from tests.support.dflash import BLOCK, BlockReference, check_blocks, write_dflash
from tests.support.mtp import write_mtp

CUT = np.array([3, *range(9, 120), 150])
KINDS: dict[str, dict[str, Any]] = {
    "as its authors write it": {"layers": (0, 1, 2)},
    "as transformers does, cut": {"theirs": True, "tokens": CUT},
    "over a recurrent target": {"name": "qwen3_5_delta", "layers": (1, 3)},
    "that is accepted": {"agrees": True},
    "DFlash 2": {"layers": (0, 1, 2), "second": True},
    "DFlash 2, cut": {"second": True, "tokens": CUT},
    "DFlash 2 that is accepted": {"agrees": True, "second": True},
}


class Made(Pair):
    """A target and a drafter of a kind, opened."""

    def __init__(self, folder: Path, name: str = "qwen3_tied", tokens: Any = None, **how: Any) -> None:
        arch = open_model(write_mtp(folder / "target", name, agrees=True), 96)
        self.checkpoint = write_dflash(folder / "checkpoint", arch, **how)
        drafter = read_drafter(self.checkpoint, arch)
        head = arch.source.read(arch.head.weight).astype(np.float64)
        self.ids = np.arange(len(head)) if tokens is None else tokens
        self.head = head[self.ids]
        super().__init__(folder, arch, drafter if tokens is None else cut_drafter(drafter, tokens))

    def check(self, made: Recorder, least: int = 1, **broken: Any) -> None:
        tapped = broken.pop("tapped", self.tapped)
        reference = BlockReference(self.checkpoint, **broken)
        check_blocks(made, reference, self.fresh, tapped, self.head, self.ids, least)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    return cache(lambda kind: Made(tmp_path_factory.mktemp("dflash"), **KINDS[kind]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gamma", [2, BLOCK + 3])
def test_guesses_are_the_arithmetics(native: None, opened: Callable[[str], Made], kind: str, gamma: int) -> None:
    """In blocks that are shorter than trained, and in whole ones where more is asked for."""
    made = opened(kind)
    recorder = made.recorder()
    _, stats = made.write(recorder, prompt(11), 14, gamma=gamma)
    made.check(recorder, 8)
    assert max(len(proposal) for _, proposal in recorder.made) == min(gamma, BLOCK - 1)
    assert KINDS[kind].get("agrees", False) <= (0 < stats.accepted < stats.drafted)


class TestAgain(AnyDrafter):
    mistakes: tuple[dict[str, Any], ...] = (
        {"causal": True}, {"normed": True}, {"short": True}, {"early": True}, {"tapped": (0, 1, 2)},
        {"tapped": (3, 2, 1)},
    )  # fmt: skip

    @pytest.fixture
    def drawn(self, native: None, opened: Callable[[str], Made]) -> Made:
        return opened("as its authors write it")

    @pytest.fixture(params=["over a recurrent target", "that is accepted", "DFlash 2 that is accepted"])
    def made(self, request: pytest.FixtureRequest, native: None, opened: Callable[[str], Made]) -> Made:
        return opened(request.param)


@pytest.mark.parametrize("mistake", ["forward", "swapped", "anchored"])
def test_what_is_new_in_dflash_2_would_be_missed(native: None, opened: Callable[[str], Made], mistake: str) -> None:
    made = opened("DFlash 2")
    recorder = made.recorder()
    made.write(recorder, prompt(20), 14)
    with pytest.raises(AssertionError):
        made.check(recorder, **{mistake: True})


def test_entries_are_those_of_a_fresh_drafter(native: None, opened: Callable[[str], Made]) -> None:
    made = opened("that is accepted")
    recorder, other = made.recorder(), made.recorder()
    text, stats = made.write(recorder, prompt(10), 24, gamma=5)
    assert 0 < stats.accepted < stats.drafted
    made.write(other, text, 2)
    same_entries(recorder.slot, other.slot)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"dflash_config": {"target_layer_ids": [9], "mask_token_id": 2, "block_size": 6}}, "target_layer_ids"),
        ({"dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": 999, "block_size": 6}}, "token below"),
        ({"dflash_config": {"target_layer_ids": [0], "mask_token_id": 2, "block_size": 6}}, "fc.weight"),
        ({"conv_kernel_size": 2}, "kernel_projection"),
        ({"conv_kernel_size": 17}, "convolutions of 17 taps"),
        ({"conv_kernel_size": 2, "conv_group_size": 7}, "groups that divide"),
        ({"selector_rank": 8}, "candidate_selector"),
        ({"selector_rank": 8, "sample_from_anchor": True}, "first row guesses"),
        ({"hidden_size": 32}, "hidden size"),
    ],
    ids=str,
)
def test_what_is_not_for_this_model_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    arch = open_model(write_mtp(tmp_path / "target", "qwen3_tied"), 96)
    folder = write_dflash(tmp_path / "drafter", arch)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | change), "utf-8")
    with pytest.raises(ExportError, match=message):
        read_drafter(folder, arch)


def test_another_method_and_stock_operators_are_refused(tmp_path: Path) -> None:
    arch = open_model(write_mtp(tmp_path / "target", "qwen3_tied"), 96)
    drafter = read_drafter(write_dflash(tmp_path / "drafter", arch), arch)
    with pytest.raises(ExportError, match="--method dflash"):
        check_drafter(drafter, ["eagle"], "auto")
    with pytest.raises(ExportError, match="only native operators"):
        check_drafter(drafter, ["dflash"], "stock")
