"""Budgets as people write them and the system has them, and what an engine lets in."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.errors import BudgetError, InvalidRequest
from edgespec.planning import memory_budget as module
from edgespec.planning.budget import UNITS, Available, available_memory, check_budget, parse_bytes, show_bytes
from edgespec.planning.footprint import Memory, MemoryPart
from edgespec.planning.memory_budget import CHUNKS, MemoryBudget
from edgespec.runtimes.files.manifest import Manifest
from edgespec.runtimes.options import RunOptions
from tests.support.planning import manifest

MIB = 1 << 20


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", 1), ("1000", 1000), (7, 7), ("12B", 12), ("1KB", 1000), ("1KiB", 1024), ("2 MB", 2_000_000),
        ("3MiB", 3 << 20), ("1GB", 10**9), ("1.5GiB", 3 << 29), ("0.5 gib", 1 << 29), (".5GiB", 1 << 29),
        ("2TiB", 2 << 40), (" 1 kib ", 1024), ("0.1KiB", 102), ("1.5", 1),
    ],
)  # fmt: skip
def test_amounts_are_read(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", " ", "0", 0, -1, "-1", "-1GiB", "1 potato", "GiB", "nan", "NaN", "inf", "-inf", "1e9", "1,5GiB", "1.GiB",
     "0.1B", "1 Gi", "1GiBs", "1..5GiB", "1_000", "0x10", "1 GiB 2", "\u0661GiB", "9" * 5000, "0.0000001KiB"],
)  # fmt: skip
def test_nonsense_is_refused_with_what_is_expected(text: str | int) -> None:
    with pytest.raises(InvalidRequest, match="expected a positive number of bytes") as caught:
        parse_bytes(text)
    assert "1.5GiB" in str(caught.value.hint)
    assert len(caught.value.message) < 200


@given(st.integers(1, 10**20), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]), st.booleans())
def test_whole_amounts_of_any_unit(count: int, unit: str, space: str, upper: bool) -> None:
    assert parse_bytes(f"{count}{space}{unit.upper() if upper else unit}") == count * UNITS[unit]


@given(st.text(max_size=30))
def test_any_text_is_an_amount_or_an_error(text: str) -> None:
    with suppress(InvalidRequest):
        assert parse_bytes(text) >= 1


@given(st.integers(1, 1 << 60))
def test_what_is_shown_can_be_read_again(count: int) -> None:
    assert parse_bytes(show_bytes(count)) == pytest.approx(count, rel=0.01)


# -- what there is -----------------------------------------------------------------------------------------------------


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


@pytest.fixture
def machine(tmp_path: Path) -> tuple[Path, Path]:
    """Make a machine of 8 GiB, 6 of them free, in no control group."""
    write(
        tmp_path / "proc" / "meminfo",
        f"MemTotal:  {8 << 20} kB\nMemFree:  1024 kB\nMemAvailable:  {6 << 20} kB\nHugePages: 0\n",
    )
    write(tmp_path / "proc" / "self" / "status", "Name:\tx\nVmSize:\t  500 kB\nVmRSS:\t  100 kB\nVmData:\t  200 kB\n")
    return tmp_path / "proc", tmp_path / "cgroup"


def group(folder: Path, limit: str, used: int, cache: int, *, old: bool = False) -> None:
    write(folder / ("memory.limit_in_bytes" if old else "memory.max"), f"{limit}\n")
    write(folder / ("memory.usage_in_bytes" if old else "memory.current"), f"{used}\n")
    # version 1 counts only the group, and includes those below it under other names
    lines = ["anon 5", *(["active_file 1", "inactive_file 1"] if old else [])]
    lines += [f"{'total_' if old else ''}{name}_file {cache // 2}" for name in ("active", "inactive")]
    write(folder / "memory.stat", "\n".join(lines) + "\n")


def test_a_machine_without_limits(machine: tuple[Path, Path]) -> None:
    found = available_memory(*machine)
    assert found == Available(8 << 30, 6 << 30, "the machine", 100 << 10)
    assert found.reachable == (6 << 30) + (100 << 10)


def test_an_old_kernel_without_memavailable(machine: tuple[Path, Path]) -> None:
    write(machine[0] / "meminfo", "MemTotal:  2048 kB\nMemFree:  1024 kB\n")
    assert available_memory(*machine).available == MIB


@pytest.mark.parametrize(
    ("lines", "groups", "total", "available"),
    [
        ("0::/a/b", [("a/b", str(1000 * MIB), 300, 200, False)], 1000, 900),  # the page cache can be had
        ("7:cpu,memory:/a/b\n3:cpu:/x", [("memory/a/b", str(1000 * MIB), 300, 200, True)], 1000, 900),
        # the tightest on the way up: a neighbour has most of it
        ("0::/a/b", [("a/b", "max", 10, 0, False), ("a", str(500 * MIB), 450, 0, False)], 500, 50),
        ("4:memory:/docker/0123", [("memory", str(256 * MIB), 6, 0, True)], 256, 250),  # a container: the outer path
        ("0::/a", [("a", str(MIB), 2, 0, False)], 1, 0),  # full
        ("rubbish\n0::/a\n::", [("a", "many", 0, 0, False)], 8 << 10, 6 << 10),  # invalid lines set no limit
    ],
)
def test_control_groups(
    machine: tuple[Path, Path], lines: str, groups: list[tuple[Any, ...]], total: int, available: int
) -> None:
    """Limit, use and page cache of groups by folder; what there is, in MiB."""
    proc, cgroups = machine
    write(proc / "self" / "cgroup", f"{lines}\n")
    for folder, limit, used, cache, old in groups:
        group(cgroups / folder, limit, used * MIB, cache * MIB, old=old)
    found = available_memory(proc, cgroups)
    assert (found.total, found.available) == (total * MIB, available * MIB)
    assert found.limit_name == ("the machine" if total > 1000 else "the cgroup")


def test_groups_of_both_versions_and_a_soft_limit(machine: tuple[Path, Path]) -> None:
    proc, cgroups = machine
    write(proc / "self" / "cgroup", "0::/../s\n1:name=systemd:/s\n5:memory:/s\n")
    group(cgroups / "memory" / "s", "9223372036854771712", 6 * MIB, 0, old=True)
    write(cgroups / "unified" / "s" / "memory.high", str(64 * MIB))
    write(cgroups / "unified" / "s" / "memory.current", str(4 * MIB))
    assert available_memory(proc, cgroups).available == 60 * MIB


@pytest.mark.skipif(sys.platform != "linux", reason="limits of the process are known on Linux")
@pytest.mark.parametrize("name", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_limits_of_the_process(name: str) -> None:
    script = f"""
