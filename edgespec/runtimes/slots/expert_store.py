"""Weights that are read from the file when a pass needs them (native/expert_store.h): experts, or layers.

A model with a store needs memory for its other weights and for a cache of these.  The text is the same: what is read
is compared with checksums, which were taken when the file had its SHA-256.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import BundleError
from edgespec.runtimes.files.checked import Checked, records
from edgespec.runtimes.files.sealed import read_sealed, write_sealed
from edgespec.runtimes.slots.handles import ADDRESS, NUMBER, Functions

READS = "EDGESPEC_READS"  # `threads`: never io_uring
MOST_ROWS = 16  # of passes that are counted by their rows


@dataclass(frozen=True)
class ExpertCounts:
    """Counts of the experts that passes needed and read."""

    passes: int  # layers with experts, times passes
    sent: int  # rows times the experts of a row
    distinct: int  # experts that those were, by pass and layer
    hits: int  # of those, in the cache
    bytes: int  # that were read
    waited: float  # seconds that threads waited for reads

    @property
    def hit_rate(self) -> float:
        """Share of the experts that were in the cache; 1 where none were needed."""
        return self.hits / self.distinct if self.distinct else 1.0


def unread_expert(message: str) -> str:
    """Return the part of a pass's error that names what was not read, and why; "" = it is another error."""
    found = re.search(r"edgespec: (.*: (?:expert \d+ of mixture \d+|piece \d+ of the layers): .*)", message)
    return found[1] if found else ""


@cache
def _functions() -> Functions:
    signatures = {
        "close": (None,),
        "use": (ctypes.c_int,),
        "sizes": (None, ADDRESS),
        "reads": (ctypes.c_char_p,),
        "checksums": (NUMBER, ADDRESS),
        "expect": (None, ADDRESS),
        "counts": (None, ctypes.c_int, ADDRESS),
        "forget_counts": (None,),
        "disk_rate": (ctypes.c_double, ctypes.c_uint64, ctypes.c_int, ctypes.c_double, ctypes.c_int, ctypes.c_int),
    }
    return Functions("experts", signatures, (ctypes.c_char_p, ctypes.c_uint64, ctypes.c_int), slow=True)


def disk_rate(file: Path, piece: int, together: int, seconds: float = 0.4, checked: bool = False) -> float:
    """Measure the bytes per second at which pieces of a file are read past the page cache.

    Args:
        file: on the disk.
        piece: bytes of a read.
        together: reads at once.
        seconds: how long.
        checked: whether each piece's checksum is computed as it arrives, as passes do.

    Raises:
        BundleError: it cannot be read.
    """
    functions, threads = _functions(), os.environ.get(READS) == "threads"
    rate = functions.of["disk_rate"](os.fsencode(file), piece, together, seconds, threads, checked)
    if rate < 0:
        raise BundleError(f"{file}: the speed of its disk cannot be measured: {functions.why}", "check the disk")
    return float(rate)


