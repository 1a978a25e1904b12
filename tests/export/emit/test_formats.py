"""Graphs compute with exactly what is stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto

from edgespec.export.architectures.rules import Linear
from edgespec.export.bundle.model_part import open_model
from edgespec.export.emit.fill import fill
from edgespec.export.emit.formats import LINEAR, table_rows
from edgespec.export.emit.graph import GraphBuilder
from edgespec.export.emit.plan import LARGE_ALIGN, SMALL_ALIGN, StockPlan, WeightLayout
from edgespec.export.emit.plans import storage_plans
from edgespec.export.quantization import levels as quantize
from edgespec.export.quantization.layers import Array
from edgespec.export.quantization.levels import EMBEDDING_LEVELS
from edgespec.export.quantization.reference import NumpyOps
from edgespec.runtimes.files.formats import FORMATS, FOUR_BITS, KINDS, SPECS, Format
from edgespec.runtimes.files.kv import ATTENTION
from edgespec.runtimes.files.packing import BLOCKS
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.ort.session import make_session
from edgespec.runtimes.slots.shared import Model
from tests.conftest import OPERATORS, Written
from tests.support import hf

NAMES = sorted(hf.CORE)

Write = Callable[..., Written]
BOTH = pytest.mark.parametrize("operators", OPERATORS, indirect=True)
Matrix = NDArray[np.float32]


def blocks_of(weight: Matrix, size: int) -> Matrix:  # [n, k] -> [n, blocks, size]
    n, k = weight.shape
    return np.pad(weight, ((0, 0), (0, -k % size))).reshape(n, -1, size)


# -- one matrix through its graph --------------------------------------------------------------------------------------


def stored(folder: Path, form: Format, hidden: int, tied: bool) -> StockPlan:
    """Write a small model; return the plan that stores it in format ``form``."""
    config = {**hf.CONFIGS["llama_tied_gqa"], "hidden_size": hidden, "head_dim": 8, "tie_word_embeddings": tied}
    arch = open_model(hf.write_checkpoint(folder / "source", config, 1), None)
    plan = storage_plans(arch, form, None, None)["stock"]
    assert isinstance(plan, StockPlan)
    return plan


def stored_as(weight: Matrix, form: str) -> Matrix:
    """Quantize and dequantize ``weight`` as format ``form`` does, by the formulas of quantize.py."""
    if form in BLOCKS:
        blocks = BLOCKS[form]
        return quantize.dequantize_block(*quantize.quantize_block(weight, blocks), weight.shape[1], blocks.bits)
    return quantize.dequantize_channel(*quantize.quantize_channel(weight)) if form == "w8a8" else weight


def by_token(x: Array) -> Array:
    """w8a8: activations rounded to 127 levels either side of zero, each token on its own."""
    scale = np.maximum(np.abs(x).max(-1, keepdims=True), np.float32(1e-12)) * np.float32(1 / 127)
    return np.rint(x / scale) * scale


def by_block(x: Array, size: int = 32) -> Array:
    """Activations rounded to 127 levels either side of zero, in blocks; MatMulNBits at accuracy level 4 has 32."""
    blocks = blocks_of(x.reshape(-1, x.shape[-1]), size)
    scale = np.maximum(np.abs(blocks).max(-1, keepdims=True), np.float32(1e-30)) / np.float32(127)
    return (np.rint(blocks / scale) * scale).reshape(len(blocks), -1)[:, : x.shape[-1]].reshape(x.shape)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("k", [32, 64, 100])
@pytest.mark.parametrize("form", FORMATS)
def test_a_product_is_that_of_the_stored_matrix(tmp_path: Path, form: Format, k: int, bias: bool) -> None:
    random, plan = np.random.default_rng(k), stored(tmp_path, form, k, True)
    errors = fill(tmp_path / "model.data", plan)
    name = next(name for name in plan.matrices if "q_proj" in name)
    matrix = plan.matrices[name]
    assert len(matrix.parts) == (1 if form == "fp32" else 3)
    parts = {part: plan.arch.source.read(part) for part in matrix.parts}
    added = random.standard_normal(matrix.n, np.float32)
    graph = GraphBuilder(plan)
    graph.input("x", TensorProto.FLOAT, ["T", k])
    y = LINEAR[form].multiply(graph, "x", name, k, matrix.n, graph.constant("added", added) if bias else None)
    graph.node("Identity", [y], ["y"])
    graph.output("y", TensorProto.FLOAT, ["T", matrix.n])
    graph.save(tmp_path / "g.onnx")
    x = random.standard_normal((9, k), np.float32) * np.float32(3)
    (got,) = make_session(tmp_path / "g.onnx", 1).run(None, {"x": x})
    weight = np.concatenate([stored_as(part, form) for part in parts.values()]).astype(np.float64)
    seen = by_token(x) if form == "w8a8" else x
    expected = seen @ weight.T + (added if bias else 0)
    rounding = 1e-5 * (np.abs(x) @ np.abs(weight).T + 1)
    if form in BLOCKS:
        emulated = by_block(x) @ weight.T + (added if bias else 0)
        assert (np.abs(got - emulated) <= rounding).mean() > 0.95  # except values just between two levels
        step = np.abs(blocks_of(x, 32)).max(-1) / 127  # [T, blocks]
        rounding += 0.5 * step @ np.abs(blocks_of(weight.astype(np.float32), 32)).sum(-1).T
    assert (np.abs(got - expected) <= rounding).all()
    for part, values in parts.items():
        error, norm = quantize.squared_error(values, stored_as(values, form))
        assert errors[part] == pytest.approx((error, norm), rel=1e-5)


@pytest.mark.parametrize("kind", ["lookup", "table"])
@pytest.mark.parametrize("form", FORMATS)
def test_embedding_rows_are_the_stored_ones(tmp_path: Path, form: Format, kind: str) -> None:
    """They come from the matrix of the LM head (tied), or from a separate table (untied, of no whole blocks)."""
    hidden = 64 if kind == "lookup" else 100
    plan = stored(tmp_path, form, hidden, kind == "lookup")
    name = plan.arch.embedding
    fill(tmp_path / "model.data", plan)
    ids, weight = np.array([[3, 0, 49, 3, 7, 21]]), plan.arch.source.read(name)
    assert (name in plan.matrices) == (kind == "lookup")
    graph = GraphBuilder(plan)
    graph.input("ids", TensorProto.INT64, [1, "T"])
    if kind == "lookup":
        rows, expected = LINEAR[form].lookup(graph, "ids", name), stored_as(weight, form)
    else:
        rows, expected = table_rows(graph, "ids", name), weight
        if form != "fp32":
            expected = quantize.dequantize_channel(*quantize.quantize_channel(weight, EMBEDDING_LEVELS))
    graph.node("Identity", [rows], ["y"])
    graph.output("y", TensorProto.FLOAT, [1, "T", hidden])
    graph.save(tmp_path / "g.onnx")
    (got,) = make_session(tmp_path / "g.onnx", 1).run(None, {"ids": ids})
    np.testing.assert_allclose(got[0], expected[ids[0]], rtol=0, atol=1e-6)


# -- whole models ------------------------------------------------------------------------------------------------------


class StoredOps(NumpyOps):
    """The numpy reference with every matrix as it was stored, and w8a8's activations as that format rounds them."""

    form: Format = "fp32"
    size = 32  # of the blocks that activations are rounded in

    def embed(self, weight: str, scale: float = 1.0, positions: str | None = None) -> Array:
        arch, matrix = self.arch, self.source.read(weight)
        if arch.facts.hidden % 32 == 0 if self.form in BLOCKS else arch.facts.tied:
            return stored_as(matrix, self.form)[self.tokens][None]
        rows = quantize.dequantize_channel(*quantize.quantize_channel(matrix, EMBEDDING_LEVELS))
        return (matrix if self.form == "fp32" else rows)[self.tokens][None]

    def _linear(self, x: Array, part: Linear) -> Array:
        seen = x if self.form == "fp32" else by_token(x) if self.form == "w8a8" else by_block(x, self.size)
        y = seen @ stored_as(self.source.read(part.weight), self.form).T
        return y if part.bias is None else y + self.source.read(part.bias)


