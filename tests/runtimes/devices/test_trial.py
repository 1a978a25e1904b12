"""Trying a device before it is trusted: faults are noticed, and a driver that crashes does not crash this process."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import edgespec.runtimes.devices.driver_check as opening
from edgespec.engine.loading import load
from edgespec.errors import BundleError, DeviceError
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.runtimes.devices.driver_check import check_trial, golden_step
from edgespec.runtimes.devices.model import NARROW
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.cache import cache_folder
from edgespec.runtimes.files.facts import ModelFacts
from edgespec.runtimes.files.manifest import PRECISIONS, Precision
from tests.conftest import TARGET
from tests.support.device import HostModel


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("trial") / "bundle"
    kinds: Any = {"devices": ("webgpu",), "device_precisions": PRECISIONS, "threads": 1}
    export_model(ExportOptions(TARGET, output, [], "int4", **kinds), golden=False)
    return output


FAULTS = ("none", "interleaved rotation", "positions one off", "keys for values", "swapped heads", "stale cache",
          "no mask for trees", "one layer left out")  # fmt: skip


def swap_heads(graph: onnx.GraphProto, made: onnx.NodeProto, facts: ModelFacts) -> None:
    """Reverse the order of the heads in the output of ``made``, an attention of ``graph``."""
    order = np.arange(facts.heads * facts.head_dim).reshape(-1, facts.head_dim)[::-1].reshape(-1)
    graph.initializer.append(onnx.numpy_helper.from_array(order, "order"))
    reader = next(node for node in graph.node if made.output[0] in node.input)
    reader.input[0] = "swapped"
    gather = helper.make_node("Gather", [made.output[0], "order"], ["swapped"], axis=2)
    graph.node.insert(list(graph.node).index(made) + 1, gather)


def leave_out_layer(graph: onnx.GraphProto) -> None:
    """Let what reads the sixth sum of ``graph`` read the fourth, so that the layer between them is left out."""
    adds = [node for node in graph.node if node.op_type == "Add"]
    for node in graph.node:
        for at, name in enumerate(node.input):
            if name == adds[5].output[0]:
                node.input[at] = adds[3].output[0]


def damage(graph: onnx.GraphProto, fault: str, facts: ModelFacts) -> None:
    """Change ``graph`` by ``fault``, where it is one of the graph and not of a pass."""
    attention = [node for node in graph.node if node.op_type == "GroupQueryAttention"]
    if fault == "interleaved rotation":
        for node in (node for node in graph.node if node.op_type == "RotaryEmbedding"):
            node.attribute.append(helper.make_attribute("interleaved", 1))
    elif fault == "keys for values":
        attention[1].input[1], attention[1].input[2] = attention[1].input[2], attention[1].input[1]
    elif fault == "swapped heads":
        swap_heads(graph, attention[2], facts)
    elif fault == "one layer left out":
        leave_out_layer(graph)


def faulty(bundle: Path, folder: Path, fault: str, precision: Precision) -> HostModel:
    """Copy ``bundle`` to ``folder`` and load its graph with ``fault``, as a wrong kernel would have it."""
    shutil.copytree(bundle, folder, dirs_exist_ok=True)
    part = Bundle.open(bundle, check=False).manifest.target
    model = HostModel(folder, part, "webgpu", precision=precision)
    path = folder / model.graph.file
    proto = onnx.load(path, load_external_data=False)
    damage(proto.graph, fault, model.facts)
    Path(path).write_bytes(proto.SerializeToString())
    model = HostModel(folder, part, "webgpu", precision=precision)
    run = model.run

    def wrong(which: str, small: Any, held: Any, kept: Any, wanted: Any) -> Any:
        small, held, kept = dict(small), dict(held), dict(kept)
        if fault == "positions one off" and small.get("past", [0])[0] > 0:
            small["position_ids"] = small["position_ids"] + 1
        if fault == "no mask for trees" and "tree" in small:
            small["tree"] = np.zeros_like(small["tree"])
        if fault == "stale cache" and small.get("past", [0])[0] > 0:
            kept |= {name: model.put(np.zeros(kept[name].shape(), model.number)) for name in kept if "present" in name}
        return run(which, small, held, kept, wanted)

    model.run = wrong  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, precision: Precision
) -> None:
    """The comparison with the CPU or that of passes finds it: tolerances must be between rounding and faults."""
    monkeypatch.setattr(opening, "driver", lambda: "host")
    model = faulty(bundle, tmp_path / "copy", fault, precision)
    found = golden_step(model.folder, model.part, model, 1)
    if fault == "none":
        check_trial("webgpu", model.part.format, found)
        return
    with pytest.raises(
        DeviceError, match=r"gives wrong numbers here: (its logits differ|rows of one text differ)"
    ) as wrong:
        check_trial("webgpu", model.part.format, found)
    assert ("device precision fp32" in str(wrong.value.hint)) == (precision == "fp16")


# -- the other process -------------------------------------------------------------------------------------------------


@pytest.fixture
def usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that device webgpu exists."""
    monkeypatch.setattr(opening, "require_device", lambda _: None)
    monkeypatch.setattr(opening, "driver", lambda: "a driver that crashes")