class ExpertStore:
    """The experts of one graph of native operators, or the matrices of its layers where it has none.

    Args:
        graph: its file.
        weights: the file of its weights, in the same folder.
        size: bytes of the cache.
        checked: digests of the bundle's files; experts are not compared where it compares nothing.

    Attributes:
        experts: number of experts of all layers.
        slots: experts that the cache holds.
        slot_bytes: bytes of each in the cache.
        expert_bytes: bytes of all experts.
        layers: whether they are pieces of layers.
        reads: how they are read, ``io_uring`` or ``threads``.

    Raises:
        BundleError: the cache is too small for two experts, or three pieces of layers, or a read failed.
    """

    def __init__(self, graph: Path, weights: Path, size: int, checked: Checked | None = None) -> None:
        self._functions, self._graph = _functions(), graph
        self._of = self._functions.of
        self._handle = self._functions.try_open(os.fsencode(graph), size, os.environ.get(READS) == "threads")
        if self._handle is None:
            raise self._error()
        sizes = np.zeros(5, np.uint64)
        self._of["sizes"](self._handle, sizes.ctypes.data)
        self.experts, self.slots, self.slot_bytes, self.expert_bytes = map(int, sizes[:4])
        self.layers = bool(sizes[4])
        self.reads: str = self._of["reads"](self._handle).decode()
        if checked is not None and checked.wanted:
            self._expect(weights, checked)

    def _error(self) -> BundleError:
        why = self._functions.why
        return BundleError(f"{self._graph}: its weights cannot be streamed: {why}", "copy the bundle again")

    def _expect(self, weights: Path, checked: Checked) -> None:
        """Find the checksums of all experts, recorded or computed now, and compare what is read with them."""
        digests = [checked.digest(path) for path in (self._graph, weights)]
        name = hashlib.sha256("".join(digests).encode()).hexdigest()[:32]
        path, purpose = records() / f"{name}.json", f"checksums of experts {name}"
        sums: NDArray[np.uint64] | None = None
        with suppress(OSError, ValueError, TypeError, KeyError):
            sums = np.array([int(one, 16) for one in read_sealed(path, purpose)["experts"]], np.uint64)
        if sums is None or len(sums) != self.experts:
            sums = np.zeros(self.experts, np.uint64)
            if self._of["checksums"](self._handle, sums.ctypes.data) < 0:
                raise self._error()
            checked.compare_disk(weights)  # the checksums are those of the disk, which may differ from cached pages
            with suppress(OSError):
                write_sealed(path, purpose, {"experts": [f"{int(one):x}" for one in sums]})
        self._of["expect"](self._handle, sums.ctypes.data)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let the session of the graph that is opened inside, by this thread, read its experts here.

        Raises:
            BundleError: no session took it.
        """
        self._of["use"](self._handle)
        try:
            yield
        finally:
            left = self._of["use"](None)
        if left:
            raise BundleError(f"{self._graph}: its session does not read weights from a store", "export it again")

    def counts(self, rows: int = 0) -> ExpertCounts:
        """Count what passes of ``rows`` rows read; 0 = all passes, ``MOST_ROWS`` also those of more rows."""
        found = np.zeros(6, np.float64)
        self._of["counts"](self._handle, min(rows, MOST_ROWS), found.ctypes.data)
        passes, sent, distinct, hits, read = map(int, found[:5])
        return ExpertCounts(passes, sent, distinct, hits, read, float(found[5]))

    def read_so_far(self) -> tuple[float, int]:
        """Seconds that threads waited for reads, and bytes that were read."""
        counts = self.counts()
        return counts.waited, counts.bytes

    def distinct_by_rows(self) -> dict[int, float]:
        """Mean of distinct experts in a layer of a pass, by the pass's rows; the last entry is of all larger passes."""
        counts = {rows: self.counts(rows) for rows in range(1, MOST_ROWS + 1)}
        return {rows: one.distinct / one.passes for rows, one in counts.items() if one.passes}

    @property
    def share(self) -> float:
        """Share of the experts that the cache holds."""
        return self.slots / self.experts

    def words(self) -> str:
        """Say what was read since the model was loaded."""
        counts, by_rows = self.counts(), self.distinct_by_rows()
        if self.layers:
            return (
                f"layers since loading: {counts.hit_rate:.0%} of those needed were in memory, {counts.bytes / 1e6:.1f} "
                f"MB were read by {self.reads}"
            )
        rows = ", ".join(f"{mean:.1f} for {rows}" for rows, mean in by_rows.items())
        return (
            f"experts since loading: {counts.hit_rate:.0%} of those needed were in the cache, {counts.bytes / 1e6:.1f} "
            f"MB were read by {self.reads}; different ones in a layer, by rows of a pass: {rows}"
        )

    def forget_counts(self) -> None:
        """Begin to count again."""
        self._of["forget_counts"](self._handle)

    def close(self) -> None:
        """Free the cache once no session uses it."""
        if self._handle is not None:
            self._of["close"](self._handle)
            self._handle = None

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self.close()
