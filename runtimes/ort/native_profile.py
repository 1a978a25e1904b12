"""What native passes spend their time on, and the two roofs of the machine they run on."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from edgespec.errors import InvalidRequest
from edgespec.runtimes.ort.native_library import native_library, read_bandwidth

PARTS = ("linear", "attention", "head", "rest")  # as the library counts them
_STREAMS = (1, 4, 8)  # of a reading thread; which number is fastest depends on the machine


@dataclass(frozen=True)
class Roofs:
    """What this machine reaches at best.

    Attributes:
        bandwidth: bytes a second that are read from memory.
        dots: multiply-adds of bytes a second, as the kernels of this instruction set multiply them, in registers.
    """

    bandwidth: float
    dots: float

    def seconds(self, size: float, macs: float) -> float:
        """The least that reading ``size`` bytes and ``macs`` multiply-adds can take, both at once."""
        return max(size / self.bandwidth, macs / self.dots)


@dataclass(frozen=True)
class PartCounts:
    """One part of the passes: seconds, bytes of weights or of keys and values, multiply-adds."""

    seconds: float
    bytes: float
    macs: float


@dataclass(frozen=True)
class PassCounts:
    """What was counted.

    Attributes:
        passes: how many.
        wall: seconds from before the call to after it.
        inside: seconds within the operator.
        parts: by name (``PARTS``).
    """

    passes: int
    wall: float
    inside: float
    parts: dict[str, PartCounts]


def measure_roofs(threads: int) -> Roofs:
    """Both roofs, the best of several tries.

    Raises:
        InvalidRequest: no native operators here.
    """
    rate = _library().edgespec_dot_rate
    rate.restype, rate.argtypes = ctypes.c_double, [ctypes.c_int64, ctypes.c_int, ctypes.c_int]
    bandwidth = max(read_bandwidth(threads, streams, 256, 2) for streams in _STREAMS)
    return Roofs(1e9 * bandwidth, 1e9 * float(rate(1 << 19, threads, 9)))


def count_passes(run: Callable[[], object]) -> PassCounts:
    """Count the native passes that ``run`` makes; other passes of the process at the same time are counted, too.

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
