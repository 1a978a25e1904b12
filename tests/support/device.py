"""The graphs for devices in the host's memory, on the CPU provider: the same files, slots and calls, without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.runtimes.devices.model import DeviceModel
from edgespec.runtimes.ort.session import make_session


class HostModel(DeviceModel):
    """A model for device webgpu whose sessions are the CPU's."""

    def _make_session(self, path: Path) -> Any:
        self.memory = "cpu"
        return make_session(path, 1)

    def _without_half(self) -> str:
        return ""

    def put(self, array: NDArray[Any]) -> Any:
        self.memory = "cpu"
        self._alive = [*getattr(self, "_alive", []), np.ascontiguousarray(array)]  # an OrtValue here owns nothing
        self.crossed.to_device += array.nbytes
        import onnxruntime as ort

        return ort.OrtValue.ortvalue_from_numpy(self._alive[-1])
