"""Drafting whole blocks reproduces plain decoding's text, greedy, sampled and quantized."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgespec.decoding.settings import Settings
from edgespec.engine.loading import load
from edgespec.errors import EdgespecError, ExportError
from edgespec.export.bundle.model_part import open_model
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.planning.footprint import memory_of
from edgespec.runtimes.files.formats import Format
from edgespec.runtimes.options import RunOptions
from tests.support import hf
from tests.support.dflash import BLOCK, MASK, write_dflash
from tests.support.mtp import write_mtp
from tests.support.planned import plan_of
from tests.support.requests import assert_plain_text, said_of

LOUD = 77  # a token that the model hardly writes
PROMPTS = ("The harbour lights came on", "and the ferry", "went down")


def options(folder: Path, form: Format, method: str = "dflash") -> ExportOptions:
    model = write_mtp(folder / "model", "qwen3_tied", agrees=True)
    drafter = write_dflash(
        folder / "drafter",
        open_model(model, None),
        agrees=True,
        spark=method == "dspark",
        second=method == "dflash2",
    )
    wanted = method.removesuffix("2")
    return ExportOptions(
        str(model), folder / "bundle", [wanted], form, operators="native", threads=1, drafter=str(drafter)
    )


@pytest.mark.parametrize(
    "form, method",
    [("int4", "dflash"), ("int8", "dflash"), ("fp32", "dflash"), ("int4", "dspark"),
     ("int8", "dspark"), ("int4", "dflash2"), ("int8", "dflash2"), ("fp32", "dflash2")],
)  # fmt: skip
def test_blocks_are_lossless(native: None, tmp_path: Path, form: Format, method: str) -> None:
    made = options(tmp_path, form, method)
    manifest, method = export_model(made, golden=False), method.removesuffix("2")
    assert manifest.drafter is not None
    assert manifest.drafter.decoder is not None
    assert (manifest.drafter.decoder.kind, manifest.drafter.decoder.block) == (method, BLOCK)
    assert manifest.methods[method].gamma < BLOCK
    greedy = Settings(max_new_tokens=40, ignore_eos=True, fallback=False, adaptive=False, gamma=4)
    drawn = greedy.changed(temperature=0.5, seed=3, acceptance="coupled")
    selector = memory_of(manifest, RunOptions(method, context=64)).part("draft selector")
    assert (selector.file > 0) == (manifest.drafter.decoder.selector is not None)
    with load(made.output, threads=1, operators="native") as engine:
        assert_plain_text(engine, method, PROMPTS, greedy, drawn)
        rejected = engine.generate(PROMPTS[0], greedy.changed(temperature=1.0, seed=1), method=method)
        assert rejected.lossless
        assert len(rejected.tokens) == 40


def test_stock_operators_say_that_they_cannot(native: None, tmp_path: Path) -> None:
    made = options(tmp_path, "int8")
    export_model(made, golden=False)
    settings = Settings(max_new_tokens=8, ignore_eos=True)
    with load(made.output, threads=1, operators="stock") as engine:
        assert len(engine.generate(PROMPTS[0], settings, method="ngram").tokens) == 8
        assert len(engine.generate(PROMPTS[0], settings).tokens) == 8
        with pytest.raises(EdgespecError, match="native operators"):
            engine.generate(PROMPTS[0], settings, method="dflash")


def test_a_plan_by_the_configuration(native: None, tmp_path: Path) -> None:
    model = write_mtp(tmp_path / "model", "qwen3_tied")
    planned = plan_of(model, methods=["dflash"])
    assert planned.drafter is not None
    assert planned.drafter.facts.layers == 5
    assert planned.memory["weight_bytes"]["drafter"] > 0
    assert any("5 layers" in line for line in planned.provenance["assumed"])


def test_a_drafter_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="needs a drafter"):
        ExportOptions("model", tmp_path, ["dflash"]).wanted()


@pytest.mark.parametrize("said, right", [((2, 0), "[0, 2]"), ((0, 1), "[1, 2]")])
def test_other_layers_are_said_where_they_would_help(
    native: None, tmp_path: Path, said: tuple[int, int], right: str
) -> None:
    """Counted from another end, and one too few: only the last layer says what the drafter reads."""
    made = options(tmp_path, "fp32")
    model, drafter = tmp_path / "model" / "model.safetensors", tmp_path / "drafter" / "model.safetensors"
    config = json.loads((tmp_path / "model" / "config.json").read_text("utf-8"))
    dim, group = config["head_dim"], config["num_attention_heads"] // config["num_key_value_heads"]
    tensors = load_file(model)
    embedded = tensors["model.embed_tokens.weight"]
    half = embedded.shape[1] // 2
    embedded[:, half:] = 0
    for name, values in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            values[:] = 0
    last = f"model.layers.{config['num_hidden_layers'] - 1}.self_attn."
    tensors[f"{last}v_proj.weight"][:] = 0
    at = np.arange(half)
    tensors[f"{last}v_proj.weight"][at, at] = 1
    tensors[f"{last}o_proj.weight"][half + at, at // dim * group * dim + at % dim] = 1
    save_file(tensors, model, {"format": "pt"})
    tensors = load_file(drafter)
    tensors["fc.weight"][:] = 0
    tensors["fc.weight"][at, embedded.shape[1] + half + at] = 1
    save_file(tensors, drafter)
    config = json.loads((tmp_path / "drafter" / "config.json").read_text("utf-8"))
    config["dflash_config"]["target_layer_ids"] = said
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(config), "utf-8")
    hint = said_of(made)
    assert f"would be right with target_layer_ids: {right} in its config.json" in hint


def test_another_mask_is_said_where_it_would_help(native: None, tmp_path: Path) -> None:
    """A configuration with two: the drafter was trained with the other one, and this one's embedding is loud."""
    made = options(tmp_path, "fp32")
    model = tmp_path / "model"
    config = json.loads((model / "config.json").read_text("utf-8")) | {"tie_word_embeddings": False}
    (model / "config.json").write_text(json.dumps(config), "utf-8")
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.embed_tokens.weight"][LOUD] *= 50
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "drafter" / "config.json").read_text("utf-8")) | {"mask_token_id": MASK}
    config["dflash_config"]["mask_token_id"] = LOUD
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(config), "utf-8")
    hint = said_of(made)
    assert f"would be right with mask_token_id: {MASK} in its config.json" in hint
    assert "target_layer_ids" not in hint
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_embeddings_as_they_are_stored_are_said_where_they_would_help(native: None, tmp_path: Path) -> None:
    """A drafter that was trained on them: as large as Gemma has them, the mask's embedding drowns what was tapped."""
    model = hf.write_reference_checkpoint(tmp_path / "model", "gemma3_old")
    tensors = load_file(model / "model.safetensors")
    for name, value in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = (value.astype(np.float32) * 0.4).astype(value.dtype)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    drafter = write_dflash(tmp_path / "drafter", open_model(model, None), agrees=True)
    made = ExportOptions(str(model), tmp_path / "bundle", ["dflash"], "fp32", threads=1, drafter=str(drafter))
    hint = said_of(made)
    assert "would be right with embeddings as they are stored, not 8 times that" in hint
