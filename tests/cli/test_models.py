"""``edgespec models``; models of which an export takes a part, or says something."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgespec.engine.loading import load
from edgespec.export.architectures import ARCHITECTURES, VERIFIED
from edgespec.export.architectures.descriptions import as_used_for
from edgespec.export.bundle.model_part import open_model
from edgespec.export.foreign import model as foreign_model
from edgespec.export.quantization.reference import reference_logits
from edgespec.runtimes.files.manifest import read_manifest
from tests.cli.conftest import Command
from tests.conftest import Reference
from tests.support import hf, saved


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


VISION = {"vision_config": {"model_type": "siglip"}, "image_token_id": 5}
# model_type, what config.json has in addition to the text part, its modality, where tensors are, the tower
SHAPES: dict[str, tuple[str, str, dict[str, Any], str, Callable[[str], str], str]] = {
    "llava": ("llama_tied_gqa", "llava", {"vision_config": {"a": 1}, "image_token_index": 7}, "images",
              lambda name: f"language_model.{name}", "vision_tower.a.weight"),
    "smolvlm": ("llama_tied_gqa", "smolvlm", VISION, "images",
                lambda name: name.replace("model.", "model.text_model.", 1), "model.vision_model.a.weight"),
    "gemma3": ("gemma3_new", "gemma3", VISION, "images",
               lambda name: name.replace("model.", "model.language_model.", 1), "model.vision_tower.a.weight"),
    "ministral3": ("ministral3_window", "mistral3", VISION, "images",
                   lambda name: name.replace("model.", "model.language_model.", 1), "model.vision_tower.a.weight"),
    "qwen2_audio": ("llama_tied_gqa", "qwen2_audio", {"audio_config": {"a": 1}}, "sound",
                lambda name: f"language_model.{name}", "audio_tower.a.weight"),
    "gemma3n": ("gemma4_alone", "gemma3n", {**VISION, "audio_config": {"a": 1}}, "images and sound",
               lambda name: name.replace("model.", "model.language_model.", 1), "model.audio_tower.a.weight"),
}  # fmt: skip


@pytest.fixture
def whole(tmp_path: Path) -> Callable[[str], Path]:
    """Name of ``SHAPES`` -> a checkpoint of a model that reads more than text."""

    def make(shape: str) -> Path:
        name, kind, more, _, outer, tower = SHAPES[shape]
        folder = hf.write_reference_checkpoint(tmp_path / shape, name)
        text = json.loads((folder / "config.json").read_text("utf-8"))
        (folder / "config.json").write_text(json.dumps({"model_type": kind, "text_config": text, **more}), "utf-8")
        tensors = load_file(folder / "model.safetensors")
        renamed = {outer(tensor) if shape != "smolvlm" or tensor != "lm_head.weight" else tensor: value
                   for tensor, value in tensors.items()}  # fmt: skip
        save_file({**renamed, tower: np.zeros((4, 4), np.float32)}, folder / "model.safetensors")
        return folder

    return make


@pytest.mark.parametrize("shape", sorted(SHAPES.keys() - {"smolvlm", "gemma3"}))
def test_it_is_refused_in_one_sentence_everywhere(
    command: Command, whole: Callable[[str], Path], tmp_path: Path, shape: str
) -> None:
    folder, what = whole(shape), SHAPES[shape][3]
    commands = [("models", folder), ("plan", folder), ("export", folder, "-o", tmp_path / "out")]
    said = [command(*one, "--json").failed(1) for one in commands]
    (folder / "model.safetensors").unlink()  # only config.json is left
    said += [command(*one, "--json").failed(1) for one in commands[:2]]
    assert len({json.dumps(error) for error in said}) == 1
    assert said[0]["message"].startswith(f"{folder}: this model reads {what}, and edgespec does not yet")
    assert ("gemma3, gemma4, idefics3" in said[0]["message"]) == ("images" in what)
    assert said[0]["hint"] == "--text-only takes its text half alone"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("shape", SHAPES)
def test_its_text_half_says_what_transformers_says(
    whole: Callable[[str], Path], reference: Callable[[str], Reference], shape: str
) -> None:
    arch, known = open_model(whole(shape), None, text_only=True), reference(SHAPES[shape][0])
    logits = reference_logits(arch, known.tokens.tolist(), known.rows.tolist())
    np.testing.assert_allclose(logits, known.logits, rtol=0, atol=1e-4)


def test_a_bundle_of_a_text_half_says_so(command: Command, whole: Callable[[str], Path], tmp_path: Path) -> None:
    folder, bundle = whole("llava"), tmp_path / "bundle"
    made = command("export", folder, "-o", bundle, "--text-only", "--threads", 1)
    assert made.code == 0
    assert "note: the text half alone: the model itself reads images" in made.out
    assert read_manifest(bundle).provenance["approximations"] == ["text alone: the source model also reads images"]
    assert "text half alone of a model that reads images" in " ".join(command("info", bundle).out.split())
    with load(bundle, threads=1) as engine:
        assert (
            "text alone: the source model also reads images" in engine.generate("The", max_new_tokens=3).approximations
        )
    assert "text half alone of a model that reads images" in command("models", folder, "--text-only").out
    planned = command("plan", folder, "--text-only", "--method", "ngram", "--budget", "4GiB", "--json").json
    assert "--text-only" in json.dumps(planned)


def test_a_model_of_text_needs_no_option(command: Command, tmp_path: Path) -> None:
    """Nor does one whose text part is wrapped, or whose configuration leaves other parts empty."""
    folder = hf.write_reference_checkpoint(tmp_path / "model", "gemma3_new")
    text = json.loads((folder / "config.json").read_text("utf-8"))
    for config in (text, text | {"vision_config": None}, {"model_type": "gemma3", "text_config": text}):
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
        for more in ((), ("--text-only",)):
            found = command("models", folder, *more, "--json").json
            assert not any("text half" in trait for trait in found["traits"])


def test_a_tower_that_no_configuration_names_is_seen(whole: Callable[[str], Path], command: Command) -> None:
    folder = whole("llava")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config["text_config"]), "utf-8")
    command("models", folder).refused(1, "this model reads images")


def test_a_text_half_that_is_not_supported_either(whole: Callable[[str], Path], command: Command) -> None:
    folder = whole("llava")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["text_config"]["model_type"] = "mixtral"
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    for more in ((), ("--text-only",)):
        error = command("models", folder, *more, "--json").failed(1)
        assert "reads images" in error["message"]
        assert error["hint"] == "take another model"


@pytest.mark.parametrize("missing", [None, "transformers is not installed here"])
@pytest.mark.parametrize(
    "config, words",
    [({"model_type": "longt5", "is_encoder_decoder": True}, "'longt5' is not supported: it needs local and transient"),
     ({"model_type": "led"}, "'led' is not supported: it needs windowed"),
     ({"model_type": "electra"}, "'electra' is an encoder"),
     ({"model_type": "plbart", "is_encoder_decoder": True}, "'plbart' is not supported: its layers are not described")],
)  # fmt: skip
def test_encoders_are_refused_by_name_without_useless_advice(
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
    words: str,
    missing: str | None,
) -> None:
    """Whether transformers is there or not: no graph of its that has an encoder can be run."""
    monkeypatch.setattr(foreign_model, "exporter_missing", lambda: missing)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    save_file({"shared.weight": np.zeros((4, 4), np.float32)}, folder / "model.safetensors")
    for one in (("models", folder), ("plan", folder), ("export", folder, "-o", tmp_path / "out")):
        error = command(*one, "--json").failed(1)
        assert words in error["message"]
        assert "optimum" not in error["message"] + error["hint"]


SHORT = 96
"""Tokens that `phi3_short_partial` was first trained on; it goes to 512."""


def test_the_export_warns_and_says_what_it_is(
    command: Command, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Parity is low where short texts are rotated as long ones: it is measured against what transformers does."""
    text = tmp_path / "text.txt"
    text.write_text("The harbour lights came on one after another. " * 3, "utf-8")
    options = ("--format", "fp32", "--threads", 1, "--calibration", text)
    source, found = checkpoint("phi3_short_partial"), {}
    for name, more in (("long", ()), ("short", ("--context", SHORT))):
        made = command("export", source, "-o", tmp_path / name, *options, *more)
        assert made.code == 0, made.err
        warned = f"warning: texts of up to {SHORT} tokens" in made.err and f"--context {SHORT}" in made.err
        with load(tmp_path / name, threads=1) as engine:
            said = [one for one in engine.generate("The", max_new_tokens=3).approximations if "rotation" in one]
        found[name] = warned, bool(said), read_manifest(tmp_path / name).parity
    assert [one[:2] for one in found.values()] == [(True, True), (False, False)]
    assert found["short"][2]["logit_max_error"] < 1e-3
    assert read_manifest(tmp_path / "long").cost["depth"] <= SHORT  # tokens of the text that was measured
    assert found["long"][2]["logit_max_error"] > 0.05
    assert "differs the rotation" in " ".join(command("info", tmp_path / "long").out.split())
    assert "differs" not in command("info", tmp_path / "short").out


