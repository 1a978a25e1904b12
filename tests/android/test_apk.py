"""The demo app as a file that a phone installs: contents, manifest, alignment and signature."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests.support import apk
from tests.support.jvm import need_maven

LIBRARIES = {"libedgespec.so", "libonnxruntime.so", "libonnxruntime4j_jni.so"}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The app with empty libraries: what is in them is not this test's."""
    need_maven()
    if lost := apk.missing():
        pytest.skip(f"not installed: {', '.join(lost)}")
    folder = tmp_path_factory.mktemp("apk")
    libraries = []
    for name in sorted(LIBRARIES):
        libraries.append(folder / name)
        libraries[-1].write_bytes(bytes(5000))
    apk.assemble(folder / "app.apk", libraries, apk.own_jars(folder / "built"))
    return folder / "app.apk"


def test_it_is_signed(app: Path) -> None:
    said = apk.run("apksigner", "verify", "--min-sdk-version", str(apk.MIN_SDK), "-v", app)
    assert said.startswith("Verifies")
    assert "(APK Signature Scheme v2): true" in said


def test_the_manifest_is_the_projects(app: Path) -> None:
    said = apk.run("aapt", "dump", "badging", app)
    assert "package: name='dev.edgespec.app'" in said
    assert "sdkVersion:'26'" in said
    assert "launchable-activity: name='dev.edgespec.app.MainActivity'" in said
    assert "native-code: 'arm64-v8a'" in said
    assert "uses-permission" not in said


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
    assert {one.filename for one in found} == {f"lib/{apk.ABI}/{name}" for name in LIBRARIES}
    for name in ("app/MainActivity", "app/App", "engine/Engine", "runtimes/NativeSlot"):
        assert f"Ldev/edgespec/{name};".encode() in dexed
