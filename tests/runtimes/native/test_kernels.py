"""The native kernels and passes without ONNX Runtime: test programs, built and run for every instruction set."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType

from benchmarks.device import FORMATS, main
from edgespec.export.bundle.model import write_model
from edgespec.export.bundle.model_part import ModelSpec, open_model
from edgespec.runtimes.files.formats import GGML, HALVES, KINDS
from tests.conftest import Written
from tests.support import arm64, hf, packed
from tests.support.gguf_files import with_types, write_gguf
from tests.support.selftest import (
    ARM,
    COMMON,
    FUZZERS,
    OPERATOR,
    PARTS,
    PLAIN,
    READERS,
    SANITIZED,
    SOURCES,
    TESTS,
    Program,
    build,
    compiled,
    host_compiler,
    host_isas,
    knows,
    linked,
)  # fmt: skip

C_INTERFACE = ("damaged", *READERS)
DAMAGED = [("qwen2_tied_gqa7", "int4"), ("lfm2_conv", "int8"), ("qwen2_untied", "fp32")]  # bundles to change
# type of most matrices of a file -> those of the two that are long enough for groups of 256
FILES = {"Q5_0": ("Q2_K", "Q3_K"), "Q5_1": ("Q4_K", "Q5_K"), "Q4_1": ("Q6_K", "IQ4_XS")}
GROUPS: dict[str, tuple[packed.Packer, dict[str, Any]]] = {
    "ordered": (packed.gptq(4, 32, act=True, symmetric=False, each=True), {"bits": 4, "group_size": 32}),
    "of-64": (packed.gptq(4, 64, symmetric=False), {"bits": 4, "group_size": 64}),
    "of-128": (packed.gptq(4, 128, symmetric=False), {"bits": 4, "group_size": 128}),
    "bytes": (packed.gptq(8, 64, symmetric=False), {"bits": 8, "group_size": 64, "checkpoint_format": "gptq"}),
    "bytes-of-128": (packed.gptq(8, 128, symmetric=False), {"bits": 8, "group_size": 128, "checkpoint_format": "gptq"}),
}  # fmt: skip
# without the features that the emulator lacks, of which it would warn
HASWELL = "Haswell-noTSX,-pcid,-x2apic,-tsc-deadline,-invpcid"
# the largest errors, about three times what was seen (relative, or in the unit the name's comment says)
BOUNDS = {
    **{f"linear_{kind}": 1.2e-7 for kind, spec in KINDS.items() if spec.size},
    **{f"linear_{kind}": 2e-7 for kind in (*GGML, *HALVES)},
    "linear_mxfp4": 1.6e-6,  # scales of which some are powers far from the others
    "linear_p8": 2e-4,  # of only the high plane, whose middle is rounded in every block
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
    "swiglu_oai": 1e-6,
    "swiglu_oai_below": 1e-6,  # absolute, x <= 0
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


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not host_compiler():
        pytest.skip("no C++ compiler")
    return tmp_path_factory.mktemp("selftest")


@pytest.fixture(scope="session")
def program(folder: Path) -> Program:
    return build(folder / "plain", host_compiler() or "c++", host_isas())


@pytest.fixture(scope="session")
def sanitized(folder: Path, program: Program) -> dict[str, Program]:
    """Build the selftest and the fuzzers with the address and undefined-behaviour sanitizers.

    Only two instruction sets are built, the scalar specification and the best one: they are most of the code.
    """
    compiler, place = host_compiler() or "c++", folder / "sanitized"
    place.mkdir()
    probe = folder / "probe.cpp"
    probe.write_text("int main() { return 0; }\n")
    done = subprocess.run([compiler, *SANITIZED, str(probe), "-o", str(folder / "probe")], capture_output=True)
    if done.returncode != 0 or subprocess.run([str(folder / "probe")], capture_output=True).returncode != 0:
        pytest.skip("the compiler has no sanitizer runtime")
    flags = (*PLAIN, *SANITIZED)
    beside = (*FUZZERS, *C_INTERFACE)
    objects = compiled(place, compiler, (*OPERATOR, *beside), (f"isa_{program.isas[-1]}",), flags)
    shared, own_parts = objects[: len(OPERATOR)], dict(zip(beside, objects[len(OPERATOR) :], strict=True))
    # the selftest's own parts are not instrumented: the sanitizer still watches the memory that they pass to the
    # kernels
    parts = {"selftest": [str(program.path.parent / f"{name}.o") for name in PARTS]}
    parts |= {name: [own_parts[name]] for name in FUZZERS} | {"damaged": [own_parts[name] for name in C_INTERFACE]}
    return {name: linked(place / name, compiler, [*shared, *own], flags) for name, own in parts.items()}


@pytest.fixture(scope="session")
def arm_parts(folder: Path, arm_library: Path) -> tuple[str, tuple[str, ...], list[str]]:
    """Return the cross compiler, its flags, and the objects that are the same on every Arm."""
    compiler = shutil.which(arm64.COMPILER) or ""
    flags = (*("-O1" if flag == "-O3" else flag for flag in COMMON), "-static")
    shared = [str(arm_library.parent / f"{name}.o") for name in SOURCES if name not in ARM]
    return compiler, flags, [*shared, *compiled(folder / "arm", compiler, PARTS, (), flags)]


@pytest.fixture(scope="session", params=["dot products", "baseline"])
def arm(folder: Path, arm_parts: tuple[str, tuple[str, ...], list[str]], request: pytest.FixtureRequest) -> Program:
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if not emulator:
        pytest.skip("no emulator (qemu-user)")
    compiler, flags, shared = arm_parts
    isas = () if request.param == "baseline" else tuple(name for name in ARM if knows(compiler, name))
    place = folder / f"arm-{request.param.replace(' ', '-')}"
    own = compiled(place, compiler, ARM, isas, flags)
    return replace(linked(place / "selftest", compiler, [*shared, *own], flags), runner=(emulator,))


@pytest.fixture(scope="session")
def hashes(program: Program) -> str:
    return program.run("hash", "scalar")


def differences(expected: str, found: str) -> list[str]:
    return [line for line in found.splitlines() if line not in set(expected.splitlines())]


@pytest.mark.nightly
def test_an_emulated_haswell_computes_the_same_bits(program: Program, hashes: str) -> None:
    emulator = shutil.which("qemu-x86_64") or shutil.which("qemu-x86_64-static")
    if not emulator:
        pytest.skip("no emulator (qemu-user)")
    haswell = replace(program, runner=(emulator, "-cpu", HASWELL))
    assert haswell.isas == ["scalar", "avx2"]
    for isa in haswell.isas:
        assert not differences(hashes, haswell.run("hash", isa)), f"{isa} differs from the specification"


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
        if isa != "scalar":  # slow; the same bits as the others, of which the best one does it in full
            brief = () if isa == program.isas[-1] else ("brief",)
            assert program.run("pass", *brief, EDGESPEC_ISA=isa) == f"ok ({isa})\n"


def test_numbers_that_are_none_reach_the_logits(program: Program) -> None:
    for isa in program.isas:
        assert program.run("numbers", EDGESPEC_ISA=isa) == f"ok ({isa})\n"


@pytest.mark.nightly
def test_passes_under_sanitizers(sanitized: dict[str, Program]) -> None:
    assert sanitized["selftest"].run("pass", "brief").startswith("ok")
    assert sanitized["selftest"].run("numbers").startswith("ok")


@pytest.mark.nightly
def test_kernels_under_sanitizers(sanitized: dict[str, Program], hashes: str) -> None:
    for isa in sanitized["selftest"].isas:
        assert sanitized["selftest"].run("hash", isa) == hashes


@pytest.mark.nightly
@pytest.mark.parametrize("name, count", [("fuzz_program", 200), ("fuzz_inputs", 200), ("fuzz_cache", 100)])
def test_what_strangers_give_under_sanitizers(sanitized: dict[str, Program], name: str, count: int) -> None:
    """Kept and generated inputs run or are rejected with a message (tests/fuzz/README.md)."""
    kept = sorted(str(path) for path in (TESTS / "corpus" / name).iterdir())
    assert sanitized[name].run("7", str(count), *kept).startswith(f"ok, {count} inputs and {len(kept)} files, ")


@pytest.mark.nightly
def test_damaged_bundles_under_sanitizers(
    sanitized: dict[str, Program], writer: Callable[..., Written], tmp_path: Path
) -> None:
    """The C interface refuses bundles whose files were changed or cut off, or runs them."""
    made = [writer("native", name, form) for name, form in DAMAGED]
    graphs = [str(one.folder / one.part.graphs["native"].file) for one in made]
    options = "allocator_may_return_null=1:max_allocation_size_mb=1024"
    said = sanitized["damaged"].run("7", "400", str(tmp_path), *graphs, ASAN_OPTIONS=options)
    found = [int(word) for word in said.replace(",", "").split() if word.isdigit()]
    assert min(found) > 100, said


def file_bundles(folder: Path) -> list[str]:
    """Write models with a file's own weights, of every type, and return their graphs."""
    for at, (kind, downs) in enumerate(FILES.items()):
        types = {f"blk__{layer}__ffn_down__weight": down for layer, down in enumerate(downs)}
        change = with_types(**types, blk__0__attn_q__weight="IQ4_NL", blk__0__attn_v__weight="MXFP4")
        write_gguf(folder / f"{at}.gguf", "llama_tied_gqa", kind=GGMLQuantizationType[kind], change=change)
    config = hf.CONFIGS["llama_tied_gqa"] | {"hidden_size": 128, "intermediate_size": 256}
    for name, (packer, settings) in GROUPS.items():
        hf.write_checkpoint(folder / name, config, 3, "bfloat16")
        packed.pack_checkpoint(folder / name, packer, {"quant_method": "gptq", "sym": False, **settings})
    graphs = []
    for path in [*sorted(folder.glob("*.gguf")), *(folder / name for name in GROUPS)]:
        made = folder / f"{path.stem}-bundle"
        made.mkdir()
        part = write_model(made, open_model(path, 128), ModelSpec("file", gated=True)).part
        graphs.append(str(made / part.graphs["native"].file))
    return graphs


