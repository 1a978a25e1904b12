"""GGUF files of every architecture that is read: the same model as the checkpoint that the file was converted from."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from edgespec.errors import EdgespecError, UnsupportedModel
from edgespec.export.architectures import Architecture, architecture
from edgespec.export.source.gguf_kinds import KINDS
from edgespec.export.source.source import Checkpoint
from tests.support.gguf_forms import (
    ARCHITECTURES,
    SOURCES,
    convert,
    metadata_of,
    tensors_in,
    write_file,
    write_source,
)

ALIKE = {
    "exaone": "llama_untied_mha_llama3_legacy",
    "internlm2": "llama_untied_mha_llama3_legacy",
    "minicpm": "granite_biases",
    "qwen2vl": "qwen2_untied",
    "qwen3vl": "qwen3_tied",
    "qwen3vlmoe": "qwen3_moe_sparse",
}
"""Architectures whose checkpoints transformers does not write, by a configuration whose file has the same tensors."""
ELSEWHERE = {"t5", "gpt-oss"}  # see test_gguf.py and test_mxfp4.py
ONE = {kind: name for name, kind in ARCHITECTURES.items()}  # a configuration of each architecture
CONVERTER_FAILS = ("lfm2_biases",)  # it takes convolutions without biases alone
POSITIONS = 400


def opened(folder: Path, name: str, **how: Any) -> Architecture:
    return architecture(Checkpoint.open(write_file(folder / "model.gguf", name, **how), tokenizer=False))


def assert_same_model(made: Architecture, expected: Architecture) -> None:
    """Check that two descriptions compute the same of the same tensors: rotations to the digits of a file's factors."""
    ours, theirs = (one.facts.model_dump(exclude={"rope", "context"}) for one in (made, expected))
    assert ours == theirs
    assert made.tensors == expected.tensors
    assert repr(made.trace()) == repr(expected.trace())
    assert (made.logits, made.activation) == (expected.logits, expected.activation)
    assert made.eps == pytest.approx(expected.eps, rel=1e-6)
    assert made.rotaries.keys() == expected.rotaries.keys()
    for name, rotary in expected.rotaries.items():
        own = made.rotaries[name]
        for mine, its in zip(own.tables(POSITIONS, POSITIONS), rotary.tables(POSITIONS, POSITIONS), strict=True):
            np.testing.assert_allclose(mine, its, atol=3e-3)
        grown, growth = own.growth(POSITIONS), rotary.growth(POSITIONS)
        assert (grown is None) == (growth is None)
        if grown is not None and growth is not None:
            np.testing.assert_allclose(grown, growth, rtol=1e-5)


def assert_same_values(made: Architecture, expected: Architecture, loss: float = 1e-6) -> None:
    """Check every tensor, as the export reads it.

    Args:
        loss: by what a value may differ, of the largest one of its tensor.
    """
    for name in expected.tensors:
        value, found = expected.source.read(name), made.source.read(name)
        assert found.shape == value.shape
        np.testing.assert_allclose(found, value, rtol=1e-5, atol=loss * max(1.0, np.abs(value).max()), err_msg=name)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_file_is_the_model_that_it_was_converted_from(tmp_path: Path, name: str) -> None:
    made = opened(tmp_path, name)
    expected = architecture(Checkpoint.open(write_source(tmp_path / "source", name)))
    assert_same_model(made, expected)
    assert_same_values(made, expected)


def test_every_architecture_has_a_file() -> None:
    assert set(KINDS) - set(ONE) - ELSEWHERE == set(ALIKE)


@pytest.mark.parametrize("kind", ALIKE)
def test_an_architecture_that_is_like_another(tmp_path: Path, kind: str) -> None:
    name = ALIKE[kind]
    assert_same_model(opened(tmp_path, name, architecture=kind), opened(tmp_path, name))


@pytest.mark.parametrize("kind", ONE)
def test_an_unknown_or_missing_tensor_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    name = ONE[kind]
    with pytest.raises(UnsupportedModel, match=r"tensor blk\.0\.attn_novel\.weight is unknown for model type"):
        opened(tmp_path, name, tensors={"blk.0.attn_novel.weight": np.zeros(8, np.float32)})
    missing = next(tensor for tensor in tensors_in(name) if re.match(r"blk\.\d+\.\w*norm\w*\.weight", tensor))
    with pytest.raises(EdgespecError, match="missing from the checkpoint"):
        opened(tmp_path, name, without=missing)


@pytest.mark.parametrize(
    "name, key, value",
    [
        ("llama_biases_mqa", "logit_scale", 2.0),
        ("llama_biases_mqa", "expert_count", 8),
        ("qwen3_tied", "embedding_scale", 3.0),
        ("olmo2_mha", "attention.clamp_kqv", 8.0),
        ("glm4_half", "rope.dimension_sections", [8, 12, 12, 0]),
        ("qwen3_moe_sparse", "expert_weights_scale", 2.5),
        ("qwen3_moe_sparse", "expert_gating_func", 2),
        ("cohere_tied", "attn_logit_softcapping", 30.0),
        ("lfm2_moe_bias", "expert_gating_func", 1),
        ("qwen3_tied", "attention.head_count_kv", [1, 2, 2]),
    ],
)
def test_metadata_that_changes_a_model_is_refused_by_name(tmp_path: Path, name: str, key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModel, match=re.escape(f"{ARCHITECTURES[name]}.{key}")):
        opened(tmp_path, name, metadata={key: value})


