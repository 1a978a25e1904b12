"""Tensors of every layout are read as float32, whole or in part; damaged files are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.bundle.model_part import open_model
from edgespec.export.quantization.reference import reference_logits
from edgespec.export.source.packed import unpack
from edgespec.export.source.source import Checkpoint
from edgespec.export.source.stored import read_header, span
from tests.support import hf, packed

CASES = [
    *((kind, "llama_tied_gqa") for kind in packed.KINDS),
    # 120 inputs: the last group, and for some the last word, is cut off
    *((kind, "qwen2_untied") for kind in packed.KINDS if kind != "gptq2"),
]
WEIGHTS = "model.safetensors"


def write(folder: Path, kind: str, config: str = "llama_tied_gqa") -> dict[str, np.ndarray]:
    hf.write_checkpoint(folder, hf.CONFIGS[config], 3)
    return packed.pack_checkpoint(folder, *packed.KINDS[kind])


def edit(folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    tensors = {name: tensor.raw() for name, tensor in read_header(folder / WEIGHTS).items()}  # numpy has no float8
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def settings(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config), "utf-8")


# -- what is converted -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, config", CASES)
def test_every_part_is_read_as_what_it_means(tmp_path: Path, kind: str, config: str) -> None:
    truth = write(tmp_path, kind, config)
    checkpoint = Checkpoint.open(tmp_path)
    assert set(checkpoint.index) == set(truth)
    for name, value in truth.items():
        assert checkpoint.shape(name) == value.shape
        got = checkpoint.read(name)
        assert got.dtype == np.float32
        assert got.flags.c_contiguous
        np.testing.assert_array_equal(got, value)
        if value.ndim == 2:
            for rows in (slice(0, 1), slice(3, 29), slice(8, 16), slice(31, None), slice(-5, None), slice(4, 4)):
                for columns in (None, slice(0, 1), slice(5, 43), slice(32, None), slice(7, 7)):
                    expected = value[rows] if columns is None else value[rows, columns]
                    np.testing.assert_array_equal(checkpoint.read(name, rows, columns), expected)


@pytest.mark.parametrize("kind", packed.KINDS)
def test_the_user_is_told(tmp_path: Path, kind: str) -> None:
    write(tmp_path, kind)
    (note,) = Checkpoint.open(tmp_path).notes
    assert packed.KINDS[kind][1]["quant_method"] in note
    assert "loses a little more" in note


def test_plain_checkpoints_have_no_notes(checkpoint: Callable[[str], Path]) -> None:
    assert Checkpoint.open(checkpoint("llama_tied_gqa")).notes == []


def test_the_model_is_that_of_the_meant_weights(tmp_path: Path) -> None:
    truth = write(tmp_path / "packed", "awq")
    plain = hf.write_checkpoint(tmp_path / "plain", hf.CONFIGS["llama_tied_gqa"], 3)
    save_file(truth, plain / WEIGHTS)
    tokens = [5, 6, 7, 90, 17]
    np.testing.assert_array_equal(
        reference_logits(open_model(tmp_path / "packed", None), tokens),
        reference_logits(open_model(plain, None), tokens),
    )


def test_only_what_is_asked_for_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows of a packed matrix must not unpack all of it."""
    from edgespec.export.source import packed as reader

    write(tmp_path, "gptq4")
    seen: list[int] = []

    def counted(words: np.ndarray, *how: Any) -> np.ndarray:
        seen.append(words.size)
        return unpack(words, *how)

    monkeypatch.setattr(reader, "unpack", counted)
    Checkpoint.open(tmp_path).read("model.layers.0.mlp.up_proj.weight", slice(8, 16), slice(0, 16))
    assert sum(seen) <= 8 * 2 + 2  # words: eight rows of 16 levels, one word of zero points for each of two groups


def test_groups_without_g_idx(tmp_path: Path) -> None:
    truth = write(tmp_path, "gptq4", "qwen2_untied")
    edit(tmp_path, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.endswith("g_idx")])
    checkpoint = Checkpoint.open(tmp_path)
    for name, value in truth.items():
        np.testing.assert_array_equal(checkpoint.read(name), value)


def test_groups_that_config_json_says_otherwise(tmp_path: Path) -> None:
    """Without g_idx, group_size must fit the scales; where it is not said, they say it."""
    truth = write(tmp_path, "gptq4", "qwen2_untied")
    edit(tmp_path, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.endswith("g_idx")])
    for wrong in (-1, 64, 0, "many"):
        settings(tmp_path, group_size=wrong)
        with pytest.raises(ExportError, match="groups of scales"):
            Checkpoint.open(tmp_path)
    settings(tmp_path, group_size=None)
    checkpoint = Checkpoint.open(tmp_path)
    for name, value in truth.items():
        np.testing.assert_array_equal(checkpoint.read(name), value)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("said", [None, "gptq", "gptq_v2"])
