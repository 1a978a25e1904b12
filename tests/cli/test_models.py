"""``edgespec models``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.export.architectures import ARCHITECTURES, VERIFIED
from tests.cli.conftest import Command


def test_all(command: Command) -> None:
    said = command("models", "--json").json
    assert [kind["model_type"] for kind in said["architectures"]] == list(ARCHITECTURES)
    assert all(kind["examples"] and kind["features"] for kind in said["architectures"])
    assert VERIFIED in said["verified"]
    shown = command("models").out
    assert all(name in shown for name in ARCHITECTURES)
    assert all(why in shown and all(name in shown for name in names) for why, names in said["refused"].items())
    refused = [name for names in said["refused"].values() for name in names]
    assert len(refused) == len(set(refused))
    assert not set(refused) & set(ARCHITECTURES)


@pytest.mark.parametrize(
    "name, context, expected",
    [
        ("mistral_window", None, ["windows of 16 in 3 of 3 layers", "4 heads of 32 in 64"]),
        ("gemma2_caps", None, ["windows of 16 in 2 of 3 layers", "scores capped at 2", "logits capped at 6"]),
        ("phi3_long", 4, ["longrope, short factors for a context of 4 (long ones beyond 4"]),
        ("phi3_long", None, ["longrope, long factors for a context of 512"]),
        ("smollm3_interval", None, ["1 layers without positions"]),
        ("stablelm_quarter", None, ["8 of 32 channels rotated", "untied LM head"]),
        ("gpt2_default", None, ["learned positions"]),
        ("hunyuan_alpha", None, ["norms of each head after rotation"]),
        ("ministral3_growth", None, ["queries grow beyond position 64"]),
        ("lfm2_conv", None, ["short convolutions of 3 tokens in 3 of 4 layers"]),
        ("qwen3_5_delta", None, ["gated delta rules in 3 of 4 layers", "4 states of 16 x 32", "gates on the output"]),
        (
            "gemma4_shared",
            None,
            [
                "heads of 16 and 32",
                "2 of 6 layers read keys and values of earlier ones",
                "embeddings of 16 in each layer",
                "proportional rotation in 2 of 6 layers",
            ],
        ),
        ("qwen3_moe_dense", None, ["3 of 7 experts of 32 in 2 of 3 layers"]),
        ("nanochat_capped", None, ["logits capped at 6"]),
        ("phi_half", None, ["LM head with a bias"]),
        ("qwen3_tied", None, ["norms of each head", "tied embeddings"]),
    ],
)
def test_one(
    command: Command, checkpoint: Callable[[str], Path], name: str, context: int | None, expected: list[str]
) -> None:
    more = [] if context is None else ["--context", str(context)]
    found = command("models", str(checkpoint(name)), *more, "--json").json
    for text in expected:
        assert any(trait.startswith(text) or text in trait for trait in found["traits"]), found["traits"]
    assert found["weight_bytes"]["fp32"] > found["weight_bytes"]["int8"] > found["weight_bytes"]["int4"]
    shown = command("models", str(checkpoint(name)), *more).out
    assert all(trait in shown for trait in found["traits"])


def test_what_is_not_supported(command: Command, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    config = json.loads((checkpoint("llama_tied_gqa") / "config.json").read_text("utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}), "utf-8")
    (tmp_path / "model.safetensors").write_bytes((checkpoint("llama_tied_gqa") / "model.safetensors").read_bytes())
    command("models", tmp_path).refused(1, "'mamba' is not supported (recurrent states", "gemma3_text")
    command("models", tmp_path / "nothing").refused(1, "no such folder")


def test_a_config_alone_is_enough(command: Command, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    whole = checkpoint("phi3_long")
    (tmp_path / "config.json").write_bytes((whole / "config.json").read_bytes())
    said = [command("models", folder, "--json").json for folder in (whole, tmp_path)]
    assert said[0].pop("model") != said[1].pop("model")
    assert said[0] == said[1]
    assert "longrope" in command("models", tmp_path).out
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    command("models", tmp_path).refused(1, "weights only as pickle")
