"""Clang for other systems, as Debian has it: Windows over mingw-w64's headers, arm64 over GCC's libraries."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.support.arm64 import COMPILER as ARM_COMPILER
from tests.support.required import need
from tests.support.selftest import COMMON, NATIVE, TESTS, Program, compiled

ROOT = NATIVE.parents[1]
MINGW = "x86_64-w64-mingw32-g++-posix"
ARM = ("--target=aarch64-linux-gnu", "-static")
LIMIT = 900  # seconds: a busy machine may be slow


@cache
def clang() -> tuple[str, str]:
    """Find a clang and the name of its linker, or skip the test."""
    for version in ("-16", "-17", "-18", "-19", ""):
        if shutil.which(f"clang++{version}") and shutil.which(f"ld.lld{version}"):
            return f"clang++{version}", f"lld{version}"
    pytest.skip("no clang++-16 and no ld.lld-16 (clang-16, lld-16)")


class Windows:
    """The library for Windows, and programs over its sources, under wine.

    Args:
        folder: for all that is built, and for wine's own files.
    """

    def __init__(self, folder: Path) -> None:
        need("cmake", "ninja", MINGW, "wine", "to build for Windows")
        self._clang, self._linker = clang()
        self._folder, build = folder, folder / "build"
        chosen = (f"-DEDGESPEC_CLANG={self._clang}", f"-DEDGESPEC_LLD={self._linker}")
        _run("cmake", "--preset", "windows-from-linux", "-B", str(build), *chosen)
        _run("cmake", "--build", str(build), "--parallel", "2")
        self.library = build / "edgespec.dll"
        self._objects = sorted(map(str, build.glob("CMakeFiles/edgespec.dir/edgespec/runtimes/native/*.obj")))
        headers = Path(_run(MINGW, "-print-file-name=include/c++").strip())
        self._flags = (*COMMON, "--target=x86_64-w64-mingw32", f"-isystem{headers}",
                       f"-isystem{headers / 'x86_64-w64-mingw32'}")  # fmt: skip
        # at -O0, GCC's headers also define functions of its library
        self._link = (f"-L{headers.parents[1]}", "-static", "-lpthread", f"-fuse-ld={self._linker}",
                      "-Wl,--allow-multiple-definition")  # fmt: skip
        self.environment: Mapping[str, str] = {
            "WINEPREFIX": str(folder / "wine"), "WINEDEBUG": "-all", "LC_ALL": "C.UTF-8",
        }  # fmt: skip

    def program(self, name: str) -> Program:
        """Build a test program (tests/native) over the library's objects."""
        own = compiled(self._folder / name, self._clang, (name,), (), self._flags)
        path = self._folder / f"{name}.exe"
        _run(self._clang, "--target=x86_64-w64-mingw32", *self._objects, *own, *self._link, "-o", str(path))
        return Program(path, ("wine",))

    def example(self, source: Path) -> Path:
        """Build a program in C over the library, into the same folder."""
        path = self.library.with_name(f"{source.stem}.exe")
        gcc = MINGW.replace("g++", "gcc")
        _run(gcc, "-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{NATIVE}", str(source), str(self.library), "-o",
             str(path))  # fmt: skip
        return path

    def session(self) -> Path:
        """Build the program that runs a graph in ONNX Runtime for Windows."""
        path = self._folder / "ort_windows.exe"
        _run(MINGW, "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-static", f"-I{NATIVE}",
             str(TESTS / "ort_windows.cpp"), "-o", str(path))  # fmt: skip
        return path


def for_arm(folder: Path, names: tuple[str, ...], isas: tuple[str, ...]) -> list[str]:
    """Compile sources for arm64 by clang."""
    return compiled(folder, clang()[0], names, isas, (*COMMON, ARM[0]))


def link_for_arm(path: Path, objects: list[str], runner: str) -> Program:
    """Link them with GCC's libraries."""
    _run(ARM_COMPILER, "-static", "-pthread", *objects, "-o", str(path))
    return Program(path, (runner, "-cpu", "max"))


def _run(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, env=os.environ)
    assert done.returncode == 0, f"{' '.join(command)[:300]}:\n{(done.stdout + done.stderr)[-4000:]}"
    return done.stdout
