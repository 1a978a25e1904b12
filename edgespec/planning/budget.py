"""Memory budgets: parse sizes, and measure the limits of the machine, the container and the process."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path, PurePosixPath

from edgespec.errors import InvalidRequest

UNITS = {"": 1, "b": 1} | {
    prefix + ending: base**power
    for power, prefix in enumerate("kmgt", 1)
    for ending, base in (("", 1024), ("b", 1000), ("ib", 1024))  # 1G is 1GiB, as for systemd, Docker and the JVM
}
_NUMBER = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,30})?|\.[0-9]{1,30})\s*([A-Za-z]{0,3})")

PROMPTS, MOST_PROMPTS = "EDGESPEC_PROMPT_CACHE", 4 << 30  # bytes of prompts on the disk, where the user has set none


def parse_bytes(text: str | int) -> int:
    """ "1.5GiB" -> 1610612736; a plain number is bytes, and fractions of a byte are dropped.

    Raises:
        InvalidRequest: not a number of bytes, or less than one.
    """
    match = _NUMBER.fullmatch(str(text).strip()) if len(str(text)) < 80 else None
    unit = UNITS.get(match[2].lower()) if match else None
    found = int(Fraction(match[1]) * unit) if match and unit else 0
    if found < 1:
        shown = str(text) if len(str(text)) < 80 else f"{str(text)[:77]}..."
        raise InvalidRequest(
            f"{shown!r} is no amount of memory: expected a positive number of bytes",
            "write it like 1.5GiB, 900MB or 2000000000; units are B, KB, MB, GB, TB and KiB, MiB, GiB, TiB; 1G is 1GiB",
        )
    return found


def prompt_limit() -> int:
    """Bytes that all prompts may take by ``EDGESPEC_PROMPT_CACHE``; 0 = none are kept.

    Raises:
        InvalidRequest: it is not a size.
    """
    said = os.environ.get(PROMPTS, "").strip().lower()
    if said in ("0", "off", "no", "false"):
        return 0
    return MOST_PROMPTS if said in ("", "1", "on", "yes", "true") else parse_bytes(said)


def show_bytes(count: float) -> str:
    """Format bytes: 1610612736 -> "1.50 GiB"."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.{1 if abs(value) >= 100 else 2}f} {unit}"


def most_tokens(fits: Callable[[int], bool], high: int) -> int:
    """Find by halves how many tokens fit where ``high`` do not; at most 64 too few."""
    low = 0
    while high - low > 64:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class Available:
    """Memory limits of this process."""

    total: int  # the smallest of the limits, bytes: more than this no process here can ever have
    available: int  # bytes that this process may allocate in addition
    limit_name: str  # the limit that decides ``available``: "the machine", "the cgroup", "RLIMIT_AS", "RLIMIT_DATA"
    resident: int = 0  # bytes that this process has now; 0 = not known

    @property
    def reachable(self) -> int:
        """The largest resident memory that this process can reach, for comparison with a predicted peak."""
        return self.resident + self.available


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Available:
    """Measure the memory limits of this process: the machine's memory, the limits of its control groups, and its own.

    Memory that the system could get back at once, such as the page cache, counts as available.  Of RLIMIT_DATA only
    private memory counts, so a mapped file may fit where this says that it does not.
    """
    status, info = table_of(proc / "self" / "status"), table_of(proc / "meminfo")
    if "MemTotal" not in info:
        return _elsewhere()
    limits = [("the machine", info["MemTotal"], info.get("MemAvailable", info.get("MemFree", 0)))]
    limits += [("the cgroup", limit, limit - used) for limit, used in _cgroup_limits(proc, cgroups)]
    limits += [(name, limit, limit - used) for name, limit, used in _own_limits(status)]
    name, _, left = min(limits, key=lambda limit: limit[2])
    total = min(limit for _, limit, _ in limits)
    return Available(total, max(0, left), name, status.get("VmRSS", 0))


def check_budget(budget: int, available: Available) -> None:
    """Reject a budget that is larger than the available memory.

    Raises:
        InvalidRequest: it is; the message has both figures.
    """
    if budget > available.total:
        raise InvalidRequest(
            f"a budget of {show_bytes(budget)} is more than the {show_bytes(available.total)} that there are here",
            f"at most {show_bytes(available.total)}; {show_bytes(available.reachable)} can be had now",
        )


def system_file(path: Path) -> str:
    """Read a file of the system; empty where it cannot be read."""
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


def table_of(path: Path) -> dict[str, int]:
    """Lines such as "VmRSS:  123 kB" -> bytes by name; none where the file cannot be read."""
    found = re.findall(r"^([\w()]+):\s+(\d+) kB$", system_file(path), re.MULTILINE)
    return {name: int(value) * 1024 for name, value in found}


def _own_limits(status: dict[str, int]) -> Iterator[tuple[str, int, int]]:
    """Limits of the process: (name, bytes, used now)."""
    try:
        import resource
    except ImportError:  # Windows
        return
    kinds = (("RLIMIT_AS", resource.RLIMIT_AS, "VmSize"), ("RLIMIT_DATA", resource.RLIMIT_DATA, "VmData"))
    for name, kind, used in kinds:
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY and used in status:
            yield name, limit, status[used]


def _cgroup_limits(proc: Path, cgroups: Path) -> Iterator[tuple[int, int]]:
    """Limits of the process's control groups and all those above: (bytes, used now without page cache)."""
    for line in system_file(proc / "self" / "cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            bases = cgroups, cgroups / "unified"
            limiting, current = ["memory.max", "memory.high"], "memory.current"
        elif "memory" in controllers.split(","):
            bases = cgroups / "memory", cgroups / controllers
            limiting, current = ["memory.limit_in_bytes"], "memory.usage_in_bytes"
        else:
            continue
        # its folder and those above: a container may see the outer path but not its folders
        inner = PurePosixPath(*(part for part in PurePosixPath(path).parts if part not in ("/", "..", ".")))
        for folder in (base / outer for base in bases for outer in (inner, *inner.parents)):
            limits = [limit for name in limiting if (limit := _number(folder / name)) is not None]
            if limits:
                used = (_number(folder / current) or 0) - _page_cache(folder / "memory.stat")
                yield min(limits), max(0, used)


def _number(path: Path) -> int | None:
    """Read a file of a control group; None = no file, or no limit."""
    text = system_file(path).strip()
    return int(text) if re.fullmatch(r"[0-9]{1,20}", text) else None


def _page_cache(path: Path) -> int:
    """Bytes of files that the system can drop; memory that is shared or in tmpfs is not among them."""
    found = {name: int(value) for name, value in re.findall(r"^(\w+) (\d+)$", system_file(path), re.MULTILINE)}
    # version 1 counts the groups below separately
    return sum(found.get(f"total_{name}", found.get(name, 0)) for name in ("active_file", "inactive_file"))


def _elsewhere() -> Available:
    """Query the memory of a system without /proc; if it does not report free memory, all counts as available."""
    total = left = 0
    kernel = getattr(getattr(ctypes, "windll", None), "kernel32", None)
    # MEMORYSTATUSEX: its length and the load in the first 8 bytes, then bytes in all, bytes available, and five more
    status = (ctypes.c_uint64 * 8)(64)
    if kernel is not None and kernel.GlobalMemoryStatusEx(ctypes.byref(status)):
        total, left = status[1], status[2]
    else:
        with suppress(ValueError, OSError, AttributeError):
            total = left = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Available(total, left, "the machine") if total > 0 else Available(sys.maxsize, sys.maxsize, "nothing known")
