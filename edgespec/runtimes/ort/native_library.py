"""The library of native operators: is it there, does it load, which instruction set, what do its passes cost?

It is built with the package where there is a C++ compiler.  Without it everything works on stock operators, slower.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter

from edgespec.errors import InvalidRequest

NAME = {"darwin": "libedgespec.dylib", "win32": "edgespec.dll"}.get(sys.platform, "libedgespec.so")
PARTS = ("linear", "attention", "head", "rest")  # as the library counts them
_STREAMS = (1, 4, 8)  # of a reading thread; which number is fastest depends on the machine


@dataclass(frozen=True)
class NativeLibrary:
    """The native library, and why it is used or not."""

    path: Path | None  # the library; None if it cannot be used
    isa: str  # the instruction set it uses here: avx512, avxvnni, avx2, i8mm, neon or scalar
    reason: str  # why it is used, or why not
    version: str = ""  # of edgespec that it was built from; "" = it does not say


@cache
def native_library() -> NativeLibrary:
    """Find the library of this installation; EDGESPEC_NATIVE=0 hides it, EDGESPEC_NATIVE=PATH names another one."""
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
    if not hasattr(library, "edgespec_sources_open"):
        return NativeLibrary(None, "", f"no native operators: {path} is of an older edgespec")
    if refused := _refused(path):
        return NativeLibrary(None, "", f"no native operators: {refused}")
    note = f" ({error.decode()})" if error else ""
    return NativeLibrary(path, isa, f"native operators, {isa} kernels{note}", _version(library))


def c_paths() -> dict[str, Path]:
    """Find what programs in C need of this installation.

    Returns:
        ``include``: the header's folder; ``library``: the file to link and load; ``cmake``: the folder for
        ``edgespec_DIR``; ``pkgconfig``: the folder for ``PKG_CONFIG_PATH``.

    Raises:
        InvalidRequest: there is no library here.
    """
    library = native_library()
    if library.path is None:
        raise InvalidRequest(library.reason, "install a wheel, or a C++ compiler and edgespec again")
    folder = library.path.resolve().parent
    found = {"include": folder, "library": library.path.resolve(), "cmake": folder / "cmake",
             "pkgconfig": folder / "pkgconfig"}  # fmt: skip
    if not (folder / "edgespec.h").is_file():
        raise InvalidRequest(
            f"{folder}: has no edgespec.h next to the library", "install edgespec again, or unset EDGESPEC_NATIVE"
        )
    return found


def _version(library: ctypes.CDLL) -> str:
    if (said := getattr(library, "edgespec_version", None)) is None:  # of before it said so
        return ""
    said.restype = ctypes.c_char_p
    return str(said().decode())


def _refused(path: Path) -> str:
    """Say why ONNX Runtime does not take the library, whose operators speak its C interface; empty = it does."""
    import onnxruntime

    try:
        onnxruntime.SessionOptions().register_custom_ops_library(str(path))
    except Exception as error:  # its exceptions share no public base class
        return f"ONNX Runtime {onnxruntime.__version__} does not take {path.name}: {error}"
    return ""


def read_bandwidth(threads: int, streams: int = 4, megabytes: int = 512, repeats: int = 5) -> float:
    """Measure the GB per second at which memory can be read, the best of some tries; 0 without the library.

    Args:
        threads: that read at once.
        streams: distant regions that each thread reads, interleaved.
        megabytes: read by all together, in each try.
        repeats: tries.
    """
    library = native_library()
    if library.path is None:
        return 0.0
    read = ctypes.CDLL(str(library.path)).edgespec_read_bandwidth
    read.restype, read.argtypes = ctypes.c_double, [ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int]
    return float(read(megabytes << 20, threads, streams, repeats))


def _installed() -> Path | None:
    """Find the library next to its sources, where the build puts it, or in the installed package if editable."""
    beside = Path(__file__).resolve().parents[1] / "native" / NAME
    if beside.is_file():
        return beside
    if not (Path(__file__).resolve().parents[3] / "CMakeLists.txt").is_file():
        return None  # a whole installation: a library elsewhere belongs to another one
    for entry in sys.path:
        found = Path(entry or ".") / "edgespec" / "runtimes" / "native" / NAME
        if found.is_file():
            return found
    return None


# -- profile -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RooflineLimits:
    """Limits of this machine."""

    bandwidth: float  # bytes per second that are read from memory
    dots: float  # multiply-adds of bytes per second in registers, with this instruction set's kernels

    def seconds(self, size: float, macs: float) -> float:
        """Compute the least that reading ``size`` bytes and ``macs`` multiply-adds can take, both at once."""
        return max(size / self.bandwidth, macs / self.dots)


@dataclass(frozen=True)
class PartCounts:
    """One part of the passes: seconds, bytes of weights or of keys and values, multiply-adds."""

    seconds: float
    bytes: float
    macs: float


@dataclass(frozen=True)
class PassCounts:
    """Counts and times of native passes."""

    passes: int  # how many
    wall: float  # seconds from before the call to after it
    inside: float  # seconds within the operator
    parts: dict[str, PartCounts]  # by name (``PARTS``)


def measure_roofs(threads: int) -> RooflineLimits:
    """Measure both roofs, the best of several tries.

    Raises:
        InvalidRequest: no native operators here.
    """
    rate = _library().edgespec_dot_rate
    rate.restype, rate.argtypes = ctypes.c_double, [ctypes.c_int64, ctypes.c_int, ctypes.c_int]
    bandwidth = max(read_bandwidth(threads, streams, 256, 2) for streams in _STREAMS)
    return RooflineLimits(1e9 * bandwidth, 1e9 * float(rate(1 << 19, threads, 9)))


def count_passes(run: Callable[[], object]) -> PassCounts:
    """Count the native passes that ``run`` makes, and any other passes of the process at the same time.

    Raises:
        InvalidRequest: no native operators here.
    """
    library = _library()
    library.edgespec_profile.argtypes = [ctypes.c_int]
    library.edgespec_profile_read.argtypes = [ctypes.POINTER(ctypes.c_double)]
    found = (ctypes.c_double * (2 + 3 * len(PARTS)))()
    library.edgespec_profile(1)
    try:
        start = perf_counter()
        run()
        wall = perf_counter() - start
        library.edgespec_profile_read(found)
    finally:
        library.edgespec_profile(0)
    parts = {name: PartCounts(*found[2 + 3 * at : 5 + 3 * at]) for at, name in enumerate(PARTS)}
    return PassCounts(int(found[0]), wall, found[1], parts)


def _library() -> ctypes.CDLL:
    library = native_library()
    if library.path is None:
        raise InvalidRequest(f"passes are counted by native operators: {library.reason}", "install a C++ compiler")
    return ctypes.CDLL(str(library.path))
