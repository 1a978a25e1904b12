"""Which machine this is: what a profile belongs to, and what tells it from others."""

from __future__ import annotations

import hashlib
import platform
from functools import cache
from pathlib import Path

import onnxruntime

from edgespec import __version__
from edgespec.planning.memory.budget import available_memory
from edgespec.planning.profile.record import Machine
from edgespec.runtimes.devices.webgpu import DeviceName, driver
from edgespec.runtimes.ort.native_library import native_library
from edgespec.runtimes.ort.session import default_threads

_FLAGS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "asimddp", "i8mm", "sve")  # what kernels differ by


@cache
def this_machine(device: DeviceName = "cpu") -> Machine:
    """This machine; with ``device`` other than the CPU its driver, which is asked for."""
    library = native_library()
    return Machine(
        processor=_processor(),
        cores=default_threads(),
        memory=available_memory().total,
        onnxruntime=onnxruntime.__version__,
        edgespec=__version__,
        isa=library.isa,
        library=_digest(library.path) if library.path else "",
        driver="" if device == "cpu" else driver(device),
    )


def _processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Architecture, name and the instruction sets that matter."""
    name, flags = platform.processor(), ""
    try:
        lines = cpuinfo.read_text("utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        lines = []
    for line in lines:
        key, _, value = (part.strip() for part in line.partition(":"))
        if key == "model name" or (key == "Hardware" and not name):
            name = value
        if key in ("flags", "Features"):
            flags = " ".join(flag for flag in _FLAGS if flag in value.split())
            break
    return " ".join(filter(None, (platform.machine(), name, flags)))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
