"""Graphs are checked before ONNX Runtime opens them: exported ones pass, malicious ones do not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgespec.errors import BundleError
from edgespec.runtimes.files.graph_check import check_graph
from edgespec.runtimes.files.manifest import Operators
from tests.conftest import Written

Change = Callable[[onnx.ModelProto], object]


def first(model: onnx.ModelProto) -> onnx.TensorProto:
    """Return the first tensor of ``model`` that is in its weight file."""
    return next(one for one in model.graph.initializer if one.external_data)


def entry(model: onnx.ModelProto, key: str, value: str) -> None:
    next(one for one in first(model).external_data if one.key == key).value = value


def node(kind: str, inputs: list[str], domain: str = "") -> Change:
    return lambda model: model.graph.node.append(helper.make_node(kind, inputs, ["made"], domain=domain))


def constant(model: onnx.ModelProto, values: list[int]) -> str:
    model.graph.initializer.append(numpy_helper.from_array(np.array(values, np.int64), "many"))
    return "many"


def loop(model: onnx.ModelProto) -> None:
    body = helper.make_graph([helper.make_node("Loop", [], ["x"])], "body", [], [])
    model.graph.node.append(helper.make_node("If", ["input_ids"], ["made"], then_branch=body, else_branch=body))


COMMON: dict[str, tuple[Change, str]] = {
    "a function": (lambda m: m.functions.add(), "functions"),
    "an absolute path": (lambda m: entry(m, "location", "/etc/passwd"), "not a file in the graph's folder"),
    "a path that leaves": (lambda m: entry(m, "location", "../model.data"), "not a file in the graph's folder"),
    "a file that is not there": (lambda m: entry(m, "location", "other.data"), "No such file"),
    "an offset beyond the end": (lambda m: entry(m, "offset", str(1 << 40)), "which has"),
    "a negative offset": (lambda m: entry(m, "offset", "-4"), "is at"),
    "another length": (lambda m: entry(m, "length", "4"), "4 at byte"),
    "a shape of terabytes": (lambda m: first(m).dims.extend([1 << 20, 1 << 20]), "tensor"),
    "a negative size": (lambda m: first(m).dims.append(-1), "shape"),
    "nine dimensions": (lambda m: first(m).dims.extend([1] * 9), "shape"),
    "an unknown type": (lambda m: setattr(first(m), "data_type", 8), "of type 8"),
    "numbers that are not there": (
        lambda m: m.graph.initializer.append(TensorProto(name="x", data_type=1, dims=[1 << 30])),
        "has 0 bytes",
    ),
    "sparse tensors": (lambda m: m.graph.sparse_initializer.add(), ""),
}
STOCK: dict[str, tuple[Change, str]] = {
    "a loop": (node("Loop", []), "operator 'Loop'"),
    "a loop in a branch": (loop, "operator 'Loop'"),
    "an operator of another domain": (node("Add", [], "org.example"), "of org.example"),
    "a Range of gigabytes": (lambda m: node("Range", [constant(m, [1 << 40])])(m), "Range is to make"),
    "an Expand of gigabytes": (lambda m: node("Expand", [constant(m, [1 << 20, 1 << 20])])(m), "Expand is to make"),
}
NATIVE: dict[str, tuple[Change, str]] = {
    "a second node": (node("Add", ["kv", "kv"]), "alone"),
    "a cache that is a constant": (
        lambda m: m.graph.initializer.append(helper.make_tensor("kv", TensorProto.UINT8, [1, 8], [0] * 8)),
        "need distinct names",
    ),
    "weights of four bits": (
        lambda m: m.graph.initializer.append(helper.make_tensor("four", TensorProto.UINT4, [8], [0] * 8)),
        "of type 21",
    ),
    "a weight that is no constant": (lambda m: m.graph.node[0].input.append("ids"), "'ids' is not a constant weight"),
    "an input more": (
        lambda m: m.graph.input.append(helper.make_tensor_value_info("more", TensorProto.FLOAT, [1])),
        "expected inputs",
    ),
    "inputs in another order": (lambda m: m.graph.node[0].input.reverse(), "first inputs"),
}


@pytest.mark.parametrize(
    "operators, name", [*(("stock", name) for name in COMMON | STOCK), *(("native", name) for name in COMMON | NATIVE)]
)
def test_what_is_refused(writer: Callable[..., Written], tmp_path: Path, operators: Operators, name: str) -> None:
    folder = writer(operators, "qwen2_untied", "int4").folder
    source = folder / ("model.native.onnx" if operators == "native" else "model.strict.onnx")
    shutil.copyfile(folder / "model.data", tmp_path / "model.data")
    check_graph(source, operators)
    model = onnx.load(source, load_external_data=False)
    change, said = (COMMON | (NATIVE if operators == "native" else STOCK))[name]
    change(model)
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(BundleError, match=r"not a graph of a bundle|cannot read") as caught:
        check_graph(path, operators)
    assert said in caught.value.message


@pytest.mark.parametrize("data", [b"\xff", b"\x3a\xff\xff\xff\xff\x0f", b"\x3b", b"\x3a\x02\x08", b"x" * 100, b""])
def test_bytes_that_are_no_graph(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    with pytest.raises(BundleError, match="not a graph of a bundle"):
        check_graph(path, "native")
