"""On arm64: the Kotlin runtime on a JVM under emulation, with ONNX Runtime for arm64 and our native operators."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import PROMPTS
from tests.support import agreement, arm64
from tests.support.jvm import need_maven

LENGTH = 8
CORE = "cortex-a76"  # the other one by command (tests/support/agreement.py): starting Java is what takes time
GREEDY = ("ngram", "speculative", "medusa")
SEEDED = ("self-spec", "blockwise", "paradecode")

# functions of the C library, beside the C++ library's own, that Android 8 has
BIONIC = """
    abort calloc free getauxval getenv ldexp ldexpf malloc memchr memcmp memcpy memmove memset nearbyint nearbyintf
    pthread_create pthread_join pthread_mutex_lock pthread_mutex_unlock pthread_once realloc sched_yield sqrt sqrtf
    strcmp strlen strtof strtol __cxa_atexit __cxa_finalize
"""
OF_GCC = {"__getauxval"}  # its own run-time library asks for it, where the NDK's has another way


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    arm64.need_compiler()
    return arm64.cross_compile(tmp_path_factory.mktemp("cross"))


def test_the_library_asks_for_nothing_that_android_lacks(library: Path) -> None:
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


@pytest.mark.usefixtures("native")
def test_an_arm_core_writes_the_tokens_of_this_one(library: Path, bundles: Callable[..., Path], tmp_path: Path) -> None:
    need_maven()
    java = arm64.need_java()
    ways = [{"method": name} for name in GREEDY] + [{"method": name, **agreement.SEEDED} for name in SEEDED]
    requests = [(settings, PROMPTS[at]) for at, settings in enumerate(ways)]
    made = agreement.serve(bundles("native", "int4"), "native", requests, LENGTH)
    path = tmp_path / "golden.json"
    path.write_text(json.dumps({"bundles": [made]}), "utf-8")
    root = tmp_path / "root"
    root.mkdir()
    code, said = agreement.replay(path, library, arm64.java(java, CORE, root))
    assert code == 0, said
    assert said.startswith(f"aarch64 native int4: {LENGTH * len(ways)} tokens of {len(ways)} requests"), said
