"""Sizes of published models, planned from what their config.json says, beside arithmetic of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.shapes import SHAPES, write_shape
from edgespec.export.planned import planned_bundle

# parameters of the text part, as transformers 5.23 makes it, and numbers of the tables of positions, for each position
PARAMETERS = {
    "qwen2.5-0.5b": (494_032_768, 64),
    "llama-3.2-1b": (1_235_814_400, 64),
    "llama-3.2-3b": (3_212_749_824, 128),
    "qwen3.5-0.8b": (752_393_024, 64),
    "qwen3.5-2b": (1_881_825_088, 64),
    "lfm2-350m": (354_483_968, 64),
    "lfm2-1.2b": (1_170_340_608, 64),
    "lfm2-8b-a1b": (8_339_929_856, 64),
    "lfm3-1.7b": (1_728_801_536, 128 + 64),
    "gemma-4-e2b": (4_628_569_344, 256 + 128),
    "gemma-4-e4b": (7_463_013_376, 256 + 128),
    "granite-4.0-350m": (352_379_904, 64),
    "granite-4.0-h-350m": (340_332_224, 0),
    "granite-3.1-1b-a400m": (1_334_628_352, 64),
    "olmoe-1b-7b": (6_919_161_856, 128),
    "qwen3-30b-a3b": (30_532_122_624, 128),
    "olmo-hybrid-7b": (7_430_870_688, 0),
    "smollm3-3b": (3_075_098_624, 128),
}
INT4, INT8 = 0.5 + 2 / 32, 1.0  # bytes of a weight: levels, and a scale of two bytes for 32 of them


def test_every_shape_is_here() -> None:
    assert set(PARAMETERS) == set(SHAPES)


@pytest.mark.parametrize("name", SHAPES)
def test_sizes_of_published_models_are_planned_within_three_percent(tmp_path: Path, name: str) -> None:
    config = SHAPES[name]
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    planned = planned_bundle(tmp_path)
    parameters, angles = PARAMETERS[name]
    # beside the parameters of transformers: the bias of each router, which it takes for a buffer, and norms of ones
    assert planned.target.facts.parameters == pytest.approx(parameters, abs=1000)
    table = config["num_hidden_layers"] * config.get("hidden_size_per_layer_input", 0) * config["vocab_size"]
    weights = INT4 * (parameters - table) + INT8 * table
    expected = weights + 4 * angles * config["max_position_embeddings"]
    assert planned.files["model.data"].size == pytest.approx(expected, rel=0.03)
    assert planned.memory["weight_bytes"] == {"target": planned.files["model.data"].size}


def test_a_written_shape_is_as_large_as_planned(tmp_path: Path) -> None:
    """All files of a model of 31 million parameters, layers of both kinds."""
    config = {**SHAPES["granite-4.0-h-350m"], "vocab_size": 8192, "num_hidden_layers": 12,
              "layer_types": ["mamba"] * 11 + ["attention"], "hidden_size": 384, "num_attention_heads": 6,
              "num_key_value_heads": 2, "mamba_n_heads": 24, "shared_intermediate_size": 1024}  # fmt: skip
    write_shape(config, tmp_path / "made", context=256)
    small = tmp_path / "small"
    small.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "made" / name).rename(small / name)
    planned = planned_bundle(small, context=256)
    made = {file.name: file.stat().st_size for folder in ("made", "small") for file in (tmp_path / folder).iterdir()}
    made.pop("edgespec.json")
    assert planned.files["model.data"].size == made["model.data"]
    assert sum(file.size for file in planned.files.values()) == pytest.approx(sum(made.values()), rel=0.03)
