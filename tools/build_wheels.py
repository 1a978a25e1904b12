"""Build the wheels of all systems on one Linux machine, and check each as far as it can be here.

    python tools/build_wheels.py [-o DIST] [--bundle BUNDLE] [PLATFORM ...]

Linux x86-64 and arm64 are built by Zig's clang for glibc 2.28 and checked by auditwheel, Windows by clang over
mingw-w64, macOS by Zig's clang.  It needs ``pip install ziglang auditwheel scikit-build-core cmake ninja``; Windows
also needs clang-16, lld-16 and g++-mingw-w64-x86-64-posix.  A library is loaded by a program in C
(``examples/c/greedy.c``) where this machine or an emulator (qemu-user, wine) runs it: with ``--bundle``, a bundle of
native operators, it also generates eight tokens.  Prints a line for each: built, loaded, run, or why not.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
NATIVE = ROOT / "edgespec" / "runtimes" / "native"
EXAMPLE = ROOT / "examples" / "c" / "greedy.c"
GLIBC = "2.28"
MINGW = "x86_64-w64-mingw32-gcc-posix"
ARM_LIBRARIES = "/usr/aarch64-linux-gnu"  # where Debian's cross compiler has those of arm64


@dataclass(frozen=True)
class Platform:
    """A system that wheels are built for."""

    tag: str  # of the wheel
    library: str
    target: str = ""  # of Zig; "" = mingw-w64
    runner: tuple[str, ...] = ()  # what runs its programs here

    @property
    def cmake(self) -> dict[str, object]:
        """Settings of CMake."""
        if not self.target:
            return {"CMAKE_TOOLCHAIN_FILE": ROOT / "cmake" / "mingw-clang.cmake", "EDGESPEC_CLANG": "clang++-16",
                    "EDGESPEC_LLD": "lld-16"}  # fmt: skip
        return {"CMAKE_TOOLCHAIN_FILE": ROOT / "cmake" / "zig.cmake", "EDGESPEC_ZIG_PYTHON": sys.executable,
                "EDGESPEC_ZIG_TARGET": self.target}  # fmt: skip


MANY = f"manylinux_{GLIBC.replace('.', '_')}"
PLATFORMS = {
    "linux-x86_64": Platform(f"{MANY}_x86_64", "libedgespec.so", f"x86_64-linux-gnu.{GLIBC}"),
    "linux-aarch64": Platform(f"{MANY}_aarch64", "libedgespec.so", f"aarch64-linux-gnu.{GLIBC}",
                              ("qemu-aarch64", "-L", ARM_LIBRARIES)),
    "windows-x86_64": Platform("win_amd64", "edgespec.dll", runner=("wine",)),
    "macos-arm64": Platform("macosx_13_0_arm64", "libedgespec.dylib", "aarch64-macos.13.0"),
}  # fmt: skip


def call(command: Sequence[object], **changes: str) -> str:
    """Return the output of a command that must work.

    Raises:
        SystemExit: it failed.
    """
    words = list(map(str, command))
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **changes})
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def build(one: Platform, dist: Path, flags: str) -> Path:
    """Build a wheel into ``dist``; ``flags``: further settings of CMake."""
    with TemporaryDirectory() as folder:
        defines = " ".join(f"-D{name}={value}" for name, value in one.cmake.items())
        command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, ROOT]
        call(command, CMAKE_ARGS=f"{defines} {flags}".strip(), SKBUILD_WHEEL_TAGS=f"py3-none-{one.tag}",
             SKBUILD_BUILD_DIR=str(Path(folder) / "build"))  # fmt: skip
        (made,) = Path(folder).glob("*.whl")
        dist.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(made, dist))


def check_glibc(wheel: Path, one: Platform) -> None:
    """Check that a wheel for Linux needs no newer library than its tag says.

    Raises:
        SystemExit: it does.
    """
    said = call([sys.executable, "-m", "auditwheel", "show", wheel])
    processor = one.tag.removeprefix(f"{MANY}_")
    known = {f"manylinux_2_{minor}_{processor}" for minor in range(5, int(GLIBC.split(".")[1]) + 1)}
    if not any(f'"{tag}"' in said for tag in known):
        raise SystemExit(f"{wheel.name} is newer than {one.tag}:\n{said}")


def load(one: Platform, wheel: Path, bundle: Path | None) -> str:
    """Load the library of a wheel by a program in C; returns how far that went here.

    Raises:
        SystemExit: the program does not do what it should.
    """
    here = platform.system() == "Linux" and one.tag == f"{MANY}_{platform.machine()}"
    if not here and not (one.runner and shutil.which(one.runner[0])):
        return f"built; not loaded: no {one.runner[0]} here" if one.runner else "built and linked; nothing here runs it"
    with TemporaryDirectory() as name:
        folder = Path(name)
        with zipfile.ZipFile(wheel) as archive:
            library = Path(archive.extract(f"edgespec/runtimes/native/{one.library}", folder))
        program = library.with_name("greedy" if one.target else "greedy.exe")
        zig = [sys.executable, "-m", "ziglang", "cc", "-target", one.target, f"-Wl,-rpath,{library.parent}"]
        call([*(zig if one.target else [MINGW]), "-std=c11", "-O1", f"-I{NATIVE}", EXAMPLE, library, "-o", program])
        graph = bundle / "model.native.onnx" if bundle else folder / "none.onnx"
        command = [*(() if here else one.runner), str(program), str(graph), "8", "-", "1", "2", "3"]
        environment = {**os.environ, "WINEPREFIX": str(folder / "wine"), "WINEDEBUG": "-all"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if bundle is None and done.returncode == 1 and "edgespec" in done.stderr:  # the library says what is missing
            return "loaded"
        if bundle is not None and done.returncode == 0 and len(done.stdout.split()) == 8:
            return f"run: {done.stdout.strip()}"
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr[-2000:]}")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("platforms", nargs="*", metavar="PLATFORM", help=f"of {', '.join(PLATFORMS)}; default: all")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "dist")
    parser.add_argument("--bundle", type=Path, help="a bundle in the layout of native operators, to generate with")
    parser.add_argument("--cmake", default="", help="further settings of CMake")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.platforms if name not in PLATFORMS]:
        raise SystemExit(f"unknown platform {unknown[0]}: expected some of {', '.join(PLATFORMS)}")
    for name in arguments.platforms or PLATFORMS:
        one = PLATFORMS[name]
        wheel = build(one, arguments.output, arguments.cmake)
        if "linux" in name:
            check_glibc(wheel, one)
        print(
            f"{name}: {wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB: {load(one, wheel, arguments.bundle)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
