"""Builds the native sources with their test programs (tests/native), and runs them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

NATIVE = Path(__file__).resolve().parents[2] / "runtimes" / "native"
TESTS = Path(__file__).resolve().parents[1] / "native"
PROGRAMS = TESTS / "programs"  # of nodes of real models

# as the library is built
COMMON = ("-O3", "-std=c++17", "-ffp-contract=off", "-Wall", "-Wextra")
# what the library is built of
CMAKE = (NATIVE.parents[1] / "CMakeLists.txt").read_text("utf-8")


def _listed(name: str) -> tuple[str, ...]:
    found = re.search(rf"^set\({name} ([^)]*)\)", CMAKE, re.MULTILINE)
    assert found, f"CMakeLists.txt sets no {name}"
    return tuple(found[1].split())


LIBRARY_SOURCES = _listed("FILES")  # apart from those of instruction sets
ISAS = tuple(f"isa_{name}" for name in _listed("ISAS"))
ISA_FLAGS = {
    f"isa_{isa}": tuple(flags.split())
    for isa, flags in re.findall(r"^ +edgespec_flags\((\w+) ([^)]*)\)", CMAKE, re.MULTILINE)
}
ISA_FLAGS["isa_avx512"] += ("-Wno-uninitialized", "-Wno-maybe-uninitialized")  # GCC 12's own headers
ARM = tuple(isa for isa, flags in ISA_FLAGS.items() if any(flag.startswith("-march=arm") for flag in flags))
# layers between passes and their callers
READERS = ("texts", "c_api")
LOOP = ("sampling", "verify", "target", "hosted", "drawing", "ngram", "cost", "control", "policy", "auto", "lora",
        "heads", "hidden_state", "loop", "json",
        "shared_library", "codec", "stream", "bundle", "session")  # fmt: skip
BESIDE = ("values", "ops", "node", "jni", *READERS, *LOOP)
SOURCES = tuple(name for name in (*LIBRARY_SOURCES, *ISAS) if name not in BESIDE)
OPERATOR = (*SOURCES, "node", "values", "ops")
PARTS = ("selftest_all",)
FUZZERS = ("fuzz_program", "fuzz_inputs", "fuzz_cache")
DEBUG = ("-O1", "-g1", "-fno-sanitize-recover=all")
SANITIZED = (*DEBUG, "-fsanitize=address,undefined,float-cast-overflow")
THREADS = (*DEBUG, "-fsanitize=thread")
PLAIN = tuple(flag for flag in COMMON if flag != "-O3")


@dataclass(frozen=True)
class Program:
    """A built selftest and its runner (an emulator, or nothing)."""

    path: Path
    runner: tuple[str, ...] = ()

    def run(self, *arguments: str, **environment: str) -> str:
        done = subprocess.run(
            [*self.runner, str(self.path), *arguments],
            capture_output=True, text=True, timeout=300,
            env={**os.environ, "EDGESPEC_PROGRAMS": str(PROGRAMS), **environment},
        )  # fmt: skip
        assert done.returncode == 0, (
            f"{self.path.name} {' '.join(arguments)}:\n{done.stdout[-500:]}\n{done.stderr[-4000:]}"
        )
        return done.stdout

    @property
    def isas(self) -> list[str]:
        return self.run("isas").split()


def of_the_library(name: str) -> str | None:
    """Give the object that the installed library was linked of, where ``EDGESPEC_OBJECTS`` names its build folder."""
    folder = os.environ.get("EDGESPEC_OBJECTS")
    found = Path(folder or ".") / "CMakeFiles" / "edgespec.dir" / "edgespec" / "runtimes" / "native" / f"{name}.cpp.o"
    if not folder or not found.exists():
        return None
    newest = max(file.stat().st_mtime for file in NATIVE.iterdir() if file.suffix in (".cpp", ".h", ".inl"))
    return str(found) if found.stat().st_mtime > newest else None


def compiled(folder: Path, compiler: str, names: tuple[str, ...], isas: tuple[str, ...],
             flags: tuple[str, ...]) -> list[str]:  # fmt: skip
    """Objects of sources, each with its flags, two at a time; ``isas``: the files that get theirs."""

    def compile_one(name: str) -> str:
        target, source = folder / f"{name}.o", NATIVE / f"{name}.cpp"
        if flags == COMMON and isas == host_isas() and (found := of_the_library(name)):
            return found
        own = ISA_FLAGS.get(name, ()) if name in isas else ()
        if not source.exists():  # a test program gains little from being optimized, and a fuzzer nothing
            source, own = TESTS / f"{name}.cpp", ("-O0" if name in FUZZERS else "-O1",)
        command = [compiler, *flags, *own, f"-I{NATIVE}", "-c", str(source), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{name}.cpp does not compile:\n{done.stderr[-4000:]}"
        return str(target)

    folder.mkdir(exist_ok=True)
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(compile_one, names))


def linked(path: Path, compiler: str, objects: list[str], flags: tuple[str, ...]) -> Program:
    subprocess.run([compiler, *flags, *objects, "-pthread", "-o", str(path)], check=True)
    return Program(path)


def build(folder: Path, compiler: str, isas: tuple[str, ...], flags: tuple[str, ...] = COMMON) -> Program:
    """Give the selftest."""
    return linked(folder / "selftest", compiler, compiled(folder, compiler, (*SOURCES, *PARTS), isas, flags), flags)


@cache
def host_compiler() -> str | None:
    if named := os.environ.get("CXX"):
        return shutil.which(named)
    return shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def knows(compiler: str, isa: str) -> bool:
    """Whether the compiler has the instruction set of a file, as CMakeLists.txt asks it."""
    command = [compiler, *ISA_FLAGS[isa], "-x", "c++", "-fsyntax-only", os.devnull]
    return subprocess.run(command, capture_output=True).returncode == 0


@cache
def host_isas() -> tuple[str, ...]:
    """Files that the host's compiler can compile for more than its baseline."""
    machine = os.uname().machine
    arm = machine == "aarch64"
    wanted = [isa for isa in ISA_FLAGS if (isa in ARM) == arm] if arm or machine == "x86_64" else []
    return tuple(name for name in wanted if knows(host_compiler() or "c++", name))
