"""``edgespec devices``, and ``--device`` of the other commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.runtimes.devices import webgpu as devices
from edgespec.runtimes.devices.webgpu import DEVICES, DeviceState
from tests.cli.conftest import Command, export
from tests.conftest import TARGET


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp("device") / "bundle", TARGET, "--device", "webgpu", "--format", "fp32")


def test_devices_are_listed(command: Command) -> None:
    found = command("devices", "--json").json["devices"]
    assert [state["name"] for state in found] == list(DEVICES)
    assert all(set(state) == {"name", "usable", "reason", "hint", "precisions"} for state in found)
    assert found[0]["usable"]
    shown = command("devices").out
    assert all(state["reason"] in shown for state in found)


def test_why_a_device_is_not_usable(
    command: Command, bundle: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(devices.LIBRARY, str(tmp_path / "none.so"))
    shown = command("devices").out
    assert "webgpu: not usable" in shown
    assert "none.so: no such file" in shown
    for name in ("run", "bench", "verify"):
        more = ["--prompt", "A"] if name == "run" else []
        refused = command(name, bundle, "--device", "webgpu", *more)
        refused.refused(1, "device webgpu: ", "none.so: no such file", "hint: ")


def test_no_adapter_is_said(command: Command, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    none = DeviceState("webgpu", False, "the provider is there, but no adapter", "install a driver")
    monkeypatch.setattr(devices, "webgpu_state", lambda: none)
    command("run", bundle, "--device", "webgpu", "--prompt", "A").refused(1, "no adapter", "hint: install a driver")


def test_a_bundle_without_graphs_for_a_device(command: Command, tmp_path: Path) -> None:
    plain = export(tmp_path / "bundle", TARGET)
    command("run", plain, "--device", "webgpu", "--prompt", "A").refused(1, "export it again with `--device webgpu`")
    command("run", plain, "--device", "npu", "--prompt", "A").refused(2, "npu")
    assert "devices" in command("info", plain).out


def test_graphs_in_both_precisions(command: Command, tmp_path: Path) -> None:
    both = export(
        tmp_path / "both", TARGET, "--device", "webgpu", "--device-precision", "fp16", "--device-precision", "fp32"
    )
    assert "cpu, webgpu (fp16, fp32)" in command("info", both).out
    graphs = command("info", both, "--json").json["manifest"]["target"]["graphs"]
    assert graphs["webgpu"]["precision"] == "fp32"
    assert graphs["webgpu-fp16"]["precision"] == "fp16"
    refused = command("run", both, "--device-precision", "fp16", "--prompt", "A")
    refused.refused(1, "device precision fp16: device cpu has none")
    output = tmp_path / "none"
    command("export", TARGET, "-o", output, "--device-precision", "fp16").refused(
        1, "no --device", "add --device webgpu"
    )
    assert not output.exists()


def test_a_bundle_says_its_devices(command: Command, bundle: Path) -> None:
    shown = command("info", bundle).out
    assert "cpu, webgpu" in shown
    graphs = command("info", bundle, "--json").json["manifest"]["target"]["graphs"]
    assert {graph["device"] for graph in graphs.values()} == {"cpu", "webgpu"}
    assert command("run", bundle, "--prompt", "ROMEO:", "--max-new-tokens", "4", "--json").json["device"] == "cpu"


def test_a_model_that_the_provider_computes_wrongly(
    command: Command, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    output = tmp_path / "bundle"
    refused = command("export", checkpoint("gemma2_caps"), "-o", output, "--device", "webgpu")
    refused.refused(1, "attention caps its scores", "use it on the CPU")
    assert not output.exists()


def test_a_format_that_no_device_has(command: Command, tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    command("export", TARGET, "-o", output, "--device", "webgpu", "--format", "w8a8").refused(
        1, "--device webgpu and --format w8a8"
    )
    assert not output.exists()
