"""GGUF files that are refused, with the reason."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from safetensors.numpy import save_file

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.source.source import Checkpoint, resolve
from tests.support.gguf_files import Change, write_gguf

NAME = "llama_tied_gqa"


def with_arrays(*names: str) -> Callable[[GGUFWriter], None]:
    """Tensors of this name, of no use to any model."""

    def change(writer: GGUFWriter) -> None:
        for name in names:
            writer.add_tensor(name, np.ones(4, np.float32))

    return change


def refused(file: Path, *words: str, error: type[ExportError] = ExportError) -> None:
    with pytest.raises(error) as caught:
        Checkpoint.open(file)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("architecture", ["mamba", "phi3", "qwen2moe", "clip"])
def test_other_architectures(tmp_path: Path, architecture: str) -> None:
    write_gguf(tmp_path / "model.gguf", NAME, architecture=architecture)
    refused(
        tmp_path / "model.gguf", f"'{architecture}' is not supported; supported: llama, qwen2", error=UnsupportedModel
    )


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda w: w.add_expert_count(8), ["mixture of experts"]),
        (lambda w: w.add_type("adapter"), ["holds a GGUF adapter"]),
        (lambda w: w.add_uint16("split.count", 3), ["one of 3 parts", "--merge"]),
        (lambda w: w.add_string("general.type", "mmproj"), ["holds a GGUF mmproj"]),
        (with_arrays("blk.0.attn_sinks"), ["tensor blk.0.attn_sinks is unknown"]),
        (with_arrays("blk.0.ffn_gate_inp.weight"), ["tensor blk.0.ffn_gate_inp.weight is unknown"]),
        (lambda w: w.add_value_length(7), ["values of another length"]),
        (lambda w: w.add_rope_dimension_count(8), ["a part of the head"]),
    ],
)
def test_options_that_are_not_supported(tmp_path: Path, change: Change, words: list[str]) -> None:
    write_gguf(tmp_path / "model.gguf", NAME, change=change)
    refused(tmp_path / "model.gguf", *words, error=UnsupportedModel)


@pytest.mark.parametrize("key", ["embedding_length", "block_count", "attention.head_count", "context_length"])
def test_a_missing_fact_is_named(tmp_path: Path, key: str) -> None:
    write_gguf(tmp_path / "model.gguf", NAME, change=lambda writer: writer.kv_data[0].pop(f"llama.{key}"))
    refused(tmp_path / "model.gguf", f"expected a positive number llama.{key}, got None")


@pytest.mark.parametrize("key", ["tokens", "merges"])
def test_a_missing_part_of_the_tokenizer_is_named(tmp_path: Path, key: str) -> None:
    write_gguf(tmp_path / "model.gguf", NAME, change=lambda writer: writer.kv_data[0].pop(f"tokenizer.ggml.{key}"))
    refused(tmp_path / "model.gguf", f"tokenizer.ggml.{key}", "tokenizer.json")


def test_sizes_that_differ_between_layers(tmp_path: Path) -> None:
    def change(writer: GGUFWriter) -> None:
        del writer.kv_data[0]["llama.attention.head_count_kv"]
        writer.add_head_count_kv([2, 4])

    write_gguf(tmp_path / "model.gguf", NAME, change=change)
    refused(tmp_path / "model.gguf", "llama.attention.head_count_kv differs between layers: [2, 4]")


def test_damaged_files(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, NAME)
    content = file.read_bytes()
    for left in [0, 3, 4, 20, 100, 1000, 3000, 5000, len(content) // 2, len(content) - 100]:
        file.write_bytes(content[:left])
        refused(file, "model.gguf", "download it again")
    file.write_bytes(b"PK\x03\x04" + content[4:])
    refused(file, "not a readable GGUF file")


def test_damaged_bytes(tmp_path: Path) -> None:
    """Whatever a header says, it is read or refused, and soon."""
    file = tmp_path / "model.gguf"
    write_gguf(file, NAME)
    content, generator = file.read_bytes(), np.random.default_rng(1)
    refusals = 0
    for at in [8, 15, 16, 23, *(int(at) for at in generator.integers(0, 4000, 120))]:
        file.write_bytes(content[:at] + b"\xff" + content[at + 1 :])
        try:
            Checkpoint.open(file)
        except ExportError:
            refusals += 1
    assert 20 < refusals < 124


@pytest.mark.parametrize("key", ["llama.rope.scaling.factor", "tokenizer.ggml.bos_token_id", "split.count"])
def test_metadata_of_other_types(tmp_path: Path, key: str) -> None:
    def change(writer: GGUFWriter) -> None:
        writer.kv_data[0].pop(key, None)
        writer.add_string("llama.rope.scaling.type", "linear")
        writer.add_string(key, "many")

    write_gguf(tmp_path / "model.gguf", NAME, change=change)
    refused(tmp_path / "model.gguf", "its metadata cannot be understood", "many")


def test_a_file_cut_off_after_it_was_opened(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, NAME)
    checkpoint = Checkpoint.open(file)
    file.write_bytes(file.read_bytes()[:10000])
    with pytest.raises(ExportError, match=r"model\.gguf: cannot read(.|\n)*download it again"):
        checkpoint.read("model.layers.1.mlp.up_proj.weight")


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "model.gguf", NAME)
    monkeypatch.setitem(sys.modules, "gguf", None)
    refused(tmp_path / "model.gguf", "needs the package gguf", "pip install 'edgespec[gguf]'")


def test_other_files_are_no_models(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": np.ones(3, np.float32)}, file)
    with pytest.raises(ExportError, match=r"expected a model folder, got a file(.|\n)*or a \.gguf file"):
        resolve(str(file))