@pytest.mark.parametrize(
    "program, seconds, said",
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 300.0, "was killed by SIGSEGV"),
        ("import os; os.abort()", 300.0, "was killed by SIGABRT"),
        ("import sys; sys.exit('vkCreateDevice failed')", 300.0, "ended with status 1: vkCreateDevice failed"),
        ("import time; time.sleep(600)", 1.0, "was not done after 1 seconds"),
    ],
    ids=["segfault", "abort", "exit", "hang"],
)
def test_a_driver_that_crashes_or_hangs(
    bundle: Path, usable: None, monkeypatch: pytest.MonkeyPatch, program: str, seconds: float, said: str
) -> None:
    monkeypatch.setattr(opening, "COMMAND", (sys.executable, "-c", program))
    monkeypatch.setattr(opening, "SECONDS", seconds)
    before = opening._known()
    for _ in range(2):  # a crash must not be remembered as a success
        with pytest.raises(DeviceError, match="device webgpu: a trial") as error:
            load(bundle, device="webgpu")
        assert said in str(error.value)
        assert "use device cpu" in str(error.value.hint)
    assert opening._known() == before


def test_errors_come_back_from_the_other_process(
    bundle: Path, usable: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The real one, which finds no provider library."""
    monkeypatch.setenv("EDGESPEC_WEBGPU_LIBRARY", str(tmp_path / "none.so"))
    with pytest.raises(DeviceError, match=r"none\.so: no such file") as error:
        load(bundle, device="webgpu", device_precision="fp32")
    assert ".[webgpu]" in str(error.value.hint)
    with pytest.raises(DeviceError, match="device webgpu: the CPU"):
        opening._answer({"error": "DeviceError", "message": "device webgpu: the CPU", "hint": None})


def test_what_the_other_process_found(bundle: Path, usable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = '{"precision": "fp16", "cpu": 0.001, "passes": 0.002, "wide": 0.5}'
    program = f"import sys, pathlib; pathlib.Path(sys.argv[2]).write_text({answer!r})"
    monkeypatch.setattr(opening, "COMMAND", (sys.executable, "-c", program))
    monkeypatch.setattr(opening, "driver", lambda: "another driver")
    monkeypatch.setattr(opening, "DeviceModel", HostModel)
    engine = load(bundle, device="webgpu")
    assert isinstance(engine.model, HostModel)
    assert (engine.model.precision, engine.model.most_rows) == ("fp16", NARROW)
    monkeypatch.setattr(opening, "COMMAND", ("no such program",))  # remembered
    load(bundle, device="webgpu")
    assert "another driver" in (cache_folder() / "devices.json").read_text("utf-8")
    bad = answer.replace("0.002", "NaN")
    program = f"import sys, pathlib; pathlib.Path(sys.argv[2]).write_text({bad!r})"
    monkeypatch.setattr(opening, "COMMAND", (sys.executable, "-c", program))
    monkeypatch.setattr(opening, "driver", lambda: "a third driver")
    with pytest.raises(DeviceError, match="rows of one text differ by nan% between its passes"):
        load(bundle, device="webgpu")


def test_a_bundle_without_graphs_is_not_tried(bundle: Path, usable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "COMMAND", ("no such program",))
    manifest = Bundle.open(bundle).manifest
    graphs = {name: graph for name, graph in manifest.target.graphs.items() if graph.precision == "fp32"}
    part = manifest.target.model_copy(update={"graphs": graphs})
    half = Bundle(bundle, manifest.model_copy(update={"target": part}))
    with pytest.raises(BundleError, match="no fp16 graphs for device webgpu, but fp32"):
        opening.open_on_device(half, "webgpu", "fp16", True, 1)
