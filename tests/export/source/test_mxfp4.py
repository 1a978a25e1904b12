"""gpt-oss in MXFP4: experts as safetensors and GGUF files have them are the same numbers, and stay as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.bundle.model import write_model
from edgespec.export.bundle.model_part import ModelSpec, open_model
from edgespec.export.emit.plan import kept_types
from edgespec.export.quantization.reference import reference_logits
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.shared import Model
from tests.export.test_file_weights import check_rows
from tests.support import gguf_files, hf

Tensors = dict[str, NDArray[Any]]
Written = tuple[tuple[Path, Path], Tensors]  # as safetensors and as GGUF, and what matrices mean
NAME = "gpt_oss_default"
CONFIG = hf.CONFIGS[NAME]
LEVELS = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]  # E2M1
MATRICES = ("gate_up_proj", "down_proj")


def meaning(blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Give what blocks [experts, n, groups, 16] mean, byte by byte -> [experts, n, k]."""
    found = np.zeros((*blocks.shape[:3], 32), np.float32)
    for at in range(16):
        for half in range(2):
            codes = blocks[..., at] >> 4 if half else blocks[..., at] & 15
            found[..., 2 * at + half] = np.array(LEVELS, np.float32)[codes] * np.exp2(scales.astype(np.float64) - 127)
    return found.reshape(*blocks.shape[:2], -1)


def write_mxfp4(folder: Path) -> tuple[Tensors, Tensors]:
    """Write a checkpoint as it is published -> its tensors, and what the experts' matrices mean."""
    hf.write_reference_checkpoint(folder, NAME)
    file, random = folder / "model.safetensors", np.random.default_rng(8)
    tensors, truth = load_file(file), Tensors()
    for name in [name for name in tensors if name.endswith(MATRICES)]:
        experts, k, n = tensors.pop(name).shape  # as transformers has them, inputs first
        blocks = random.integers(0, 256, (experts, n, k // 32, 16), np.uint8)
        scales = random.integers(121, 125, blocks.shape[:3], np.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        truth[name] = meaning(blocks, scales)
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return tensors, truth


def as_gguf(file: Path, tensors: Tensors) -> None:
    """Write the same model as llama.cpp's converter does: gate and up as two, nibbles i and i + 16 in a byte."""
    writer = GGUFWriter(file, "gpt-oss")
    gguf_files.add_model(writer, CONFIG | {"rms_norm_eps": 1e-5})
    writer.add_expert_count(CONFIG["num_local_experts"])
    writer.add_expert_used_count(CONFIG["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(CONFIG["intermediate_size"])
    writer.add_sliding_window(CONFIG["sliding_window"])
    rope = CONFIG["rope_parameters"]
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    size = CONFIG["vocab_size"]
    gguf_files.add_byte_level(writer, hf.make_tokenizer(size, False), size, False, pre="gpt-4o")
    for name, value in tensors.items():
        if name.endswith("_scales"):
            continue
        at, _, rest = name.removeprefix("model.layers.").partition(".")
        if rest.startswith("mlp.experts."):
            part = rest.split(".")[2]
            for number, which in enumerate(("gate", "up") if "gate" in part else ("down",)):
                own = slice(number, None, 2) if "gate" in part else slice(None)
                into = f"blk.{at}.ffn_{which}_exps"
                if part.endswith("_bias"):
                    writer.add_tensor(f"{into}.bias", np.ascontiguousarray(value[:, own].astype(np.float32)))
                    continue
                codes, scales = value[:, own], tensors[name.replace("_blocks", "_scales")][:, own]
                each = np.stack([codes & 15, codes >> 4], -1).reshape(*scales.shape, 2, 16)
                blocks = np.concatenate([scales[..., None], each[..., 0, :] | each[..., 1, :] << 4], -1)
                writer.add_tensor(f"{into}.weight", blocks.reshape(*blocks.shape[:2], -1),
                                  raw_dtype=GGMLQuantizationType.MXFP4)  # fmt: skip
            continue
        theirs = {
            "self_attn.sinks": "attn_sinks.weight",
            "post_attention_layernorm.weight": "post_attention_norm.weight",
            "mlp.router.weight": "ffn_gate_inp.weight",
            "mlp.router.bias": "ffn_gate_inp.bias",
        }.get(rest)
        writer.add_tensor(f"blk.{at}.{theirs}" if theirs else gguf_files.gguf_name(name, "gpt_oss"),
                          np.asarray(value, np.float32))  # fmt: skip
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("mxfp4")
    tensors, truth = write_mxfp4(folder / "model")
    as_gguf(folder / "model.gguf", tensors)
    return (folder / "model", folder / "model.gguf"), truth


@pytest.mark.parametrize("which", [0, 1])
def test_experts_are_what_the_format_says(written: Written, which: int) -> None:
    source, truth = open_model(written[0][which], 128).source, written[1]
    for layer in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{layer}.mlp.experts"
        both, down = (truth[f"{at}.{name}"] for name in MATRICES)
        for part, expected in {"gate": both[:, ::2], "up": both[:, 1::2], "down": down}.items():
            name, expected = f"{at}.{part}.weight", expected.reshape(-1, expected.shape[2])
            np.testing.assert_array_equal(source.read(name), expected)
            np.testing.assert_array_equal(source.read(name, slice(5, 41), slice(3, 20)), expected[5:41, 3:20])
            rows = source.blocks(name)
            assert rows is not None
            assert rows.type == "MXFP4"
            wanted = np.array([7, 3, len(expected) - 1])
            found = np.asarray(dequantize(rows.read(wanted), GGMLQuantizationType.MXFP4))
            np.testing.assert_array_equal(found, expected[wanted])


def test_both_files_are_one_model(written: Written) -> None:
    tokens = np.random.default_rng(1).integers(2, CONFIG["vocab_size"], 40).tolist()
    found = [reference_logits(open_model(path, 128), tokens) for path in written[0]]
    np.testing.assert_allclose(found[1], found[0], atol=2e-5)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("which", [0, 1])
def test_experts_stay_as_they_are(tmp_path: Path, written: Written, which: int) -> None:
    arch = open_model(written[0][which], 128)
    assert kept_types(arch) == (["F32" if which else "BF16", "MXFP4"], [])
    made = write_model(tmp_path, arch, ModelSpec("file", gated=True))
    slot = open_slot(Model(tmp_path, made.part, "native", 1))
    check_rows(arch, slot, 3e-2)  # activations of 8 bits send a row to another expert
    slot.close()


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    write_mxfp4(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.experts.down_proj"
    for change, error, message in (
        ({f"{name}_scales": None}, ExportError, "down_proj_scales is missing"),
        ({f"{name}_scales": np.zeros((5, 64, 3), np.uint8)}, ExportError, r"expected \[5, 64, 2\]"),
        ({f"{name}_blocks": np.zeros((4, 64, 16), np.uint8)}, UnsupportedModel, r"expected uint8 \[experts"),
    ):
        save_file({key: value for key, value in (tensors | change).items() if value is not None}, file)
        with pytest.raises(error, match=message):
            open_model(tmp_path, 128)