def test_how_zero_points_are_stored(tmp_path: Path, symmetric: bool, first: bool, said: str | None) -> None:
    """The file's numbers decide, not its settings; contradictions raise at least an error."""
    told: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": symmetric}
    hf.write_checkpoint(tmp_path, hf.CONFIGS["llama_tied_gqa"], 3)
    packer = packed.gptq(4, 32, symmetric=symmetric, first=first)
    truth = packed.pack_checkpoint(tmp_path, packer, told | ({"checkpoint_format": said} if said else {}))
    if not symmetric and said not in (None, "gptq" if first else "gptq_v2"):
        with pytest.raises(ExportError, match=f"zero points are those of {'gptq:' if first else 'gptq_v2:'}"):
            Checkpoint.open(tmp_path)
        return
    checkpoint = Checkpoint.open(tmp_path)
    for name, value in truth.items():
        np.testing.assert_array_equal(checkpoint.read(name), value)


def test_zero_points_that_nothing_tells(tmp_path: Path) -> None:
    write(tmp_path, "gptq4_act_asym")
    edit(
        tmp_path,
        lambda tensors: tensors.update(
            {name: np.zeros_like(value) for name, value in tensors.items() if name.endswith("qweight")}
        ),
    )
    with pytest.raises(ExportError, match=r'add "checkpoint_format"'):
        Checkpoint.open(tmp_path)


def test_modules_with_bits_of_their_own(tmp_path: Path) -> None:
    truth = write(tmp_path, "gptq4")
    name, value = next(
        (name, value) for name, value in hf.weights(hf.CONFIGS["llama_tied_gqa"], 3).items() if "up_proj" in name
    )
    parts, meant = packed.gptq(8, 32)(name.removesuffix(".weight"), value)
    edit(tmp_path, lambda tensors: tensors.update(parts))
    settings(tmp_path, dynamic={"+:.*up_proj.*": {"bits": 8}})
    checkpoint = Checkpoint.open(tmp_path)
    np.testing.assert_array_equal(checkpoint.read(name), meant)
    other = next(other for other in truth if "down_proj" in other)
    np.testing.assert_array_equal(checkpoint.read(other), truth[other])


def test_a_zero_point_that_wraps_around_is_zero(tmp_path: Path) -> None:
    """The first GPTQ format stores zero points less one, so 15 stands for 0."""
    write(tmp_path, "gptq4")
    name = "model.layers.0.mlp.up_proj"
    edit(tmp_path, lambda tensors: tensors[f"{name}.qzeros"].fill(-1))
    stored = load_file(tmp_path / WEIGHTS)
    levels = (stored[f"{name}.qweight"][0, 0] >> (4 * 3)) & 15  # row 0, input 3
    assert Checkpoint.open(tmp_path).read(f"{name}.weight")[0, 3] == levels * np.float32(stored[f"{name}.scales"][0, 0])


@pytest.mark.parametrize(
    "file, kind, old",
    [
        ("quantize_config.json", "gptq4", {"bits": 4, "group_size": 32, "desc_act": False}),
        ("quant_config.json", "awq", {"w_bit": 4, "q_group_size": 32, "version": "GEMM", "zero_point": True}),
    ],
)
def test_settings_of_older_tools_stand_beside(tmp_path: Path, file: str, kind: str, old: dict[str, Any]) -> None:
    hf.write_checkpoint(tmp_path, hf.CONFIGS["llama_tied_gqa"], 3)
    truth = packed.pack_checkpoint(tmp_path, packed.KINDS[kind][0], None)
    with pytest.raises(UnsupportedModel, match=r"no quantization_config"):
        Checkpoint.open(tmp_path)
    (tmp_path / file).write_text(json.dumps(old), "utf-8")
    name = "model.layers.1.self_attn.k_proj.weight"
    np.testing.assert_array_equal(Checkpoint.open(tmp_path).read(name), truth[name])


def test_slices_have_no_step() -> None:
    assert (span(None, 7), span(slice(5, 2), 7), span(slice(-3, None), 7)) == ((0, 7), (5, 5), (4, 7))
    with pytest.raises(ValueError, match="step"):
        span(slice(0, 7, 2), 7)


def test_biases_of_zeros_are_left_out(tmp_path: Path) -> None:
    """Some GPTQ tools give every projection one; any other bias would be missed."""
    write(tmp_path, "gptq4")
    bias = np.zeros(96, np.float16)
    edit(tmp_path, lambda tensors: tensors.update({"model.layers.1.mlp.up_proj.bias": bias}))
    open_model(tmp_path, None)
    bias[5] = 1
    edit(tmp_path, lambda tensors: tensors.update({"model.layers.1.mlp.up_proj.bias": bias}))
    with pytest.raises(ExportError, match=r"up_proj\.bias is part of the checkpoint"):
        open_model(tmp_path, None)


