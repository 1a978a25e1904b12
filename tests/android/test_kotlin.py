"""The Kotlin runtime on a JVM with real ONNX Runtime, token for token what Python writes; on arm64; the app it is in.

One file, so that one process builds it, once.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgespec.export.bundle.model_part import open_model
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import Exporter
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.formats import FORMATS
from edgespec.runtimes.files.manifest import MANIFEST
from edgespec.runtimes.ort.native_library import native_library
from tests.conftest import OPERATORS, PROMPTS, TARGET, THREADS
from tests.support import arm64, golden, hf, sourced
from tests.support.agreement import SEEDED, export, export_random, replay, serve, ways
from tests.support.dflash import write_dflash
from tests.support.jvm import need_maven, run_tests, same_onnxruntime
from tests.support.mtp import write_mtp
from tests.support.older import schema_2
from tests.support.required import need
from tests.support.wide import wide_config
from tools import make_apk as apk
from tools.network import left_in, network_calls, traced

LENGTH = 24
CHOSEN = (0, 4, 10, 13)  # prompts
SPREAD = 4  # formats that share the ways; native int4 has all of them, and by tests/support/agreement.py all have

# states of convolutions and of delta rules with experts of which some get every row; layers that share keys and values;
# state spaces
KINDS = ("lfm2_conv", "qwen3_5_moe_shared", "gemma4_shared", "granite_hybrid_experts")
STORY = "There was nothing left to do but wait. She had"
# texts that go back: states are read on from where the second left the first, and the fourth the third
BACK = (STORY * 8, STORY * 3 + STORY[::-1] * 3, STORY * 3 + STORY[2:] * 4, STORY * 3 + "?")
# two conversations that alternate, and a third that begins like the first: each goes on from where it has been
OTHER = STORY[::-1]
LONG = PROMPTS[14] * 20  # more than two blocks of what is kept of prompts
TURNS = (STORY * 5, OTHER * 5, STORY * 5 + OTHER, OTHER * 5 + STORY, STORY * 5 + OTHER * 2, STORY * 4 + OTHER * 2)
RANDOM: tuple[dict[str, Any], ...] = (
    {"method": "ar"}, {"method": "speculative"}, {"method": "speculative", "branch": [2], **SEEDED},
    {"method": "swift"}, {"method": "self-spec", **SEEDED}, {"method": "paradecode", "threshold": 0.05},
    {"method": "medusa"},
)  # fmt: skip

# tokens on an emulated arm64 core, where starting Java is what takes time; all the rest by tests/support/agreement.py
ON_ARM, CORE = 8, "cortex-a76"
ARM_GREEDY, ARM_SEEDED = ("ngram", "speculative", "medusa"), ("self-spec", "blockwise", "paradecode")
LIBRARIES = {"libedgespec.so", "libonnxruntime.so", "libonnxruntime4j_jni.so", "libtokenizers.so"}
ARM64 = 183  # in the header of a library

# functions of the C library, beside the C++ library's own, that Android 8 has
BIONIC = """
    abort calloc close fma fmaf free fstat getauxval getenv ldexp ldexpf malloc memchr memcmp memcpy memmove memset
    mmap munmap nearbyint nearbyintf open pthread_create pthread_join pthread_mutex_lock pthread_mutex_unlock
    pthread_once realloc sched_yield sqrt sqrtf strcmp strerror strlen strtof strtol strtoull __cxa_atexit
    __cxa_finalize __memcpy_chk __stack_chk_fail
