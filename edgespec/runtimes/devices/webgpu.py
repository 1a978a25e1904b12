"""Devices that a bundle can run on: the CPU, and GPUs through ONNX Runtime's WebGPU provider.

The provider is a plugin (Dawn over Vulkan, Metal or Direct3D 12): a package, or a library somewhere on the machine.
"""

from __future__ import annotations

import base64
import os
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from edgespec.errors import DeviceError, first_line, install_hint
from edgespec.runtimes.files.manifest import Precision

if TYPE_CHECKING:
    import onnxruntime

DeviceName = Literal["cpu", "webgpu"]
DEVICES: tuple[DeviceName, ...] = ("cpu", "webgpu")
LIBRARY = "EDGESPEC_WEBGPU_LIBRARY"  # environment: a provider library instead of the package's
REGISTERED = "edgespec.webgpu"
PROVIDER = "WebGpuExecutionProvider"
# y = x + x, float16 [2]; tests/runtimes/devices/test_devices.py writes it out
HALF_GRAPH = "CAo6OAoOCgF4CgF4EgF5IgNBZGQSBGhhbGZaDwoBeBIKCggIChIECgIIAmIPCgF5EgoKCAgKEgQKAggCQgQKABAV"
INSTALL = f"{install_hint('webgpu')}, or name a provider library in {LIBRARY}"


@dataclass(frozen=True)
class DeviceState:
    """Whether a device can be used here."""

    name: DeviceName  # as in ``--device``
    usable: bool  # whether it can
    reason: str  # what it is, or why not
    hint: str = ""  # what would help; empty if nothing is wrong
    precisions: tuple[Precision, ...] = ()  # of activations: fp16 where its shaders have float16


def device_states() -> list[DeviceState]:
    """Every device, usable or not."""
    from edgespec.runtimes.ort.session import default_threads

    cpu = DeviceState("cpu", True, f"{default_threads()} processors")
    webgpu = webgpu_state()
    if webgpu.usable:
        webgpu = replace(webgpu, precisions=("fp32",) if without_half() else ("fp32", "fp16"))
    return [cpu, webgpu]


def webgpu_state() -> DeviceState:
    """Return whether the WebGPU provider is installed and has an adapter."""
    library, missing = _library()
    if library is None:
        return DeviceState("webgpu", False, missing, INSTALL)
    try:
        found = _adapters(library)
    except Exception as error:  # ONNX Runtime's exceptions share no public base class
        return DeviceState("webgpu", False, f"{library}: {first_line(error)}", "the library must fit onnxruntime")
    if not found:
        return DeviceState(
            "webgpu",
            False,
            "the provider is there, but no adapter: no GPU, or no driver for Vulkan, Metal or Direct3D 12",
            "install the GPU's Vulkan driver (on Linux also libvulkan1)",
        )
    return DeviceState("webgpu", True, _described(found[0]))


def driver() -> str:
    """Name the parts that determine the GPU's numbers: its adapter, the provider and ONNX Runtime."""
    import onnxruntime as ort

    library, _ = _library()
    size = Path(library).stat().st_size if library else 0
    return f"{webgpu_state().reason}; onnxruntime {ort.__version__}; provider of {size} bytes"


def require_device(device: DeviceName) -> None:
    """Check that a device exists.

    Raises:
        DeviceError: with the reason.
    """
    state = webgpu_state()
    if not state.usable:
        raise DeviceError(f"device {device}: {state.reason}", state.hint)


def make_device_session(path: Path, device: DeviceName) -> onnxruntime.InferenceSession:
    """Open a graph on a device, with all of its nodes there and none on the CPU.

    Raises:
        DeviceError: the device is not there, or does not take the graph.
    """
    import onnxruntime as ort

    require_device(device)
    try:
        session = ort.InferenceSession(str(path), _options())
    except Exception as error:
        raise DeviceError(f"{path}: device {device} does not take this graph: {first_line(error)}") from error
    if PROVIDER not in session.get_providers():
        raise DeviceError(f"{path}: expected {PROVIDER}, got {', '.join(session.get_providers())}")
    return session


def without_half() -> str:
    """Explain why the WebGPU adapter has no float16 in its shaders; empty if it has.

    The provider says nothing of the adapter's features, so a graph is run that needs them.
    """
    library, missing = _library()
    return missing if library is None else _half_error(library)


@lru_cache(maxsize=4)
def _half_error(library: str) -> str:
    import onnxruntime as ort

    try:
        session = ort.InferenceSession(base64.b64decode(HALF_GRAPH), _options())
        (found,) = session.run(None, {"x": np.array([0.5, 3], np.float16)})
    except Exception as error:  # ONNX Runtime's exceptions share no public base class
        return first_line(error).rsplit("Status Message: ", 1)[-1]
    return "" if found.tolist() == [1.0, 6.0] else f"it computes 0.5 + 0.5, 3 + 3 = {found.tolist()} in float16"


def _options() -> onnxruntime.SessionOptions:
    """Return options of a session on the adapter; requires the provider."""
    import onnxruntime as ort

    library, _ = _library()
    assert library is not None
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.inter_op_num_threads = options.intra_op_num_threads = 1
    # without it a node, or a whole session, that the provider refuses would run on the CPU without a word
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    options.add_provider_for_devices(_adapters(library)[:1], {})
    return options


@lru_cache(maxsize=4)
def _adapters(library: str) -> tuple[Any, ...]:
    """List the provider's devices; it is registered once per process."""
    import onnxruntime as ort

    ort.register_execution_provider_library(REGISTERED, library)
    return tuple(found for found in ort.get_ep_devices() if found.ep_name == PROVIDER)


def _library() -> tuple[str | None, str]:
    """Find the provider library, or explain why there is none."""
    named = os.environ.get(LIBRARY)
    if named:
        return (named, "") if Path(named).is_file() else (None, f"{LIBRARY}={named}: no such file")
    try:
        import onnxruntime_ep_webgpu as package
    except ImportError:
        return None, "the WebGPU provider is not installed"
    return str(package.get_library_path()), ""


def _described(device: Any) -> str:
    hardware = getattr(device, "device", None)
    kind = str(getattr(hardware, "type", "")).rsplit(".", 1)[-1]
    vendor = getattr(hardware, "vendor", "") or "unknown vendor"
    return f"{vendor}, {kind or 'adapter'}, through {device.ep_name}"
