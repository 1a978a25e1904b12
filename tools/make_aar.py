"""Assemble the runtime as an Android archive (.aar) with its POM, for a repository of artifacts.

    python -m tools.make_aar FOLDER --library arm64-v8a=libedgespec.so arm64-v8a=libedgespec_tokenizer.so

FOLDER gets ``edgespec-android-VERSION.aar``, ``.pom``, ``-sources.jar`` and, with ``--docs``, ``-javadoc.jar`` by
Dokka.  The archive holds the classes, the rules for R8, and the native libraries that are given.  An app takes it by
its coordinates, ``dev.edgespec:edgespec-android:VERSION``; DJL's tokenizers come along where our own are not among
the libraries, and ONNX Runtime where the app asks for it.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from tests.support.jvm import DEMO, folder_alone, maven, version_of

VERSION = "0.1.0"
NAME = "edgespec-android"
MIN_SDK = 26
Libraries = Sequence[tuple[str, Path]]
ABIS = ("arm64-v8a", "x86_64")
STAMP = (2026, 1, 1, 0, 0, 0)  # so that the same inputs make the same archive
MANIFEST = f"""<?xml version="1.0" encoding="utf-8"?>
<manifest xmlns:android="http://schemas.android.com/apk/res/android" package="dev.edgespec">
    <uses-sdk android:minSdkVersion="{MIN_SDK}" />
</manifest>
"""
NEEDED = (
    ("org.jetbrains.kotlin:kotlin-stdlib", "kotlin", "compile"),
    ("org.jetbrains.kotlinx:kotlinx-coroutines-core-jvm", "coroutines", "compile"),
    ("ai.djl.huggingface:tokenizers", "tokenizers", "runtime"),
    ("ai.djl.android:tokenizer-native", "tokenizers", "runtime"),
    ("com.google.code.gson:gson", "gson", "runtime"),
)
TOKENIZER = "libedgespec_tokenizer.so"  # edgespec/runtimes/tokenizer, in the place of DJL's
LICENCE = "Apache-2.0"


def pom(own_tokenizer: bool) -> str:
    """Write the POM: coordinates, the licence, and what an app gets with it."""
    needed = "".join(
        f"    <dependency>\n      <groupId>{group}</groupId>\n      <artifactId>{artifact}</artifactId>\n"
        f"      <version>{version_of(of)}</version>\n      <scope>{scope}</scope>\n"
        + ("      <type>aar</type>\n" if group == "ai.djl.android" else "")
        + "    </dependency>\n"
        for (group, artifact), of, scope in ((name.split(":"), of, scope) for name, of, scope in NEEDED)
        if not (own_tokenizer and of == "tokenizers")
    )
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n<project xmlns="http://maven.apache.org/POM/4.0.0">\n'
        "  <modelVersion>4.0.0</modelVersion>\n  <groupId>dev.edgespec</groupId>\n"
        f"  <artifactId>{NAME}</artifactId>\n  <version>{VERSION}</version>\n  <packaging>aar</packaging>\n"
        f"  <licenses><license><name>{escape(LICENCE)}</name></license></licenses>\n"
        f"  <dependencies>\n{needed}  </dependencies>\n</project>\n"
    )


def rules() -> str:
    """Extract R8's keep rules of the runtime from the app's rules."""
    kept = (DEMO / "app" / "r8-rules.pro").read_text("utf-8").split("\n\n")
    return "\n\n".join(part for part in kept if "dev.edgespec.app" not in part)


def built(docs: bool) -> Path:
    """Build the runtime's jars -> the folder where they are."""
    done = maven("package", "-DskipTests", "-pl", "edgespec", "-Prelease", *([] if docs else ["-Ddokka.skip"]))
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return DEMO / "edgespec" / "target"


def write_aar(path: Path, classes: Path, libraries: Libraries) -> None:
    """Write the archive.

    Args:
        path: of the archive.
        classes: a jar.
        libraries: the ABI and the file of each.
    """
    texts = {"AndroidManifest.xml": MANIFEST, "proguard.txt": rules(), "R.txt": ""}
    held = {name: text.encode() for name, text in texts.items()} | {"classes.jar": classes.read_bytes()}
    held |= {f"jni/{abi}/{library.name}": library.read_bytes() for abi, library in sorted(libraries)}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in held.items():
            archive.writestr(zipfile.ZipInfo(name, STAMP), data, zipfile.ZIP_DEFLATED)


def assemble(folder: Path, libraries: Libraries, docs: bool = False) -> list[Path]:
    """Write everything of the artifact into a folder -> the files."""
    folder.mkdir(parents=True, exist_ok=True)
    begin = folder / f"{NAME}-{VERSION}"
    with folder_alone():
        target = built(docs)
        write_aar(Path(f"{begin}.aar"), target / f"edgespec-{VERSION}.jar", libraries)
        own = {abi for abi, library in libraries if library.name == TOKENIZER}
        Path(f"{begin}.pom").write_text(pom(bool(own) and own == {abi for abi, _ in libraries}), "utf-8")
        for kind in ("sources", "javadoc") if docs else ("sources",):
            shutil.copy(target / f"edgespec-{VERSION}-{kind}.jar", f"{begin}-{kind}.jar")
    return sorted(folder.glob(f"{begin.name}*"))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--library", nargs="+", default=[], metavar="ABI=FILE", help=f"of {', '.join(ABIS)}")
    parser.add_argument("--docs", action="store_true", help="the documentation too, by Dokka")
    asked = parser.parse_args(arguments)
    libraries = []
    for one in asked.library:
        abi, _, file = one.partition("=")
        if abi not in ABIS or not Path(file).is_file():
            parser.error(f"--library {one}: expected ABI=FILE, ABI one of {', '.join(ABIS)}, and a file that exists")
        libraries.append((abi, Path(file)))
    for path in assemble(asked.folder, libraries, asked.docs):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
