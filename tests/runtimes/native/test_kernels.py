"""The native kernels and passes without ONNX Runtime: the program selftest, built and run for every instruction set."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parents[3] / "runtimes" / "native"
TESTS = Path(__file__).resolve().parents[2] / "native"

# as the library is built
COMMON = ("-O3", "-std=c++17", "-ffp-contract=off", "-Wall", "-Wextra")
ISA_FLAGS = {
    "isa_avx2": ("-mavx2", "-mfma", "-mf16c"),
    "isa_avxvnni": ("-mavxvnni", "-mavx2", "-mfma", "-mf16c"),
    "isa_avx512": (
        *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mf16c", "-mfma"),
        *("-Wno-uninitialized", "-Wno-maybe-uninitialized"),  # GCC 12's own headers
    ),
    "isa_neon": ("-march=armv8.2-a+dotprod",),
    "isa_i8mm": ("-march=armv8.2-a+dotprod+i8mm",),
}
SOURCES = ("program", "program_check", "cache", "check", "pass", "profile", "lm_heads", "experts", "recurrent",
           "attention", "dispatch", "isa_scalar", "isa_avx2", "isa_avxvnni", "isa_avx512", "isa_neon",
           "isa_i8mm")  # fmt: skip
PARTS = ("selftest", "selftest_hash", "selftest_accuracy", "selftest_pass", "selftest_parts", "selftest_nan")
SANITIZED = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")

# the largest errors, about three times what was seen (relative, or in the unit the name's comment says)
BOUNDS = {
    "linear_q4": 1.2e-7,
    "linear_q8": 1.2e-7,
    "linear_c8": 8e-8,
    "linear_f32": 2e-7,
    "exponential": 6e-7,  # -10 <= x <= 0
    "exponential_small": 2.5e-6,  # down to -60: grows with |x|
    "exponential_none": 0,  # below: nothing at all
    "exponential_sum": 6e-7,
    "softmax": 2e-7,  # absolute
    "glu": 6e-7,
    "glu_small": 3e-10,  # absolute, gates below -10
    "norm": 5e-7,
    "quantize": 0.5001,  # steps
    "quantize_query": 0.5001,  # steps
    "to_half": 1.0,  # halves of the last place
    "score_f32": 5e-7,
    "score_f16": 5e-7,
    "score_int8": 2e-7,
    "score_int4": 1.2e-7,
    "score_nomad1": 0.501,  # steps of the table a look-up
    "score_nomad2": 0.501,
    "weigh_f32": 4e-7,
    "weigh_f16": 5e-7,
    "weigh_int8": 8e-3,  # the weights have 7 bits
    "gelu": 1e-6,
    "gelu_below": 7e-7,  # absolute, x <= 0
    "gelu_tanh": 5e-7,
    "gelu_tanh_below": 2e-7,  # absolute, x <= 0
    "relu": 0,
    "relu_below": 0,
    "relu2": 1.2e-7,
    "relu2_below": 0,
    "sigmoid": 5e-7,
    "sigmoid_below": 5e-7,  # absolute, x <= 0
    "decays": 1e-6,  # absolute
    "delta": 1e-6,  # of the sum of what is added up
    "xielu": 1e-6,  # of the larger of x and the result
    "softcap": 1.5e-6,
    "softcap_large": 0,  # absolute
    "softcap_nan": 0,
    "functions_large": 0,  # absolute
    "center": 2e-6,  # standard deviations
    "layer_norm": 3e-6,  # absolute
}


@dataclass(frozen=True)
class Program:
    """A built selftest and what runs it (an emulator, or nothing)."""

    path: Path
    runner: tuple[str, ...] = ()

    def run(self, *arguments: str, **environment: str) -> str:
        done = subprocess.run(
            [*self.runner, str(self.path), *arguments],
            capture_output=True, text=True, timeout=300, env={**os.environ, **environment},
        )  # fmt: skip
        assert done.returncode == 0, f"selftest {' '.join(arguments)}:\n{done.stdout[-500:]}\n{done.stderr[-4000:]}"
        return done.stdout

    @property
    def isas(self) -> list[str]:
        return self.run("isas").split()


def build(folder: Path, compiler: str, isas: tuple[str, ...], common: tuple[str, ...] = COMMON,
          link: tuple[str, ...] = ()) -> Path:  # fmt: skip
    """Compile every source with its flags, two at a time, and link; ``isas``: the files that get theirs."""

    def compile_one(name: str) -> str:
        target = folder / f"{name}.o"
        # the test program itself gains nothing from being optimized
        flags = (*common, *(ISA_FLAGS.get(name, ()) if name in isas else ()), *(("-O1",) if name in PARTS else ()))
        source = (TESTS if name in PARTS else NATIVE) / f"{name}.cpp"
        done = subprocess.run(
            [compiler, *flags, f"-I{NATIVE}", "-c", str(source), "-o", str(target)], capture_output=True, text=True
        )
        assert done.returncode == 0, f"{name}.cpp does not compile:\n{done.stderr[-4000:]}"
        return str(target)

    folder.mkdir()
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, (*SOURCES, *PARTS)))
    program = folder / "selftest"
    subprocess.run([compiler, *common, *objects, *link, "-pthread", "-o", str(program)], check=True)
    return program


@cache
def host_compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def knows(compiler: str, isa: str) -> bool:
    """Whether the compiler has the instruction set of a file, as CMakeLists.txt asks it."""
    command = [compiler, *ISA_FLAGS[isa], "-x", "c++", "-fsyntax-only", os.devnull]
    return subprocess.run(command, capture_output=True).returncode == 0


@cache
def host_isas() -> tuple[str, ...]:
    """Files that the host's compiler can compile for more than its baseline."""
    machine = os.uname().machine
    wanted = {"x86_64": ("isa_avx2", "isa_avxvnni", "isa_avx512"), "aarch64": ("isa_neon", "isa_i8mm")}.get(machine, ())
    return tuple(name for name in wanted if knows(host_compiler() or "c++", name))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not host_compiler():
        pytest.skip("no C++ compiler")
    return tmp_path_factory.mktemp("selftest")