@pytest.mark.nightly
def test_damaged_weights_of_files_under_sanitizers(sanitized: dict[str, Program], tmp_path: Path) -> None:
    """Every type of a file, and orders of inputs, as the bundles above."""
    graphs = file_bundles(tmp_path)
    kinds = {word[5:].decode() for graph in graphs for word in Path(graph).read_bytes().split() if word[:5] == b"kind="}
    assert set(GGML) <= kinds
    options = "allocator_may_return_null=1:max_allocation_size_mb=1024"
    (tmp_path / "changed").mkdir()
    said = sanitized["damaged"].run("7", "80", str(tmp_path / "changed"), *graphs, ASAN_OPTIONS=options)
    found = [int(word) for word in said.replace(",", "").split() if word.isdigit()]
    assert min(found) > 100, said


@pytest.mark.nightly
def test_memory_that_fails_is_an_error_in_words(sanitized: dict[str, Program]) -> None:
    """Each allocation and each call of ONNX Runtime fails once: nothing is lost, and the next pass is whole."""
    words = sanitized["fuzz_inputs"].run("memory").split()
    assert words[0] == "ok,"
    assert int(words[1]) > 100
    assert int(words[4]) > 100


@pytest.mark.nightly
@pytest.mark.parametrize("arm", ["baseline"], indirect=True)
def test_baseline_arm_computes_the_same_bits(arm: Program, hashes: str) -> None:
    assert not differences(hashes, arm.run("hash", "neon"))


