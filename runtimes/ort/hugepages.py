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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_HUGE = 2 << 20
_SMALLEST = 4 << 20  # pieces below this hold no weights worth the call
_RESIDENT = 0.9  # collapsing fills holes: memory that is reserved but not used must stay so
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_HEADER = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p 0+ 00:00 0 ")


Span = tuple[int, int]  # addresses: first byte, and the one after the last


@contextmanager
def huge_pages() -> Iterator[None]:
    """Move large memory that is allocated inside to huge pages; what the process had before stays as it is."""
    if sys.platform != "linux" or os.environ.get("EDGESPEC_HUGE_PAGES") == "0":
        yield
        return
    before = [span for span, _ in _anonymous()]
    yield
    with suppress(OSError, AttributeError):  # no /proc, no madvise: a sandbox or another C library
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for start, end in new_spans(list(_anonymous()), before):
            first, last = -(-start // _HUGE) * _HUGE, end // _HUGE * _HUGE
            if last > first and madvise(first, last - first, _MADV_HUGEPAGE) == 0:
                madvise(first, last - first, _MADV_COLLAPSE)


def new_spans(now: Sequence[tuple[Span, int]], before: Sequence[Span]) -> list[Span]:
    """The large pieces of mappings that are resident and were not there before.

    Args:
        now: mappings, and their resident bytes.
        before: earlier ones; the system joins neighbours, so a new mapping may hold an old one.
    """
    found = []
    for (start, end), resident in now:
        if resident < _RESIDENT * (end - start):
            continue
        at = start
        for old, until in sorted(span for span in before if span[0] < end and span[1] > start):
            found.append((at, old))
            at = max(at, until)
        found.append((at, end))
    return [(start, end) for start, end in found if end - start >= _SMALLEST]


def _anonymous() -> Iterator[tuple[Span, int]]:
    """Anonymous writable mappings and their resident bytes; none where the system does not tell."""
    span: Span | None = None
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        if found := _HEADER.match(line):
            span = int(found[1], 16), int(found[2], 16)
        elif "-" in line.split(" ", 1)[0]:
            span = None  # the header of another kind of mapping
        elif span and line.startswith("Rss:"):
            yield span, int(line.split()[1]) * 1024
