"""What the operating system says of this process."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress
from pathlib import Path


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


def trim_memory() -> None:
    """Give what was freed back to the system: glibc keeps what its heap once held, such as packed weights."""
    if sys.platform == "linux":
        with suppress(AttributeError, OSError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
