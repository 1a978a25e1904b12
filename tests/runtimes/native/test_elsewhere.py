"""Other systems and another compiler: Windows under wine, arm64 under qemu, clang and GCC: same bits, same texts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from edgespec.engine.engine import Engine
from tests.conftest import PROMPTS, TARGET, Written
from tests.support import arm64
from tests.support.clang import Windows, for_arm, link_for_arm
from tests.support.native_graph import Raw
from tests.support.selftest import (
    ARM,
    FUZZERS,
    ISAS,
    LIBRARY_SOURCES,
    NATIVE,
    PARTS,
    SOURCES,
    TESTS,
    build,
    host_compiler,
    host_isas,
    knows,
)

pytestmark = pytest.mark.nightly
EXAMPLE = NATIVE.parents[1] / "examples" / "c" / "greedy.c"
NEW = 40


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Windows:
    return Windows(tmp_path_factory.mktemp("windows"))


@pytest.fixture(scope="module")
def hashes(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Hash the outputs of every kernel, as the host's compiler built them."""
    program = build(tmp_path_factory.mktemp("host"), host_compiler() or "c++", host_isas())
    return program.run("hash", program.isas[-1])


def test_windows_computes_the_same_bits(windows: Windows, hashes: str) -> None:
    selftest = windows.program(*PARTS)
    isas = selftest.run("isas", **windows.environment).split()
    assert isas[0] == "scalar"
    for isa in isas:
        assert selftest.run("hash", isa, **windows.environment) == hashes, isa
    for _ in range(2):  # threads come and go
        assert selftest.run("pass", **windows.environment).startswith("ok")
    assert selftest.run("numbers", **windows.environment).startswith("ok")


@pytest.mark.parametrize("name", FUZZERS)
def test_what_strangers_give_on_windows(windows: Windows, name: str) -> None:
    kept = sorted(str(path) for path in (TESTS / "corpus" / name).iterdir())
    said = windows.program(name).run("7", "40", *kept, **windows.environment)
    assert said.startswith(f"ok, 40 inputs and {len(kept)} files, ")


def test_clang_computes_the_same_bits_on_arm(tmp_path: Path, hashes: str) -> None:
    arm64.need_compiler()
    emulator = arm64.emulator()
    assert emulator
    isas = tuple(isa for isa in ARM if knows(arm64.COMPILER, isa))
    selftest = link_for_arm(tmp_path / "selftest", for_arm(tmp_path, (*SOURCES, *PARTS), isas), emulator)
    assert selftest.run("isas").split() == ["scalar", "neon", "i8mm"]
    for isa in ("scalar", "neon", "i8mm"):
        assert selftest.run("hash", isa) == hashes, isa


def check_texts(engine: Engine, bundle: Path, command: list[str], **environment: str) -> None:
    ends = ",".join(map(str, engine.bundle.manifest.tokenizer.eos))
    for prompt in map(engine.codec.encode, PROMPTS[:3]):
        words = [*command, str(bundle / "model.native.onnx"), str(NEW), ends, *map(str, prompt)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, env={**os.environ, **environment})
        assert done.returncode == 0, done.stderr
        expected = engine.generate(prompt, method="ar", max_new_tokens=NEW).tokens
        assert [int(token) for token in done.stdout.split()] == expected


def test_texts_on_windows(windows: Windows, engines: Callable[..., Engine], tmp_path: Path) -> None:
    engine = engines("native")
    folder = shutil.copytree(engine.bundle.path, tmp_path / "ein B\u00fcndel \ud55c")  # a path as people have them
    check_texts(engine, folder, ["wine", str(windows.example(EXAMPLE))], **windows.environment)


def test_an_open_bundle_is_renamed_on_windows(windows: Windows, writer: Callable[..., Written], tmp_path: Path) -> None:
    made = writer("native", TARGET, "int4")
    folder = shutil.copytree(made.folder, tmp_path / "bundle")
    program = windows.example(TESTS / "renamed_windows.c")
    done = subprocess.run(["wine", str(program), str(folder)], capture_output=True, text=True, timeout=300,
                          env={**os.environ, **windows.environment})  # fmt: skip
    assert done.returncode == 0, done.stderr
    before, after, *said = done.stdout.split()
    assert before == after
    assert said[:3] == ["cannot", "be", "opened"]
    assert sorted(path.name for path in folder.glob("*.old")) == ["model.data.old", "model.native.onnx.old"]