@pytest.fixture
def device(program: Program, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
           tmp_path: Path) -> Callable[..., str]:  # fmt: skip
    """Return a function that runs ``benchmarks.device`` with ``built`` for the device, and this machine's program."""

    def run(built: Program, *arguments: str) -> str:
        for name, one in (("device", built), ("plain", program)):
            (tmp_path / name).mkdir()
            (tmp_path / name / "selftest").symlink_to(one.path)
        small = ("--shape", "64x256,32x512", "--layers", "2", "--rows", "1,17", "--turns", "1", "--megabytes", "1",
                 "--depth", "2000", "--heads", "4x2x32")  # fmt: skip
        monkeypatch.setattr(sys, "argv", ["device", "--folder", str(tmp_path), *small, *arguments])
        main()
        return capsys.readouterr().out

    return run


def check_figures(found: dict[str, Any], isas: list[str]) -> None:
    assert list(found["isas"]) == isas
    assert [isa for isa, about in found["isas"].items() if about["other_bits"]] == []
    assert found["passes"].startswith("ok (")
    for isa in isas[1:]:
        for one in found["isas"][isa]["threads"].values():
            assert set(one) == {"read_gb_s", "dots_gmac_s", "attention", *FORMATS.values()}
            # two layers, keys and values of 2 heads of 32 numbers: 2 bytes each, or 1 and a scale of 4 a token
            attention = one["attention"]
            assert (attention["depth"], attention["heads"]) == (2000, "4x2x32")
            assert attention["float16"]["mb"] == round(2000 * 2 * 2 * 2 * 32 * 2 / 1e6, 1)
            assert attention["int8"]["mb"] == round(2000 * 2 * 2 * 2 * (32 + 4) / 1e6, 1)
            for form in ("float16", "int8"):
                cells = attention[form]["rows"]
                assert set(cells) == {"1", "17"}
                assert cells["1"]["v"] == 1
                products = 17 * 2 * 2 * 4 * 32 * 2000  # rows, layers, keys and values, heads, numbers, tokens
                assert cells["17"]["gmac_s"] == pytest.approx(products / cells["17"]["ms"] / 1e6, rel=0.05, abs=0.01)
            for form in FORMATS.values():
                cells = one[form]["rows"]
                assert set(cells) == {"1", "17"}
                assert cells["1"]["v"] == 1
                # the same pass over weights that stay in the caches
                assert min(cell["held_ms"] for cell in cells.values()) > 0
                first, last = cells["1"]["ms"], cells["17"]  # rounded, and a few microseconds
                rounded = 0.001 * (1 + last["least_v"]) + 0.01 * first
                assert last["least_v"] * first == pytest.approx(last["held_ms"], abs=rounded)
    assert found["isas"][isas[-1]]["threads"].keys() == {"1", "2"}


