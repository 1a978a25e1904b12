"""Weight formats: the numbers, what is stored, and that the graphs compute with exactly what is stored."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from onnx import TensorProto
from safetensors.numpy import save_file

from edgespec.export.architectures.ops import Linear
from edgespec.export.graphs import formats
from edgespec.export.graphs.formats import EmbeddingTable, Errors, linear_format
from edgespec.export.graphs.graph import GraphBuilder, WeightFile
from edgespec.export.quantization.quantizers import levels as quantize
from edgespec.export.quantization.quantizers.levels import BLOCK, EMBEDDING_LEVELS
from edgespec.export.quantization.reference import Array, NumpyOps
from edgespec.export.source.source import Checkpoint
from edgespec.export.storage.layout import LARGE_ALIGN, SMALL_ALIGN
from edgespec.runtimes.files.kv import ATTENTION
from edgespec.runtimes.files.manifest import FORMATS, Format
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.ort.session import make_session
from edgespec.runtimes.slots.shared import Model
from tests.conftest import OPERATORS, Reference, Written
from tests.support import hf

NAMES = sorted(hf.CORE)
BITS = {"int4": 4, "int8": 8}

Write = Callable[..., Written]
BOTH = pytest.mark.parametrize("operators", OPERATORS, indirect=True)
Matrix = NDArray[np.float32]

MATRICES = st.tuples(st.integers(1, 4), st.sampled_from([1, 2, 31, 32, 33, 64, 70])).flatmap(
    lambda shape: arrays(np.float32, shape, elements=st.floats(-1e4, 1e4, width=32))
)
PROPERTIES = settings(max_examples=150, deadline=None)
VANISHING = 2.0**-25  # half of float16's smallest step: such scales may become 0


def blocks_of(weight: Matrix) -> Matrix:  # [n, k] -> [n, blocks, BLOCK]
    n, k = weight.shape
    return np.pad(weight, ((0, 0), (0, -k % BLOCK))).reshape(n, -1, BLOCK)


# -- quantization ------------------------------------------------------------------------------------------------------


@PROPERTIES
@given(weight=MATRICES, bits=st.sampled_from([4, 8]))
def test_the_error_of_a_block_is_half_a_step(weight: Matrix, bits: int) -> None:
    levels, scales = quantize.quantize_block(weight, bits)
    n, k = weight.shape
    blocks = -(-k // BLOCK)
    assert levels.shape == (n, blocks, BLOCK)
    assert quantize.pack_levels(levels, bits).shape == (n, blocks, BLOCK * bits // 8)
    np.testing.assert_array_equal(quantize.unpack_levels(quantize.pack_levels(levels, bits), bits), levels)
    assert scales.shape == (n, blocks)
    assert np.isfinite(scales).all()
    got = quantize.dequantize_block(levels, scales, k, bits)
    assert got.shape == weight.shape
    wide, step = blocks_of(weight).astype(np.float64), np.abs(scales.astype(np.float64))[..., None]
    error = np.abs(wide - blocks_of(got))
    # the side that has a level less may be clipped, by one step at most
    last = np.sign(scales)[..., None] * wide > ((1 << (bits - 1)) - 1) * step
    assert (error <= np.where(last, 1.0, 0.5) * step * (1 + 1e-5) + VANISHING * (1 << (bits - 1))).all()


@PROPERTIES
@given(weight=MATRICES, bits=st.sampled_from([4, 8]))
def test_the_largest_of_a_block_is_kept(weight: Matrix, bits: int) -> None:
    got = blocks_of(quantize.dequantize_block(*quantize.quantize_block(weight, bits), weight.shape[1], bits))
    # to the precision of a float16 scale
    atol = VANISHING * (1 << (bits - 1))
    np.testing.assert_allclose(np.abs(got).max(-1), np.abs(blocks_of(weight)).max(-1), rtol=2.0**-11, atol=atol)


@PROPERTIES
@given(weight=MATRICES, bits=st.sampled_from([4, 8]))
def test_quantizing_twice_changes_nothing(weight: Matrix, bits: int) -> None:
    once = quantize.dequantize_block(*quantize.quantize_block(weight, bits), weight.shape[1], bits)
    twice = quantize.dequantize_block(*quantize.quantize_block(once, bits), weight.shape[1], bits)
    np.testing.assert_allclose(twice, once, rtol=1e-6, atol=VANISHING)


@PROPERTIES
@given(weight=MATRICES, limit=st.sampled_from([quantize.CHANNEL_LEVELS, EMBEDDING_LEVELS]))
def test_the_error_of_a_channel_is_half_a_step(weight: Matrix, limit: int) -> None:
    levels, scales = quantize.quantize_channel(weight, limit)
    assert levels.dtype == np.int8
    assert np.abs(levels.astype(int)).max() <= limit
    assert (scales > 0).all()
    got = quantize.dequantize_channel(levels, scales)
    assert (np.abs(got - weight) <= scales[:, None] * (0.5 + 1e-4)).all()
    twice = quantize.dequantize_channel(*quantize.quantize_channel(got, limit))
    np.testing.assert_allclose(twice, got, rtol=1e-6, atol=1e-40)


@PROPERTIES
@given(weight=MATRICES, bits=st.sampled_from([4, 8]))
def test_scales_are_float16_values(weight: Matrix, bits: int) -> None:
    """Both layouts hold the same numbers, and the packed one has room for float16."""
    huge = weight * np.float32(1e5)  # beyond what float16 holds, where it matters
    for matrix in (weight, huge):
        _, scales = quantize.quantize_block(matrix, bits)
        assert scales.dtype == np.float32
        assert np.isfinite(scales).all()
        np.testing.assert_array_equal(scales.astype(np.float16).astype(np.float32), scales)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("k", [1, 32, 45])
def test_zeros_stay_zeros(bits: int, k: int) -> None:
    weight = np.zeros((3, k), np.float32)
    weight[1, 0] = 5
    got = quantize.dequantize_block(*quantize.quantize_block(weight, bits), k, bits)
    np.testing.assert_array_equal(got, weight)
    np.testing.assert_array_equal(quantize.dequantize_channel(*quantize.quantize_channel(weight)), weight)


def test_levels_are_packed_low_nibble_first() -> None:
    weight = np.zeros((1, 32), np.float32)
    weight[0, :3] = [-8, 7, 1]  # scale 1, zero point 8
    levels, scales = quantize.quantize_block(weight, 4)
    assert scales.tolist() == [[1.0]]
    assert quantize.pack_levels(levels, 4)[0, 0, :2].tolist() == [0 | 15 << 4, 9 | 8 << 4]


def test_squared_error() -> None:
    weight, other = np.array([[3.0, 4.0]], np.float32), np.array([[3.0, 2.0]], np.float32)
    assert quantize.squared_error(weight, other) == (4.0, 25.0)


# -- one matrix through its graph --------------------------------------------------------------------------------------


def source_of(folder: Path, **tensors: Matrix) -> Checkpoint:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({}), "utf-8")
    save_file(tensors, folder / "model.safetensors")
    return Checkpoint.open(folder)


def stored_as(weight: Matrix, form: str) -> Matrix:
    """What a matrix is after it was stored, by the formulas of quantize.py."""
    if form in BITS:
        return quantize.dequantize_block(*quantize.quantize_block(weight, BITS[form]), weight.shape[1], BITS[form])
    return quantize.dequantize_channel(*quantize.quantize_channel(weight)) if form == "w8a8" else weight


def by_token(x: Array) -> Array:
    """w8a8: activations rounded to 127 levels either side of zero, each token on its own."""
    scale = np.maximum(np.abs(x).max(-1, keepdims=True), np.float32(1e-12)) * np.float32(1 / 127)
    return np.rint(x / scale) * scale


def by_block(x: Array) -> Array:
    """MatMulNBits at accuracy level 4: activations rounded to 127 levels either side of zero, in blocks of 32."""
    blocks = blocks_of(x.reshape(-1, x.shape[-1]))
    scale = np.maximum(np.abs(blocks).max(-1, keepdims=True), np.float32(1e-30)) / np.float32(127)
    return (np.rint(blocks / scale) * scale).reshape(len(blocks), -1)[:, : x.shape[-1]].reshape(x.shape)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("k", [32, 64, 100])
@pytest.mark.parametrize("form", FORMATS)
def test_a_product_is_that_of_the_stored_matrix(tmp_path: Path, form: Format, k: int, bias: bool) -> None:
    random = np.random.default_rng(k)
    parts = {"a": random.standard_normal((24, k), np.float32), "b": random.standard_normal((40, k), np.float32)}
    added = random.standard_normal(64, np.float32)
    source = source_of(tmp_path / "source", **parts)
    linear, errors = linear_format(form), Errors()
    names = list(parts) if linear.joins else ["a"]
    n = sum(len(parts[name]) for name in names)
    with WeightFile(tmp_path / "w.data") as weights:
        linear.store(weights, source, "+".join(names), names, errors)
        graph = GraphBuilder(weights)
        graph.input("x", TensorProto.FLOAT, ["T", k])
        constant = graph.constant("added", added[:n]) if bias else None
        y = linear.multiply(graph, "x", "+".join(names), k, n, constant)
        graph.node("Identity", [y], ["y"])
        graph.output("y", TensorProto.FLOAT, ["T", n])
        graph.save(tmp_path / "g.onnx")
    x = random.standard_normal((9, k), np.float32) * np.float32(3)
    (got,) = make_session(tmp_path / "g.onnx", 1).run(None, {"x": x})
    weight = np.concatenate([stored_as(parts[name], form) for name in names]).astype(np.float64)
    seen = by_token(x) if form == "w8a8" else x
    expected = seen @ weight.T + (added[:n] if bias else 0)
    rounding = 1e-5 * (np.abs(x) @ np.abs(weight).T + 1)
    if form in BITS:
        emulated = by_block(x) @ weight.T + (added[:n] if bias else 0)
        assert (np.abs(got - emulated) <= rounding).mean() > 0.95  # but for values just between two levels
        step = np.abs(blocks_of(x)).max(-1) / 127  # [T, blocks]
        rounding += 0.5 * step @ np.abs(blocks_of(weight.astype(np.float32))).sum(-1).T
    assert (np.abs(got - expected) <= rounding).all()
    for name in names:
        error, norm = quantize.squared_error(parts[name], stored_as(parts[name], form))
        assert errors[name] == pytest.approx((error, norm), rel=1e-5)


@pytest.mark.parametrize("kind", ["lookup", "table"])
@pytest.mark.parametrize("form", FORMATS)
def test_embedding_rows_are_the_stored_ones(tmp_path: Path, form: Format, kind: str) -> None:
    """Looked up in the matrix of the LM head (tied), or in a table of their own (untied)."""
    weight = np.random.default_rng(1).standard_normal((50, 64), np.float32)
    weight[7] = 0
    source, linear = source_of(tmp_path / "source", e=weight), linear_format(form)
    ids = np.array([[3, 0, 49, 3, 7, 21]])
    with WeightFile(tmp_path / "w.data") as weights:
        graph = GraphBuilder(weights)
        graph.input("ids", TensorProto.INT64, [1, "T"])
        if kind == "lookup":
            assert linear.can_lookup(64, True)
            linear.store(weights, source, "e", ["e"], Errors())
            rows, expected = linear.lookup(graph, "ids", "e", 64, 50), stored_as(weight, form)
        else:
            table = EmbeddingTable(form == "fp32")
            table.store(weights, source, "e")
            rows = table.lookup(graph, "ids", "e")
            expected = weight
            if form != "fp32":
                expected = quantize.dequantize_channel(*quantize.quantize_channel(weight, EMBEDDING_LEVELS))
        graph.node("Identity", [rows], ["y"])
        graph.output("y", TensorProto.FLOAT, [1, "T", 64])
        graph.save(tmp_path / "g.onnx")
    (got,) = make_session(tmp_path / "g.onnx", 1).run(None, {"ids": ids})
    np.testing.assert_allclose(got[0], expected[ids[0]], rtol=0, atol=1e-6)


# -- whole models ------------------------------------------------------------------------------------------------------


class StoredOps(NumpyOps):
    """The numpy reference with every matrix as it was stored, and w8a8's activations as that format rounds them."""

    form: Format = "fp32"

    def embed(self, weight: str, scale: float = 1.0, positions: str | None = None) -> Array:
        arch, matrix = self.arch, self.source.read(weight)
        if linear_format(self.form).can_lookup(arch.facts.hidden, arch.facts.tied):
            return stored_as(matrix, self.form)[self.tokens][None]
        rows = quantize.dequantize_channel(*quantize.quantize_channel(matrix, EMBEDDING_LEVELS))
        return (matrix if self.form == "fp32" else rows)[self.tokens][None]

    def _linear(self, x: Array, part: Linear) -> Array:
        seen = x if self.form == "fp32" else by_token(x) if self.form == "w8a8" else by_block(x)
        y = seen @ stored_as(self.source.read(part.weight), self.form).T
        return y if part.bias is None else y + self.source.read(part.bias)


