"""The library of native operators: is it there, does it load, which instruction set does it use?

It is built with the package where there is a C++ compiler.  Without it everything works on stock operators, slower.
"""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

NAME = {"darwin": "libedgespec.dylib", "win32": "edgespec.dll"}.get(sys.platform, "libedgespec.so")


@dataclass(frozen=True)
class NativeLibrary:
    """What was found.

    Attributes:
        path: the library; None if it cannot be used.
        isa: the instruction set it uses here: avx512, avxvnni, avx2, i8mm, neon or scalar.
        reason: why it is used, or why not, in words.
        version: of edgespec that it was built from; "" = it does not say.
    """

    path: Path | None
    isa: str
    reason: str
    version: str = ""


@cache
def native_library() -> NativeLibrary:
    """The library of this installation; EDGESPEC_NATIVE=0 hides it, EDGESPEC_NATIVE=PATH names another one."""
    chosen = os.environ.get("EDGESPEC_NATIVE")
    if chosen == "0":
        return NativeLibrary(None, "", "EDGESPEC_NATIVE=0 turns native operators off")
    path = Path(chosen) if chosen else _installed()
    if path is None or not path.is_file():
        why = f"{path} does not exist" if path else "this installation was built without a C++ compiler"
        return NativeLibrary(None, "", f"no native operators: {why}")
    try:
        library = ctypes.CDLL(str(path))
        library.edgespec_isa.restype = library.edgespec_isa_error.restype = ctypes.c_char_p
        isa, error = library.edgespec_isa().decode(), library.edgespec_isa_error()
    except (OSError, AttributeError) as problem:
        return NativeLibrary(None, "", f"no native operators: {path} does not load: {problem}")
    if refused := _refused(path):
        return NativeLibrary(None, "", f"no native operators: {refused}")
    note = f" ({error.decode()})" if error else ""
    return NativeLibrary(path, isa, f"native operators, {isa} kernels{note}", _version(library))


def _version(library: ctypes.CDLL) -> str:
    try:
        said = library.edgespec_version
    except AttributeError:  # of before it said so
        return ""
    said.restype = ctypes.c_char_p
    return str(said().decode())


def _refused(path: Path) -> str:
    """Why ONNX Runtime does not take the library; empty = it does.  The operators speak its C interface."""
    import onnxruntime

    try:
        onnxruntime.SessionOptions().register_custom_ops_library(str(path))
    except Exception as error:  # its exceptions share no public base class
        return f"ONNX Runtime {onnxruntime.__version__} does not take {path.name}: {error}"
    return ""


def read_bandwidth(threads: int, streams: int = 4, megabytes: int = 512, repeats: int = 5) -> float:
    """GB/s at which this machine's memory can be read, the best of some tries; 0 without the library.

    Args:
        threads: that read at once.
        streams: places far apart that each of them reads in turn.
        megabytes: read by all together, once a try.
        repeats: tries.
    """
    library = native_library()
    if library.path is None:
        return 0.0
    read = ctypes.CDLL(str(library.path)).edgespec_read_bandwidth
    read.restype, read.argtypes = ctypes.c_double, [ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int]
    return float(read(megabytes << 20, threads, streams, repeats))


def _installed() -> Path | None:
    """Where the build puts it: beside its sources, or, in an editable installation, in the installed package."""
    beside = Path(__file__).resolve().parents[1] / "native" / NAME
    if beside.is_file():
        return beside
    if not (Path(__file__).resolve().parents[2] / "CMakeLists.txt").is_file():
        return None  # a whole installation: a library elsewhere belongs to another one
    for entry in sys.path:
        found = Path(entry or ".") / "edgespec" / "runtimes" / "native" / NAME
        if found.is_file():
            return found
    return None