@pytest.mark.parametrize("kind", ONE)
@pytest.mark.parametrize("value", [0, 2**31 - 1, 1.5, float("inf"), "many"])
def test_absurd_numbers_are_read_or_refused_at_once(tmp_path: Path, kind: str, value: Any) -> None:
    name = ONE[kind]
    numbers = [key for key, known in metadata_of(name).items() if isinstance(known, int | float)]
    for key in {"block_count", "nextn_predict_layers", *numbers}:
        with suppress(EdgespecError):
            opened(tmp_path, name, metadata={key: value})
            assert key not in ("block_count", "nextn_predict_layers") or not value, key


def test_layers_that_guess_are_left_out(tmp_path: Path) -> None:
    layers = metadata_of("qwen3_5_delta")["block_count"]
    extra = {f"blk.{layers}.nextn.eh_proj.weight": (64, 128), f"blk.{layers}.attn_norm.weight": (64,)}
    tensors = {name: np.ones(shape, np.float32) for name, shape in extra.items()}
    more = {"block_count": layers + 1, "nextn_predict_layers": 1}
    made = opened(tmp_path, "qwen3_5_delta", metadata=more, tensors=tensors)
    assert made.facts.layers == layers
    assert any("layers that guess" in note for note in made.source.notes)


def test_projections_that_are_fused_are_split(tmp_path: Path) -> None:
    name = "qwen3_moe_sparse"
    whole, more = tensors_in(name), dict[str, Any]()
    for layer in range(metadata_of(name)["block_count"]):
        at = f"blk.{layer}"
        more[f"{at}.attn_qkv.weight"] = np.concatenate([whole[f"{at}.attn_{part}.weight"] for part in "qkv"])
        gate, up = (whole[f"{at}.ffn_{part}_exps.weight"] for part in ("gate", "up"))
        more[f"{at}.ffn_gate_up_exps.weight"] = np.concatenate([gate, up], 1)
    gone = re.compile(r"blk\.\d+\.(attn_[qkv]|ffn_(gate|up)_exps)\.weight")
    made = opened(tmp_path, name, tensors=more, without=gone)
    expected = architecture(Checkpoint.open(write_source(tmp_path / "source", name)))
    assert_same_model(made, expected)
    assert_same_values(made, expected)


@pytest.mark.parametrize(
    "name, module",
    [
        ("smollm3_interval", "self_attn.q_proj"),
        ("granite_tied", "mlp.down_proj"),
        ("granite_tied", "self_attn.o_proj"),
        ("phi3_long", "mlp.gate_proj"),
        ("qwen3_5_delta", "linear_attn.out_proj"),
        ("qwen3_5_delta", "linear_attn.in_proj_qkv"),
        ("gpt_neox_parallel", "self_attn.k_proj"),
        ("gpt2_default", "mlp.up_proj"),
        ("qwen3_moe_sparse", "mlp.experts.gate"),
        ("granite_hybrid_dense", "mlp.gate_proj"),
    ],
)
def test_rows_are_taken_as_the_file_has_them(tmp_path: Path, name: str, module: str) -> None:
    made = opened(tmp_path, name)
    rows = made.source.blocks(f"model.layers.0.{module}.weight")
    assert rows is not None
    assert rows.type == "F32"
    found = rows.read(slice(None)).view(np.float32)
    if rows.order is not None:
        found = found[:, np.argsort(rows.order)]
    np.testing.assert_array_equal(found, made.source.read(f"model.layers.0.{module}.weight"))


@pytest.mark.parametrize("name, wide", [("qwen2_moe_normed", 1), ("qwen2_moe_normed", 3), ("qwen3_5_moe_shared", 1)])
@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.F16])
def test_a_shared_expert_is_taken_as_the_file_has_it(
    tmp_path: Path, name: str, wide: int, kind: GGMLQuantizationType
) -> None:
    """Also one as wide as several experts, whose columns are cut."""
    whole, metadata = tensors_in(name), metadata_of(name)
    tensors = {
        key: np.tile(value, (1, wide) if "down" in key else (wide, 1)) * np.float32(0.5)
        for key, value in whole.items()
        if key.endswith("_shexp.weight") and "_inp" not in key
    }
    size = {"expert_shared_feed_forward_length": wide * metadata["expert_shared_feed_forward_length"]}
    made = opened(tmp_path, name, kind=kind, tensors=tensors, metadata=size)
    assert made.facts.experts is not None
    assert made.facts.experts.always == wide
    for part in ("gate", "up", "down"):
        tensor = f"model.layers.{made.facts.experts.layers[0]}.mlp.experts.{part}.weight"
        rows = made.source.blocks(tensor)
        assert rows is not None
        assert rows.type == kind.name
        np.testing.assert_array_equal(dequantize(rows.read(slice(None)), kind), made.source.read(tensor))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["f32", "q8_0"])
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in CONVERTER_FAILS])
def test_the_converter_of_llama_cpp_writes_the_same_model(tmp_path: Path, name: str, kind: str) -> None:
    pytest.importorskip("torch")
    if not os.environ.get(SOURCES):
        pytest.skip(f"needs llama.cpp's sources in the folder {SOURCES}")
    file = convert(Path(os.environ[SOURCES]), name, tmp_path / f"{name}.gguf", kind)
    made, expected = (architecture(Checkpoint.open(path)) for path in (file, file.with_suffix("")))
    assert_same_model(made, expected)
    assert_same_values(made, expected, 1e-6 if kind == "f32" else 0.01)
