"""Maven and the Kotlin runtime in android_demo."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import onnxruntime

from tests.support.alone import alone
from tests.support.required import need

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "android_demo"
MODULES = "edgespec", "app"
LIMIT = 900  # seconds: a busy machine may be slow


@dataclass(frozen=True)
class Ran:
    """Results of a run of tests on the JVM."""

    tests: int
    skipped: int
    output: str


def need_maven() -> None:
    """Skip the test without a JDK and Maven."""
    need("javac", "mvn", "to build the Kotlin runtime with")


def maven(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Maven in android_demo, without the network if all artifacts are in the local repository."""
    # the build sets the JVM's memory limits
    command = ["mvn", "-q", "-B", *arguments]
    found = subprocess.run([*command, "-o"], cwd=DEMO, capture_output=True, text=True, timeout=LIMIT)
    # the second where not even the plug-in that a prefix stands for is known
    if found.returncode and re.search("offline|No plugin found for prefix", found.stdout + found.stderr):
        found = subprocess.run(command, cwd=DEMO, capture_output=True, text=True, timeout=LIMIT)
    return found


def folder_alone() -> AbstractContextManager[None]:
    """Maven's outputs are this process's: tests of several processes share the folder."""
    (DEMO / "target").mkdir(exist_ok=True)
    return alone(DEMO / "target" / "lock")


def _sources() -> str:
    """SHA-256 of everything that is built."""
    files = [file for file in DEMO.rglob("*") if file.suffix in (".kt", ".xml") and "target" not in file.parts]
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()


def _build(*arguments: str, modules: Sequence[str] = MODULES) -> str:
    """Build modules, and note the class path of their tests -> what Maven said; fails with that."""
    sources = _sources()
    found = maven(*arguments, "dependency:build-classpath", "-Dmdep.outputFile=target/classpath.txt")
    said = (found.stdout + found.stderr)[-6000:]
    assert found.returncode == 0, said
    for module in modules:
        (DEMO / module / "target" / "built").write_text(sources, "utf-8")
    return said


def build(folder: Path, modules: Sequence[str] = MODULES) -> Path:
    """Build where sources are newer -> ``folder`` with a copy of ``modules``; of all of them, jars too."""
    with folder_alone():
        stamps = [DEMO / module / "target" / "built" for module in modules]
        if any(not stamp.is_file() or stamp.read_text("utf-8") != _sources() for stamp in stamps):
            goals = ("package", "-DskipTests") if modules == MODULES else ("-pl", ",".join(modules), "test-compile")
            _build(*goals, modules=modules)
        for module in modules:
            shutil.copytree(DEMO / module / "target", folder / module)
    return folder


def classpath(folder: Path) -> str:
    """Return the class path of the Kotlin runtime's tests, which also contain programs; ``folder`` is new."""
    built = build(folder, ["edgespec"]) / "edgespec"
    needed = (built / "classpath.txt").read_text("utf-8").strip()
    return ":".join([str(built / "classes"), str(built / "test-classes"), needed])


def environment(classes: str) -> dict[str, str]:
    """Return the environment of a JVM with these classes: a long command would overflow its main thread's stack."""
    return {**os.environ, "CLASSPATH": classes}


def first_start(classes: Iterable[Path], bundle: Path, folder: Path, library: Path) -> str:
    """Start the app without its views, over these classes, with a bundle that it brings -> what it said."""
    folder.mkdir(exist_ok=True)
    shutil.rmtree(folder / "bundle", ignore_errors=True)
    env = environment(":".join(map(str, classes)))
    command = ["java", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
    command += [f"-XX:ErrorFile={folder / 'crash.log'}"]  # without a rule that is needed it crashes
    command += [f"-Djava.library.path={library.parent}", "dev.edgespec.app.FirstStartKt", str(bundle), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=LIMIT)
    return done.stdout + done.stderr


def run_tests(**properties: str) -> Ran:
    """Run ``mvn verify`` with system properties; fails with Maven's output."""
    with folder_alone():
        for reports in DEMO.glob("*/target/surefire-reports"):
            shutil.rmtree(reports)
        said = _build("verify", *(f"-Dedgespec.{name}={value}" for name, value in properties.items()))
        suites = [ElementTree.parse(file).getroot() for file in DEMO.glob("*/target/surefire-reports/TEST-*.xml")]
    return Ran(sum(int(one.get("tests", 0)) for one in suites), sum(int(one.get("skipped", 0)) for one in suites), said)


def same_onnxruntime(folder: Path) -> Path:
    """Make a library that gives the JVM this Python's ONNX Runtime, because versions differ in rounding.

    The Java artifact asks for the functions of the C interface under the name of its version; the interface is
    append-only, so a later library serves it.
    """
    capi = Path(onnxruntime.__file__).parent / "capi"
    library = next(capi.glob("libonnxruntime.so.*"))
    source, script, made = folder / "same.c", folder / "same.map", folder / "libonnxruntime.so.1"
    source.write_text(
        "#include <dlfcn.h>\n"
        f'static void* find(const char* name) {{ return dlsym(dlopen("{library}", RTLD_NOW | RTLD_GLOBAL), name); }}\n'
        "const void* OrtGetApiBase(void) { return ((const void* (*)(void))find(__func__))(); }\n"
        "void* OrtSessionOptionsAppendExecutionProvider_CPU(void* options, int arena) {\n"
        "  return ((void* (*)(void*, int))find(__func__))(options, arena);\n"
        "}\n"
    )
    script.write_text(f"VERS_{version_of('onnxruntime')} {{ global: Ort*; local: *; }};\n")
    flags = ["-shared", "-fPIC", f"-Wl,--version-script={script}", "-Wl,-soname,libonnxruntime.so.1"]
    subprocess.run(["cc", *flags, str(source), "-o", str(made), "-ldl"], check=True, timeout=LIMIT)
    return made


def version_of(name: str) -> str:
    """Make a version of the parent POM, such as ``onnxruntime.version``."""
    found = re.search(rf"<{name}\.version>([^<]+)<", (DEMO / "pom.xml").read_text("utf-8"))
    assert found, name
    return found[1]