@pytest.mark.parametrize("kind, part, value", [("gptq4", "scales", np.inf), ("awq", "scales", np.nan),
                                               ("fp8_blocks", "weight_scale_inv", np.inf)])  # fmt: skip
def test_scales_that_are_no_numbers(tmp_path: Path, kind: str, part: str, value: float) -> None:
    write(tmp_path, kind)
    name = "model.layers.1.mlp.up_proj"
    edit(tmp_path, lambda tensors: tensors[f"{name}.{part}"].fill(value))
    with pytest.raises(ExportError, match=rf"tensor {name}\.weight holds NaN or infinity"):
        Checkpoint.open(tmp_path).read(f"{name}.weight")


def test_settings_of_the_text_part(tmp_path: Path) -> None:
    truth = write(tmp_path, "gptq4")
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    inner = {"quantization_config": config.pop("quantization_config")}
    (tmp_path / "config.json").write_text(json.dumps(config | {"text_config": inner}), "utf-8")
    name = "model.layers.0.mlp.up_proj.weight"
    np.testing.assert_array_equal(Checkpoint.open(tmp_path).read(name), truth[name])


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", ["bitsandbytes", "hqq", "eetq", "quanto", "mxfp4", "torchao", "exl2", "bitnet", "marlin", "unheard"]
)
def test_other_methods_are_refused_by_name(tmp_path: Path, method: str) -> None:
    write(tmp_path, "gptq4")
    settings(tmp_path, quant_method=method)
    with pytest.raises(UnsupportedModel, match=rf"already quantized \({method}\)(.|\n)*unquantized checkpoint"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    "name, method",
    [
        ("a.weight.absmax", "bitsandbytes"),
        ("a.SCB", "bitsandbytes"),
        ("a.q_weight", "exl2"),
        ("a.W_q", "hqq"),
        ("model.layers.0.mlp.experts.down_proj_blocks", "mxfp4"),
        ("a.weight._data", "quanto"),
        ("a.qweight", "gptq or awq"),
    ],
)
def test_packed_tensors_without_settings_are_recognized(tmp_path: Path, name: str, method: str) -> None:
    hf.write_checkpoint(tmp_path, hf.CONFIGS["llama_tied_gqa"], 3)
    edit(tmp_path, lambda tensors: tensors.update({name: np.ones(4, np.uint8)}))
    with pytest.raises(UnsupportedModel, match=rf"\({method}\); holds {name}"):
        Checkpoint.open(tmp_path)


