"""Run a model on a device: its graphs, opened when needed, and the transfers between host and device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import BundleError, DeviceError, InvalidRequest, first_line
from edgespec.runtimes.devices.webgpu import DEVICES, DeviceName, make_device_session, without_half
from edgespec.runtimes.files.checked import Checked
from edgespec.runtimes.files.kv import ATTENTION
from edgespec.runtimes.files.manifest import PRECISIONS, ModelPart, Precision, graph_name
from edgespec.runtimes.files.repack import usable_graph
from edgespec.runtimes.slots.shared import Model, inputs_of

NARROW, WIDE = 16, 128
"""Rows of a pass that attention's kernels for few and for many rows compute."""


@dataclass
class TransferBytes:
    """Bytes transferred from host to device and back, since the model was opened."""

    to_device: int = 0
    to_host: int = 0

    @property
    def total(self) -> int:
        """Both ways."""
        return self.to_device + self.to_host


def have_precisions(part: ModelPart, device: DeviceName, wanted: Precision | None) -> list[Precision]:
    """Return the precisions in which a model has graphs for a device.

    Raises:
        BundleError: in none, or not in the one that is wanted.
        InvalidRequest: no such device is known.
    """
    if device not in DEVICES:
        raise InvalidRequest(f"device {device}: expected one of {', '.join(DEVICES)}", "see `edgespec devices`")
    have: list[Precision] = [kind for kind in PRECISIONS if graph_name(device, kind) in part.graphs]
    if not have:
        raise BundleError(f"this bundle has no graphs for device {device}", f"export it again with `--device {device}`")
    if wanted is not None and wanted not in have:
        raise BundleError(
            f"this bundle has no {wanted} graphs for device {device}, but {have[0]}",
            f"export it again with `--device {device} --device-precision {wanted}`",
        )
    return have


def choose_precision(
    part: ModelPart, device: DeviceName, wanted: Precision | None, without_half: Callable[[], str]
) -> Precision:
    """Choose the precision of a model's graphs on a device.

    Args:
        part, device, wanted: see ``have_precisions``; None = float16 where both have it.
        without_half: why the device has no float16; empty if it has.

    Raises:
        BundleError: no graphs for this device, or in this precision.
        DeviceError: only float16 graphs, or those were asked for, and a device without.
    """
    have = have_precisions(part, device, wanted)
    if wanted == "fp32" or "fp16" not in have:
        return "fp32"
    why = without_half()
    if not why:
        return "fp16"
    if wanted is None and "fp32" in have:
        return "fp32"
    other = "load with device precision fp32" if "fp32" in have else "export it again with `--device-precision fp32`"
    raise DeviceError(
        f"device {device}: float16 graphs need shaders with float16 (shader-f16), which this adapter lacks: {why}",
        f"{other}, or use device cpu",
    )


