"""Java for arm64 under emulation, and the native operators cross-compiled for it.

python -m tests.support.arm64 FOLDER fetches Debian's Java for arm64 into FOLDER (43 MB; nothing is installed).
Tests find it by EDGESPEC_ARM64_JAVA.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.selftest import ARM, ISA_FLAGS, ISAS, LIBRARY_SOURCES, NATIVE

CROSS = Path("/usr/aarch64-linux-gnu/lib")  # where Debian's cross compiler has the libraries of arm64
COMPILER = "aarch64-linux-gnu-g++"
CORES = {"cortex-a76": "fphp asimdhp asimdrdm asimddp", "cortex-a72": ""}
"""Emulated cores, with dot products and without -> what they say that they have beyond the baseline."""
OF_A_THREAD = {"_ZSt11__once_call", "_ZSt15__once_callable"}  # variables of GCC's C++ library
LIBRARY = "libedgespec.so"
LIMIT = 600  # seconds: a busy machine may be slow


def emulator() -> str | None:
    """Give the program that runs programs for arm64."""
    return shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")


def need_compiler() -> None:
    """Skip the test without a cross compiler."""
    if not shutil.which(COMPILER) or not CROSS.is_dir():
        pytest.skip("no cross compiler (g++-aarch64-linux-gnu)")


def need_java() -> Path:
    """Find the folder with Java for arm64, or skip the test without it or the emulator."""
    if not emulator():
        pytest.skip("no emulator (qemu-user)")
    folder = Path(os.environ.get("EDGESPEC_ARM64_JAVA", ""))
    if not (folder / "usr" / "lib" / "jvm").is_dir():
        pytest.skip("no Java for arm64: EDGESPEC_ARM64_JAVA names no folder of tests/support/arm64.py")
    return folder


def fetch(folder: Path) -> None:
    """Unpack Java for arm64 and its dependencies from Debian's packages, with separate package lists."""
    lists, packages = folder / "lists", folder / "packages"
    (lists / "partial").mkdir(parents=True)
    packages.mkdir()
    said = subprocess.run(["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"],
                          capture_output=True, text=True, check=True, timeout=LIMIT).stdout  # fmt: skip
    mirror = next(line for line in said.splitlines() if line.endswith("/debian/"))  # this machine's own
    release = next(line.partition("=")[2] for line in Path("/etc/os-release").read_text("utf-8").splitlines()
                   if line.startswith("VERSION_CODENAME="))  # fmt: skip
    key = "/usr/share/keyrings/debian-archive-keyring.gpg"
    (folder / "sources.list").write_text(f"deb [arch=arm64 signed-by={key}] {mirror} {release} main\n", "utf-8")
    options = {"APT::Architecture": "arm64", "APT::Architectures::": "arm64", "Dir::Etc::SourceParts": "/dev/null",
               "Dir::Etc::SourceList": str(folder / "sources.list"), "Dir::State::Lists": str(lists),
               "Dir::Cache::pkgcache": "", "Dir::Cache::srcpkgcache": ""}  # fmt: skip
    apt = ["apt-get", "-qq", *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]
    subprocess.run([*apt, "update"], check=True, timeout=LIMIT)
    names = ["openjdk-17-jre-headless:arm64", "zlib1g:arm64"]
    subprocess.run([*apt, "download", *names], cwd=packages, check=True, timeout=LIMIT)
    for package in packages.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", str(package), str(folder)], check=True, timeout=LIMIT)
    for name in (lists, packages):
        shutil.rmtree(name)


def java(folder: Path, core: str, scratch: Path) -> list[str]:
    """Give the beginning of a command that runs Java on an emulated core; ``scratch``: a new folder for what it needs.

    ONNX Runtime asks /proc/cpuinfo for the core and fails on that of another architecture, so the emulator gets one.
    """
    for name in ("usr", "etc"):
        (scratch / name).symlink_to(folder / name)
    (scratch / "lib").symlink_to(CROSS)
    (scratch / "proc").mkdir()
    part = {"cortex-a76": "0xd0b", "cortex-a72": "0xd08"}[core]
    about = f"Features\t: fp asimd {CORES[core]}\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU part\t: {part}\n\n"
    (scratch / "proc" / "cpuinfo").write_text("".join(f"processor\t: {at}\n{about}" for at in range(2)), "utf-8")
    places = [CROSS, *(folder / at / "aarch64-linux-gnu" for at in ("lib", "usr/lib"))]
    home = next((folder / "usr" / "lib" / "jvm").glob("java-17-openjdk-*"))
    return [emulator() or "", "-cpu", core, "-L", str(scratch), "-E", f"LD_LIBRARY_PATH={':'.join(map(str, places))}",
            str(home / "bin" / "java"), "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]  # fmt: skip


def cross_compile(folder: Path) -> Path:
    """Build the library of native operators for arm64, as CMake does, without optimization, which changes no bit."""

    def compile_one(name: str) -> str:
        target = folder / f"{name}.o"
        own = ISA_FLAGS[name] if name in ARM else ()
        flags = ["-O1", "-std=c++17", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", *own]
        source = NATIVE / f"{name}.cpp"
        subprocess.run([COMPILER, *flags, "-c", str(source), "-o", str(target)], check=True, timeout=LIMIT)
        return str(target)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, (*LIBRARY_SOURCES, *ISAS)))
    library = folder / LIBRARY
    linked = [COMPILER, "-shared", "-Wl,-z,max-page-size=16384", *objects, "-pthread", "-o", str(library)]
    subprocess.run(linked, check=True, timeout=LIMIT)
    return library


def link_for_android(folder: Path, system: Iterable[str], language: Iterable[str]) -> Path:
    """Link the objects of ``cross_compile`` in a folder against stubs only; any other dependency is a failure.

    Args:
        folder: also where the library is written.
        system: functions of Android's C library.
        language: of the C++ library, which the NDK puts into the library itself.
    """
    stubs = {"libc.so": system, "libc++.so": language}
    for name, functions in stubs.items():
        source = folder / f"{name}.s"
        lines = [f".globl {one}\n.type {one}, %function\n{one}: ret\n" for one in set(functions) - OF_A_THREAD]
        lines += [
            f'.section .tbss,"awT",%nobits\n.globl {one}\n{one}: .skip 8\n' for one in OF_A_THREAD & set(functions)
        ]
        source.write_text("".join(lines), "utf-8")
        made = [COMPILER, "-shared", "-nostdlib", f"-Wl,-soname,{name}", str(source), "-o", str(folder / name)]
        subprocess.run(made, check=True, timeout=LIMIT)
    library = folder / "libedgespec-android.so"
    start = folder / "start.s"  # what the NDK's object files of the beginning define
    start.write_text(".data\n.hidden __dso_handle\n.globl __dso_handle\n__dso_handle: .quad __dso_handle\n", "utf-8")
    files = [str(file) for file in (start, *sorted(folder.glob("*.o")), *(folder / name for name in stubs))]
    linked = [COMPILER, "-shared", "-nostdlib", "-Wl,--no-undefined", *files, "-lgcc", "-o", str(library)]
    subprocess.run(linked, check=True, timeout=LIMIT)
    return library


if __name__ == "__main__":
    fetch(Path(sys.argv[1]))
