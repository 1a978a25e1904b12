"""Devices that a bundle can run on: the CPU, and GPUs through ONNX Runtime's WebGPU provider.

The provider is a plugin (Dawn over Vulkan, Metal or Direct3D 12): a package, or a library somewhere on the machine.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from edgespec.errors import DeviceError, first_line

if TYPE_CHECKING:
    import onnxruntime

DeviceName = Literal["cpu", "webgpu"]
DEVICES: tuple[DeviceName, ...] = ("cpu", "webgpu")
LIBRARY = "EDGESPEC_WEBGPU_LIBRARY"  # environment: a provider library instead of the package's
REGISTERED = "edgespec.webgpu"
PROVIDER = "WebGpuExecutionProvider"
INSTALL = "pip install 'edgespec[webgpu]', or name a provider library in " + LIBRARY


@dataclass(frozen=True)
class DeviceState:
    """Whether a device can be used here.

    Attributes:
        name: as in ``--device``.
        usable: whether it can.
        reason: what it is, or why not.
        hint: what would help; empty if nothing is wrong.
    """

    name: DeviceName
    usable: bool
    reason: str
    hint: str = ""


def device_states() -> list[DeviceState]:
    """Every device, usable or not."""
    from edgespec.runtimes.ort import default_threads

    cpu = DeviceState("cpu", True, f"{default_threads()} processors")
    return [cpu, webgpu_state()]


def webgpu_state() -> DeviceState:
    """Whether the WebGPU provider is there and has an adapter."""
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


def driver(device: DeviceName) -> str:
    """What a device's numbers depend on: its adapter, the provider and ONNX Runtime."""
    import onnxruntime as ort

    library, _ = _library()
    size = Path(library).stat().st_size if library else 0
    return f"{webgpu_state().reason}; onnxruntime {ort.__version__}; provider of {size} bytes"


def make_device_session(path: Path, device: DeviceName) -> onnxruntime.InferenceSession:
    """Open a graph on a device; not a single node may run on the CPU.

    Raises:
        DeviceError: the device is not there, or does not take the graph.
    """
    import onnxruntime as ort

    state = webgpu_state()
    if not state.usable:
        raise DeviceError(f"device {device}: {state.reason}", state.hint)
    library, _ = _library()
    assert library is not None
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.inter_op_num_threads = options.intra_op_num_threads = 1
    # without it a node, or a whole session, that the provider refuses would run on the CPU without a word
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    options.add_provider_for_devices(_adapters(library)[:1], {})
    try:
        session = ort.InferenceSession(str(path), options)
    except Exception as error:
        raise DeviceError(f"{path}: device {device} does not take this graph: {first_line(error)}") from error
    if PROVIDER not in session.get_providers():
        raise DeviceError(f"{path}: expected {PROVIDER}, got {', '.join(session.get_providers())}")
    return session


@lru_cache(maxsize=4)
def _adapters(library: str) -> tuple[Any, ...]:
    """The provider's devices; it is registered once a process."""
    import onnxruntime as ort

    ort.register_execution_provider_library(REGISTERED, library)
    return tuple(found for found in ort.get_ep_devices() if found.ep_name == PROVIDER)


def _library() -> tuple[str | None, str]:
    """The provider library, or why there is none."""
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
