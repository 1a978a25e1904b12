"""Build the modules of WebAssembly of the npm package: ``python -m tools.build_web [FOLDER]`` (default: web/dist).

Zig's clang compiles them (``pip install ziglang``), which brings the C and C++ libraries of WASI with it.  Exceptions
are those of WebAssembly; Zig's libraries for WASI are without them, so the few files of LLVM's runtimes that throw and
catch are compiled here, from its sources.  There are two modules: with SIMD128 alone, and with relaxed SIMD as well,
which an engine that does not know it refuses as a whole.  Both import memory that threads may share.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NATIVE = ROOT / "edgespec" / "runtimes" / "native"
ABSENT = ("mapping", "jni", "roofs")  # no file system, no Java, no clock of a thread
RUNTIME = ("web_runtime", "web_threads")
OWN = ("memory_files", "web")
RELAXED = "isa_relaxed"
TARGET = ("-target", "wasm32-wasi", "-mcpu=generic+simd128+exception_handling+bulk_memory+atomics", "-fwasm-exceptions")
FLAGS = (*TARGET, "-O3", "-g0", "-ffp-contract=off", "-fvisibility=hidden", "-fno-sanitize=undefined")
STACK = "-Wl,-z,stack-size=2097152"
SHARED = ("-Wl,--shared-memory", "-Wl,--import-memory", "-Wl,--initial-memory=8388608", "-Wl,--max-memory=4294901760")
UNWINDER = ("cxa_exception", "cxa_personality")
EXPORTED = (
    "version", "isa", "error", "bundle_open", "bundle_close", "bundle_describe", "session_close", "session_bytes",
    "session_save", "session_restore", "session_counts", "next", "web_alloc", "web_free", "web_file", "web_drop",
    "web_find", "web_codec", "web_session", "web_begin", "web_worker", "web_serve",
)  # fmt: skip


def main(words: list[str]) -> int:
    """Build both modules into a folder; return 0."""
    folder = Path(words[0]) if words else ROOT / "web" / "dist"
    folder.mkdir(parents=True, exist_ok=True)
    plain, relaxed = objects(ROOT / "build" / "web")
    exported = [f"-Wl,--export=edgespec_{function}" for function in EXPORTED]
    for made, parts in ((folder / "edgespec.wasm", plain), (folder / "edgespec-relaxed.wasm", relaxed)):
        link(made, parts, "-mexec-model=reactor", "-s", *SHARED, *exported)
        print(f"{made.name}: {made.stat().st_size:,} bytes")
    return 0


def objects(folder: Path, more: Sequence[Path] = (), own: Sequence[str] = OWN) -> tuple[list[Path], list[Path]]:
    """Compile the sources, and ``more`` -> the objects without relaxed SIMD, and with it."""
    folder.mkdir(parents=True, exist_ok=True)
    cmake = (ROOT / "CMakeLists.txt").read_text("utf-8")
    files, isas = (re.findall(rf"^set\({name} ([^)]*)\)", cmake, re.MULTILINE)[0].split() for name in ("FILES", "ISAS"))
    runtimes = _zig_library()
    sources = [  # what replaces parts of the libraries first, or the linker takes those
        *(NATIVE / f"{name}.cpp" for name in RUNTIME),
        runtimes / "libunwind" / "src" / "Unwind-wasm.c",
        *(runtimes / "libcxxabi" / "src" / f"{name}.cpp" for name in UNWINDER),
        *(NATIVE / f"{name}.cpp" for name in (*files, *own) if name not in ABSENT),
        *(NATIVE / f"isa_{isa}.cpp" for isa in isas),
        *more,
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        waiting = [pool.submit(_compile, source, folder / f"{source.stem}.o") for source in sources]
        other = pool.submit(_compile, NATIVE / f"{RELAXED}.cpp", folder / f"{RELAXED}-on.o", "-mrelaxed-simd")
        plain = [one.result() for one in waiting]
    return plain, [other.result() if one.stem == RELAXED else one for one in plain]


def link(made: Path, parts: Sequence[Path], *flags: str) -> None:
    """Link objects into a module, by Zig, which also compiles its own libraries of C and C++ once."""
    _zig("c++", *TARGET, *flags, *parts, STACK, "-o", made)


def _compile(source: Path, made: Path, *flags: str) -> Path:
    runtimes = _zig_library()
    needed = made.with_suffix(".d")
    read = needed.read_text("utf-8").replace("\\\n", " ").split()[1:] if made.exists() and needed.exists() else []
    if read and all(Path(file).exists() and Path(file).stat().st_mtime < made.stat().st_mtime for file in read):
        return made
    if runtimes not in source.parents:
        (version,) = re.findall(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
        own = ["-std=c++17", "-Wall", "-Wextra", "-include", str(NATIVE / "web_threads.h"), f"-I{NATIVE}",
               "-DEDGESPEC_BUILDING", f'-DEDGESPEC_VERSION="{version}"']  # fmt: skip
    elif source.suffix == ".cpp":
        parts = ("libcxxabi/include", "libcxxabi/src", "libcxx/src", "libcxx/include")
        own = ["-std=c++20", "-D_LIBCXXABI_BUILDING_LIBRARY", "-D_LIBCPP_BUILDING_LIBRARY",
               *(f"-I{runtimes / part}" for part in parts)]  # fmt: skip
    else:
        own = ["-w", "-D_LIBUNWIND_HIDE_SYMBOLS", f"-I{runtimes / 'libunwind' / 'include'}"]
    _zig("cc" if source.suffix == ".c" else "c++", *FLAGS, *own, *flags, "-MD", "-MF", needed, "-c", source, "-o", made)
    return made


def _zig_library() -> Path:
    found = importlib.util.find_spec("ziglang")
    if found is None or found.origin is None:
        raise SystemExit("build_web: no Zig here: pip install ziglang==0.17.1")
    return Path(found.origin).parent / "lib"


def _zig(*words: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "ziglang", *map(str, words)], check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
