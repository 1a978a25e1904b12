"""What graphs call their weights: never a file that holds them in another layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import onnx
import onnxruntime
import pytest

from edgespec.export.emit.device import add_device_graphs
from edgespec.export.emit.graph import reads
from edgespec.runtimes.files.formats import FORMATS
from edgespec.runtimes.files.manifest import ModelPart, Operators
from tests.conftest import OPERATORS, Written

NAME = "qwen2_untied"


def graphs(folder: Path, part: ModelPart, native: bool) -> Iterator[tuple[str, onnx.ModelProto]]:
    for name, graph in part.graphs.items():
        if (graph.operators == "native") == native:
            yield name, onnx.load(folder / graph.file, load_external_data=False)


def files_named(model: onnx.ModelProto) -> set[str]:
    """The files that a graph's tensors lie in."""
    return {item.value for one in model.graph.initializer for item in one.external_data if item.key == "location"}


def everything(writer: Callable[..., Written], layout: Operators, form: str = "int4") -> tuple[Path, ModelPart]:
    """A model with all of its graphs, those for a device included."""
    made = writer(layout, NAME, form)
    part = made.part
    if form in ("int4", "fp32"):
        part = add_device_graphs(made.folder, made.arch, part, "webgpu", None)
    return made.folder, part


@pytest.mark.parametrize("layout", OPERATORS)
def test_a_graph_of_the_other_layout_names_a_file_that_is_not_there(
    writer: Callable[..., Written], layout: Operators
) -> None:
    folder, part = everything(writer, layout)
    converted = f"model.{'stock' if layout == 'native' else 'native'}.data"
    assert part.converted == converted
    assert not (folder / converted).exists()
    for native in (True, False):
        own = native == (layout == "native")
        for name, model in graphs(folder, part, native):
            assert files_named(model) <= {"model.data" if own else converted}, name
    model = dict(graphs(folder, part, True))["native"]
    assert files_named(model)


@pytest.mark.parametrize("form", FORMATS)
def test_plain_onnxruntime_finds_no_weights_rather_than_others(writer: Callable[..., Written], form: str) -> None:
    """Of a bundle for native operators: fp32 and w8a8 had opened, and given wrong numbers."""
    folder, part = everything(writer, "native", form)
    stock = [graph for graph in part.graphs.values() if graph.operators == "stock" and graph.device == "cpu"]
    assert stock
    for graph in stock:
        with pytest.raises(Exception, match=r"model\.stock\.data"):
            onnxruntime.InferenceSession(str(folder / graph.file), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("layout", OPERATORS)
def test_every_initializer_is_read(writer: Callable[..., Written], layout: Operators, form: str) -> None:
    """ONNX Runtime warns of others."""
    folder, part = everything(writer, layout, form)
    for native in (True, False):
        for name, model in graphs(folder, part, native):
            read = {one for node in model.graph.node for one in reads(node)}
            assert {one.name for one in model.graph.initializer} <= read, name
