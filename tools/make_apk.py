"""Assemble the demo app from Maven's outputs: shrunk and dexed by R8, signed with a temporary key.

    python -m tools.make_apk app.apk --bundle my-bundle --library libedgespec.so libc++_shared.so

Needs Debian's aapt, zipalign, apksigner and android-framework-res; R8 and the archives (.aar) of ONNX Runtime and the
tokenizers come from Maven Central.  Libraries of the NDK and the archives make an app for phones.  Without them it gets
the local ones: edgespec's own, cross-compiled, and those in Maven's jars, which are for arm64 but other Linux systems.
Such an app can be inspected, not run.  The release path is the Gradle project, which shrinks by the same rules.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from tests.support import arm64
from tests.support.jvm import DEMO, build, maven, version_of

FRAMEWORK = Path("/usr/share/android-framework-res/framework-res.apk")
TOOLS = ("aapt", "zipalign", "apksigner", "keytool", "javac")
MIN_SDK, TARGET_SDK = 26, 29  # the resources of Debian's framework end at 29
PAGE = 1 << 14  # bytes: uncompressed libraries are mapped from the file, on phones with pages of 16 KiB too
ABI = "arm64-v8a"
LIMIT = 900  # seconds
PACKAGE = "dev.edgespec.app"
RULES = DEMO / "app" / "r8-rules.pro"
# what the app shows at its first start, as app/build.gradle.kts has it
EXAMPLE = ("builtin:shakespeare-73m", "--quick", "--method", "speculative", "--draft", "builtin:shakespeare-draft",
           "--operators", "native")  # fmt: skip


def missing() -> list[str]:
    """Give what is not installed."""
    return [name for name in TOOLS if shutil.which(name) is None] + ([] if FRAMEWORK.is_file() else [FRAMEWORK.name])


def run(*command: str | Path) -> str:
    """Run a tool -> what it said; fails with that."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, f"{command[0]}: {(done.stdout + done.stderr)[-4000:]}"
    return done.stdout


def own_jars(folder: Path) -> list[Path]:
    """Give the classes of app and runtime, built into ``folder``, which is new."""
    built = build(folder)
    return [built / name / f"{name}-0.1.0.jar" for name in ("app", "edgespec")]


def needed_jars() -> list[Path]:
    """Give the libraries that app and runtime need."""
    to = "-Dmdep.outputFile=target/needed.txt"
    done = maven("dependency:build-classpath", "-pl", "edgespec", "-DincludeScope=runtime", to)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    names = (DEMO / "edgespec" / "target" / "needed.txt").read_text("utf-8").strip()
    return [Path(name) for name in names.split(":")]


def _copied(folder: Path, artifact: str, said: list[str]) -> Path | None:
    """Make an artifact of Maven Central, in a folder; None = it is not to be had, and ``said`` gets why."""
    done = maven("dependency:copy", f"-Dartifact={artifact}", f"-DoutputDirectory={folder}", "-N")
    if done.returncode:
        said.append((done.stdout + done.stderr)[-4000:])
        return None
    _, name, version, *kind = artifact.split(":")
    return folder / f"{name}-{version}.{kind[0] if kind else 'jar'}"


