"""What R8 leaves of app and runtime, by the rules of a release build, works on a JVM as all of it does."""

from __future__ import annotations

import re
import shutil
import zipfile
from pathlib import Path

import pytest

from edgespec.runtimes.ort.native_library import native_library
from tests.support.jvm import first_start, need_maven
from tools import make_apk as apk

pytestmark = pytest.mark.nightly
START = """
-keep class dev.edgespec.app.FirstStartKt { public static void main(java.lang.String[]); }
-keep class dev.edgespec.app.App, dev.edgespec.app.MainActivity, dev.edgespec.app.WorkService
-keep class dev.edgespec.app.SharedFiles
"""
Said = list[tuple[list[str], list[str]]]
NAMES = ["messages", "pieces", "typed", "method", "role", "content", "text", "kind", "USER", "MODEL", "user"]
KEPT = [line for line in apk.RULES.read_text("utf-8").splitlines() if line.startswith("-keep")]


@pytest.fixture(scope="module")
def jars(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Give the app's jars, all that they need, and the program that starts the app without its views."""
    need_maven()
    folder = tmp_path_factory.mktemp("jars")
    own = apk.own_jars(folder / "built")
    tests = folder / "built" / "app" / "test-classes"
    for file in tests.rglob("*.class"):
        if not re.match("(FirstStartKt|Copied)", file.name):
            file.unlink()
    return [*own, *apk.needed_jars(), Path(shutil.make_archive(str(folder / "program"), "zip", tests))]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Give a small model's bundles for native and for stock operators, with golden vectors."""
    folders = [tmp_path_factory.mktemp("bundles") / kind for kind in ("native", "stock")]
    for folder in folders:
        apk.run("edgespec", "export", "builtin:shakespeare", "--quick", "--operators", folder.name, "-o", folder)
    return folders


@pytest.fixture(scope="module")
def whole(jars: list[Path], exported: list[Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Said, Path]:
    """Give what all of the app says, and the folder where it has kept chats."""
    folder = tmp_path_factory.mktemp("whole")
    return [start(jars, bundle, folder) for bundle in exported], folder


def shrunk(jars: list[Path], rules: str, folder: Path) -> list[Path]:
    """Shrink by these rules -> a jar."""
    (folder / "rules.pro").write_text(rules + START, "utf-8")
    apk.shrink(folder / "shrunk.jar", jars, [folder / "rules.pro"], "--classfile")
    return [folder / "shrunk.jar"]


def start(classes: list[Path], bundle: Path, folder: Path) -> tuple[list[str], list[str]]:
    """Start the app with a bundle, twice -> what it said of texts, and what is named in the file of its chat."""
    place, library = folder / bundle.name, native_library().path
    assert library is not None
    said = "".join(first_start(classes, bundle, place, library) for _ in range(2))
    chat = place / "chat.json"
    kept = chat.read_text("utf-8") if chat.exists() else ""
    names = [name for name in NAMES if f'"{name}"' in kept]
    found = re.findall(r"\d+ of \d+ texts equal|true|false|Exception.*|Error.*", said)
    if bundle.name == "stock":  # as many as this version of ONNX Runtime rounds alike, which differs between runs
        found = [re.sub(r"\d+ of \d+", "some", one) for one in found]
    return found, names


def test_the_rest_does_what_the_whole_does(
    jars: list[Path], exported: list[Path], whole: tuple[Said, Path], tmp_path: Path
) -> None:
    expected, place = whole
    (proved, *others), names = expected[0]
    assert re.fullmatch(r"([1-9]\d*) of \1 texts equal", proved)
    assert (others, names) == (["true", proved, "true"], NAMES)
    assert expected[1][1] == NAMES
    rest = shrunk(jars, apk.RULES.read_text("utf-8"), tmp_path)
    assert [start(rest, bundle, tmp_path) for bundle in exported] == expected
    assert [start(rest, bundle, place) for bundle in exported] == expected  # chats that another version has kept
    with zipfile.ZipFile(rest[0]) as held:
        assert "dev/edgespec/app/AppState.class" not in held.namelist()


@pytest.mark.parametrize("rule", KEPT)
def test_every_rule_is_needed(
    jars: list[Path], exported: list[Path], whole: tuple[Said, Path], tmp_path: Path, rule: str
) -> None:
    rest = shrunk(jars, apk.RULES.read_text("utf-8").replace(rule, "-dontoptimize"), tmp_path)  # which takes longest
    assert [start(rest, bundle, tmp_path) for bundle in exported] != whole[0]