class DeviceModel(Model):
    """The graphs of a model for a device.

    Args:
        folder, part, checked: see ``Model``.
        device: where it runs.
        strict: rows have the same bits in every pass: see ``least_rows``.
        precision: of activations, keys and values; None = float16 where the bundle has such graphs and the device such
            shaders, otherwise float32.

    Attributes:
        number: type of keys and values.

    Raises:
        BundleError: the bundle has no graphs for the device, or not in this precision.
        DeviceError: the device is missing, or has no float16.
    """

    def __init__(
        self,
        folder: Path,
        part: ModelPart,
        device: DeviceName,
        strict: bool = True,
        precision: Precision | None = None,
        checked: Checked | None = None,
    ) -> None:
        self.precision = choose_precision(part, device, precision, self._without_half)
        self.folder, self.part, self.facts, self.device = folder, part, part.facts, device
        self._checked = checked
        self.graph, self.strict = part.graphs[self.name()], strict
        self.kv = ATTENTION["f32" if self.precision == "fp32" else "f16"]
        self.number: type[np.floating[Any]] = np.float32 if self.precision == "fp32" else np.float16
        self.threads, self.memory = 1, device
        self.most_rows = NARROW  # of a pass, until driver_check.py has tried more
        self.crossed = TransferBytes()
        self._flat, self._views = {}, {}
        self._opened: dict[str, Any] = {}
        self.session: Any = self.open("")

    def relaxed(self) -> DeviceModel:
        """Copy the model, sessions shared, for passes of any number of rows."""
        other = copy(self)
        other.strict = False
        return other

    @property
    def least_rows(self) -> int:
        """The minimum rows of a pass in strict mode: fewer rows use other kernels, which round differently.

        MatMul and attention have one for a single row, MatMulNBits one for fewer than four.
        """
        return 1 if not self.strict else 2 if self.part.format == "fp32" else 4

    @property
    def approximations(self) -> list[str]:
        """Describe the effects of float16, for results."""
        if self.precision == "fp32":
            return []
        weights = ["16-bit weights"] if self.part.format == "fp32" else []
        return [*weights, "16-bit activations", *self.kv.approximations]

    def open(self, which: str) -> Any:
        """Open the session of a graph: "" is the whole decoder, others are parts of it, such as ``heads/medusa``.

        Raises:
            InvalidRequest: the bundle has no such graph.
        """
        name = self.name(which)
        if name not in self._opened:
            if name not in self.part.graphs:
                own = self.part.graphs.items()
                have = ", ".join(name for name, g in own if (g.device, g.precision) == (self.device, self.precision))
                raise InvalidRequest(f"this bundle has no graph {name}; it has: {have}", "use device cpu for it")
            path = usable_graph(self.folder, self.part, self.part.graphs[name], self._checked)
            self._opened[name] = self._make_session(path)
        return self._opened[name]

    def name(self, which: str = "") -> str:
        return graph_name(self.device, self.precision, which)

    def inputs(self, which: str) -> dict[str, str]:
        """Map the current names of a graph's inputs to the names in the graph."""
        return inputs_of(self.open(which))

    def _make_session(self, path: Path) -> Any:
        return make_device_session(path, self.device)

    def _without_half(self) -> str:
        return without_half()

    def put(self, array: NDArray[Any]) -> Any:
        """Put an array into the device's memory -> an OrtValue.

        Raises:
            DeviceError: it does not fit there.
        """
        import onnxruntime as ort

        self.crossed.to_device += array.nbytes
        try:
            return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array), self.memory, 0)
        except Exception as error:  # ONNX Runtime's exceptions share no public base class
            size = f"{array.nbytes / 2**20:.0f} MiB"
            raise DeviceError(
                f"device {self.device} has no room for a buffer of {size}: {first_line(error)}",
                "load with a smaller context",
            ) from error

    def run(
        self,
        which: str,
        small: Mapping[str, NDArray[Any]],
        held: Mapping[str, Any],
        kept: Mapping[str, Any],
        wanted: Sequence[str],
    ) -> list[NDArray[Any]]:
        """Run a graph (``open``): transfer ``small`` inputs and ``wanted`` outputs; ``held`` and ``kept`` ones stay.

        Raises:
            DeviceError: the device failed; what it held is lost.
        """
        session = self.open(which)
        binding = session.io_binding()
        for name, array in small.items():
            self.crossed.to_device += array.nbytes
            binding.bind_cpu_input(name, array)
        for name, value in held.items():
            binding.bind_ortvalue_input(name, value)
        for name, value in kept.items():
            binding.bind_ortvalue_output(name, value)
        for name in wanted:
            binding.bind_output(name, "cpu")
        try:
            session.run_with_iobinding(binding)
            # outputs come in the order in which they were bound
            values = binding.get_outputs()
            found: list[NDArray[Any]] = [value.numpy() for value in values[len(values) - len(wanted) :]]
        except Exception as error:  # ONNX Runtime's exceptions share no public base class
            raise DeviceError(f"device {self.device} failed: {first_line(error)}", "use device cpu") from error
        self.crossed.to_host += sum(array.nbytes for array in found)
        return found