@BOTH
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", [*NAMES, "builtin:shakespeare"])
def test_a_model_computes_with_what_is_stored(
    written: Write, request: pytest.FixtureRequest, name: str, form: Format
) -> None:
    """With the stored weights, and activations rounded as each format does, numpy gets the same logits.

    Mostly to 1e-6 of their spread.  An activation just between two levels may round the other way, though, and that
    moves all that follows: 3 % is the bound.  Leaving the rounding of int4 weights out moves them more than that.
    """
    made = written(name, form)
    tokens = np.random.default_rng(5).integers(2, made.part.facts.vocab, 150 if "llama3" in name else 40).tolist()

    def rounded(size: int) -> Array:  # -> [T, vocab]
        ops = StoredOps(made.arch, tokens)
        ops.form, ops.size = form, size
        found: Array = ops.run(made.arch.trace())[0]
        return found

    wide = KINDS[SPECS[form].acts].size  # of the blocks that native operators round activations in
    by_size = {size: rounded(size) for size in {32, wide or 32}}
    unrounded: Array = NumpyOps(made.arch, tokens).run(made.arch.trace())[0]
    for graph, about in made.part.graphs.items():
        if graph == "standard":  # no slot drives it: tests/export/bundle/test_standard.py
            continue
        if about.operators == "native":
            request.getfixturevalue("native")
        expected = by_size[wide if wide and about.operators == "native" else 32]
        # a float16 cache would add its own error
        model = Model(made.folder, made.part, graph, 1, ATTENTION["f32"])
        logits = open_slot(model).forward(np.array(tokens)).logits
        error = np.sqrt(np.mean(np.square(logits - expected))) / expected.std()
        assert error < (1e-5 if form == "fp32" else 0.03)
        if form in FOUR_BITS:
            assert np.sqrt(np.mean(np.square(logits - unrounded))) / expected.std() > 2 * error


