"""Weights on huge pages: a step streams all of them, and with 4 KiB pages address translation costs a tenth of it.

ONNX Runtime allocates its packed weights as ordinary memory.  Linux 6.1 can collapse such memory into huge pages on
request (MADV_COLLAPSE).  Native operators use weights where a file is mapped: what the system's cache does not have
yet, Linux reads into huge pages on request; what is cached keeps its pages (``files/large_writes.py``).  Best effort:
elsewhere, or if the kernel declines, nothing changes.  EDGESPEC_HUGE_PAGES=0 turns it off.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_HUGE = 2 << 20
_SMALLEST = 4 << 20  # pieces below this hold no weights worth the call
_RESIDENT = 0.9  # collapsing fills holes: memory that is reserved but not used must stay so
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) rw-p 0+ 00:00 0 ", re.M)
_OF_FILES = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) r\S+ \S+ \S+ \d+ +(/.*)$", re.M)
_RSS = re.compile(_MAPPING.pattern + r".*\n(?:(?!Rss)\w+: .*\n)*Rss: +(\d+) kB$", re.M)


Span = tuple[int, int]  # addresses: first byte, and the one after the last


def read_in_huge_pages(file: Path) -> None:
    """Ask for huge pages where a file is mapped, for what is read of it from now on."""
    if sys.platform != "linux" or os.environ.get("EDGESPEC_HUGE_PAGES") == "0":
        return
    with suppress(OSError, AttributeError):
        madvise, own = _madvise(), os.path.realpath(file)
        for found in _OF_FILES.finditer(Path("/proc/self/maps").read_text()):
            start, end = int(found[1], 16), int(found[2], 16)
            if found[3] == own and end - start >= _HUGE:
                madvise(start, end - start, _MADV_HUGEPAGE)


@contextmanager
def huge_pages() -> Iterator[None]:
    """Move large memory that is allocated inside to huge pages; what the process had before stays as it is."""
    if sys.platform != "linux" or os.environ.get("EDGESPEC_HUGE_PAGES") == "0":
        yield
        return
    before = _anonymous()
    yield
    # resident bytes take the kernel a walk over all memory: asked for only where something large is new
    if not new_spans([(span, span[1] - span[0]) for span in _anonymous()], before):
        return
    with suppress(OSError, AttributeError):  # no /proc, no madvise: a sandbox or another C library
        madvise = _madvise()
        for start, end in new_spans(_resident(), before):
            first, last = -(-start // _HUGE) * _HUGE, end // _HUGE * _HUGE
            if last > first and madvise(first, last - first, _MADV_HUGEPAGE) == 0:
                madvise(first, last - first, _MADV_COLLAPSE)


def new_spans(now: Sequence[tuple[Span, int]], before: Sequence[Span]) -> list[Span]:
    """Find the large pieces of mappings that are resident and were not there before.

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


def _madvise() -> Callable[[int, int, int], int]:
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return madvise


def _anonymous() -> list[Span]:
    """List anonymous writable mappings; none where the system does not tell."""
    with suppress(OSError):
        return [(int(one[1], 16), int(one[2], 16)) for one in _MAPPING.finditer(Path("/proc/self/maps").read_text())]
    return []


def _resident() -> list[tuple[Span, int]]:
    """List them with their resident bytes."""
    found = _RSS.finditer(Path("/proc/self/smaps").read_text())
    return [((int(one[1], 16), int(one[2], 16)), int(one[3]) * 1024) for one in found]
