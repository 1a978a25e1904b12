"""Linear layers of foreign graphs on native operators: the same numbers, exact rows, and what stays on stock ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from edgespec.engine.loading import load
from edgespec.errors import BundleError
from edgespec.export.foreign.model import ForeignModel
from edgespec.export.foreign.write import write_foreign
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.export.quantization.weights import WeightChoice
from edgespec.runtimes.files.formats import Format
from edgespec.runtimes.files.graph_check import check_graph
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


@pytest.mark.parametrize("form", ["int4", "int8"])
def test_rows_are_those_of_stock_operators(source: Path, tmp_path: Path, form: Format) -> None:
    model = ForeignModel.open(source, None)
    part = write_foreign(tmp_path, model.open_graph(), model.facts, WeightChoice.of(form, None, None)).part
    tokens = np.random.default_rng(3).integers(2, CONFIG["vocab_size"], 40)
    found = []
    for name in ("strict", "linear"):
        slot = open_slot(Model(tmp_path, part, name, 1))
        found.append(slot.forward(tokens).logits.copy())
    scale = float(np.abs(found[0]).max())
    assert np.abs(found[0] - found[1]).max() < 0.05 * scale  # activations are rounded by other rules
    assert (found[0].argmax(1) == found[1].argmax(1)).mean() > 0.9
    assert rows_exact(open_slot(Model(tmp_path, part, "linear", 1)))


def test_layers_that_read_one_value_are_one_node(source: Path, tmp_path: Path) -> None:
    model = ForeignModel.open(source, None)
    write_foreign(tmp_path, model.open_graph(), model.facts, WeightChoice.of("int4", None, "int8"))
    nodes = onnx.load(str(tmp_path / "model.linear.onnx"), load_external_data=False).graph.node
    programs = [
        helper.get_attribute_value(attribute).decode()
        for node in nodes
        for attribute in node.attribute
        if attribute.name == "program"
    ]
    kinds = [[line.split()[0] for line in program.splitlines()] for program in programs]
    # of each layer: queries, keys and values; the output; the MLP; and the LM head
    assert [steps.count("linear") for steps in kinds] == [3, 1, 1] * 2 + [1]
    assert [steps.count("glu") for steps in kinds] == [0, 0, 1] * 2 + [0]
    assert ["norm=" in program for program in programs] == [True, False, True] * 2 + [True]
    assert not any(node.op_type == "MatMulNBits" for node in nodes)
    assert "kind=q8" in programs[-1]


def test_methods_write_plain_decoding_s_text_on_either(source: Path, tmp_path: Path) -> None:
    options = ExportOptions(
        str(source), tmp_path / "bundle", format="int4", threads=1, methods=["speculative"], draft=str(source)
    )
    manifest = export_model(options, golden=False)
    assert manifest.draft is not None
    assert "linear" in {*manifest.target.graphs} & {*manifest.draft.graphs}
    for operators, graph in (("auto", "linear"), ("stock", "strict")):
        with load(tmp_path / "bundle", threads=1, operators=operators) as engine:
            assert engine.model.graph_name == graph
            texts = [
                engine.generate([5, 9, 5], method=method, max_new_tokens=24, ignore_eos=True, fallback=False).tokens
                for method in ("ar", "ngram", "speculative")
            ]
            assert engine.exact_rows
        assert texts[0] == texts[1] == texts[2]


def test_weights_of_a_node_must_be_constants(source: Path, tmp_path: Path) -> None:
    model = ForeignModel.open(source, None)
    part = write_foreign(tmp_path, model.open_graph(), model.facts, WeightChoice.of("int4", None, None)).part
    path = usable_graph(tmp_path, part, part.graphs["linear"])  # next to the weights
    check_graph(path, "native", foreign=True)
    graph = onnx.load(str(path), load_external_data=False)
    node = next(one for one in graph.graph.node if one.domain == "edgespec")
    node.input[len(node.input) - 1] = node.input[7]
    (path.parent / "odd.onnx").write_bytes(graph.SerializeToString())
    with pytest.raises(BundleError, match="not a constant weight"):
        check_graph(path.parent / "odd.onnx", "native", foreign=True)
    with pytest.raises(BundleError, match="not one that a bundle may use"):
        check_graph(path, "stock")