# -- files -------------------------------------------------------------------------------------------------------------


def subgraphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield attribute.g


@BOTH
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", NAMES)
def test_emitted_graphs_are_sound(written: Write, name: str, form: Format) -> None:
    made = written(name, form)
    size = (made.folder / "model.data").stat().st_size
    for graph, entry in made.part.graphs.items():
        if entry.operators != made.part.layout:  # its tensors are in a separate file of converted weights
            continue
        path = made.folder / entry.file
        onnx.checker.check_model(str(path))
        model = onnx.load(path, load_external_data=False)
        branches = list(subgraphs(model.graph))
        gates = 2 * 2 * made.part.facts.layers if graph == "gated" else 0
        assert len(branches) == gates
        assert not [inner for branch in branches for inner in subgraphs(branch)]  # not pre-packed: 15 times slower
        assert not [branch for branch in branches if branch.initializer]
        assert path.stat().st_size < 1 << 20
        ranges = set()
        for tensor in model.graph.initializer:
            if not tensor.external_data:
                assert len(tensor.raw_data) < 1 << 16
                continue
            where = {item.key: item.value for item in tensor.external_data}
            assert where["location"] == "model.data"
            offset, length = int(where["offset"]), int(where["length"])
            assert offset % 64 == 0  # kernels read whole vectors in place
            items = int(np.prod(tensor.dims)) * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
            assert length == items
            assert offset + length <= size
            if not tensor.name.endswith(".low"):  # those are stored together, at the end
                assert offset % (LARGE_ALIGN if length >= 1 << 20 else SMALL_ALIGN) == 0
            ranges.add((offset, offset + length))
        ordered = sorted(ranges)
        assert all(end <= start for (_, end), (start, _) in pairwise(ordered))


def test_nested_branches_are_refused() -> None:
    graph = GraphBuilder(WeightLayout())

    def inner() -> list[onnx.ValueInfoProto]:
        graph.branch("deeper", list)
        return []

    with pytest.raises(AssertionError, match="depth one"):
        graph.branch("outer", inner)


@pytest.mark.parametrize("form", FORMATS)
def test_a_tied_embedding_is_stored_once(tmp_path: Path, form: Format, written: Write) -> None:
    made = written("builtin:shakespeare", form)
    facts = made.part.facts
    assert facts.tied
    bits, scales = SPECS[form].bits, {"blocks": 4 / 32, "channels": 4 / facts.hidden, "floats": 0}
    entry_bytes = bits / 8 + scales[SPECS[form].family]
    one = facts.vocab * facts.hidden * entry_bytes
    tensors = {
        tensor.name: {item.key: int(item.value) for item in tensor.external_data if item.key != "location"}
        for tensor in onnx.load(made.folder / "model.strict.onnx", load_external_data=False).graph.initializer
        if tensor.name.startswith(made.arch.embedding)
    }
    stored = {where["offset"]: where["length"] for where in tensors.values()}
    assert sum(stored.values()) == one
    assert made.arch.embedding not in {name.removesuffix(".table") for name in tensors if name.endswith(".table")}
