"""Models that read images or sound are refused in one sentence everywhere; `--text-only` takes their text half."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgespec.engine.loading import load
from edgespec.export.bundle.model import open_model
from edgespec.export.optimum import model as foreign_model
from edgespec.export.quantization.reference import reference_logits
from edgespec.runtimes.files.manifest import read_manifest
from tests.cli.conftest import Command
from tests.conftest import Reference
from tests.support import hf

VISION = {"vision_config": {"model_type": "siglip"}, "image_token_id": 5}
# model_type, what config.json has beside the text part, what it reads, where tensors lie, the tower
SHAPES: dict[str, tuple[str, str, dict[str, Any], str, Callable[[str], str], str]] = {
    "llava": ("llama_tied_gqa", "llava", {"vision_config": {"a": 1}, "image_token_index": 7}, "images",
              lambda name: f"language_model.{name}", "vision_tower.a.weight"),
    "smolvlm": ("llama_tied_gqa", "smolvlm", VISION, "images",
                lambda name: name.replace("model.", "model.text_model.", 1), "model.vision_model.a.weight"),
    "gemma3": ("gemma3_new", "gemma3", VISION, "images",
               lambda name: name.replace("model.", "model.language_model.", 1), "model.vision_tower.a.weight"),
    "ministral3": ("ministral3_window", "mistral3", VISION, "images",
                   lambda name: name.replace("model.", "model.language_model.", 1), "model.vision_tower.a.weight"),
    "voxtral": ("llama_tied_gqa", "voxtral", {"audio_config": {"a": 1}}, "sound",
                lambda name: f"language_model.{name}", "audio_tower.a.weight"),
    "gemma4": ("gemma4_alone", "gemma4", {**VISION, "audio_config": {"a": 1}}, "images and sound",
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


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_refused_in_one_sentence_everywhere(
    command: Command, whole: Callable[[str], Path], tmp_path: Path, shape: str
) -> None:
    folder, what = whole(shape), SHAPES[shape][3]
    commands = [("models", folder), ("plan", folder), ("export", folder, "-o", tmp_path / "out")]
    said = [command(*one, "--json").failed(1) for one in commands]
    (folder / "model.safetensors").unlink()  # config.json alone
    said += [command(*one, "--json").failed(1) for one in commands[:2]]
    assert len({json.dumps(error) for error in said}) == 1
    assert said[0]["message"] == f"{folder}: this model reads {what}, and edgespec does not yet"
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
        assert error["hint"] == "take a model that reads text alone"


@pytest.mark.parametrize("missing", [None, "optimum is not installed here"])
@pytest.mark.parametrize(
    "config",
    [{"model_type": "t5", "is_encoder_decoder": True}, {"model_type": "bert"},
     {"model_type": "other", "is_encoder_decoder": True}],
)  # fmt: skip
def test_encoders_are_refused_by_name_without_useless_advice(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], missing: str | None
) -> None:
    """Whether optimum is there or not: no graph of its that has an encoder can be run."""
    monkeypatch.setattr(foreign_model, "optimum_missing", lambda: missing)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    save_file({"shared.weight": np.zeros((4, 4), np.float32)}, folder / "model.safetensors")
    for one in (("models", folder), ("plan", folder), ("export", folder, "-o", tmp_path / "out")):
        error = command(*one, "--json").failed(1)
        assert f"architecture '{config['model_type']}' is not supported: it has an encoder" in error["message"]
        assert "optimum" not in error["message"] + error["hint"]