@BOTH
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", [*NAMES, "builtin:shakespeare"])
def test_a_model_computes_with_what_is_stored(written: Write, name: str, form: Format) -> None:
    """With the stored weights, and activations rounded as each format does, numpy gets the same logits.

    Mostly to 1e-6 of their spread.  An activation just between two levels may round the other way, though, and that
    moves all that follows: 3 % is the bound.  Leaving the rounding of int4 weights out moves them more than that.
    """
    made = written(name, form)
    tokens = np.random.default_rng(5).integers(2, made.part.facts.vocab, 150 if "llama3" in name else 40).tolist()
    ops = StoredOps(made.arch, tokens)
    ops.form = form
    expected: Array = made.arch.build(ops)[0]
    unrounded: Array = made.arch.build(NumpyOps(made.arch, tokens))[0]
    for graph in made.part.graphs:
        # a float16 cache would be an error of its own
        model = Model(made.folder, made.part, graph, 1, ATTENTION["f32"])
        logits = open_slot(model).forward(np.array(tokens)).logits
        error = np.sqrt(np.mean(np.square(logits - expected))) / expected.std()
        assert error < (1e-5 if form == "fp32" else 0.03)
        if form == "int4":
            assert np.sqrt(np.mean(np.square(logits - unrounded))) / expected.std() > 2 * error


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", NAMES)
def test_gates_change_no_bit(written: Write, reference: Callable[[str], Reference], name: str, form: Format) -> None:
    made, tokens = written(name, form), reference(name).tokens[:25]
    plain, gated = made.slot("strict"), made.slot("gated")
    np.testing.assert_array_equal(plain.forward(tokens).logits, gated.forward(tokens).logits)
    plain.keep(range(25))
    gated.keep(range(25))
    for key, values in plain.snapshot().items():
        np.testing.assert_array_equal(values, gated.snapshot()[key])


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
        if entry.operators != made.part.layout:  # its tensors lie elsewhere, in converted weights
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
            assert offset % (LARGE_ALIGN if length >= 1 << 20 else SMALL_ALIGN) == 0
            ranges.add((offset, offset + length))
        ordered = sorted(ranges)
        assert all(end <= start for (_, end), (start, _) in pairwise(ordered))