@pytest.mark.usefixtures("native")
def test_onnx_runtime_for_windows_takes_the_operators(
    windows: Windows, writer: Callable[..., Written], tmp_path: Path
) -> None:
    """A pass of the node in ONNX Runtime's own library for Windows, out of its wheel, gives the bits of Linux."""
    runtime = os.environ.get("EDGESPEC_WINDOWS_ONNXRUNTIME")
    if not runtime:
        pytest.skip("no ONNX Runtime for Windows: EDGESPEC_WINDOWS_ONNXRUNTIME names no onnxruntime.dll")
    made = writer("native", TARGET, "int4")
    raw, types = Raw(made), {"f": 1, "B": 2, "l": 7, "?": 9}
    feeds = {**raw.feeds([5, 6, 7, 8]), "kv": np.zeros_like(raw.kv.array)}
    given = []
    for name, array in feeds.items():
        (tmp_path / name).write_bytes(array.tobytes())
        given.append(" ".join(map(str, (name, types[array.dtype.char], array.nbytes, *array.shape))))
    (tmp_path / "given").write_text("\n".join(given), "utf-8")
    graph = made.folder / made.part.graphs["native"].file
    words = [str(windows.session()), runtime, str(windows.library), str(graph), str(tmp_path)]
    done = subprocess.run(["wine", *words], capture_output=True, text=True, timeout=300,
                          env={**os.environ, **windows.environment})  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    logits = raw.run({name: array for name, array in feeds.items() if name != "kv"})[0]
    assert (tmp_path / "logits").read_bytes() == logits.tobytes()
    assert (tmp_path / "kv").read_bytes() == raw.kv.array.tobytes()


def test_texts_on_arm(arm_library: Path, engines: Callable[..., Engine], tmp_path: Path) -> None:
    emulator, program, engine = arm64.emulator(), tmp_path / "greedy", engines("native")
    assert emulator
    command = [arm64.COMPILER.replace("g++", "gcc"), "-std=c11", "-O1", f"-I{NATIVE}", str(EXAMPLE), str(arm_library)]
    subprocess.run([*command, f"-Wl,-rpath,{arm_library.parent}", "-o", str(program)], check=True, timeout=300)
    check_texts(engine, engine.bundle.path, [emulator, "-L", str(arm64.CROSS.parent), str(program)])


@pytest.mark.timeout(3600)  # zig builds its libc++ first
def test_macos_links(tmp_path: Path) -> None:
    """Nothing runs: headers, symbols and the linker are those of macOS on arm64."""
    if not find_spec("ziglang"):
        pytest.skip("no clang with macOS's headers (pip install ziglang)")

    def zig(language: str, *words: str) -> None:
        target = ("-target", "aarch64-macos.13.0", "-mcpu=apple_m2", "-O1", "-Wall", "-Wextra", "-Werror")
        place = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": str(tmp_path / "cache")}
        command = [sys.executable, "-m", "ziglang", language, *target, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800, cwd=tmp_path, env=place)
        assert done.returncode == 0, done.stderr[-2000:]

    sources = [str(NATIVE / f"{name}.cpp") for name in (*LIBRARY_SOURCES, *ISAS)]
    flags = ("-std=c++17", "-ffp-contract=off", "-fvisibility=hidden", "-DEDGESPEC_BUILDING")
    zig("c++", *flags, "-dynamiclib", *sources, "-o", "libedgespec.dylib")
    zig("cc", "-std=c11", f"-I{NATIVE}", str(EXAMPLE), "libedgespec.dylib", "-o", "greedy")
    for name in ("libedgespec.dylib", "greedy"):
        assert (tmp_path / name).read_bytes()[:4] == bytes.fromhex("cffaedfe"), name  # Mach-O of 64 bits
