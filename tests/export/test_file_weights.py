"""Weights as a GGUF file has them: the file's numbers, with the same bits for any number of rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from edgespec import load
from edgespec.errors import ExportError
from edgespec.export.bundle.model import write_model
from edgespec.export.bundle.model_part import ModelSpec, open_model
from edgespec.export.emit.plan import kept_types
from edgespec.export.loading import load_source
from edgespec.export.measuring.parity import divergence
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.export.quantization.reference import reference_logits
from edgespec.runtimes.files.formats import FILE_KINDS
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.ort.native_library import native_library
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot
from tests.support import hf
from tests.support.gguf_files import Change, with_types, write_gguf
from tests.support.slots import next_rows, one_by_one

NAME = "llama_tied_gqa"
DOWN, QUERY, KEY, VALUE = (f"blk.0.{name}.weight" for name in ("ffn_down", "attn_q", "attn_k", "attn_v"))
GATE, UP = "blk.1.ffn_gate.weight", "blk.1.ffn_up.weight"
BLOCKS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16"]
RANDOM = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"]

pytestmark = pytest.mark.skipif(native_library().path is None, reason="no native operators here")


def made(tmp_path: Path, kind: str, change: Change | None = None) -> tuple[Any, Slot]:
    """Write a GGUF file, its model, and open it."""
    file = tmp_path / "model.gguf"
    write_gguf(file, NAME, kind=GGMLQuantizationType[kind], change=change)
    arch = open_model(file, 128)
    written = write_model(tmp_path, arch, ModelSpec("file", gated=True))
    return arch, open_slot(Model(tmp_path, written.part, "native", 1))


def check_rows(arch: Any, slot: Slot, nats: float = 2e-3) -> None:
    """Check that rows in a batch have the bits of single rows, and match the dequantized file."""
    tokens = np.random.default_rng(1).integers(2, arch.facts.vocab, 24).tolist()
    alone = one_by_one(slot, tokens[:4], tokens[4:])
    for count in (2, 3, 4, 5, 8, 17, 20):
        slot.follow([])
        slot.prefill(tokens[:4])
        np.testing.assert_array_equal(next_rows(slot, tokens[4 : 4 + count]).view(np.uint32),
                                      alone[:count].view(np.uint32), err_msg=f"{count} rows")  # fmt: skip
    exact = reference_logits(arch, tokens, list(range(4, 24)))
    assert divergence(exact, alone) < nats


@pytest.mark.parametrize("kind", BLOCKS)
def test_every_matrix_in_a_type(tmp_path: Path, kind: str) -> None:
    arch, slot = made(tmp_path, kind)
    assert kept_types(arch)[0] == [kind]
    check_rows(arch, slot)
    kinds = {matrix for matrix in (tmp_path / "model.native.onnx").read_bytes().split() if b"kind=" in matrix}
    assert f"kind={FILE_KINDS[kind]}".encode() in kinds
    slot.close()


@pytest.mark.parametrize("kind", RANDOM)
def test_types_of_random_codes(tmp_path: Path, kind: str) -> None:
    arch, slot = made(tmp_path, "Q8_0", with_types(blk__0__ffn_down__weight=kind))
    assert kept_types(arch) == (sorted(["Q8_0", kind]), [])
    check_rows(arch, slot)
    slot.close()


def test_neighbours_of_different_types(tmp_path: Path) -> None:
    """Queries, keys and values, or gate and up, that cannot be multiplied in one step."""
    types = {QUERY: "IQ4_NL", VALUE: "MXFP4", GATE: "IQ4_NL"}
    arch, slot = made(tmp_path, "Q5_1", with_types(**{name.replace(".", "__"): kind for name, kind in types.items()}))
    assert kept_types(arch)[0] == ["IQ4_NL", "MXFP4", "Q5_1", "Q8_0"]
    check_rows(arch, slot, 5e-3)
    slot.close()


@pytest.mark.parametrize("inner, down", [("F16", "Q8_0"), ("Q5_0", "F16"), ("F16", "F16")])
def test_matrices_of_an_mlp_that_multiply_different_activations(tmp_path: Path, inner: str, down: str) -> None:
    types = {GATE: inner, UP: inner, "blk.1.ffn_down.weight": down}
    arch, slot = made(tmp_path, "Q8_0", with_types(**{name.replace(".", "__"): kind for name, kind in types.items()}))
    check_rows(arch, slot)
    slot.close()


def test_types_without_kernels_become_int8_and_are_named(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, NAME, kind=GGMLQuantizationType.Q4_1, change=with_types(blk__0__ffn_down__weight="TQ1_0"))
    source = load_source(ExportOptions(str(file), tmp_path / "bundle", format="file", quick=True))
    assert any("int8 instead of TQ1_0" in note for note in source.notes)
    assert not any("once more" in note for note in source.notes)


def test_a_quantized_file_keeps_its_weights_by_default(tmp_path: Path) -> None:
    file, options = tmp_path / "model.gguf", ExportOptions("", tmp_path / "bundle", quick=True, choose=True)
    write_gguf(file, NAME, kind=GGMLQuantizationType.Q4_1)
    told: list[str] = []
    manifest = export_model(replace(options, model=str(file)), lambda stage, done, of, what: told.append(what))
    assert manifest.target.format == "file"
    assert manifest.target.bytes_per_weight is not None
    assert [*manifest.target.graphs] == ["native"]
    assert len(manifest.golden) == 1  # verify reads its prompts there
    assert any(line.startswith("the file's own weights, ") for line in told)
    write_gguf(file, NAME, kind=GGMLQuantizationType.F16)
    assert load_source(replace(options, model=str(file))).options.format != "file"


def test_a_file_of_8_bits_drafts_by_its_high_planes(tmp_path: Path) -> None:
    """The upper four bits of Q8_0 are a draft model that no byte is added for; a text has all bits."""
    write_gguf(tmp_path / "model.gguf", NAME, kind=GGMLQuantizationType.Q8_0)
    options = ExportOptions(str(tmp_path / "model.gguf"), tmp_path / "bundle", quick=True, choose=True)
    manifest = export_model(options, golden=False)
    assert manifest.target.format == "file"
    assert manifest.target.layers_have_planes
    with load(tmp_path / "bundle", threads=1) as engine:
        plain = engine.generate("the", method="ar", max_new_tokens=40, ignore_eos=True)
        drafted = engine.generate("the", method="self-spec", max_new_tokens=40, ignore_eos=True, fallback=False)
    assert drafted.exact
    assert drafted.tokens == plain.tokens
    assert drafted.stats.drafted > 0
    assert drafted.stats.accepted > 0


def test_a_file_with_few_matrices_of_8_bits_does_not(tmp_path: Path) -> None:
    change = with_types(**{f"blk__{layer}__ffn_{name}__weight": "Q5_0" for layer in (0, 1) for name in ("gate", "up")})
    write_gguf(tmp_path / "model.gguf", NAME, kind=GGMLQuantizationType.Q5_0, change=change)
    options = ExportOptions(str(tmp_path / "model.gguf"), tmp_path / "bundle", quick=True, choose=True)
    manifest = export_model(options, golden=False)
    assert manifest.target.planes
    assert not manifest.target.layers_have_planes


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"operators": "stock"}, r"--format file: stock operators can hold none of its weights exactly \(Q4_1\)"),
        ({"adapter": "lora"}, "--format file and --adapter"),
    ],
)
def test_what_does_not_go_with_it(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    write_gguf(tmp_path / "model.gguf", NAME, kind=GGMLQuantizationType.Q4_1)
    options = ExportOptions(str(tmp_path / "model.gguf"), tmp_path / "bundle", format="file", **changes)
    with pytest.raises(ExportError, match=said):
        load_source(options)


def test_it_is_for_decoders_alone(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="--format file is for the weights of decoders"):
        load_source(ExportOptions("builtin:restore", tmp_path / "bundle", format="file"))


def test_floats_of_a_checkpoint_stay_as_they_are(tmp_path: Path) -> None:
    hf.write_checkpoint(tmp_path / "model", hf.CONFIGS[NAME], 3, "bfloat16")
    arch = open_model(tmp_path / "model", 128)
    assert kept_types(arch) == (["BF16"], [])
    slot = open_slot(Model(tmp_path, write_model(tmp_path, arch, ModelSpec("file", gated=True)).part, "native", 1))
    check_rows(arch, slot, 1e-5)
    slot.close()


def test_a_disk_without_room_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "model.gguf", NAME, kind=GGMLQuantizationType.Q4_1)
    options = ExportOptions(str(tmp_path / "model.gguf"), tmp_path / "bundle", format="file", quick=True)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(total=1 << 40, free=1000))
    with pytest.raises(ExportError, match=r"need .* of disk"):
        export_model(options, golden=False)
    assert not (tmp_path / "bundle").exists()