"""
# what GCC's own run-time library asks for, where the NDK's has another way, and glibc's errno
OF_GCC = {"__getauxval", "__errno_location"}


def write_golden(bundles: Callable[..., Path], checkpoint: Callable[[str], Path], path: Path) -> int:
    """Keep what Python writes on fresh exports, for the Kotlin test; give the number of requests."""
    every = [(settings, PROMPTS[CHOSEN[number % len(CHOSEN)]]) for number, settings in enumerate(ways())]
    common = [request for request in every if request[0]["method"] != "eagle"]
    full = export(path.parent / "full", "int4")
    made = [serve(full, "native", every, LENGTH)]
    for operators in OPERATORS:
        for number, form in enumerate(FORMATS):
            if (operators, form) != ("native", "int4"):
                made.append(serve(bundles(operators, form), operators, common[number % SPREAD :: SPREAD], LENGTH))
    older = schema_2(bundles("stock", "int8"), path.parent / "older")
    made.append(serve(older, "stock", common[:SPREAD], LENGTH))
    eagle = [request for request in every if request[0]["method"] == "eagle"]
    made.append(serve(export(path.parent / "eagle", "int8", "stock"), "stock", eagle, LENGTH))
    back: list[tuple[dict[str, Any], str]] = [({"method": "ar"}, text) for text in BACK]
    talks: list[tuple[dict[str, Any], str]] = [({"method": "speculative"}, text) for text in TURNS]
    for operators in OPERATORS:
        made.append(serve(bundles(operators, "int8"), operators, talks, LENGTH))
        reused = [case["reused"] for case in made[-1]["cases"]]
        assert min(reused[2:]) > len(made[-1]["cases"][0]["prompt"]) // 2
    turns: list[tuple[dict[str, Any], str]] = [({"method": "ar"}, text) for text in TURNS]
    requests = [*back, *turns, *((settings, STORY) for settings in RANDOM)]
    for name in KINDS:
        made.append(serve(export_random(path.parent / name, str(checkpoint(name))), "native", requests, LENGTH))
        assert made[-1]["cases"][2]["reused"] > len(STORY)
    wide = hf.write_checkpoint(path.parent / "wide-source", wide_config(256, layers=3, positions=512), seed=5)
    made.append(serve(export_random(path.parent / "wide", str(wide), "stock"), "stock", requests, LENGTH))
    source = write_mtp(path.parent / "mtp", "qwen3_5_delta", agrees=True)
    drafter = write_dflash(path.parent / "dflash", open_model(source, None), (1, 3), agrees=True)
    for method, given in (("mtp", None), ("dflash", str(drafter))):
        options = ExportOptions(str(source), path.parent / f"{method}-bundle", [method], "int8", operators="native",
                                threads=THREADS, drafter=given)  # fmt: skip
        Exporter(options).run()
        data = json.loads((options.output / MANIFEST).read_text("utf-8"))
        data["methods"]["self-spec"]["skip"]["head_rows"] = 96  # int8 drafts by its high planes, and a cut LM head
        (options.output / MANIFEST).write_text(json.dumps(data), "utf-8")
        for name in (method, "self-spec"):
            asked = [({"method": name, **how}, STORY) for how in ({}, SEEDED)]
            made.append(serve(options.output, "native", asked, LENGTH))
        made.append(serve(options.output, "native", [({"method": method}, STORY)], LENGTH, "high"))
        assert made[-1]["cases"][0]["tokens"] != made[-2]["cases"][0]["tokens"]
    made += [*sourced.restored(path.parent, LENGTH), *sourced.kinds(path.parent, LENGTH)]
    (path.parent / "forms").mkdir()
    coded = ExportOptions(TARGET, path.parent / "coded", [], "int4", attention=["int4"], threads=THREADS)
    Exporter(coded).run()
    long: list[golden.Long] = [
        (full, {}, {"method": "ar"}, LONG),
        (full, {}, {"method": "speculative", "fallback": False}, LONG[1:]),
        (full, {"attention": "int8"}, {"method": "ngram"}, LONG),
        (bundles("stock", "int8"), {}, {"method": "self-spec"}, LONG),
        (coded.output, {"attention": "int4"}, {"method": "ar"}, LONG),
        *((path.parent / name / "bundle", {}, {"method": "ar"}, STORY * 12) for name in KINDS),
    ]
    more = {
        "prompts": golden.prompts(long, path.parent / "kept"),
        "chats": golden.chats(),
        "tokenizers": golden.tokenizers(path.parent),
        "conversation": golden.conversation(full, path.parent),
        "forms": sourced.forms(path.parent / "forms"),
        "heard": sourced.heard(path.parent / "digits"),
    }
    path.write_text(json.dumps({"library": str(native_library().path), "bundles": made, **more}), "utf-8")
    return sum(len(one["cases"]) for one in made)


@pytest.mark.usefixtures("native")
def test_every_method_writes_what_python_writes(
    bundles: Callable[..., Path], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    need_maven()
    path = tmp_path / "golden.json"
    assert write_golden(bundles, checkpoint, path) >= 2 * len(ways())
    ran = run_tests(golden=str(path), onnxruntime=str(same_onnxruntime(tmp_path)))
    assert ran.tests >= 20, ran.output
    assert ran.skipped == 0, ran.output
    golden.find_prompts(json.loads(path.read_text("utf-8"))["prompts"])


@pytest.mark.usefixtures("native")
def test_nothing_leaves_the_device(bundles: Callable[..., Path], tmp_path: Path) -> None:
    """Seen by system calls, where no variable silences ONNX Runtime or the tokenizers' library."""
    need_maven()
    need("strace", "to see system calls with")
    made = serve(bundles("native", "int4"), "native", [({"method": "ngram"}, PROMPTS[0])], LENGTH)
    golden, log, home = tmp_path / "golden.json", tmp_path / "calls", tmp_path / "home"
    golden.write_text(json.dumps({"bundles": [made]}), "utf-8")
    home.mkdir()
    told = [word for name in ("CI", "ORT_DISABLE_TELEMETRY", "OPT_OUT_TRACKING") for word in ("-u", name)]
    library = native_library().path
    assert library is not None
    code, said = replay(golden, library, ["env", *told, f"HOME={home}", *traced(["java"], home, log)], onnxruntime=True)
    assert code == 0, said
    assert f"{LENGTH} tokens of 1 requests" in said
    assert network_calls(log.read_text("utf-8")) == []
    assert [name for name in left_in(home) if "Microsoft" in name or "onnxruntime" in name] == []
    code, said = replay(golden, library, onnxruntime=None)  # native operators need no ONNX Runtime
    assert code == 0, said


