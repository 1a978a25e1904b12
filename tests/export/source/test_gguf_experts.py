"""Mixtures of experts of GGUF files whose last matrices have another type, as in Q4_K_M: they stay as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from edgespec.export.architectures.base import Architecture
from edgespec.export.bundle.model import write_model
from edgespec.export.bundle.model_part import ModelSpec, open_model
from edgespec.export.emit.plan import CHANGED, kept_types
from edgespec.export.loading import load_source
from edgespec.export.options import ExportOptions
from edgespec.export.quantization.k_blocks import K_BLOCKS, quantize_k
from edgespec.planning.weights import all_expert_bytes
from edgespec.runtimes.files.formats import FILE_KINDS
from edgespec.runtimes.files.manifest import ModelPart
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.shared import Model
from tests.export.test_file_weights import check_rows
from tests.support import gguf_files, hf
from tests.support.slots import next_rows

HIDDEN, INNER, EXPERTS, CHOSEN, LAYERS, HEADS, DIM = 256, 512, 8, 2, 4, 4, 64
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 320, "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": DIM,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
}  # fmt: skip
PARTS = ("gate", "up", "down")

pytestmark = pytest.mark.usefixtures("native")


def write_mixture(file: Path, inner: str, down: str, *, up: str | None = None) -> None:
    """Write a mixture whose matrices are of type ``inner``, and the last of experts in half of the layers ``down``.

    Args:
        up: the type of the second matrices there; None = ``inner``.
    """
    draw, writer = np.random.default_rng(4), GGUFWriter(file, "qwen3moe")
    gguf_files.add_model(writer, CONFIG)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(CHOSEN)
    writer.add_expert_feed_forward_length(INNER)
    size = CONFIG["vocab_size"]
    gguf_files.add_byte_level(writer, hf.make_tokenizer(size, False), size, False)

    def matrix(name: str, kind: str, *shape: int, scale: float = 1.0) -> None:
        values = (draw.standard_normal(shape) * scale / np.sqrt(shape[-1])).astype(np.float32)
        if kind == "F32":
            writer.add_tensor(name, values)
            return
        own = next((form for key, form in K_BLOCKS.items() if key.upper() == kind), None)
        flat = values.reshape(-1, shape[-1])
        if own is None:
            rows = np.asarray(quantize(flat, GGMLQuantizationType[kind])).view(np.uint8)
        else:
            rows = quantize_k(flat, own)[0]
        writer.add_tensor(name, rows.reshape(*shape[:-1], -1), raw_dtype=GGMLQuantizationType[kind])

    def norm(name: str, width: int) -> None:
        writer.add_tensor(name, (1 + 0.1 * draw.standard_normal(width)).astype(np.float32))

    matrix("token_embd.weight", inner, size, HIDDEN, scale=8)
    norm("output_norm.weight", HIDDEN)
    for layer in range(LAYERS):
        at, fine = f"blk.{layer}", layer % 2 == 0
        for name, width in (("attn", HIDDEN), ("ffn", HIDDEN), ("attn_q", DIM), ("attn_k", DIM)):
            norm(f"{at}.{name}_norm.weight", width)
        for name, n in (("q", HEADS * DIM), ("k", 2 * DIM), ("v", 2 * DIM), ("output", HIDDEN)):
            matrix(f"{at}.attn_{name}.weight", inner, n, HEADS * DIM if name == "output" else HIDDEN)
        matrix(f"{at}.ffn_gate_inp.weight", "F32", EXPERTS, HIDDEN, scale=8)
        types = {"gate": inner, "up": up if up and fine else inner, "down": down if fine else inner}
        for part, kind in types.items():
            n, k = (HIDDEN, INNER) if part == "down" else (INNER, HIDDEN)
            matrix(f"{at}.ffn_{part}_exps.weight", kind, EXPERTS, n, k)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def written(folder: Path, inner: str, down: str, **more: Any) -> tuple[Architecture, ModelPart]:
    write_mixture(folder / "model.gguf", inner, down, **more)
    arch = open_model(folder / "model.gguf", 128)
    return arch, write_model(folder, arch, ModelSpec("file", gated=True)).part


def types_of(arch: Architecture, layer: int) -> list[str | None]:
    """Types of gate, up and down as they stay; None = int8."""
    found = [arch.source.blocks(f"model.layers.{layer}.mlp.experts.{part}.weight") for part in PARTS]
    return [None if rows is None else rows.type for rows in found]


def notes_of(folder: Path) -> list[str]:
    options = ExportOptions(str(folder / "model.gguf"), folder / "bundle", format="file", quick=True)
    return list(load_source(options).notes)


def logits(model: Model, tokens: list[int], count: int) -> NDArray[np.float32]:
    slot = open_slot(model)
    slot.prefill(tokens[:4])
    found = next_rows(slot, tokens[4 : 4 + count])
    slot.close()
    return found


@pytest.mark.parametrize("inner, down", [("Q4_K", "Q6_K"), ("Q5_K", "Q8_0")])
def test_the_last_matrix_may_have_another_type(tmp_path: Path, inner: str, down: str) -> None:
    arch, part = written(tmp_path, inner, down)
    assert kept_types(arch) == (sorted({inner, down}), [])
    assert [types_of(arch, layer) for layer in range(2)] == [[inner, inner, down], [inner] * 3]
    tensors = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "model.gguf").tensors}
    for name in PARTS:
        stored = tensors[f"blk.0.ffn_{name}_exps.weight"]
        own = arch.source.blocks(f"model.layers.0.mlp.experts.{name}.weight")
        assert own is not None
        rows = own.read(slice(None))
        np.testing.assert_array_equal(rows, stored.data.reshape(rows.shape))
        values = arch.source.read(f"model.layers.0.mlp.experts.{name}.weight")
        np.testing.assert_array_equal(values, dequantize(rows, GGMLQuantizationType[own.type]))
    program = (tmp_path / "model.native.onnx").read_bytes()
    assert program.count(f"downkind={FILE_KINDS[down]} ".encode()) == LAYERS // 2 == program.count(b"downkind=")
    slot = open_slot(Model(tmp_path, part, "native", 1))
    check_rows(arch, slot, 1e-2)
    slot.close()
    stored_bytes = sum(int(tensor.n_bytes) for tensor in tensors.values())
    assert (tmp_path / part.weights).stat().st_size == pytest.approx(stored_bytes, rel=0.05)
    experts = sum(int(tensor.n_bytes) for name, tensor in tensors.items() if "_exps" in name)
    assert all_expert_bytes(part) == pytest.approx(experts, rel=0.05)


@pytest.mark.parametrize("inner, down", [("Q4_K", "Q6_K"), ("Q5_K", "Q8_0")])
def test_streamed_experts_have_the_bits_of_resident_ones(tmp_path: Path, inner: str, down: str) -> None:
    _, part = written(tmp_path, inner, down)
    tokens = np.random.default_rng(1).integers(2, CONFIG["vocab_size"], 24).tolist()
    resident = Model(tmp_path, part, "native", 2)
    streamed = Model(tmp_path, part, "native", 2, expert_cache=all_expert_bytes(part) // 3)
    assert streamed.experts is not None
    assert 2 <= streamed.experts.slots < streamed.experts.experts == LAYERS * EXPERTS
    for count in (1, 3, 8, 20):
        found = logits(streamed, tokens, count)
        np.testing.assert_array_equal(found.view(np.uint32), logits(resident, tokens, count).view(np.uint32))
    counts = streamed.experts.counts()
    assert 0 < counts.hits < counts.distinct


@pytest.mark.parametrize(
    "inner, down, up, stay",
    [
        ("Q4_K", "F16", None, [None, None, None]),  # other activations
        ("Q4_K", "Q6_K", "Q5_K", [None, None, "Q6_K"]),  # gate and up differ
        ("Q4_K", "TQ1_0", None, ["Q4_K", "Q4_K", "TQ1_0"]),  # int8, and said by its name
    ],
)
def test_what_cannot_stay_becomes_int8_and_is_said(
    tmp_path: Path, inner: str, down: str, up: str | None, stay: list[str | None]
) -> None:
    arch, part = written(tmp_path, inner, down, up=up)
    assert types_of(arch, 0) == stay
    assert types_of(arch, 1) == [inner] * 3
    slot = open_slot(Model(tmp_path, part, "native", 1))
    check_rows(arch, slot, 0.1)
    slot.close()
    notes = notes_of(tmp_path)
    (note,) = [note for note in notes if "int8 instead of" in note]
    assert f"int8 instead of {down if down == 'TQ1_0' else CHANGED}, which" in note


def test_without_another_type_nothing_is_said(tmp_path: Path) -> None:
    write_mixture(tmp_path / "model.gguf", "Q4_K", "Q6_K")
    notes = notes_of(tmp_path)
    assert not any("int8" in note for note in notes)
    assert any("weights are the file's own (Q4_K, Q6_K)" in note for note in notes)
