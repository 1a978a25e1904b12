"""Drafting by an assistant over the model's cache reproduces plain decoding's text, greedy, sampled and quantized."""

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
from edgespec.export.plan_manifest import PlannedSource, possible_drafter
from edgespec.runtimes.files.formats import Format
from tests.support import hf
from tests.support.assistant import write_assistant, write_target
from tests.support.planned import plan_of
from tests.support.requests import assert_plain_text, said_of

PROMPTS = ("The harbour lights came on", "and the ferry", "went down")


def options(folder: Path, form: Format, **how: bool) -> ExportOptions:
    model = write_target(folder / "model")
    drafter = write_assistant(folder / "drafter", open_model(model, None), **how)
    return ExportOptions(str(model), folder / "bundle", ["assistant"], form, threads=1, drafter=str(drafter))


@pytest.mark.parametrize("form", ["int4", "int8", "fp32"])
def test_assistants_are_lossless(native: None, tmp_path: Path, form: Format) -> None:
    made = options(tmp_path, form, agrees=True)
    manifest = export_model(made, golden=False)
    drafter = manifest.drafter
    assert drafter is not None
    assert drafter.decoder is not None
    assert (drafter.decoder.kind, drafter.decoder.reads) == ("assistant", [2, 3, 2, 3])
    assert drafter.facts.kv_bytes_per_token == 0
    assert manifest.memory["weight_bytes"]["drafter"] == (made.output / drafter.weights).stat().st_size
    greedy = Settings(max_new_tokens=30, ignore_eos=True, fallback=False, adaptive=False, gamma=3)
    drawn = greedy.changed(temperature=0.5, seed=3, acceptance="coupled")
    with load(made.output, threads=1) as engine:
        assert_plain_text(engine, "assistant", PROMPTS, greedy, drawn)
        rejected = engine.generate(PROMPTS[0], greedy.changed(temperature=1.0, seed=1), method="assistant")
        assert rejected.lossless
        plain = [engine.generate(prompt, greedy, method="ar").tokens for prompt in PROMPTS]
        batch = engine.generate_batch(list(PROMPTS), greedy.changed(method="assistant"))
        assert [result.tokens for result in batch] == plain
        assert engine.generate(PROMPTS[0], greedy.changed(adaptive=True), method="auto").tokens == plain[0]


@pytest.mark.parametrize("same", [True, False])
def test_a_plan_by_the_configuration(tmp_path: Path, same: bool) -> None:
    model = hf.write_reference_checkpoint(tmp_path / "model", "gemma4_shared")
    if not same:  # the assistant's full layer is another one than the model's, and it has fewer heads
        config = json.loads((model / "config.json").read_text("utf-8"))
        kinds = config["layer_types"]
        kinds[2], kinds[3] = kinds[3], kinds[2]
        config |= {"num_attention_heads": 8, "num_key_value_heads": 8}
        config["per_layer_config"]["2"] = config["per_layer_config"].pop("3")
        (model / "model.safetensors").unlink()
        (model / "config.json").write_text(json.dumps(config), "utf-8")
    assert possible_drafter(PlannedSource(str(model))) == "assistant"
    planned = plan_of(model, methods=["assistant"])
    assert planned.drafter is not None
    assert planned.drafter.facts.hidden == 64
    assert planned.memory["weight_bytes"]["drafter"] > 0
    other = hf.write_reference_checkpoint(tmp_path / "other", "qwen3_tied")
    with pytest.raises(ExportError, match="assistants are for Gemma 4"):
        plan_of(other, methods=["assistant"])


def test_one_near_chance_is_refused(native: None, tmp_path: Path) -> None:
    with pytest.raises(EdgespecError, match="of the drafter's first guesses"):
        export_model(options(tmp_path, "int8"), golden=False)
    assert not (tmp_path / "bundle").exists()


def test_the_state_before_the_norm_is_said_where_it_would_help(native: None, tmp_path: Path) -> None:
    """An assistant that was trained on it: it takes a little of what is small there, and large after the norm."""
    made = options(tmp_path, "fp32", agrees=True)
    for folder in (tmp_path / "model", tmp_path / "drafter"):
        tensors = load_file(folder / "model.safetensors")
        for name, values in tensors.items():  # the same with a residual stream of a 64th
            if "embed_tokens.weight" in name or ("post_" in name and name.endswith("norm.weight")):
                tensors[name] = values / values.dtype.type(64)
        if "pre_projection.weight" in tensors:  # a tenth of the hidden state is subtracted from the token's embedding
            taken = tensors["pre_projection.weight"]
            taken[:, len(taken) :] = -0.1 * np.eye(len(taken))
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    hint = said_of(made)
    assert "would be right with the hidden state before the model's final norm, which this" in hint
    assert not made.output.exists()
