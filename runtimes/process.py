"""What the operating system says of this process."""

from __future__ import annotations

import sys
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
