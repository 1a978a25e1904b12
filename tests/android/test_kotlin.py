"""Kotlin's binding on a JVM, token for token what Python writes; on arm64; the app it is in.

One file, so that one process builds it, once.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.runtimes.files.formats import Format
from edgespec.runtimes.files.manifest import Operators
from edgespec.runtimes.ort.native_library import native_library
from tests.android.writes import LENGTH, write_golden
from tests.conftest import PROMPTS
from tests.support import arm64
from tests.support.agreement import HOSTED, METHODS, SEEDED, replay, serve, ways
from tests.support.jvm import first_start, need_maven, run_tests, same_onnxruntime
from tests.support.required import need
from tools import make_apk as apk
from tools.network import left_in, network_calls, traced

# tokens on an emulated arm64 core, where starting Java is what takes time; all the rest by tests/support/agreement.py
ON_ARM, CORE = 8, "cortex-a76"
ARM_GREEDY, ARM_SEEDED = ("ngram", "speculative", "medusa"), ("self-spec", "blockwise")
LIBRARIES = {"libedgespec.so", "libonnxruntime.so", "libonnxruntime4j_jni.so", "libtokenizers.so"}
ARM64 = 183  # in the header of a library

# functions of Android 8's C library, in addition to those of the C++ library
BIONIC = """
    abort calloc close dlerror dlopen dlsym exp exp2 expf fma fmaf free fstat getauxval getenv isalnum ldexp
    ldexpf llround log log2 lseek madvise malloc memchr memcmp memcpy memmove memset mmap munmap nearbyint
    nearbyintf open posix_fadvise posix_memalign pow pread pthread_create pthread_join pthread_mutex_lock
    pthread_mutex_unlock pthread_once realloc rename sched_yield sqrt sqrtf strcmp strerror strlen strtof strtol
    strtoll strtoull syscall sysconf unlink vsnprintf write __cxa_atexit __cxa_finalize __memcpy_chk
    __stack_chk_fail
"""
# what GCC's own libraries ask for, where the NDK's have another way, and glibc's errno
OF_GCC = {"__getauxval", "__errno_location", "__libc_single_threaded"}


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(
    "operators, form, some", [("native", "int4", 3), ("native", "int4-k", 6), ("stock", "int8", 3)]
)
def test_methods_write_what_python_writes(
    bundles: Callable[..., Path], tmp_path: Path, operators: Operators, form: Format, some: int
) -> None:
    """One of ``some`` ways to decode; the next test has all of them, and everything else that Kotlin does."""
    need_maven()
    known = (*METHODS, "chain") if operators == "native" else HOSTED
    every = [settings for settings in ways() if settings["method"] in known and settings["method"] != "eagle"]
    requests = [(settings, PROMPTS[at % len(PROMPTS)]) for at, settings in enumerate(every[::some])]
    made = serve(bundles(operators, form), operators, requests, LENGTH)
    (tmp_path / "golden.json").write_text(json.dumps({"bundles": [made]}), "utf-8")
    library = native_library().path
    assert library is not None
    java = ["java"] if operators == "native" else ["java", own_onnxruntime(tmp_path)]
    code, said = replay(tmp_path / "golden.json", library, java)
    assert code == 0, said
    assert f"{LENGTH * len(requests)} tokens of {len(requests)} requests" in said


def own_onnxruntime(folder: Path) -> str:
    """Give the option by which Java loads Python's ONNX Runtime."""
    return f"-Donnxruntime.native.onnxruntime.path={same_onnxruntime(folder)}"


@pytest.mark.nightly
@pytest.mark.usefixtures("native")
def test_every_method_writes_what_python_writes(
    bundles: Callable[..., Path], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    need_maven()
    path = tmp_path / "golden.json"
    assert write_golden(bundles, checkpoint, path) >= 2 * len(ways())
    ran = run_tests(golden=str(path), libraries=str(tmp_path), onnxruntime=str(same_onnxruntime(tmp_path)))
    assert ran.tests >= 20, ran.output
    assert ran.skipped == 0, ran.output


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("operators, form", [("native", "int4"), ("stock", "int8")])
def test_nothing_leaves_the_device(
    bundles: Callable[..., Path], tmp_path: Path, operators: Operators, form: Format
) -> None:
    """Seen by system calls, where no variable silences ONNX Runtime or the tokenizers' library."""
    need_maven()
    need("strace", "to see system calls with")
    made = serve(bundles(operators, form), operators, [({"method": "ngram"}, PROMPTS[0])], LENGTH)
    golden, log, home = tmp_path / "golden.json", tmp_path / "calls", tmp_path / "home"
    golden.write_text(json.dumps({"bundles": [made]}), "utf-8")
    home.mkdir()
    told = [word for name in ("CI", "ORT_DISABLE_TELEMETRY", "OPT_OUT_TRACKING") for word in ("-u", name)]
    library = native_library().path
    assert library is not None
    code, said = replay(
        golden, library, ["env", *told, f"HOME={home}", *traced(["java", own_onnxruntime(tmp_path)], home, log)]
    )
    assert code == 0, said
    assert f"{LENGTH} tokens of 1 requests" in said
    assert network_calls(log.read_text("utf-8")) == []
    assert [name for name in left_in(home) if "Microsoft" in name or "onnxruntime" in name] == []


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
def app(tmp_path_factory: pytest.TempPathFactory, arm_library: Path) -> Path:
    """Give the app with the bundle that it brings by default, and libraries for arm64 (of other Linux systems)."""
    need_maven()
    if lost := apk.missing():
        pytest.skip(f"not installed: {', '.join(lost)}")
    made = tmp_path_factory.mktemp("apk") / "app.apk"
    apk.main([str(made), "--library", str(arm_library)])
    return made


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
    rights = {one.rpartition(".")[2] for one in re.findall("uses-permission: name='(.*)'", said)}
    assert rights == {"FOREGROUND_SERVICE", "FOREGROUND_SERVICE_DATA_SYNC", "POST_NOTIFICATIONS"}
    assert "icon='res/mipmap-anydpi-v26/icon.xml'" in said


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
    for name in ("MainActivity", "App", "WorkService", "SharedFiles"):
        assert f"Ldev/edgespec/app/{name};".encode() in dexed, "the system starts it by its name"
    assert b"Ldev/edgespec/app/AppState;" not in dexed  # R8 has been there


@pytest.mark.nightly
@pytest.mark.usefixtures("native")
def test_its_first_start_writes_with_the_bundle_that_it_brings(app: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(app) as packed:
        packed.extractall(tmp_path, [name for name in packed.namelist() if name.startswith("assets/bundle/")])
    jars = [*apk.own_jars(tmp_path / "built"), tmp_path / "built" / "app" / "test-classes", *apk.needed_jars()]
    library = native_library().path
    assert library is not None
    said = first_start(jars, tmp_path / "assets" / "bundle", tmp_path / "app", library)
    assert re.search(r"^(speculative|ngram|self-spec): [\d.]+ tokens/s", said, re.M), (
        said
    )  # at once, whichever is fastest
    assert re.search(r"([1-9]\d*) of \1 texts equal on this device", said), said
