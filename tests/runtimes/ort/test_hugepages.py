"""Huge pages: only memory that was allocated while opening is moved to them."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path

import pytest

from edgespec.runtimes.ort.hugepages import huge_pages, new_spans, read_in_huge_pages

MIB = 1 << 20


def test_only_large_resident_pieces_that_are_new() -> None:
    old = [(0, 10 * MIB), (40 * MIB, 50 * MIB)]
    now = [
        ((0, 10 * MIB), 10 * MIB),  # was there
        ((20 * MIB, 30 * MIB), 10 * MIB),  # new
        ((32 * MIB, 35 * MIB), 3 * MIB),  # small
        ((36 * MIB, 60 * MIB), 24 * MIB),  # an old one between two new pieces
        ((100 * MIB, 200 * MIB), 50 * MIB),  # half of it is only reserved
    ]
    assert new_spans(now, old) == [(20 * MIB, 30 * MIB), (36 * MIB, 40 * MIB), (50 * MIB, 60 * MIB)]
    assert new_spans(now[:1], []) == [(0, 10 * MIB)]


def filled(size: int) -> mmap.mmap:
    """Return new private memory, all of it resident."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(b"x" * size)
    return memory


def advised(memory: mmap.mmap) -> bool:
    """Whether huge pages were requested for its address range ("hg" of /proc/self/smaps)."""
    at = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + len(memory) // 2
    flags, inside = "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= at < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            flags = line
    assert flags
    return "hg" in flags.split()


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="this kernel has no huge pages")
@pytest.mark.parametrize("wanted", ["1", "0"])
def test_what_others_allocated_is_left_alone(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    monkeypatch.setenv("EDGESPEC_HUGE_PAGES", wanted)
    before = filled(16 * MIB)
    with huge_pages():
        meanwhile = filled(16 * MIB)
    after = filled(16 * MIB)
    assert [advised(memory) for memory in (before, meanwhile, after)] == [False, wanted == "1", False]


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="this kernel has no huge pages")
@pytest.mark.parametrize("wanted", ["1", "0"])
def test_a_mapped_file_is_read_in_huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    monkeypatch.setenv("EDGESPEC_HUGE_PAGES", wanted)
    mapped = []
    for name in ("weights", "other"):
        (tmp_path / name).write_bytes(bytes(8 * MIB))
        with (tmp_path / name).open("rb") as file:
            mapped.append(mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE))
    read_in_huge_pages(tmp_path / "weights")
    assert [advised(memory) for memory in mapped] == [wanted == "1", False]