import resource
from edgespec.planning.budget import available_memory
before = available_memory()
resource.setrlimit(resource.{name}, (4 << 30, resource.RLIM_INFINITY))
first = available_memory()
held = bytearray(64 << 20)
second = available_memory()
assert first.limit_name == "{name}" and first.total == 4 << 30, (before, first)
assert 0 < first.available < 4 << 30
print(first.available - second.available)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    if "AssertionError: (Available(" in ran.stderr and "the machine" in ran.stderr:
        pytest.skip("this machine has less than 4 GiB to spare")
    assert ran.returncode == 0, ran.stderr
    assert 64 * MIB <= int(ran.stdout) < 66 * MIB


def test_this_machine_has_memory() -> None:
    found = available_memory()
    assert 0 < found.available <= found.total or found.limit_name == "nothing known"


def test_systems_without_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PHYS_PAGES": 1024, "SC_PAGE_SIZE": 4096}[name], raising=False)
    assert available_memory(tmp_path) == Available(4 * MIB, 4 * MIB, "the machine")

    def unknown(name: str) -> int:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(os, "sysconf", unknown, raising=False)
    assert available_memory(tmp_path).limit_name == "nothing known"
    monkeypatch.setattr(sys, "platform", "win32")
    assert available_memory(tmp_path).limit_name in ("nothing known", "the machine")


def test_a_budget_larger_than_the_machine() -> None:
    there = Available(8 << 30, 6 << 30, "the machine", 1 << 30)
    check_budget(8 << 30, there)
    with pytest.raises(InvalidRequest, match=r"16.00 GiB is more than the 8.00 GiB") as caught:
        check_budget(16 << 30, there)
    assert "7.00 GiB can be had now" in str(caught.value.hint)


WEIGHTS, PRIVATE, TOKEN = 300 * MIB, 50 * MIB, 100_000
EXTRA = {"speculative": 120 * MIB, "self-spec": 0}
METHODS = ("ar", "ngram", "self-spec", "speculative")


