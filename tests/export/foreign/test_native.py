"""Foreign graphs on native operators: the same numbers, exact rows, and what stays on stock ones."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from edgespec.engine.loading import load
from edgespec.errors import BundleError
from edgespec.export.foreign.model import ForeignModel
from edgespec.export.foreign.write import check_native, write_foreign
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.export.quantization.weights import WeightChoice
from edgespec.runtimes.files.formats import Format
from edgespec.runtimes.files.graph_check import check_graph
from edgespec.runtimes.files.manifest import ModelPart
from edgespec.runtimes.files.repack import usable_graph
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.ort.native_library import native_library
from edgespec.runtimes.slots.cpu import rows_exact
from edgespec.runtimes.slots.shared import Model
from tests.support import hf
from tests.support.foreign import write_export

NAME = "llama_tied_gqa"
CONFIG, SEED = hf.CONFIGS[NAME], hf.SEEDS[NAME]
pytestmark = pytest.mark.skipif(native_library().path is None, reason="needs native operators")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write an export by optimum, which tests only read; return its folder."""
    return write_export(tmp_path_factory.mktemp("export"), CONFIG, SEED)


@pytest.fixture(scope="module")
def unknown(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write one whose attention is not recognized: its mask hides every second token."""
    return changed(source, tmp_path_factory.mktemp("unknown") / "export", even_rows)


def written(source: Path, folder: Path, form: Format = "int4", head: Format | None = None) -> ModelPart:
    """Write a part of a bundle, with graphs on native operators."""
    folder.mkdir(exist_ok=True)
    model = ForeignModel.open(source, None)
    return write_foreign(folder, model.open_graph(), model.facts, WeightChoice.of(form, None, head)).part


def logits(folder: Path, part: ModelPart, graph: str) -> NDArray[np.float32]:  # [40, vocab]
    """Compute the logits of 40 tokens in two passes."""
    tokens, slot, found = np.random.default_rng(3).integers(2, CONFIG["vocab_size"], 40), None, []
    slot = open_slot(Model(folder, part, graph, 1))
    for piece in np.split(tokens, [23]):
        found.append(slot.forward(piece).logits.copy())
        slot.keep(range(len(piece)))
    return np.concatenate(found)


def check_same(folder: Path, part: ModelPart, graph: str) -> None:
    """Check that a graph on native operators computes what the stock one does, in exact rows."""
    expected, found = logits(folder, part, "strict"), logits(folder, part, graph)
    assert np.abs(expected - found).max() < 0.05 * np.abs(expected).max()  # activations are rounded by other rules
    assert (expected.argmax(1) == found.argmax(1)).mean() > 0.9
    assert rows_exact(open_slot(Model(folder, part, graph, 1)))


@pytest.mark.parametrize("form", ["int4", "int8"])
@pytest.mark.parametrize("graph", ["native", "linear"])
def test_rows_are_those_of_stock_operators(
    source: Path, unknown: Path, tmp_path: Path, form: Format, graph: str
) -> None:
    part = written(source if graph == "native" else unknown, tmp_path, form)
    assert set(part.graphs) == {"plain", "strict", graph}
    check_same(tmp_path, part, graph)


def programs(file: Path) -> list[list[str]]:
    """Read the steps of a graph's native nodes."""
    nodes = onnx.load(str(file), load_external_data=False).graph.node
    assert not any(node.op_type == "MatMulNBits" for node in nodes)
    texts = [
        helper.get_attribute_value(one).decode() for node in nodes for one in node.attribute if one.name == "program"
    ]
    return [text.splitlines() for text in texts]


def names(program: Sequence[str], *kinds: str) -> list[str]:
    """Name the steps of these kinds."""
    return [line.split()[0] for line in program if line.split()[0] in kinds]


def test_a_graph_that_is_recognized_is_one_program(source: Path, tmp_path: Path) -> None:
    written(source, tmp_path, head="int8")
    (program,) = programs(tmp_path / "model.native.onnx")
    layer = ["linear"] * 3 + ["heads", "attend", "linear", "glu", "linear"]
    assert names(program, "linear", "heads", "attend", "glu", "norm", "logits") == [*layer, *layer, "logits"]
    assert sum("norm=" in line for line in program) == 5
    assert sum("add=1" in line for line in program) == 4  # what is added to the residual stream
    assert "kind=q8" in program[-1]


def test_layers_that_read_one_value_are_one_node(unknown: Path, tmp_path: Path) -> None:
    written(unknown, tmp_path, head="int8")
    kinds = [names(program, "linear", "glu") for program in programs(tmp_path / "model.linear.onnx")]
    # queries, keys and values of a layer; what is between its attention and the next; and the LM head
    assert kinds == [["linear"] * 3, ["linear", "glu", *["linear"] * 4], ["linear", "glu", "linear", "linear"]]


def changed(source: Path, folder: Path, change: Callable[[onnx.GraphProto], None]) -> Path:
    """Copy an export, with a change in its graph."""
    shutil.copytree(source, folder)
    model = onnx.load(str(folder / "model.onnx"))
    change(model.graph)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return folder


def constant(graph: onnx.GraphProto, name: str) -> onnx.TensorProto:
    return next(one for one in graph.initializer if one.name == name)


def scores_scaled(graph: onnx.GraphProto) -> None:
    for softmax in [node for node in graph.node if node.op_type == "Softmax"]:
        added = next(node for node in graph.node if node.output[0] == softmax.input[0])
        scaled = next(node for node in graph.node if node.output[0] == added.input[0])
        constant(graph, scaled.input[1]).CopyFrom(numpy_helper.from_array(np.float32(0.61), scaled.input[1]))


def turned_back(graph: onnx.GraphProto) -> None:
    for node in graph.node:
        if node.op_type == "Cos":
            node.op_type = "Sin"
        elif node.op_type == "Sin":
            node.op_type = "Cos"


def mirrored(graph: onnx.GraphProto) -> None:
    """Add where a rotation subtracts."""
    for node in graph.node:
        if node.op_type == "Sub":
            node.op_type = "Add"


def no_rotation(graph: onnx.GraphProto) -> None:
    for node in graph.node:
        if node.op_type == "Sin":
            node.op_type = "Cos"


def kept_rows(graph: onnx.GraphProto) -> None:
    """Let every row see itself no more: rows without tokens are even."""
    for node in graph.node:
        if node.op_type == "Greater":
            node.op_type = "GreaterOrEqual"


def quick_gelu(graph: onnx.GraphProto) -> None:
    for node in [node for node in graph.node if node.op_type == "Sigmoid"]:
        x, name = node.input[0], f"{node.output[0]}.scaled"
        graph.initializer.append(numpy_helper.from_array(np.float32(1.702), f"{name}.by"))
        node.input[0] = name
        graph.node.insert([*graph.node].index(node), helper.make_node("Mul", [x, f"{name}.by"], [name]))


def tanh_gate(graph: onnx.GraphProto) -> None:
    for node in graph.node:
        if node.op_type == "Sigmoid":
            node.op_type = "Tanh"


def mean_of_rows(graph: onnx.GraphProto) -> None:
    """Norm by the mean over rows in the first norm."""
    node = next(node for node in graph.node if node.op_type == "ReduceMean")
    constant(graph, node.input[1]).CopyFrom(numpy_helper.from_array(np.array([0], np.int64), node.input[1]))


def far_rows(graph: onnx.GraphProto) -> None:
    """Hide tokens that are more than 9 rows away: a window."""
    node = next(node for node in graph.node if node.op_type == "Greater")
    keys, rows = node.input
    graph.initializer.append(numpy_helper.from_array(np.array(9, np.int64), "nine"))
    at = [*graph.node].index(node)
    graph.node[at].output[0] = "later"
    hidden = next(one for one in graph.node if one.op_type == "Where").input[0]
    graph.node.insert(at + 1, helper.make_node("Or", ["later", "far"], [hidden]))
    graph.node.insert(at + 1, helper.make_node("Greater", ["distance", "nine"], ["far"]))
    graph.node.insert(at + 1, helper.make_node("Sub", [rows, keys], ["distance"]))


def even_rows(graph: onnx.GraphProto) -> None:
    """Hide tokens an odd number of rows away: no mask that native operators have."""
    far_rows(graph)
    node = next(node for node in graph.node if node.output[0] == "far")
    graph.initializer.append(numpy_helper.from_array(np.array(2, np.int64), "two"))
    graph.initializer.append(numpy_helper.from_array(np.array(0, np.int64), "none"))
    node.input[:] = ["odd", "none"]
    graph.node.insert([*graph.node].index(node), helper.make_node("Mod", ["distance", "two"], ["odd"]))


CHANGES: dict[Callable[[onnx.GraphProto], None], str] = {
    scores_scaled: "native",
    turned_back: "native",
    no_rotation: "native",
    mirrored: "linear",
    kept_rows: "linear",
    quick_gelu: "native",
    tanh_gate: "native",
    mean_of_rows: "native",
    far_rows: "native",
    even_rows: "linear",
}
"""Changes of a graph, and which it is then: attention is recognized, or not."""


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_is_recognized_is_what_is_there(
    source: Path, tmp_path: Path, change: Callable[[onnx.GraphProto], None]
) -> None:
    part = written(changed(source, tmp_path / "export", change), tmp_path / "part", "int8")
    (graph,) = set(part.graphs) - {"plain", "strict"}
    assert graph == CHANGES[change]
    if change not in (kept_rows, mean_of_rows):  # rows that depend on others, or on nothing
        check_same(tmp_path / "part", part, graph)


@pytest.mark.parametrize("theta", [1.5, 1e9])
def test_channels_that_hardly_turn_are_seen(tmp_path: Path, theta: float) -> None:
    source = write_export(tmp_path / "export", CONFIG | {"rope_theta": theta}, SEED)
    part = written(source, tmp_path / "part", "int8")
    check_same(tmp_path / "part", part, "native")
    (program,) = programs(tmp_path / "part" / "model.native.onnx")
    assert sum("rotary=16" in line for line in program) == 2


def gates_without_layers(graph: onnx.GraphProto) -> None:
    """Let the residual stream wait for an operation that native operators do not have."""
    for node in [node for node in graph.node if node.op_type == "Add" and "down_proj" in node.input[1]]:
        x = node.input[1]
        node.input[1] = f"{x}.rounded"
        graph.node.insert([*graph.node].index(node), helper.make_node("Round", [x], [f"{x}.rounded"]))


@pytest.mark.parametrize("graph", ["native", "linear"])
def test_programs_wait_for_other_nodes(source: Path, unknown: Path, tmp_path: Path, graph: str) -> None:
    model = changed(source if graph == "native" else unknown, tmp_path / "export", gates_without_layers)
    part = written(model, tmp_path / "part", "int8")
    assert graph in part.graphs
    assert len(programs(tmp_path / "part" / part.graphs[graph].file)) > 2
    assert rows_exact(open_slot(Model(tmp_path / "part", part, graph, 1)))


def test_a_graph_that_computes_something_else_is_dropped(source: Path, tmp_path: Path) -> None:
    part = written(source, tmp_path, "int8")
    assert check_native(tmp_path, part, 1) is part
    model = onnx.load(str(tmp_path / "model.native.onnx"), load_external_data=False)
    node = next(one for one in model.graph.node if one.domain == "edgespec")
    program = next(one for one in node.attribute if one.name == "program")
    program.s = program.s.replace(b"scale=0.25", b"scale=2.5")
    (tmp_path / "model.native.onnx").write_bytes(model.SerializeToString())
    left = check_native(tmp_path, part, 1)
    assert set(left.graphs) == {"plain", "strict"}
    assert not (tmp_path / "model.native.onnx").exists()
    assert left.index is None


@pytest.mark.parametrize("graph", ["native", "linear"])
def test_methods_write_plain_decoding_s_text_on_either(source: Path, unknown: Path, tmp_path: Path, graph: str) -> None:
    model = source if graph == "native" else unknown
    options = ExportOptions(
        str(model), tmp_path / "bundle", format="int4", threads=1, methods=["speculative"], draft=str(model)
    )
    manifest = export_model(options, golden=False)
    assert manifest.draft is not None
    assert graph in {*manifest.target.graphs} & {*manifest.draft.graphs}
    for operators, name in (("auto", graph), ("stock", manifest.target.main)):
        with load(tmp_path / "bundle", threads=1, operators=operators) as engine:
            assert engine.model.graph_name == name
            texts = [
                engine.generate([5, 9, 5], method=method, max_new_tokens=24, ignore_eos=True, fallback=False).tokens
                for method in ("ar", "ngram", "speculative")
            ]
            assert engine.exact_rows
        assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("graph", ["native", "linear"])
def test_weights_of_a_node_must_be_constants(source: Path, unknown: Path, tmp_path: Path, graph: str) -> None:
    part = written(source if graph == "native" else unknown, tmp_path)
    path = usable_graph(tmp_path, part, part.graphs[graph])  # next to the weights
    check_graph(path, "native", foreign=True)
    model = onnx.load(str(path), load_external_data=False)
    node = next(one for one in model.graph.node if one.domain == "edgespec")
    node.input[len(node.input) - 1] = node.input[7]
    (path.parent / "odd.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(BundleError, match="not a constant weight"):
        check_graph(path.parent / "odd.onnx", "native", foreign=True)
    with pytest.raises(BundleError, match="not one that a bundle may use"):
        check_graph(path, "stock")
