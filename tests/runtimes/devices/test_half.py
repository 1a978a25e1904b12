"""Device graphs with float16 activations: what they are, what they compute, when they are taken.

On the CPU provider here, whose attention and int4 products know float16 and whose other operators are wrapped in casts;
tests/runtimes/devices/test_webgpu.py runs them on adapters with float16 shaders.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import edgespec.runtimes.devices.driver_check as opening
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.errors import BundleError, DeviceError, InvalidRequest
from edgespec.export.emit.device import add_device_graphs
from edgespec.export.emit.half import PRODUCTS
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.runtimes.devices import webgpu as devices
from edgespec.runtimes.devices.model import choose_precision
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.manifest import ModelPart, Precision, SkipSetPart
from edgespec.runtimes.opening import open_slot
from tests.conftest import DRAFT, HEAD_METHODS, PROMPTS, TARGET, Reference, Written, fixed_skip_set
from tests.export.architectures.test_architectures import PARENTS, path_to, run
from tests.runtimes.devices.test_devices import METHODS, on_host
from tests.runtimes.devices.test_slot import CASES
from tests.support.device import HostModel
from tests.support.passes import states

__all__ = ["on_host"]  # a fixture

CACHE = ["float16 keys", "float16 values"]
SKIP = SkipSetPart(attention=[1], mlp=[0])


@pytest.fixture(scope="module")
def made(writer: Callable[..., Written]) -> Callable[[str], tuple[Written, HostModel]]:
    """Name of a configuration -> the written model, and its float16 graphs."""
    known: dict[str, tuple[Written, HostModel]] = {}

    def get(name: str) -> tuple[Written, HostModel]:
        if name not in known:
            written = writer("stock", name)
            part = add_device_graphs(written.folder, written.arch, written.part, "webgpu", SKIP, precision="fp16")
            known[name] = written, HostModel(written.folder, part, "webgpu")
        return known[name]

    return get


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("half")
    options = ExportOptions(
        TARGET,
        folder / "bundle",
        ["speculative", "self-spec", *HEAD_METHODS],
        "int4",
        draft=DRAFT,
        skip_set=fixed_skip_set(folder, TARGET),
        threads=1,
        devices=("webgpu",),
        device_precisions=("fp32", "fp16"),
    )
    export_model(options, golden=False)
    return options.output


def relative(ours: Any, theirs: Any) -> float:
    """Root mean square of the difference over that of the logits around their mean; [rows, vocab] each."""
    return opening._difference(ours, theirs)


# -- the graphs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_what_is_float16_and_what_is_not(made: Callable[..., Any], name: str) -> None:
    written, model = made(name)
    graphs = {key: graph for key, graph in model.part.graphs.items() if graph.precision == "fp16"}
    assert set(graphs) == {"webgpu-fp16", "webgpu-fp16/move", "webgpu-fp16/rows", "webgpu-fp16/skip"}
    for graph in graphs.values():
        proto = onnx.load(written.folder / graph.file, load_external_data=False).graph
        for value in (*proto.input, *proto.output):
            kind = value.type.tensor_type.elem_type
            cached = value.name.startswith(("past_key_values", "present"))
            assert (kind == TensorProto.FLOAT16) == cached, value.name
    proto = onnx.load(written.folder / graphs["webgpu-fp16"].file, load_external_data=False).graph
    found = kinds(proto)
    full, layers = [node for node, kind in found if kind == TensorProto.FLOAT], model.facts.layers
    half = [node for node, kind in found if kind == TensorProto.FLOAT16]
    operators = {node.op_type for node in full}
    assert {"Add", "TopK", "ReduceLogSumExp"} < operators
    assert not operators & {"GroupQueryAttention", "RotaryEmbedding", "QuickGelu", "Gelu", "Relu"}
    assert not {node.op_type for node in half} & {"Add", "RMSNormalization", "LayerNormalization", "Gather"}
    assert sum(node.op_type == "GroupQueryAttention" for node in half) == layers
    # of products with weights only the last one is float32
    weights = {tensor.name for tensor in proto.initializer}
    assert sum(node.op_type in PRODUCTS and node.input[1] in weights for node in full) == 1
    assert sum(node.op_type in PRODUCTS for node in half) >= 4 * layers


def kinds(graph: onnx.GraphProto) -> list[tuple[onnx.NodeProto, int]]:
    """List nodes, except Cast, that read floating-point numbers, and the type: no node may read both types."""
    floats = TensorProto.FLOAT, TensorProto.FLOAT16
    kind = {value.name: value.type.tensor_type.elem_type for value in graph.input}
    kind |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    found = []
    for node in graph.node:
        read = {kind[name] for name in node.input if kind.get(name) in floats}
        if node.op_type == "Cast":
            read = {node.attribute[0].i}
        else:
            assert len(read) <= 1, f"{node.op_type} {node.name} reads float32 and float16"
            found += [(node, one) for one in read]
        kind |= {name: one for one in read for name in node.output}
    for value in graph.output:
        made, said = kind.get(value.name), value.type.tensor_type.elem_type
        assert said not in floats or made == said, value.name
    return found


@pytest.mark.parametrize("name", CASES)
def test_close_to_transformers(made: Callable[..., Any], reference: Callable[[str], Reference], name: str) -> None:
    """Chains, a tree, its path moved, a rollback, a self-draft."""
    known, (_, model) = reference(name), made(name)
    model.most_rows = 10**6
    slot, fresh = open_slot(model), open_slot(model)
    logits = run(slot, known.tokens.tolist(), [7, 5])
    assert 1e-6 < relative(logits[known.rows], known.logits) < 5e-3  # not float32, but near it
    tree, path = known.tokens[15 : 15 + len(PARENTS)], path_to(8)
    for each in (slot, fresh):
        each.follow([])
        each.prefill(known.tokens[:15].tolist())
    rows = slot.forward(tree, np.array(PARENTS)).logits.copy()
    assert relative(rows[path], fresh.forward(tree[path]).logits) < 5e-3
    slot.keep(path)
    fresh.follow([])
    fresh.prefill(slot.tokens)
    after = fresh.forward(known.tokens[30:33]).logits.copy()
    assert relative(slot.forward(known.tokens[30:33]).logits, after) < 5e-3
    for held in slot.snapshot().values():
        assert np.array_equal(held, held.astype(np.float16))


def test_keys_and_values_take_half_the_memory(made: Callable[..., Any]) -> None:
    written, model = made("llama_tied_gqa")
    part = add_device_graphs(written.folder, written.arch, written.part, "webgpu", None)
    full = HostModel(written.folder, part, "webgpu")
    assert 2 * open_slot(model, context=64).kv_bytes == open_slot(full, context=64).kv_bytes


def test_what_float16_cannot_hold_stays_float32(made: Callable[..., Any], writer: Callable[..., Written]) -> None:
    """The residual stream of some models grows beyond 65504."""
    written, model = made("llama_tied_gqa")
    path = written.folder / model.graph.file
    proto = onnx.load(path, load_external_data=False)
    embedded = next(node for node in proto.graph.node if node.op_type == "Add" and node.name)
    (reader,) = [at for at, node in enumerate(proto.graph.node) if node is embedded]
    huge = helper.make_node("Mul", [embedded.output[0], "huge"], ["scaled_up"])
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(1e6), "huge"))
    for node in proto.graph.node:
        for at, name in enumerate(node.input):
            if name == embedded.output[0]:
                node.input[at] = "scaled_up"
    proto.graph.node.insert(reader + 1, huge)
    name = "model.webgpu-fp16.huge.onnx"
    (written.folder / name).write_bytes(proto.SerializeToString())
    graphs = model.part.graphs | {"webgpu-fp16": model.graph.model_copy(update={"file": name})}
    large = HostModel(written.folder, model.part.model_copy(update={"graphs": graphs}), "webgpu")
    slot = open_slot(large)
    found = states(slot, np.arange(4))
    assert np.abs(np.asarray(found.hidden)).max() > 65504
    assert np.isfinite(found.logits).all()


# -- engines -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def engine(bundle: Path, on_host: None) -> Engine:
    return load(bundle, device="webgpu", threads=1, context=256)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_writes_plain_decodings_text(engine: Engine, name: str) -> None:
    settings: dict[str, Any] = {"method": name, "max_new_tokens": 30, "ignore_eos": True, "fallback": False}
    for prompt in PROMPTS[:3]:
        plain = engine.generate(prompt, method="ar", max_new_tokens=30, ignore_eos=True)
        result = engine.generate(prompt, **(settings | METHODS[name]))
        assert result.tokens == plain.tokens
        assert (result.device, result.device_lost, result.stats.dropped_reason) == ("webgpu", None, None)
        assert result.approximations == ["int4 weights", "8-bit activations", "16-bit activations", *CACHE]


# -- the choice --------------------------------------------------------------------------------------------------------


def having(part: ModelPart, *precisions: Precision) -> ModelPart:
    """Return ``part`` with only those of its device graphs that are in ``precisions``."""
    graphs = {name: g for name, g in part.graphs.items() if g.device == "cpu" or g.precision in precisions}
    return part.model_copy(update={"graphs": graphs})


@pytest.mark.parametrize(
    "have, wanted, half, expected",
    [
        (["fp32", "fp16"], None, True, "fp16"),
        (["fp32", "fp16"], None, False, "fp32"),
        (["fp32", "fp16"], "fp32", True, "fp32"),
        (["fp32", "fp16"], "fp16", True, "fp16"),
        (["fp32"], None, True, "fp32"),
        (["fp16"], None, True, "fp16"),
        (["fp32"], "fp32", False, "fp32"),
    ],
)
def test_which_precision_is_taken(bundle: Path, have: Any, wanted: Any, half: bool, expected: str) -> None:
    part = having(Bundle.open(bundle).manifest.target, *have)
    assert choose_precision(part, "webgpu", wanted, lambda: "" if half else "no f16") == expected


def test_what_cannot_be_had(bundle: Path) -> None:
    part = Bundle.open(bundle).manifest.target
    lacks = "float16 graphs need shaders with float16 .shader-f16., which this adapter lacks: no f16"
    with pytest.raises(DeviceError, match=lacks) as error:
        choose_precision(having(part, "fp16"), "webgpu", None, lambda: "no f16")
    assert error.value.hint == "export it again with `--device-precision fp32`, or use device cpu"
    with pytest.raises(DeviceError, match=lacks) as error:
        choose_precision(part, "webgpu", "fp16", lambda: "no f16")
    assert error.value.hint == "load with device precision fp32, or use device cpu"
    with pytest.raises(BundleError, match="no fp16 graphs for device webgpu, but fp32") as missing:
        choose_precision(having(part, "fp32"), "webgpu", "fp16", lambda: "")
    assert missing.value.hint == "export it again with `--device webgpu --device-precision fp16`"
    with pytest.raises(BundleError, match="no graphs for device webgpu"):
        choose_precision(having(part), "webgpu", None, lambda: "")
    with pytest.raises(InvalidRequest, match="device precision fp16: device cpu has none"):
        load(bundle, device_precision="fp16")


def test_float32_can_be_asked_for(bundle: Path, on_host: None) -> None:
    engine = load(bundle, device="webgpu", device_precision="fp32", threads=1, context=64)
    assert isinstance(engine.model, HostModel)
    assert engine.model.precision == "fp32"
    assert engine.approximations == ["int4 weights", "8-bit activations"]
    result = engine.generate("ROMEO:", method="speculative", max_new_tokens=4, fallback=False)
    assert result.device == "webgpu"
    assert isinstance(engine._drafts["draft"], HostModel)
    assert engine._drafts["draft"].precision == "fp32"


def test_how_float16_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph that is run for the trial is the documented one."""
    io = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, [2]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "half", io[:1], io[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    assert base64.b64decode(devices.HALF_GRAPH) == model.SerializeToString()
    monkeypatch.setenv(devices.LIBRARY, "/nothing.so")
    assert "no such file" in devices.without_half()