def private(method: str, tokens: int, chunk: int, batch: int = 1) -> int:
    return PRIVATE + EXTRA.get(method, 0) + TOKEN * batch * -(-tokens // 64) * 64 + chunk * 10_000


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    def memory(found: Manifest, use: RunOptions, process: int | None = None) -> Memory:
        return Memory((MemoryPart("all", private(use.method, use.context, use.chunk, use.batch), WEIGHTS),))

    monkeypatch.setattr(module, "memory_of", memory)
    monkeypatch.setattr(Memory, "peak", property(lambda self: self.private + self.file))
    monkeypatch.setattr(module, "available_memory", lambda: Available(8 << 30, 1 << 30, "the machine"))
    monkeypatch.setattr(module, "resident_now", lambda: (0, 0))


def allow(budget: str | int | None) -> MemoryBudget:
    return MemoryBudget(manifest("int4", METHODS), RunOptions(context=8192), budget)


def admit(found: MemoryBudget, method: str = "speculative", tokens: int = 640, **more: int) -> module.AdmissionDecision:
    return found.admit(method, tokens, gamma=4, greedy=True, methods=METHODS, **more)


def total(method: str, tokens: int, chunk: int) -> int:
    return WEIGHTS + private(method, tokens, chunk)


@pytest.mark.parametrize(
    ("chunk", "less", "expected"),
    [
        (128, 0, ("speculative", 128)),
        (128, 1, ("speculative", 64)),  # first the prefill is cut in smaller chunks
        (16, 0, ("speculative", 16)),
        (16, 1, ("ngram", 128)),  # then a cheaper method is taken
    ],
)
def test_what_fits_is_let_in(chunk: int, less: int, expected: tuple[str, int]) -> None:
    found = admit(allow(total("speculative", 640, chunk) - less))
    assert (found.method, found.chunk) == expected
    assert found.predicted == total(*expected[:1], 640, expected[1])
    if found.method == "speculative":
        assert found.reason == ""
    else:
        assert found.reason.startswith("speculative needs")
        assert found.reason.endswith("ngram instead")


def test_then_the_request_is_refused_with_what_would_fit() -> None:
    found = allow(total("ar", 640, 16) - 1)
    with pytest.raises(BudgetError, match="640 tokens of prompt and answer need") as caught:
        admit(found)
    assert caught.value.hint is not None
    fits = int(caught.value.hint.split()[0])
    assert 0 < fits < 640
    assert admit(found, tokens=fits).method


def test_other_requests_count_and_idle_ones_go_first() -> None:
    limit = total("ar", 640, 128)
    assert admit(allow(limit), "ar", idle=1).crowded
    assert not admit(allow(limit), "ar", idle=0).crowded
    assert admit(allow(limit), "ar", busy=1).chunk == CHUNKS[1]
    with pytest.raises(BudgetError):
        admit(allow(limit), "ar", busy=10 * MIB)


def test_what_is_free_counts_private_memory_alone() -> None:
    """Mapped files can be read again: they reject no request unless a budget was given."""
    found = allow(None)
    assert found.limit == 1 << 30
    tokens = 9000
    assert private("ar", tokens, 128) < (1 << 30) < total("ar", tokens, 128)
    assert admit(found, "ar", tokens=tokens).method == "ar"


def test_off_counts_nothing() -> None:
    found = allow("off")
    assert found.limit is None
    assert admit(found, tokens=10**9).predicted == 0
    found.admit_bundle(10**9)
    assert found.width(8, 10**9, "ar", True) == 8
    assert found.together(METHODS, 10**9) == list(METHODS)


def test_a_bundle_that_cannot_fit_is_refused_before_it_is_loaded() -> None:
    with pytest.raises(BudgetError, match="needs at least"):
        allow(WEIGHTS).admit_bundle(None)
    allow(total("ar", 64, 16)).admit_bundle(None)
    with pytest.raises(BudgetError, match="a context of 4096 tokens needs"):
        allow(total("ar", 1024, 16)).admit_bundle(4096)


def test_batches_shrink() -> None:
    found = allow(WEIGHTS + private("ar", 640, 128, 3))
    assert found.width(8, 640, "ar", True) == 3
    assert allow(total("ar", 64, 16)).width(8, 640, "ar", True) == 1


def test_methods_that_fit_at_the_same_time() -> None:
    found = allow(total("ar", 640, 16))
    assert found.together(METHODS, 640) == ["ar", "ngram", "self-spec"]
    two = ("speculative", "self-spec", "ngram")
    assert allow(total("speculative", 640, 16)).together(two, 640) == list(two)
    EXTRA["self-spec"] = 1
    try:
        assert allow(total("speculative", 640, 16)).together(two, 640) == ["speculative", "ngram"]
        assert allow("1GiB").extra(two, 640) == EXTRA["speculative"] + 1
    finally:
        EXTRA["self-spec"] = 0
    assert allow("off").extra(two, 640) == 0


@pytest.mark.parametrize("budget", ["0", "-1", "1 potato", "", 0, -5, "9GiB"])
def test_nonsense_is_refused(budget: str | int) -> None:
    with pytest.raises(InvalidRequest):
        allow(budget)
