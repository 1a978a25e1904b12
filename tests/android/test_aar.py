"""The Android archive: what it holds and lacks, its coordinates, and the example that runs against it."""

from __future__ import annotations

import os
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from edgespec import load
from edgespec.runtimes.ort.native_library import native_library
from tests.support.golden import talking
from tests.support.jvm import DEMO, environment, maven, need_maven
from tools import make_aar, make_apk

EXAMPLE = DEMO.parent / "examples" / "android" / "src" / "MainActivity.kt"
POM = """<?xml version="1.0" encoding="UTF-8"?>
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <parent>
    <groupId>dev.edgespec</groupId>
    <artifactId>android-demo</artifactId>
    <version>{version}</version>
    <relativePath>{demo}</relativePath>
  </parent>
  <artifactId>example</artifactId>
  <dependencies>
    {dependencies}
  </dependencies>
  <build>
    <sourceDirectory>{source}</sourceDirectory>
    <plugins>
      <plugin>
        <groupId>org.jetbrains.kotlin</groupId>
        <artifactId>kotlin-maven-plugin</artifactId>
      </plugin>
    </plugins>
  </build>
</project>
"""
JAR = "<dependency><groupId>test</groupId><artifactId>{name}</artifactId><version>1</version><scope>system</scope><systemPath>{path}</systemPath></dependency>"  # noqa: E501


@pytest.mark.nightly
@pytest.mark.usefixtures("native")
def test_an_app_compiles_against_the_archive_and_chats(
    arm_library: Path, bundles: Callable[..., Path], tmp_path: Path
) -> None:
    need_maven()
    files = make_aar.assemble(tmp_path / "made", [("arm64-v8a", arm_library)])
    assert [file.name.removeprefix(f"{make_aar.NAME}-{make_aar.VERSION}") for file in files] == [
        "-sources.jar",
        ".aar",
        ".pom",
    ]
    with zipfile.ZipFile(files[1]) as archive:
        names = archive.namelist()
        classes = Path(archive.extract("classes.jar", tmp_path))
        rules = archive.read("proguard.txt").decode()
        assert archive.read("jni/arm64-v8a/libedgespec.so") == arm_library.read_bytes()
    assert names == ["AndroidManifest.xml", "proguard.txt", "R.txt", "classes.jar", "jni/arm64-v8a/libedgespec.so"]
    assert "native <methods>" in rules
    assert "dev.edgespec.app" not in rules
    held = zipfile.ZipFile(classes).namelist()
    assert "dev/edgespec/Edgespec.class" in held
    assert not [
        name for name in held if name.startswith(("dev/edgespec/app", "ai/onnxruntime", "dev/edgespec/support"))
    ]
    pom = ElementTree.parse(files[2]).getroot()
    space = {"m": "http://maven.apache.org/POM/4.0.0"}
    assert [pom.findtext(f"m:{name}", "", space) for name in ("groupId", "artifactId", "version", "packaging")] == [
        "dev.edgespec", "edgespec-android", "0.1.0", "aar"]  # fmt: skip
    needed = {one.text for one in pom.iterfind(".//m:artifactId", space)}
    assert "gson" in needed
    assert "onnxruntime" not in needed  # an app whose bundles are native does without
    assert "tokenizer-native" in needed
    assert "djl" not in make_aar.pom(own_tokenizer=True)
    (DEMO / "app" / "target" / "classpath.txt").exists() or maven("package", "-DskipTests")
    jars = {"classes": classes, "android": make_apk.framework()}
    jars |= {f"needed{number}": path for number, path in enumerate(make_apk.needed_jars())}
    example = tmp_path / "example"
    example.mkdir()
    dependencies = "\n    ".join(JAR.format(name=name, path=path) for name, path in jars.items())
    text = POM.format(
        version=make_aar.VERSION,
        demo=os.path.relpath(DEMO / "pom.xml", example),
        dependencies=dependencies,
        source=EXAMPLE.parent,
    )
    (example / "pom.xml").write_text(text, "utf-8")
    done = maven("compile", "-f", str(example / "pom.xml"))
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert (example / "target" / "classes" / "dev" / "edgespec" / "example" / "MainActivity.class").is_file()
    bundle, lines, said = (
        talking(bundles("native", "int4"), tmp_path / "talking"),
        ("What say you?", "And then?"),
        list[str](),
    )
    with load(bundle, threads=2) as engine:
        talk = engine.conversation()
        said = [talk.ask(line, max_new_tokens=48).text + "\n" for line in lines]
    library = native_library().path
    assert library is not None
    program = ["java", "dev.edgespec.example.ChatKt", str(bundle), str(library), "48"]
    env = environment(":".join(map(str, (example / "target" / "classes", classes, *make_apk.needed_jars()))))
    ran = subprocess.run(program, input="\n".join(lines), capture_output=True, text=True, env=env, timeout=300)
    assert (ran.returncode, ran.stdout) == (0, "".join(said)), ran.stderr
