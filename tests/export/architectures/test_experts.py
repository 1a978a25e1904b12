"""Experts stored separately or together, and rotary tables of every type."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.architectures.rope import NEEDED, Rotary, inverse_frequencies, rope_parameters
from edgespec.export.bundle.model_part import open_model
from tests.support.saved import REFERENCE

# where an expert's own tensors are, as the hub has them
APART = {
    "qwen3_moe_dense": ("mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "qwen3_moe_plain": ("mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "olmoe_normed": ("mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "qwen3_5_moe_shared": ("mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "lfm2_moe_bias": ("feed_forward.experts", ("w1", "w3", "w2")),
}


def split(source: Path, folder: Path, name: str) -> dict[str, np.ndarray]:
    """Copy ``source`` to ``folder``; return its tensors, the fused ones of experts split into one matrix each."""
    shutil.copytree(source, folder)
    tensors, (at, (gate, up, down)) = load_file(folder / "model.safetensors"), APART[name]
    for key in [key for key in tensors if key.endswith(f"{at}.gate_up_proj")]:
        prefix = key.removesuffix("gate_up_proj")
        both, last = tensors.pop(key), tensors.pop(f"{prefix}down_proj")
        for expert, (first, second) in enumerate(zip(both, last, strict=True)):
            half = len(first) // 2
            for part, matrix in ((gate, first[:half]), (up, first[half:]), (down, second)):
                tensors[f"{prefix}{expert}.{part}.weight"] = np.ascontiguousarray(matrix)
    return tensors


@pytest.mark.parametrize("name", APART)
def test_separate_experts_are_read_as_stacked_ones(
    checkpoint: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    tensors = split(checkpoint(name), tmp_path / "apart", name)
    save_file(tensors, tmp_path / "apart" / "model.safetensors")
    whole, apart = open_model(checkpoint(name), None), open_model(tmp_path / "apart", None)
    assert whole.tensors == apart.tensors
    experts = [tensor for tensor in whole.tensors if ".experts." in tensor]
    assert experts
    for tensor in whole.tensors:
        np.testing.assert_array_equal(apart.source.read(tensor), whole.source.read(tensor))
    for tensor in experts:  # pieces across the border of two experts
        some, columns = slice(20, 75), slice(8, 24)
        np.testing.assert_array_equal(apart.source.read(tensor, some), whole.source.read(tensor)[some])
        np.testing.assert_array_equal(
            apart.source.read(tensor, some, columns), whole.source.read(tensor)[some, columns]
        )


def test_experts_in_eight_bits_are_widened_and_said(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Qwen publishes its mixtures like this: float8, and a scale that multiplies each block."""
    name, block = "qwen3_moe_plain", 32
    folder, expected = tmp_path / "fp8", {}
    tensors = split(checkpoint(name), folder, name)
    for key in [key for key in tensors if ".experts." in key]:
        values = tensors[key].astype(ml_dtypes.float8_e4m3fn)
        scales = np.full([-(-size // block) for size in values.shape], 0.5, np.float32)
        scales[-1] = 2.0
        tensors[key], tensors[f"{key}_scale_inv"] = values, scales
        expected[key] = values.astype(np.float32) * np.repeat(scales, block, 0)[: len(values), :1]
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [block, block]}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    arch = open_model(folder, None)
    assert "fp8" in " ".join(arch.source.notes)
    for part in ("gate", "up", "down"):
        whole = np.concatenate([expected[f"model.layers.1.mlp.experts.{at}.{part}_proj.weight"] for at in range(5)])
        np.testing.assert_array_equal(arch.source.read(f"model.layers.1.mlp.experts.{part}.weight"), whole)


def test_an_expert_that_is_missing_is_named(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    tensors = split(checkpoint("olmoe_normed"), tmp_path / "apart", "olmoe_normed")
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    save_file(tensors, tmp_path / "apart" / "model.safetensors")
    with pytest.raises(ExportError, match=r"experts\.2\.up_proj\.weight is missing"):
        open_model(tmp_path / "apart", None)


CASES: list[dict[str, Any]] = json.loads((REFERENCE / "ropes.json").read_text("utf-8"))
DIMS = 32


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['config']['rope_parameters']['rope_type']}")
def test_frequencies_are_those_of_transformers(case: dict[str, Any]) -> None:
    inverse, factor = inverse_frequencies(rope_parameters(case["config"]), DIMS, case["context"])
    np.testing.assert_allclose(inverse, case["inverse"], rtol=2e-6)
    assert factor == pytest.approx(case["factor"], rel=1e-6)


def test_every_type_has_a_reference() -> None:
    assert {case["config"]["rope_parameters"]["rope_type"] for case in CASES} == set(NEEDED) - {"default"}


def test_old_names_mean_the_same() -> None:
    new = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}}
    old = {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    assert rope_parameters(new) == rope_parameters(old)
    lists = {"short_factor": [1.0], "long_factor": [2.0]}
    outside = {"rope_scaling": {"type": "su", **lists}, "original_max_position_embeddings": 16}
    assert rope_parameters(outside)["rope_type"] == "longrope"
    assert rope_parameters(outside)["original_max_position_embeddings"] == 16


def test_longrope_is_chosen_once_by_the_context() -> None:
    (config,) = [case["config"] for case in CASES if case["context"] == 4097]
    parameters = rope_parameters(config)
    short, long = (Rotary(parameters, DIMS).tables(8, context) for context in (4096, 4097))
    assert not np.allclose(short[0][5], long[0][5])
    np.testing.assert_array_equal(long[0], Rotary(parameters, DIMS).tables(8, 131072)[0])


def test_tables_carry_the_factor() -> None:
    (case,) = [case for case in CASES if case["factor"] == 1.5]
    cos, sin = Rotary(rope_parameters(case["config"]), DIMS).tables(40, case["context"])
    np.testing.assert_allclose(np.hypot(cos, sin), 1.5, rtol=1e-6)


@pytest.mark.parametrize(
    "scaling, what",
    [
        ({"rope_type": "mrope"}, "supported: default, linear, dynamic, yarn, longrope, llama3"),
        ({"rope_type": "linear"}, "needs a number factor"),
        ({"rope_type": "yarn", "original_max_position_embeddings": -1}, "original_max_position_embeddings"),
        ({"rope_type": "longrope", "long_factor": [1.0]}, "needs a list short_factor"),
        ({"rope_type": "dynamic", "factor": "2"}, "needs a number factor"),
        ({"rope_type": "default", "rope_theta": 0}, "needs a number rope_theta"),
    ],
)
def test_what_is_missing_is_named(scaling: dict[str, Any], what: str) -> None:
    with pytest.raises(UnsupportedModel, match=what):
        rope_parameters({"max_position_embeddings": 64, "rope_parameters": scaling})


def test_factors_of_another_size_are_refused() -> None:
    lists = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    scaling = {"rope_type": "longrope", "original_max_position_embeddings": 16, **lists}
    with pytest.raises(UnsupportedModel, match="expected 16 numbers in short_factor, got 8"):
        Rotary(rope_parameters({"max_position_embeddings": 64, "rope_parameters": scaling}), DIMS).tables(8, 16)