def test_every_tensor_is_aligned_and_may_have_two_names(tmp_path: Path) -> None:
    with WeightFile(tmp_path / "w.data") as weights:
        small, large = np.arange(10, dtype=np.float32), np.ones((512, 1024), np.float32)
        weights.put("small", (10,), np.float32, [small[:4], small[4:]])
        weights.put("large", (512, 1024), np.float32, [large])
        weights.put("after", (3,), np.uint8, [np.array([1, 2, 3], np.uint8)])
        weights.alias("flat", "large", (512 * 1024,))
        entries = weights.entries
    content = (tmp_path / "w.data").read_bytes()
    assert [entries[name].offset for name in ("small", "large", "after")] == [
        0, LARGE_ALIGN, LARGE_ALIGN + large.nbytes,
    ]  # fmt: skip
    assert entries["flat"].offset == entries["large"].offset
    assert entries["flat"].dims == (512 * 1024,)
    assert content[:40] == small.tobytes()
    assert content[-3:] == b"\1\2\3"


def test_a_tensor_of_another_size_than_announced_is_noticed(tmp_path: Path) -> None:
    with WeightFile(tmp_path / "w.data") as weights, pytest.raises(AssertionError, match="wrote 8 bytes, expected 12"):
        weights.put("a", (3,), np.float32, [np.zeros(2, np.float32)])


def test_nested_branches_are_refused(tmp_path: Path) -> None:
    with WeightFile(tmp_path / "w.data") as weights:
        graph = GraphBuilder(weights)

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
    entry_bytes = {"fp32": 4.0, "int8": 1 + 4 / BLOCK, "int4": 0.5 + 4 / BLOCK, "w8a8": 1 + 4 / facts.hidden}[form]
    one = facts.vocab * facts.hidden * entry_bytes
    tensors = {
        tensor.name: {item.key: int(item.value) for item in tensor.external_data if item.key != "location"}
        for tensor in onnx.load(made.folder / "model.onnx", load_external_data=False).graph.initializer
        if tensor.name.startswith(made.arch.embedding)
    }
    stored = {where["offset"]: where["length"] for where in tensors.values()}
    assert sum(stored.values()) == one
    assert made.arch.embedding not in {name.removesuffix(".table") for name in tensors if name.endswith(".table")}


def test_every_format_has_a_name_and_refuses_others() -> None:
    assert [linear_format(form).name for form in FORMATS] == list(FORMATS)
    with pytest.raises(KeyError):
        linear_format("int3")
    assert formats.linear_format("w8a8").min_rows == 1  # ONNX Runtime's reductions over no rows are wrong