def shrink(output: Path, classes: Sequence[Path], rules: Sequence[Path], *how: str) -> None:
    """Shrink by R8 into ``output``: a folder of classes.dex, classes2.dex ..., or a jar with ``--classfile``."""
    said: list[str] = []
    shrinker = _copied(output.parent, f"com.android.tools:r8:{version_of('r8')}", said)
    assert shrinker, said
    home = Path(shutil.which("javac") or "").resolve().parents[1]  # java.lang, which the framework's jar leaves out
    java = ("java", "-Xmx2g", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp", shrinker)
    kept = [word for file in rules for word in ("--pg-conf", file)]
    run(*java, "com.android.tools.r8.R8", "--release", "--lib", framework(), "--lib", home, "--output", output,
        *how, *kept, *classes)  # fmt: skip


def phone_archives(folder: Path) -> list[Path]:
    """Give the archives with the libraries for phones, or none where one of them is not to be had."""
    names = {
        "onnxruntime": "com.microsoft.onnxruntime:onnxruntime-android",
        "tokenizers": "ai.djl.android:tokenizer-native",
    }
    found = [_copied(folder, f"{name}:{version_of(of)}:aar", []) for of, name in names.items()]
    return [one for one in found if one] if all(found) else []


def framework() -> Path:
    """Give the classes of Android that the app is compiled against."""
    used = (DEMO / "app" / "target" / "classpath.txt").read_text("utf-8").strip().split(":")
    return next(Path(name) for name in used if Path(name).name.startswith("android-all-"))


def manifest(folder: Path) -> Path:
    """Give the app's manifest with the package, which the Gradle project names instead."""
    text = (DEMO / "app" / "src" / "main" / "AndroidManifest.xml").read_text("utf-8")
    file = folder / "AndroidManifest.xml"
    file.write_text(text.replace("<manifest ", f'<manifest package="{PACKAGE}" ', 1), "utf-8")
    return file


def packed_libraries(folder: Path, archive: Path) -> list[Path]:
    """Libraries for arm64 out of an .aar, or out of a .jar for other systems."""
    found = []
    with zipfile.ZipFile(archive) as packed:
        for name in packed.namelist():
            if name.endswith(".so") and (f"/{ABI}/" in name or ("native/" in name and "/linux-aarch64/" in name)):
                found.append(folder / Path(name).name)
                found[-1].write_bytes(packed.read(name))
    return found


def assemble(output: Path, libraries: Sequence[Path], classes: Sequence[Path], bundle: Path | None = None) -> None:
    """Resources and manifest, dexed classes, libraries at the beginning of a page; signed with a new key.

    ``bundle``: in the app's assets, which the app takes when it starts without one.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        unsigned, key = folder / "unsigned.apk", folder / "key.jks"
        resources = DEMO / "app" / "src" / "main" / "res"
        run("aapt", "package", "-f", "-M", manifest(folder), "-S", resources, "-I", FRAMEWORK,
            "--min-sdk-version", str(MIN_SDK), "--target-sdk-version", str(TARGET_SDK), "--version-code", "1",
            "--version-name", "0.1.0", "-G", folder / "manifest.pro", "-F", unsigned)  # fmt: skip
        shrink(folder, classes, [RULES, folder / "manifest.pro"], "--min-api", str(MIN_SDK))
        with zipfile.ZipFile(unsigned, "a") as apk:
            for file in sorted(folder.glob("classes*.dex")):
                apk.write(file, file.name, zipfile.ZIP_DEFLATED)
        aligned = folder / "aligned.apk"
        run("zipalign", "-f", "4", unsigned, aligned)
        with zipfile.ZipFile(aligned, "a") as apk:
            for file in libraries:
                _store(apk, f"lib/{ABI}/{file.name}", file.read_bytes())
            if bundle:
                for file in sorted(one for one in bundle.rglob("*") if one.is_file()):
                    _store(apk, f"assets/bundle/{file.relative_to(bundle)}", file.read_bytes())
        run("keytool", "-genkeypair", "-keystore", key, "-storepass", "thrown away", "-keypass", "thrown away",
            "-alias", "demo", "-keyalg", "EC", "-validity", "9999", "-dname", "CN=edgespec demo")  # fmt: skip
        run("apksigner", "sign", "--ks", key, "--ks-pass", "pass:thrown away", "--min-sdk-version", str(MIN_SDK),
            "--out", output, aligned)  # fmt: skip


def _store(apk: zipfile.ZipFile, name: str, data: bytes) -> None:
    """Add a file, uncompressed, at the beginning of a page; the extra field that zipalign knows comes before it."""
    info = zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0))
    gap = -(apk.start_dir + 30 + len(name) + 6) % PAGE  # after the header, the name and the field's own six bytes
    info.extra = b"\x35\xd9" + (gap + 2).to_bytes(2, "little") + PAGE.to_bytes(2, "little") + bytes(gap)
    apk.writestr(info, data, zipfile.ZIP_STORED)


def main(arguments: Sequence[str] | None = None) -> None:
    """Assemble the app."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--library", type=Path, nargs="+", help="libraries of the NDK for arm64")
    parser.add_argument(
        "--archive", type=Path, nargs="+", help="the .aar of ONNX Runtime and of the tokenizers, from elsewhere"
    )
    parser.add_argument("--bundle", type=Path, help="that the app starts with  [default: an embedded model's]")
    given = parser.parse_args(arguments)
    if lost := missing():
        sys.exit(f"not installed: {', '.join(lost)}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        jars = own_jars(folder / "built") + needed_jars()
        libraries = given.library or [arm64.cross_compile(folder)]
        archives = given.archive or phone_archives(folder)
        libraries = [*libraries, *(one for file in archives or jars for one in packed_libraries(folder, file))]
        if given.bundle is None:
            run("edgespec", "export", *EXAMPLE, "-o", folder / "bundle")
        assemble(given.output, libraries, jars, given.bundle or folder / "bundle")
    foreign = ([] if given.library else ["ours"]) + ([] if archives else ["ONNX Runtime's and the tokenizers'"])
    if foreign:
        says = (
            f"libraries of another Linux system: {', '.join(foreign)}; this app can be looked at, but no phone runs it"
        )
        sys.stdout.write(f"{says}\n")


if __name__ == "__main__":
    main()
