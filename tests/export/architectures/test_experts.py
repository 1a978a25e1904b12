"""Checkpoints hold the matrices of all experts as one tensor, or of each its own: both are the same model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgespec.errors import ExportError
from edgespec.export.bundle.model_part import open_model

# where an expert's own tensors are, as the hub has them
APART = {
    "qwen3_moe_dense": ("mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "qwen3_moe_plain": ("mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "olmoe_normed": ("mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "qwen3_5_moe_shared": ("mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "lfm2_moe_bias": ("feed_forward.experts", ("w1", "w3", "w2")),
}


def split(source: Path, folder: Path, name: str) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint, those of experts one by one, and its other files in ``folder``."""
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
    """As Qwen publishes its mixtures: float8 and a scale for each block, by which they are multiplied."""
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
