"""Weights of GPTQ, AWQ and compressed-tensors as they are: the checkpoint's numbers, with exact rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from edgespec import load
from edgespec.cli.app import cli
from edgespec.errors import ExportError
from edgespec.export.bundle.model import write_model
from edgespec.export.bundle.model_part import ModelSpec, open_model
from edgespec.export.emit.plan import kept_types
from edgespec.export.loading import load_source
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.export.quantization.native_packing import pack_rows, unpack_rows
from edgespec.export.source.source import Checkpoint
from edgespec.runtimes.files.formats import FILE_KINDS
from edgespec.runtimes.files.packing import Packed
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.ort.native_library import native_library
from edgespec.runtimes.slots.shared import Model
from tests.export.test_file_weights import check_rows
from tests.support import hf, packed

CONFIG = hf.CONFIGS["llama_tied_gqa"] | {"hidden_size": 128, "intermediate_size": 256}
GPTQ = {"quant_method": "gptq", "bits": 4, "sym": False, "desc_act": False}
FIRST = GPTQ | {"checkpoint_format": "gptq"}
AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}

# type of the packed matrices, how they are packed, and the checkpoint's settings
LAYOUTS: dict[str, tuple[str, packed.Packer, dict[str, Any]]] = {
    "gptq4 of 128": ("U4X128", packed.gptq(4, 128, symmetric=False), GPTQ | {"group_size": 128}),
    "gptq4 of 64, symmetric": ("U4X64", packed.gptq(4, 64), GPTQ | {"group_size": 64, "sym": True}),
    "gptq4 of 32": ("U4X32", packed.gptq(4, 32, symmetric=False), GPTQ | {"group_size": 32}),
    "gptq4 of 32, symmetric": ("Q4_0", packed.gptq(4, 32), GPTQ | {"group_size": 32, "sym": True}),
    "gptq4 v2 of rows": (
        "U4X128", packed.gptq(4, -1, symmetric=False, first=False),
        GPTQ | {"group_size": -1, "checkpoint_format": "gptq_v2"},
    ),
    "gptq4 by importance": (
        "U4X64", packed.gptq(4, 64, act=True, symmetric=False), GPTQ | {"group_size": 64, "desc_act": True},
    ),
    "gptq4 by importance of each": (
        "U4X32", packed.gptq(4, 32, act=True, symmetric=False, each=True), GPTQ | {"group_size": 32, "desc_act": True},
    ),
    "gptq8 by importance, symmetric": (
        "Q8_0", packed.gptq(8, 64, act=True), GPTQ | {"bits": 8, "group_size": 64, "sym": True, "desc_act": True},
    ),
    "gptq8 of 64": ("U8X32", packed.gptq(8, 64, symmetric=False), FIRST | {"bits": 8, "group_size": 64}),
    "gptq8 of 128": ("U8X128", packed.gptq(8, 128, symmetric=False), FIRST | {"bits": 8, "group_size": 128}),
    "gptq2 of 32": ("U4X32", packed.gptq(2, 32, symmetric=False), FIRST | {"bits": 2, "group_size": 32}),
    "awq of 128": ("U4X128", packed.awq(128), AWQ | {"group_size": 128}),
    "awq of 32": ("U4X32", packed.awq(32), AWQ | {"group_size": 32}),
    "compressed int4": (
        "U4X64", packed.packed_int(4, 64, symmetric=False),
        packed.of_compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=64),
    ),
    "compressed int4 by importance": ("U4X32", *packed.KINDS["compressed_int4_act_asym"]),
    "compressed int8 of rows": ("Q8_0", *packed.KINDS["compressed_int8"]),
    "compressed packed int8 of rows": ("Q8_0", *packed.KINDS["compressed_packed_int8"]),
    "compressed int8 with zero points": (
        "U8X128", packed.int8_zeros, packed.of_compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
    ),
}  # fmt: skip

pytestmark = pytest.mark.skipif(native_library().path is None, reason="no native operators here")


def write(folder: Path, packer: packed.Packer, settings: dict[str, Any]) -> dict[str, NDArray[np.float32]]:
    """Write a checkpoint in 16 bits with packed projections; returns what it must mean."""
    hf.write_checkpoint(folder, CONFIG, 3, "bfloat16")
    return packed.pack_checkpoint(folder, packer, settings)


def unpacked(source: Checkpoint, name: str) -> NDArray[np.float32]:
    """Pack a matrix as it is, and convert it back to the numbers that native operators multiply by."""
    rows, (n, k) = source.blocks(name), source.shape(name)
    assert rows is not None
    form = Packed(FILE_KINDS[rows.type], n, k, 0, ((name, n),))
    pieces = list(pack_rows(form, [rows]))
    low = [low for _, low in pieces if low is not None]
    data = np.concatenate([piece for piece, _ in pieces])
    found = unpack_rows(form, data, np.concatenate(low) if low else None, slice(0, n))
    if rows.order is None:
        return found
    back = np.empty_like(found)
    back[:, rows.order] = found
    return back


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_those_of_the_checkpoint(tmp_path: Path, layout: str) -> None:
    kind, packer, settings = LAYOUTS[layout]
    truth = write(tmp_path, packer, settings)
    source = Checkpoint.open(tmp_path)
    for name, wanted in truth.items():
        if wanted.ndim == 2:
            rows = source.blocks(name)
            assert rows is not None
            assert rows.type == (kind if "_proj" in name else "BF16"), name
            np.testing.assert_array_equal(unpacked(source, name), wanted.astype(np.float32), err_msg=name)
            some = np.array([5, 3, 31, 30, 4])
            np.testing.assert_array_equal(rows.read(some), rows.read(slice(0, 32))[some], err_msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_exact_and_near_float64(tmp_path: Path, layout: str) -> None:
    kind, packer, settings = LAYOUTS[layout]
    write(tmp_path / "model", packer, settings)
    arch = open_model(tmp_path / "model", 128)
    assert kept_types(arch) == (sorted({kind, "BF16"}), [])
    written = write_model(tmp_path, arch, ModelSpec("file", gated=True))
    slot = open_slot(Model(tmp_path, written.part, "native", 1))
    check_rows(arch, slot)
    program = (tmp_path / "model.native.onnx").read_bytes()
    assert f"kind={FILE_KINDS[kind]} ".encode() in program
    assert (b" order=" in program) == ("importance" in layout)
    slot.close()


def separate_experts(file: Path) -> None:
    """Store a matrix for each expert, as quantized checkpoints do."""
    tensors = load_file(file)
    for name in [name for name in tensors if ".experts." in name]:
        at, _, part = name.rpartition(".")
        for number, matrix in enumerate(tensors.pop(name)):
            halves = np.split(matrix, 2) if part == "gate_up_proj" else [matrix]
            parts = ("gate_proj", "up_proj") if len(halves) == 2 else ("down_proj",)
            for own, half in zip(parts, halves, strict=True):
                tensors[f"{at}.{number}.{own}.weight"] = np.ascontiguousarray(half)
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize("size", [32, 64])
def test_experts_of_a_mixture(tmp_path: Path, size: int) -> None:
    """The matrices of a mixture stay as they are, the last of another type: its inputs of 32 have no groups of 64."""
    hf.write_checkpoint(tmp_path / "model", hf.CONFIGS["qwen3_moe_dense"], 15, "bfloat16")
    separate_experts(tmp_path / "model" / "model.safetensors")
    packed.pack_checkpoint(tmp_path / "model", packed.awq(size), AWQ | {"group_size": size})
    arch = open_model(tmp_path / "model", 128)
    name = "model.layers.0.mlp.experts.down.weight"
    rows = arch.source.blocks(name)
    assert rows is not None
    assert kept_types(arch)[1] == []
    n, k = arch.tensors[name]
    form = Packed("u4x32", n, k, 0, ((name, n),))
    data = np.concatenate([piece for piece, _ in pack_rows(form, [rows])])
    np.testing.assert_array_equal(unpack_rows(form, data, None, slice(0, n)), arch.source.read(name))
    written = write_model(tmp_path, arch, ModelSpec("file", gated=True))
    slot = open_slot(Model(tmp_path, written.part, "native", 1))
    check_rows(arch, slot, 2e-3 if size == 32 else 0.1)  # activations of 8 bits send one row to another expert
    slot.close()


@pytest.mark.parametrize(
    "packer, settings, named",
    [
        (packed.gptq(4, 16, symmetric=False), GPTQ | {"group_size": 16}, "4 bits in groups that are not multiples"),
        (*packed.KINDS["fp8_whole"], "F8_E4M3"),
        (packed.rescaled(packed.packed_int(4, 64), 1e-9, ml_dtypes.bfloat16), packed.KINDS["compressed_int4"][1],
         "4 bits with scales that are not float16"),
    ],
)  # fmt: skip
def test_what_has_no_kernels_becomes_int8_and_is_named(
    tmp_path: Path, packer: packed.Packer, settings: dict[str, Any], named: str
) -> None:
    if named.startswith("4 bits with"):
        settings = packed.of_compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=64)
    write(tmp_path / "model", packer, settings)
    options = ExportOptions(str(tmp_path / "model"), tmp_path / "bundle", format="file", quick=True)
    source = load_source(options)
    (note,) = [note for note in source.notes if "int8 instead of" in note]
    assert named in note
    assert not any("once more" in note for note in source.notes)
    assert load_source(replace(options, format="int4", choose=True)).options.format != "file"


def test_scales_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    _, packer, settings = LAYOUTS["awq of 128"]
    write(tmp_path / "model", packer, settings)
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.scales"][0, 3] = np.inf
    save_file(tensors, file, {"format": "pt"})
    arch = open_model(tmp_path / "model", 128)
    with pytest.raises(ExportError, match="scales hold NaN or infinity"):
        write_model(tmp_path, arch, ModelSpec("file", gated=True))


@pytest.mark.parametrize("layout", ["gptq4 by importance of each", "awq of 128", "compressed int8 of rows"])
def test_a_quantized_checkpoint_keeps_its_weights_by_default(tmp_path: Path, layout: str) -> None:
    _, packer, settings = LAYOUTS[layout]
    write(tmp_path / "model", packer, settings)
    told: list[str] = []
    options = ExportOptions(str(tmp_path / "model"), tmp_path / "bundle", quick=True, choose=True)
    manifest = export_model(options, lambda stage, done, of, what: told.append(what))
    assert manifest.target.format == "file"
    assert manifest.target.bytes_per_weight is not None
    assert any(line.startswith("the file's own weights, ") for line in told)
    assert json.loads((tmp_path / "bundle" / "edgespec.json").read_text("utf-8"))["target"]["format"] == "file"
    with load(tmp_path / "bundle", threads=1) as engine:
        plain = engine.generate("the", method="ar", max_new_tokens=24, ignore_eos=True)
        drafted = engine.generate("the", method="ngram", max_new_tokens=24, ignore_eos=True)
    assert drafted.exact
    assert drafted.tokens == plain.tokens
    proven = CliRunner().invoke(cli, ["verify", str(tmp_path / "bundle")])
    assert proven.exit_code == 0
    assert "ngram: exact: 1 of 1 prompts equal" in proven.output
    assert "golden vectors: 1 of 1 reproduced" in proven.output