@pytest.fixture(scope="session")
def program(folder: Path) -> Program:
    return Program(build(folder / "plain", host_compiler() or "c++", host_isas()))


@pytest.fixture(scope="session")
def sanitized(folder: Path) -> Program:
    compiler = host_compiler() or "c++"
    probe = folder / "probe.cpp"
    probe.write_text("int main() { return 0; }\n")
    done = subprocess.run([compiler, *SANITIZED, str(probe), "-o", str(folder / "probe")], capture_output=True)
    if done.returncode != 0 or subprocess.run([str(folder / "probe")], capture_output=True).returncode != 0:
        pytest.skip("the compiler has no sanitizer runtime")
    common = tuple(flag for flag in COMMON if flag != "-O3")
    return Program(build(folder / "sanitized", compiler, host_isas(), (*common, *SANITIZED)))


@pytest.fixture(scope="session", params=["dot products", "baseline"])
def arm(folder: Path, request: pytest.FixtureRequest) -> Program:
    compiler = shutil.which("aarch64-linux-gnu-g++")
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if not compiler or not emulator:
        pytest.skip("no cross compiler (g++-aarch64-linux-gnu) or no emulator (qemu-user)")
    plain = request.param == "baseline"
    common = tuple("-O1" if flag == "-O3" else flag for flag in COMMON)
    isas: tuple[str, ...] = () if plain else tuple(n for n in ("isa_neon", "isa_i8mm") if knows(compiler, n))
    name = "arm-baseline" if plain else "arm"
    return Program(build(folder / name, compiler, isas, common, ("-static",)), (emulator,))


@pytest.fixture(scope="session")
def hashes(program: Program) -> str:
    return program.run("hash", "scalar")


def differences(expected: str, found: str) -> list[str]:
    return [line for line in found.splitlines() if line not in set(expected.splitlines())]


def test_every_instruction_set_computes_the_same_bits(program: Program, hashes: str) -> None:
    assert len(hashes.splitlines()) > 100
    for isa in program.isas:
        found = program.run("hash", isa)
        assert not differences(hashes, found), f"{isa} differs from the specification"
        assert found == hashes


def test_errors_stay_within_rounding(program: Program) -> None:
    for isa in program.isas:
        errors = json.loads(program.run("accuracy", isa))
        assert set(errors) == set(BOUNDS)
        assert {name: error for name, error in errors.items() if not error <= BOUNDS[name]} == {}, isa


def test_rows_do_not_depend_on_what_runs_beside_them(program: Program) -> None:
    for isa in program.isas:
        if isa != "scalar":  # slow; the same bits as the others
            assert program.run("pass", EDGESPEC_ISA=isa) == f"ok ({isa})\n"


def test_numbers_that_are_none_reach_the_logits(program: Program) -> None:
    for isa in program.isas:
        assert program.run("numbers", EDGESPEC_ISA=isa) == f"ok ({isa})\n"


def test_passes_under_sanitizers(sanitized: Program) -> None:
    assert sanitized.run("pass").startswith("ok")


def test_kernels_under_sanitizers(sanitized: Program, hashes: str) -> None:
    for isa in sanitized.isas:
        assert sanitized.run("hash", isa) == hashes


def test_arm_computes_the_same_bits(arm: Program, hashes: str) -> None:
    assert "neon" in arm.isas
    for isa in arm.isas:
        assert not differences(hashes, arm.run("hash", isa)), isa


def test_arm_passes(arm: Program) -> None:
    assert arm.run("pass", "brief", EDGESPEC_ISA="neon") == "ok (neon)\n"  # emulated: 50 times slower