@pytest.mark.parametrize("context", [SHORT, None])
def test_within_the_trained_length_nothing_differs(checkpoint: Callable[[str], Path], context: int | None) -> None:
    """For short texts the source uses its short factors, for any context length of the export."""
    arch, tokens = open_model(checkpoint("phi3_short_partial"), context), list(range(2, 42))
    short = reference_logits(open_model(checkpoint("phi3_short_partial"), SHORT), tokens)
    np.testing.assert_array_equal(reference_logits(as_used_for(arch, len(tokens)), tokens), short)
    assert np.abs(reference_logits(arch, tokens) - short).max() > 0.05 or context == SHORT
    assert as_used_for(arch, SHORT + 1) is arch


@pytest.mark.nightly
@pytest.mark.parametrize("length", [40, 120])
def test_the_source_is_used_as_transformers_does(checkpoint: Callable[[str], Path], length: int) -> None:
    pytest.importorskip("transformers", "5.0", reason="needs transformers 5")
    import torch
    from transformers import AutoModelForCausalLM

    folder = checkpoint("phi3_short_partial")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    tokens = np.random.default_rng(3).integers(2, saved.saved("phi3_short_partial")["config"]["vocab_size"], length)
    with torch.inference_mode():
        expected = model(input_ids=torch.from_numpy(tokens)[None], use_cache=False).logits[0].numpy()
    arch = as_used_for(open_model(folder, None), length)
    np.testing.assert_allclose(reference_logits(arch, tokens.tolist()), expected, rtol=0, atol=2e-4)
