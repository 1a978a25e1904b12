"""The Gradle project, which nothing here runs, agrees with the Maven build, which is tested."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path
from xml.etree import ElementTree

import click

from edgespec.cli.app import cli
from tests.support.jvm import DEMO, version_of
from tools.make_apk import EXAMPLE

GRADLE = (DEMO / "app" / "build.gradle.kts").read_text("utf-8")
ANDROID = "{http://schemas.android.com/apk/res/android}"


def test_versions_are_those_of_maven() -> None:
    names = {"onnxruntime-android": "onnxruntime", "kotlinx-coroutines-core-jvm": "coroutines",
             "tokenizer-native": "tokenizers"}  # fmt: skip
    used = re.findall(r'(?:implementation|runtimeOnly)\("[^:]+:([^:]+):([^"]+)"\)', GRADLE)
    assert len(used) == 5
    for artifact, version in used:
        assert version == version_of(names.get(artifact, artifact)), artifact
    assert f'kotlin("android") version "{version_of("kotlin")}"' in GRADLE
    pom = (DEMO / "pom.xml").read_text("utf-8")
    target = re.search(r"<jvm.target>(\d+)<", pom)
    assert target
    assert set(re.findall(r"JavaVersion\.VERSION_(\d+)", GRADLE)) == {target[1]}
    named = re.search(r'versionName = "(.+)"', GRADLE)
    assert named
    assert f"<version>{named[1]}</version>" in pom


def test_sources_and_manifest_are_those_that_maven_compiles() -> None:
    for folder in re.findall(r'srcDirs\("([^"]+)", "([^"]+)"\)', GRADLE)[0]:
        assert (DEMO / "app" / folder / "dev" / "edgespec").is_dir(), folder
    manifest = ElementTree.parse(DEMO / "app" / "src" / "main" / "AndroidManifest.xml")
    for place in ("application", "application/activity", "application/service", "application/provider"):
        found = manifest.find(place)
        assert found is not None
        name = found.attrib[f"{ANDROID}name"]
        package, _, own = name.rpartition(".")
        sources = (DEMO / "app" / "src" / "main" / "kotlin" / package.replace(".", "/")).glob("*.kt")
        assert any(re.search(rf"^class {own}\b", source.read_text("utf-8"), re.MULTILINE) for source in sources), name
        assert f'namespace = "{package}"' in GRADLE
    assert "minSdk = 26" in GRADLE
    asked = {one.attrib[f"{ANDROID}name"].rpartition(".")[2] for one in manifest.iterfind("uses-permission")}
    service = manifest.find("application/service")
    assert service is not None
    kind = service.attrib[f"{ANDROID}foregroundServiceType"]  # from Android 14 on each kind needs a separate permission
    words = re.sub("([A-Z])", r"_\1", kind).upper()
    assert {"FOREGROUND_SERVICE", f"FOREGROUND_SERVICE_{words}"} <= asked


def test_licences_of_all_that_is_packed_are_shown() -> None:
    text = (DEMO / "app" / "src" / "main" / "res" / "raw" / "licences.txt").read_text("utf-8")
    assert (DEMO.parent / "LICENSE").read_text("utf-8") in text
    for artifact in re.findall(r'(?:implementation|runtimeOnly)\("[^:]+:([^:]+):[^"]+"\)', GRADLE):
        assert artifact in text, artifact


def test_what_gradle_packs_is_there() -> None:
    native = re.search(r'cmake \{ path = file\("(.+)"\) \}', GRADLE)
    rules = re.search(r'"([\w-]+\.pro)"', GRADLE)
    assert native
    assert rules
    assert (DEMO / "app" / native[1]).resolve() == DEMO.parent / "CMakeLists.txt"
    assert "ai.onnxruntime" in (DEMO / "app" / rules[1]).read_text("utf-8")
    kept = re.findall(
        r"-keep (?:class|enum|interface) (dev\.edgespec\S*)\.([A-Z]\w+)", (DEMO / "app" / rules[1]).read_text("utf-8")
    )
    assert ("dev.edgespec.app", "Kept") in kept
    for package, name in kept:
        sources = "".join(
            file.read_text("utf-8") for file in DEMO.glob(f"*/src/main/kotlin/{package.replace('.', '/')}/*.kt")
        )
        assert re.search(rf"\b(?:class|interface) {name}\b", sources), name
    excluded = re.search(r"resources.excludes \+= listOf\((.+)\)", GRADLE)
    assert excluded
    patterns = re.findall(r'"(.+?)"', excluded[1])
    desktops = ("native/lib/linux-x86_64/cpu/libtokenizers.so", "native/lib/osx-aarch64/cpu/libtokenizers.dylib",
                "native/lib/win-x86_64/cpu/tokenizers.dll", "com/sun/jna/linux-x86-64/libjnidispatch.so",
                "com/sun/jna/win32-x86/jnidispatch.dll")  # fmt: skip
    for name in desktops:
        assert any(fnmatch(name, pattern) for pattern in patterns), name
    assert not any(fnmatch("native/lib/tokenizers.properties", pattern) for pattern in patterns)


def test_the_task_that_makes_the_first_starts_bundle_says_what_the_docs_and_make_apk_say(tmp_path: Path) -> None:
    task = re.search(r"commandLine\((.+?)folder\.path", GRADLE, re.DOTALL)
    assert task
    words = re.findall(r'"([^"]+)"', task[1])
    assert words == ["edgespec", "export", *EXAMPLE, "-o"]
    command = cli.get_command(click.Context(cli), "export")
    assert command
    assert command.make_context("export", [*EXAMPLE, "-o", str(tmp_path / "bundle")]).params["model"] == EXAMPLE[0]
    guide = (DEMO.parent / "docs" / "guides" / "android.md").read_text("utf-8")
    assert f"`{EXAMPLE[0]}`" in guide
    place = re.search(r'val folder = file\("src/main/assets/(.+)"\)', GRADLE)
    assert place
    sources = "".join(file.read_text("utf-8") for file in DEMO.glob("app/src/main/kotlin/**/*.kt"))
    assert f'ASSETS = "{place[1]}/"' in sources
