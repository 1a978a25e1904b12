"""Weights on huge pages: a step streams all of them, and with 4 KiB pages address translation costs a tenth of it.

ONNX Runtime allocates its packed weights as ordinary memory.  Linux 6.1 can collapse such memory into huge pages on
request (MADV_COLLAPSE).  Best effort: elsewhere, or if the kernel declines, nothing changes.  EDGESPEC_HUGE_PAGES=0
turns it off.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_HUGE = 2 << 20
_SMALLEST = 4 << 20  # mappings below this hold no weights worth the call
_RESIDENT = 0.9  # collapsing fills holes: memory that is reserved but not used must stay so
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_HEADER = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p 0+ 00:00 0 ")


def use_huge_pages() -> int:
    """Move this process's large, resident, anonymous memory to huge pages; returns the bytes moved."""
    if sys.platform != "linux" or os.environ.get("EDGESPEC_HUGE_PAGES") == "0":
        return 0
    try:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        moved = 0
        for start, end in list(_large_mappings()):
            first, last = -(-start // _HUGE) * _HUGE, end // _HUGE * _HUGE
            if last <= first or madvise(first, last - first, _MADV_HUGEPAGE) != 0:
                continue
            if madvise(first, last - first, _MADV_COLLAPSE) == 0:
                moved += last - first
        return moved
    except (OSError, AttributeError):  # no /proc, no madvise: a sandbox or another C library
        return 0


def _large_mappings() -> Iterator[tuple[int, int]]:
    """(start, end) of anonymous writable mappings that are large and mostly resident."""
    span: tuple[int, int] | None = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := _HEADER.match(line):
            span = int(found[1], 16), int(found[2], 16)
        elif "-" in line.split(" ", 1)[0]:
            span = None  # the header of another kind of mapping
        elif span and line.startswith("Rss:"):
            resident = int(line.split()[1]) * 1024
            if span[1] - span[0] >= _SMALLEST and resident >= _RESIDENT * (span[1] - span[0]):
                yield span