@pytest.mark.nightly
@pytest.mark.parametrize("arm", ["dot products"], indirect=True)
def test_arm_computes_the_same_bits(arm: Program, device: Callable[..., str]) -> None:
    """Emulated, which is 50 times slower: every kernel, and whole passes."""
    found = device(arm, "--command", arm.runner[0], "--threads", "1,2", "--json")
    assert "neon" in arm.isas
    check_figures(json.loads(found), arm.isas)


def test_this_machine_is_measured(program: Program, device: Callable[..., str]) -> None:
    check_figures(json.loads(device(program, "--here", "--threads", "1,2", "--json")), program.isas)


def test_attention_of_the_smallest_heads(program: Program) -> None:
    found = json.loads(program.run("attention", program.isas[-1], "1", "1", "1", "1", "1,3", "1", "1x1x2"))
    assert set(found["formats"]) == {"f16", "int8"}
    assert found["formats"]["f16"]["products"] == 2 * 2


@pytest.mark.parametrize(
    "way, words",
    [("adb", ("--serial", "phone")), pytest.param("ssh", ("--ssh", "me@board"), marks=pytest.mark.nightly)],
)
def test_a_device_gets_the_program_and_loses_it(
    program: Program, device: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, words: Any
) -> None:
    """Fake adb and ssh commands run in a folder of this machine."""
    place, names = tmp_path / "place", {"adb": "/data/local/tmp", "ssh": "/tmp"}
    place.mkdir()
    scripts = {
        "adb": 'shift 2; what=$1; shift; if [ $what = push ]; then cp "$1" "$PLACE/${2##*/}"; exit; fi',
        "ssh": '[ "$1" = me@board ] || exit 1; shift',
        "scp": '[ "${3%%:*}" = me@board ] || exit 1; cp "$2" "$PLACE/${3##*/}"; exit',
    }
    for name, script in scripts.items():
        words_there = f'"$(echo "$*" | sed "s#{names[way]}/edgespec#$PLACE/edgespec#g")"'
        (tmp_path / name).write_text(f"#!/bin/sh\nPLACE='{place}'\n{script}\nsh -c {words_there}\n", "utf-8")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    lines = device(program, *words, "--threads", "1").splitlines()
    assert [line for line in lines if line.endswith("the same bits")] == [
        f"{isa}: the same bits" for isa in program.isas
    ]
    rows = [line.split() for line in lines if line.split()[:2] == ["17", "rows"]]
    columns = [*(8 for _ in FORMATS), 6, 6]  # of matrices, of attention
    assert [len(row) for row in rows] == columns * len(program.isas[1:])
    assert list(place.iterdir()) == []


def test_what_a_device_needs_is_named(device: Callable[..., str], program: Program, tmp_path: Path,
                                      monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="adb is not installed"):
        device(program)
    monkeypatch.setenv("ANDROID_NDK", str(tmp_path / "ndk"))
    shutil.rmtree(tmp_path / "device")
    shutil.rmtree(tmp_path / "plain")
    monkeypatch.setattr(sys, "argv", ["device", "--command", "/bin/sh", "--folder", str(tmp_path)])
    with pytest.raises(SystemExit, match="expected aarch64-linux-android26-clang"):
        main()
    for compiler in ("/nowhere/c++", shutil.which("false", path="/bin:/usr/bin")):
        monkeypatch.setattr(sys, "argv", ["device", "--command", "/bin/sh", "--compiler", str(compiler)])
        with pytest.raises(SystemExit, match=f"expected C[+][+]17 of {re.escape(str(compiler))}"):
            main()
    for wrong in (
        ("--rows", "0"),
        ("--rows", "129"),
        ("--shape", "64"),
        ("--turns", "x"),
        ("--heads", "8x3x64"),
        ("--heads", "8x64"),
    ):
        monkeypatch.setattr(sys, "argv", ["device", *wrong])
        with pytest.raises(SystemExit, match="2"):
            main()
