"""Builds of the sources by pip: a complete archive, a wheel with the library in it, and one without."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest

from edgespec.runtimes.ort.native_library import NAME
from tests.support.required import need
from tests.support.selftest import ISA_FLAGS

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = f"edgespec/runtimes/native/{NAME}"
HEADER = "edgespec/runtimes/native/edgespec.h"
COMMAND = "optimum/commands/register/register_edgespec.py"
FOUND = {f"edgespec/runtimes/native/{name}" for name in (
    "cmake/edgespec-config.cmake", "cmake/edgespec-config-version.cmake", "pkgconfig/edgespec.pc")}  # fmt: skip
EXAMPLE = ROOT / "examples" / "c" / "generate.c"
PROJECT = """\
cmake_minimum_required(VERSION 3.18)
project(user C CXX)
find_package(edgespec {version} CONFIG REQUIRED)
foreach(kind {kinds})
  add_executable(${{kind}} {example})
  target_link_libraries(${{kind}} PRIVATE edgespec::${{kind}})
endforeach()
"""
BIN = "Scripts" if sys.platform == "win32" else "bin"

# that all instruction sets compile is seen elsewhere: here the library must be in the wheel, and run
SCALAR = " ".join(f"-Dhas_runtimes_native_{isa}_cpp=OFF" for isa in ISA_FLAGS)
QUICK = f"{SCALAR} -DCMAKE_CXX_FLAGS_RELEASE=-O0"  # how well it is optimized does not matter either

ARM = "aarch64-linux-gnu-g++"
# platform -> how CMake builds for it, the library's name and its first bytes
CROSS: dict[str, tuple[dict[str, object], str, bytes]] = {
    "win_amd64": ({"CMAKE_TOOLCHAIN_FILE": ROOT / "cmake" / "mingw-clang.cmake", "EDGESPEC_CLANG": "clang++-16",
                   "EDGESPEC_LLD": "lld-16"}, "edgespec.dll", b"MZ"),
    "linux_aarch64": ({"CMAKE_SYSTEM_NAME": "Linux", "CMAKE_SYSTEM_PROCESSOR": "aarch64", "CMAKE_CXX_COMPILER": ARM},
                      "libedgespec.so", b"\x7fELF"),
}  # fmt: skip
COMPILERS = {"win_amd64": ("clang++-16", "ld.lld-16", "x86_64-w64-mingw32-g++-posix"), "linux_aarch64": (ARM,)}

pytestmark = [
    pytest.mark.nightly,  # .ci/run installs from the checkout, with a compiler and without
    pytest.mark.skipif(sys.platform == "win32", reason="needs symbolic links and a POSIX toolchain"),
]


def call(*command: object, **changes: str | None) -> str:
    """Give the output of a command that must work; ``changes`` are environment variables, None removes one.

    It runs far from the checkout, whose modules must not be found by chance.
    """
    environment = {name: value for name, value in (os.environ | changes).items() if value is not None}
    arguments: list[str] = [str(part) for part in command]
    ran = subprocess.run(arguments, env=environment, cwd=gettempdir(), capture_output=True, text=True, timeout=3000)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    return ran.stdout


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the bin folder of an environment with the build backend and nothing else."""
    folder = tmp_path_factory.mktemp("builder") / "env"
    call(sys.executable, "-m", "venv", folder)
    command = [str(folder / BIN / "python"), "-m", "pip", "install", "-q", "scikit-build-core>=0.11", "cmake", "ninja"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if ran.returncode:
        pytest.skip(f"pip cannot fetch the build backend here: {ran.stderr.strip().splitlines()[-1]}")
    return folder / BIN


@pytest.fixture(scope="module")
def sdist(builder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    code = "import os, sys; os.chdir(sys.argv[1]); from scikit_build_core import build; build.build_sdist(sys.argv[2])"
    call(builder / "python", "-c", code, ROOT, folder)
    (made,) = folder.iterdir()
    return made


def build(builder: Path, sdist: Path, folder: Path, **changes: str | None) -> Path:
    """Give the wheel of a source archive."""
    command = "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, sdist
    call(builder / "python", *command, **changes)
    (made,) = folder.glob("*.whl")
    return made


def installed(wheel: Path, folder: Path) -> Path:
    """Give the bin folder of an environment that has the wheel, and this environment's other packages."""
    call(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / BIN / "python"
    packages = Path(call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # not a site folder, so that what makes this environment's own edgespec importable is not read
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"), "utf-8")
    call(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel)
    return folder / BIN


def operators(binary: Path, folder: Path, **changes: str | None) -> dict[str, Any]:
    """Export, run and inspect a bundle with an installation; returns what ``info`` says of its operators."""
    clean = {"PATH": str(binary), "PYTHONPATH": None, **changes}
    where = call(binary / "python", "-c", "import edgespec; print(edgespec.__file__)", **clean).strip()
    assert Path(where).is_relative_to(binary.parent)
    edgespec = binary / "edgespec"
    # the quickest export
    call(edgespec, "export", "builtin:shakespeare", "-o", folder, "--quantizer", "rtn", "--threads", 1, **clean)
    ran = json.loads(call(edgespec, "run", folder, "--prompt", "ROMEO:", "--max-new-tokens", 8, "--json", **clean))
    found: dict[str, Any] = json.loads(call(edgespec, "info", folder, "--json", **clean))["operators"]
    assert ran["operators"] == found["active"]
    return found


def page() -> set[str]:
    """Name the files of the server's page, those of the libraries in it too."""
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "edgespec/server/page").rglob("*") if path.is_file()}
    assert {"edgespec/server/page/index.html", "edgespec/server/page/vendor/markdown-it.esm.min.mjs"} <= files
    return files


def test_the_source_archive_is_complete(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        links = [member.name for member in archive.getmembers() if member.issym()]
    sources = {f"edgespec/runtimes/native/{path.name}" for path in (ROOT / "edgespec" / "runtimes" / "native").iterdir()
               if path.suffix in (".cpp", ".h", ".inl")}  # fmt: skip
    assert sources | page() <= names
    assert {"CMakeLists.txt", "pyproject.toml", "LICENSE", "README.md", "edgespec/__init__.py",
            "edgespec/export/bundle/model.py", "edgespec/runtimes/slots/slot.py",
            "edgespec/configs/laptop-1b-chat.json",
            "edgespec/builtin/shakespeare/model.safetensors"} <= names  # fmt: skip
    assert not links  # their targets are included as files
    assert not [name for name in names if name.endswith((".so", ".dylib", ".pyc", ".onnx"))]


@pytest.mark.usefixtures("native")
def test_a_wheel_has_the_library_and_no_sources(builder: Path, sdist: Path, tmp_path: Path) -> None:
    wheel = build(builder, sdist, tmp_path / "wheel", CMAKE_ARGS=QUICK)
    assert wheel.name.startswith("edgespec-")
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert LIBRARY in names
    assert {"edgespec/runtimes/slots/slot.py", "edgespec/export/bundle/model.py", "edgespec/configs/__init__.py",
            "edgespec/builtin/shakespeare/model.safetensors",
            "edgespec/export/quantization/calibration.txt"} <= names  # fmt: skip
    assert page() <= names
    assert {f"edgespec/configs/{path.name}" for path in (ROOT / "configs").glob("*.json")} <= names
    assert HEADER in names
    sources = [name for name in names if name.endswith((".cpp", ".h", ".inl", ".rs", ".pyc")) or "test" in name]
    assert sources == [HEADER]
    assert {name.split("/")[0].split("-")[0] for name in names} == {"edgespec", "optimum"}
    assert [name for name in names if name.startswith("optimum/")] == [COMMAND]  # a namespace: no __init__.py
    assert names >= FOUND
    environment = installed(wheel, tmp_path / "env")
    found = operators(environment, tmp_path / "bundle", EDGESPEC_ISA="scalar")
    assert (found["active"], found["layout"]) == ("native", "native")
    paths = json.loads(call(environment / "edgespec", "paths", "--json", PATH=str(environment), PYTHONPATH=None))
    assert (Path(paths["include"]) / "edgespec.h").is_file()
    assert Path(paths["library"]).name == NAME
    check_programs(
        tmp_path / "user", Path(paths["cmake"]), Path(paths["pkgconfig"]), tmp_path / "bundle", ("edgespec",)
    )


def check_programs(folder: Path, package: Path, pkgconfig: Path, bundle: Path, kinds: tuple[str, ...]) -> None:
    """Build a program in C by the CMake package and by pkg-config, and generate with each."""
    need("cmake", "ninja", "pkg-config", "cc", "to build a program in C")
    folder.mkdir()
    text = PROJECT.format(version="0.1", kinds=" ".join(kinds), example=EXAMPLE)
    (folder / "CMakeLists.txt").write_text(text, "utf-8")
    call("cmake", "-G", "Ninja", "-S", folder, "-B", folder / "build", f"-Dedgespec_DIR={package}")
    call("cmake", "--build", folder / "build")
    flags = shlex.split(call("pkg-config", "--cflags", "--libs", "edgespec", PKG_CONFIG_PATH=str(pkgconfig)))
    (where,) = shlex.split(call("pkg-config", "--variable=libdir", "edgespec", PKG_CONFIG_PATH=str(pkgconfig)))
    call("cc", EXAMPLE, "-o", folder / "by-pkg-config", *flags, f"-Wl,-rpath,{where}")
    texts = {call(program, bundle, 8, 1, 2, 3, EDGESPEC_ISA="scalar")
             for program in (*(folder / "build" / kind for kind in kinds), folder / "by-pkg-config")}  # fmt: skip
    (text,) = texts
    assert len(text.split()) == 8


def test_an_archive_for_programs_in_c_may_be_moved(tmp_path: Path) -> None:
    need("cmake", "ninja", "to build the archive")
    build, made = tmp_path / "build", tmp_path / "made"
    call("cmake", "-G", "Ninja", "-S", ROOT, "-B", build, "-DEDGESPEC_SDK=ON", *QUICK.split(),
         f"-DCMAKE_INSTALL_PREFIX={made}")  # fmt: skip
    call("cmake", "--build", build, "--target", "install", "--parallel", "2")
    elsewhere = made.rename(tmp_path / "else where")
    assert {str(path.relative_to(elsewhere)) for path in elsewhere.rglob("*") if path.is_file()} == {
        "include/edgespec.h", f"lib/{NAME}", "lib/libedgespec_static.a", "lib/pkgconfig/edgespec.pc",
        "lib/cmake/edgespec/edgespec-config.cmake", "lib/cmake/edgespec/edgespec-config-version.cmake",
    }  # fmt: skip
    shutil.rmtree(build)
    bundle = tmp_path / "bundle"
    call("edgespec", "export", "builtin:shakespeare", "-o", bundle, "--quantizer", "rtn", "--threads", 1)
    lib = elsewhere / "lib"
    check_programs(tmp_path / "user", lib / "cmake" / "edgespec", lib / "pkgconfig", bundle, ("edgespec", "static"))


@pytest.mark.parametrize("tag", CROSS)
def test_wheels_for_other_systems(builder: Path, sdist: Path, tmp_path: Path, tag: str) -> None:
    """The wheels are built here for other systems, as docs/guides describe it."""
    defines, library, begins = CROSS[tag]
    need(*COMPILERS[tag], f"to build for {tag}")
    arguments = " ".join(f"-D{name}={value}" for name, value in defines.items())
    wheel = build(builder, sdist, tmp_path / "wheel", CMAKE_ARGS=f"{QUICK} {arguments}", CC=None, CXX=None,
                  SKBUILD_WHEEL_TAGS=f"py3-none-{tag}")  # fmt: skip
    assert wheel.name.endswith(f"-py3-none-{tag}.whl")
    with zipfile.ZipFile(wheel) as archive:
        (about,) = (name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
        assert f"Tag: py3-none-{tag}" in archive.read(about).decode().splitlines()
        native = {name for name in archive.namelist() if name.startswith("edgespec/runtimes/native/")}
        path = f"edgespec/runtimes/native/{library}"
        assert native - {"edgespec/runtimes/native/edgespec.dll.a"} == {path, HEADER, *FOUND}
        data = archive.read(path)
    assert data.startswith(begins)
    if tag == "win_amd64":  # PE: no library of a compiler need be there
        assert not re.search(rb"lib(stdc\+\+|gcc|winpthread)[\w.-]*\.dll", data)
    else:
        assert int.from_bytes(data[18:20], "little") == 183  # in ELF: arm64


@pytest.mark.timeout(3600)  # zig builds its libc++ first
def test_wheels_of_linux_on_one_machine(builder: Path, tmp_path: Path) -> None:
    """Zig's clang builds for glibc 2.28, auditwheel agrees, and a program in C loads the libraries."""
    need("qemu-aarch64", "to load the library for arm64")
    call(builder / "python", "-m", "pip", "install", "-q", "ziglang==0.17.1", "auditwheel>=6,<7")
    said = call(builder / "python", ROOT / "tools" / "build_wheels.py", "linux-x86_64", "linux-aarch64", "-o", tmp_path,
                f"--cmake={QUICK}", ZIG_GLOBAL_CACHE_DIR=str(tmp_path / "cache"), CXX=None, CC=None)  # fmt: skip
    for line, tag in zip(said.splitlines(), ("x86_64", "aarch64"), strict=True):
        assert f"-py3-none-manylinux_2_28_{tag}.whl, " in line
        assert line.endswith(" MB: loaded")


def test_without_a_compiler_the_package_is_pure_python(builder: Path, sdist: Path, tmp_path: Path) -> None:
    # cmake also searches outside PATH; a named compiler that does not exist is an error
    none = {"PATH": str(builder), "CXX": str(tmp_path / "no-compiler"), "CC": None}
    wheel = build(builder, sdist, tmp_path / "wheel", **none)
    names = set(zipfile.ZipFile(wheel).namelist())
    assert not [name for name in names if name.startswith("edgespec/runtimes/native/")]
    assert page() <= names
    found = operators(installed(wheel, tmp_path / "env"), tmp_path / "bundle")
    assert found["active"] == "stock"
    assert "built without a C++ compiler" in found["reason"]


def test_the_checkout_is_not_changed_by_a_build(sdist: Path) -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    changed = call("git", "-C", ROOT, "status", "--porcelain", "--untracked-files=all")
    assert not [line for line in changed.splitlines() if line.startswith("??") and "native" in line]
