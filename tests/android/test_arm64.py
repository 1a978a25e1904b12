"""The native operators for arm64: what they ask of the system, which on a phone is not this one."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.support import arm64

# functions of the C library, beside the C++ library's own, that Android 8 has
BIONIC = """
    abort calloc free getauxval getenv ldexp ldexpf malloc memchr memcmp memcpy memmove memset nearbyint nearbyintf
    pthread_create pthread_join pthread_mutex_lock pthread_mutex_unlock pthread_once realloc sched_yield sqrt sqrtf
    strcmp strlen strtof strtol __cxa_atexit __cxa_finalize
"""
OF_GCC = {"__getauxval"}  # its own run-time library asks for it, where the NDK's has another way


def test_the_library_asks_for_nothing_that_android_lacks(tmp_path: Path) -> None:
    arm64.need_compiler()
    library = arm64.cross_compile(tmp_path)
    said = subprocess.run(["aarch64-linux-gnu-nm", "-D", "--undefined-only", library], capture_output=True, text=True)
    wanted = re.findall(r" [Uw] (\w+)@(\w+)", said.stdout)
    assert wanted
    system = {name for name, version in wanted if version.startswith("GLIBC_")}
    assert "memcpy" in system
    assert system - OF_GCC <= set(BIONIC.split()), "Android 8 has no such functions"
    segments = subprocess.run(["aarch64-linux-gnu-readelf", "-lW", library], capture_output=True, text=True).stdout
    aligned = [int(line.split()[-1], 16) for line in segments.splitlines() if line.split()[:1] == ["LOAD"]]
    assert aligned
    assert all(one % (1 << 14) == 0 for one in aligned), "phones with pages of 16 KiB do not load it"