def test_mlx_is_refused_by_name(tmp_path: Path) -> None:
    hf.write_checkpoint(tmp_path, hf.CONFIGS["llama_tied_gqa"] | {"quantization": {"group_size": 64, "bits": 4}}, 3)
    with pytest.raises(UnsupportedModel, match=r"already quantized \(MLX\)"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    "kind, changes, message",
    [
        ("gptq4", {"bits": 3}, "GPTQ of 3 bits"),
        ("gptq4", {"bits": None}, "GPTQ of None bits"),
        ("gptq4", {"pack_dtype": "int16"}, "in int16"),
        ("gptq4", {"checkpoint_format": "marlin"}, "format 'marlin'"),
        ("gptq4", {"is_marlin_format": True}, "format 'marlin'"),
        ("awq", {"version": "gemv"}, "AWQ version 'gemv'"),
        ("awq", {"bits": 8}, "of 8 bits"),
        ("compressed_int4", {"format": "nvfp4-pack-quantized"}, "'nvfp4-pack-quantized' is not supported"),
        ("compressed_int4", {"transform_config": {"R1": {}}}, "transform_config"),
        ("compressed_int4", {"format": "marlin-24"}, "'marlin-24' is not supported"),
        ("compressed_int8", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "'sparse-24-bitmask'"),
        ("compressed_int4", {"config_groups": {"group_0": {"weights": {"num_bits": 3}}}}, "num_bits 3"),
    ],
)
def test_options_that_are_not_converted(tmp_path: Path, kind: str, changes: dict[str, Any], message: str) -> None:
    write(tmp_path, kind)
    settings(tmp_path, **changes)
    with pytest.raises(UnsupportedModel, match=message):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    "kind, changes",
    [
        ("gptq4", {"bits": 8}),
        ("gptq4", {"bits": 2}),
        ("awq", {"group_size": 64}),
        ("awq", {"group_size": 0}),
        ("awq", {"group_size": "many"}),
        ("fp8_blocks", {"weight_block_size": [128, 128]}),
        ("fp8_blocks", {"weight_block_size": 32}),
        ("compressed_int4", {"config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 64}}}}),
        ("compressed_fp8_blocks", {"config_groups": {}}),
        ("compressed_int8", {"config_groups": 3}),
    ],
)
def test_settings_that_do_not_fit_the_weights(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    write(tmp_path, kind)
    settings(tmp_path, **changes)
    with pytest.raises(ExportError):
        Checkpoint.open(tmp_path)


MISSING = [("gptq4", "qzeros"), ("gptq4", "scales"), ("awq", "qzeros"), ("fp8_blocks", "weight_scale_inv"),
           ("compressed_int8", "weight_scale"), ("compressed_int4", "weight_shape"),
           ("compressed_int4", "weight_scale")]  # fmt: skip
OTHER_TYPE = [("gptq4", "qweight"), ("awq", "qweight"), ("compressed_int4", "weight_packed")]


@pytest.mark.parametrize(
    "kind, part, gone", [*((*one, True) for one in MISSING), *((*one, False) for one in OTHER_TYPE)]
)
def test_a_part_that_is_missing_or_of_another_type_is_named(tmp_path: Path, kind: str, part: str, gone: bool) -> None:
    write(tmp_path, kind)
    name = f"model.layers.1.mlp.up_proj.{part}"
    edit(tmp_path, lambda own: own.pop(name) if gone else own.update({name: own[name].astype(np.int64)}))
    with pytest.raises(ExportError, match=name):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("value", [-1, 2])
def test_groups_beyond_the_scales_are_refused(tmp_path: Path, value: int) -> None:
    write(tmp_path, "gptq4")
    edit(tmp_path, lambda tensors: tensors["model.layers.1.mlp.up_proj.g_idx"].__setitem__(3, value))
    with pytest.raises(ExportError, match="has 2 groups of scales"):
        Checkpoint.open(tmp_path)


def test_a_config_of_weights_that_are_not_packed(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    hf.write_checkpoint(tmp_path, hf.CONFIGS["llama_tied_gqa"], 3)
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(UnsupportedModel, match="no tensors of gptq"):
        Checkpoint.open(tmp_path)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    hf.write_checkpoint(tmp_path, hf.CONFIGS["llama_tied_gqa"], 3)
    tensors = load_file(tmp_path / WEIGHTS)
    (tmp_path / WEIGHTS).rename(tmp_path / "a.safetensors")
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, tmp_path / "b.safetensors")
    with pytest.raises(ExportError, match=r"model\.norm\.weight is in a\.safetensors and in b\.safetensors"):
        Checkpoint.open(tmp_path)


def test_an_index_that_promises_too_much(tmp_path: Path) -> None:
    hf.write_checkpoint(tmp_path, hf.CONFIGS["llama_tied_gqa"], 3, shards=3)
    shard = tmp_path / "model-00002-of-00003.safetensors"
    tensors = load_file(shard)
    name = sorted(tensors)[0]
    del tensors[name]
    save_file(tensors, shard)
    with pytest.raises(ExportError, match=rf"{shard.name}: has no tensor {name}, which model\.safetensors\.index"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("listed", [True, False])
def test_other_files_do_not_confuse(tmp_path: Path, shards: int, listed: bool) -> None:
    config = hf.CONFIGS["llama_tied_gqa"]
    hf.write_checkpoint(tmp_path, config, 3, shards=shards)
    if not listed:
        (tmp_path / "model.safetensors.index.json").unlink(missing_ok=True)
    strange = {"model.norm.weight": np.zeros(3, np.float32), "layers.0.attention.wq.weight": np.zeros(3, np.float32)}
    for name in ("consolidated", "optimizer", "adapter_model", "training_args"):
        save_file(strange, tmp_path / f"{name}.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    assert set(checkpoint.index) == set(hf.weights(config, 3))
    np.testing.assert_array_equal(checkpoint.read("model.norm.weight"), hf.weights(config, 3)["model.norm.weight"])


def test_mistrals_own_format_alone_is_refused(tmp_path: Path) -> None:
    hf.write_checkpoint(tmp_path, hf.CONFIGS["llama_tied_gqa"], 3)
    (tmp_path / WEIGHTS).rename(tmp_path / "consolidated.safetensors")
    with pytest.raises(ExportError, match="mistral's own format"):
        Checkpoint.open(tmp_path)


def test_scalars_and_no_dtype_in_the_configuration(tmp_path: Path) -> None:
    folder = hf.write_checkpoint(tmp_path, hf.CONFIGS["llama_tied_gqa"], 3, "bfloat16")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    del config["torch_dtype"]
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    (folder / "generation_config.json").unlink()
    tensors = load_file(folder / WEIGHTS)
    save_file(tensors | {"steps": np.full((), 7.0, np.float64)}, folder / WEIGHTS)
    assert Checkpoint.open(folder).read("steps") == 7
    open_model(folder, None)