@pytest.mark.nightly
def test_the_library_asks_for_nothing_that_android_lacks(arm_library: Path) -> None:
    said = apk.run("aarch64-linux-gnu-nm", "-D", "--undefined-only", arm_library)
    wanted = re.findall(r" [Uw] (\w+)@(\w+)", said)
    assert wanted
    system = {name for name, version in wanted if version.startswith("GLIBC_")}
    assert "memcpy" in system
    assert system - OF_GCC <= set(BIONIC.split()), "Android 8 has no such functions"
    language = {name for name, version in wanted if not version.startswith("GLIBC_")}
    linked = arm64.link_for_android(arm_library.parent, {*BIONIC.split(), *OF_GCC}, language)
    said = apk.run("aarch64-linux-gnu-readelf", "-dVW", linked)
    assert set(re.findall(r"NEEDED.*\[(.*)\]", said)) == {"libc.so", "libc++.so"}
    assert "GLIBC" not in said
    segments = apk.run("aarch64-linux-gnu-readelf", "-lW", arm_library)
    aligned = [int(line.split()[-1], 16) for line in segments.splitlines() if line.split()[:1] == ["LOAD"]]
    assert aligned
    assert all(one % (1 << 14) == 0 for one in aligned), "phones with pages of 16 KiB do not load it"


