"""The native operator under libFuzzer, or its tests under the thread sanitizer.

    python -m tests.fuzz.native fuzz_inputs --minutes 10 [--corpus DIR]
    python -m tests.fuzz.native --threads

libFuzzer needs Clang with its runtime (Debian: clang-14 and libclang-rt-14-dev; ``CXX`` names the compiler, else
``clang++``).  Inputs that fail are written to DIR, where what libFuzzer found worth keeping is too.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.selftest import (
    FUZZERS,
    OPERATOR,
    PARTS,
    PLAIN,
    PROGRAMS,
    SANITIZED,
    TESTS,
    THREADS,
    Program,
    compiled,
    host_compiler,
    linked,
)  # fmt: skip

ISAS = ("isa_avx2", "isa_neon")
ENVIRONMENT = {**os.environ, "EDGESPEC_PROGRAMS": str(PROGRAMS)}


def clang() -> str:
    found = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("clang++", "clang++-14"))), None)
    return found or sys.exit("no clang++: set CXX")


def built(folder: Path, name: str, compiler: str, flags: tuple[str, ...], link: tuple[str, ...] = ()) -> Program:
    isas = ISAS[:1] if os.uname().machine == "x86_64" else ISAS[1:]
    names = (*OPERATOR, *(PARTS if name == "selftest" else (name,)))
    return linked(folder / name, compiler, compiled(folder, compiler, names, isas, flags), (*flags, *link))


def fuzz(folder: Path, name: str, minutes: float, corpus: Path) -> int:
    flags = (*PLAIN, *SANITIZED, "-fsanitize=fuzzer-no-link", "-DEDGESPEC_LIBFUZZER")
    program = built(folder, name, clang(), flags, ("-fsanitize=fuzzer",))
    corpus.mkdir(parents=True, exist_ok=True)
    seeds = PROGRAMS if name == "fuzz_program" else TESTS / "corpus" / name
    options = ["-len_control=0", "-max_len=6000", f"-max_total_time={round(minutes * 60)}", "-rss_limit_mb=4096",
               f"-artifact_prefix={corpus}/"]  # fmt: skip
    return subprocess.run([str(program.path), *options, str(corpus), str(seeds)], env=ENVIRONMENT).returncode


def threads(folder: Path) -> int:
    compiler, flags = host_compiler() or sys.exit("no C++ compiler"), (*PLAIN, *THREADS)
    for name, arguments in (
        ("selftest", ["pass", "brief"]),
        ("fuzz_program", ["7", "100"]),
        ("fuzz_inputs", ["7", "300"]),
    ):
        program = built(folder, name, compiler, flags)
        if code := subprocess.run([str(program.path), *arguments], env=ENVIRONMENT).returncode:
            return code
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=FUZZERS)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--threads", action="store_true")
    options = parser.parse_args()
    if not options.threads and not options.name:
        parser.error("expected a name or --threads")
    with tempfile.TemporaryDirectory() as name:
        if options.threads:
            return threads(Path(name))
        return fuzz(Path(name), options.name, options.minutes, options.corpus or Path(f"fuzz-{options.name}"))


if __name__ == "__main__":
    sys.exit(main())
