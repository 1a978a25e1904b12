"""Memory, time and threads of this process, as the operating system reports and controls them."""

from __future__ import annotations

import ctypes
import math
import sys
import time
from contextlib import suppress
from pathlib import Path

_trimmed = -math.inf  # when memory was last given back
_M_ARENA_MAX = -8  # glibc's malloc.h
TURN = 1e-3  # seconds that a thread of Python may compute while another one waits


def peak_bytes() -> int:
    """Largest resident memory of this process so far, in bytes; 0 where the system does not tell."""
    status = Path("/proc/self/status")
    if status.is_file():  # unlike getrusage not inherited from the process that started this one
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def trim_memory(every: float = 0.0) -> None:
    """Give what was freed back to the system: glibc keeps what its heap once held, such as packed weights.

    Args:
        every: seconds since the last time within which nothing is done; it takes a few milliseconds.
    """
    global _trimmed
    if time.monotonic() - _trimmed < every:
        return
    _trimmed = time.monotonic()
    _tell_glibc("malloc_trim", 0)


def one_arena() -> None:
    """Let all threads allocate from one heap: glibc gives each thread an arena, and each arena keeps its own holes.

    For the owner of a process that lives long, before its first thread.
    """
    _tell_glibc("mallopt", _M_ARENA_MAX, 1)


def short_turns() -> None:
    """Let threads of Python take turns of a millisecond, where five are usual.

    Each time that an event loop has looked what is new, it waits for the turn of a thread that computes.
    """
    sys.setswitchinterval(TURN)


def _tell_glibc(name: str, *given: int) -> None:
    if sys.platform == "linux":
        with suppress(AttributeError, OSError):  # another C library
            getattr(ctypes.CDLL(None), name)(*given)