@pytest.mark.nightly
@pytest.mark.usefixtures("native")
def test_an_arm_core_writes_the_tokens_of_this_one(
    arm_library: Path, bundles: Callable[..., Path], tmp_path: Path
) -> None:
    need_maven()
    java = arm64.need_java()
    ways = [{"method": name} for name in ARM_GREEDY] + [{"method": name, **SEEDED} for name in ARM_SEEDED]
    requests = [(settings, PROMPTS[at]) for at, settings in enumerate(ways)]
    made = serve(bundles("native", "int4"), "native", requests, ON_ARM)
    path = tmp_path / "golden.json"
    path.write_text(json.dumps({"bundles": [made]}), "utf-8")
    (tmp_path / "root").mkdir()
    code, said = replay(path, arm_library, arm64.java(java, CORE, tmp_path / "root"))
    assert code == 0, said
    assert said.startswith(f"aarch64 native int4: {ON_ARM * len(ways)} tokens of {len(ways)} requests"), said


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory, arm_library: Path, bundles: Callable[..., Path]) -> Path:
    """Give the app of its own classes, with libraries for arm64 (of other Linux systems) and a bundle."""
    need_maven()
    if lost := apk.missing():
        pytest.skip(f"not installed: {', '.join(lost)}")
    folder = tmp_path_factory.mktemp("apk")
    own = apk.own_jars(folder / "built")[:1]
    libraries = [one for jar in apk.needed_jars() for one in apk.packed_libraries(folder, jar)]
    apk.assemble(folder / "app.apk", [arm_library, *libraries], own, bundles("stock", "int4"))
    return folder / "app.apk"


@pytest.mark.nightly
def test_it_is_signed(app: Path) -> None:
    said = apk.run("apksigner", "verify", "--min-sdk-version", str(apk.MIN_SDK), "-v", app)
    assert said.startswith("Verifies")
    assert "(APK Signature Scheme v2): true" in said


@pytest.mark.nightly
def test_the_manifest_is_the_projects(app: Path) -> None:
    said = apk.run("aapt", "dump", "badging", app)
    assert "package: name='dev.edgespec.app'" in said
    assert "sdkVersion:'26'" in said
    assert "launchable-activity: name='dev.edgespec.app.MainActivity'" in said
    assert "native-code: 'arm64-v8a'" in said
    assert re.findall("uses-permission: name='(.*)'", said) == ["android.permission.RECORD_AUDIO"]


@pytest.mark.nightly
def test_classes_and_libraries_are_there_and_aligned(app: Path) -> None:
    apk.run("zipalign", "-c", "-p", "4", app)
    with zipfile.ZipFile(app) as packed, app.open("rb") as file:
        dexed = b"".join(packed.read(name) for name in packed.namelist() if name.endswith(".dex"))
        found = [one for one in packed.infolist() if one.filename.startswith("lib/")]
        for one in found:
            assert one.compress_type == zipfile.ZIP_STORED
            file.seek(one.header_offset)
            header = file.read(30)
            data = (
                one.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:], "little")
            )
            assert data % apk.PAGE == 0, f"{one.filename}: phones with pages of 16 KiB cannot map it"
            file.seek(data)
            assert int.from_bytes(file.read(20)[18:], "little") == ARM64, one.filename
    assert {one.filename for one in found} == {f"lib/{apk.ABI}/{name}" for name in LIBRARIES}
    for name in ("MainActivity", "App", "AppState"):
        assert f"Ldev/edgespec/app/{name};".encode() in dexed


@pytest.mark.nightly
def test_the_bundle_is_in_it_as_it_was_exported(app: Path, bundles: Callable[..., Path], tmp_path: Path) -> None:
    with zipfile.ZipFile(app) as packed:
        names = [name for name in packed.namelist() if name.startswith("assets/bundle/")]
        packed.extractall(tmp_path, names)
    assert "assets/bundle/edgespec.json" in names
    source = bundles("stock", "int4")
    assert {name.removeprefix("assets/bundle/") for name in names} == {
        str(one.relative_to(source)) for one in source.rglob("*") if one.is_file()
    }
    Bundle.open(tmp_path / "assets" / "bundle")  # every file by its SHA-256
