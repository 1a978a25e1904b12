"""Android without a phone or the NDK: Debian's clang over bionic's headers, and real bionic under unidbg.

From Android are the headers, libc and libm, the NDK's libc++, and the ELF loader's rules as unidbg has them.  The
processor (dynarmic), the kernel and the linker are not.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.support import arm64
from tests.support.clang import clang
from tests.support.required import need
from tests.support.rust_tokenizer import CRATE
from tests.support.selftest import BESIDE, ISA_FLAGS, NATIVE, SOURCES, TESTS

HEADERS = "EDGESPEC_BIONIC"  # a folder with libc/include and libc/kernel of platform_bionic
TARGET = "--target=aarch64-linux-android26"
EMULATOR = TESTS / "bionic"
PAGE = 1 << 14  # bytes, of phones with Android 15
LIMIT = 600  # seconds


def _run(*command: str | Path, limit: int = LIMIT) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=limit)
    assert done.returncode == 0, f"{command[0]} ... {command[-1]}:\n{(done.stdout + done.stderr)[-3000:]}"
    return done.stdout


class Bionic:
    """The native sources for Android on arm64, and programs over them, in an emulator.

    Args:
        folder: for all outputs; programs can read only its files.
    """

    def __init__(self, folder: Path) -> None:
        named = os.environ.get(HEADERS)
        if not named:
            pytest.skip(f"no headers of bionic ({HEADERS}, see CONTRIBUTING.md)")
        need("javac", "mvn", "to run programs for Android with")
        arm64.need_compiler()
        self._folder, libc = folder, Path(named) / "libc"
        self._compiler, self._linker = clang()
        version = re.sub(r"\D", "", self._compiler)
        standard = Path(f"/usr/lib/llvm-{version}/include/c++/v1")
        if not (standard / "__config_site").is_file():
            pytest.skip(f"no headers of libc++ (libc++-{version}-dev)")
        self._place_emulator()
        self._place_libraries(standard)
        kernel = (libc / "kernel" / part for part in ("uapi/asm-arm64", "uapi", "android/uapi"))
        system = [libc / "include", *kernel]
        own = ("-fPIC", "-mno-outline-atomics", "-ffp-contract=off", "-Wall", "-Wextra", "-nostdlibinc")
        self._c = (TARGET, *own, f"-I{NATIVE}", *(f"-isystem{path}" for path in system))
        self._cxx = (TARGET, "-std=c++17", *own, "-nostdinc++", "-D__ANDROID_UNAVAILABLE_SYMBOLS_ARE_WEAK__",
                     "-DEDGESPEC_BUILDING", f"-I{NATIVE}", f"-isystem{folder}", f"-isystem{standard}",
                     *(f"-isystem{path}" for path in system))  # fmt: skip
        wanted = sorted({*SOURCES, *BESIDE})
        with ThreadPoolExecutor(2) as pool:
            self._library = list(pool.map(partial(self._compiled, flags=("-O3", "-fvisibility=hidden")), wanted))

    def _place_emulator(self) -> None:
        """Fetch unidbg and the NDK's libc++, and build what calls them."""
        folder = self._folder
        shutil.copy(EMULATOR / "pom.xml", folder)
        _run("mvn", "-q", "-B", "-f", folder / "pom.xml", "dependency:copy-dependencies",
             f"-DoutputDirectory={folder / 'jars'}")  # fmt: skip
        _run("javac", "-cp", folder / "jars" / "*", "-d", folder, EMULATOR / "Run.java")
        (aar,) = (folder / "jars").glob("fbjni-*.aar")
        with zipfile.ZipFile(aar) as found:
            (folder / "libc++_shared.so").write_bytes(found.read("jni/arm64-v8a/libc++_shared.so"))

    def _place_libraries(self, standard: Path) -> None:
        """Write what the linker wants of Android's libraries, and the name that the NDK's libc++ has inside."""
        (self._folder / "linker").mkdir()  # not next to programs, where the emulator would find them
        for name in ("c", "m", "dl"):
            empty = (TARGET, "-shared", "-nostdlib", f"-fuse-ld={self._linker}", f"-Wl,-soname,lib{name}.so")
            _run(self._compiler, *empty, "-x", "c", os.devnull, "-o", self._folder / "linker" / f"lib{name}.so")
        site = (standard / "__config_site").read_text("utf-8")
        (self._folder / "__config_site").write_text(site.replace("NAMESPACE __1", "NAMESPACE __ndk1"), "utf-8")

    def _compiled(self, name: str, flags: tuple[str, ...] = ("-O1",)) -> Path:
        source, target = NATIVE / f"{name}.cpp", self._folder / f"{name}.o"
        own = ISA_FLAGS.get(name, ()) if name in ("isa_neon", "isa_i8mm") else ()
        _run(self._compiler, *self._cxx, *flags, *own, "-c", source if source.exists() else TESTS / f"{name}.cpp",
             "-o", target)  # fmt: skip
        return target

    def _c_object(self, source: Path, *flags: str) -> Path:
        target = self._folder / f"{source.stem}.o"
        _run(self._compiler.replace("clang++", "clang"), *self._c, *flags, "-O1", "-c", source, "-o", target)
        return target

    def program(self, source: Path, tokenizer: Path | None = None) -> Path:
        """Link a program in C, or a test program in C++, over the library, and over a static library of tokenizers."""
        texts = () if tokenizer is None else ("-DTOKENIZER", f"-I{CRATE}")
        own = self._compiled(source.stem) if source.suffix == ".cpp" else self._c_object(source, *texts)
        path = self._folder / f"lib{source.stem}{'_of_texts' if texts else ''}.so"
        gcc = Path(_run(arm64.COMPILER, "-print-libgcc-file-name").strip())  # thread_local and unwinding
        end = (gcc, gcc.with_name("libgcc_eh.a"), gcc, f"-L{self._folder / 'linker'}", "-Wl,--no-as-needed")
        _run(self._compiler, TARGET, f"-fuse-ld={self._linker}", "-shared", "-nostdlib", "-Wl,-Bsymbolic",
             f"-Wl,-z,max-page-size={PAGE}", "-Wl,--hash-style=both", *self._library, own,
             *([tokenizer] if tokenizer else []), self._c_object(EMULATOR / "processor.c"),
             self._folder / "libc++_shared.so", *end, "-lc", "-lm", "-ldl", "-Wl,--unresolved-symbols=ignore-all",
             "-o", path)  # fmt: skip
        return path

    def run(self, program: Path, *arguments: str) -> str:
        """Run a program -> what it printed; fails where it does."""
        jars = f"{self._folder}{os.pathsep}{self._folder / 'jars' / '*'}"
        libraries = (self._folder, self._folder / "libc++_shared.so", program)
        return _run("java", "-cp", jars, "Run", *libraries, *arguments, limit=300)
