"""Take pictures of the app's screens: Android's views and graphics on a desktop JVM (Robolectric), with real bundles.

    python -m tools.make_screens FOLDER

Needs Debian's aapt and android-framework-res.  It downloads 500 MB from Maven Central and Google's repository, so it is
not part of the tests.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from edgespec.runtimes.ort.native_library import native_library
from tests.support.golden import talking
from tests.support.jvm import DEMO, environment, folder_alone, maven
from tools import make_apk as apk

ARCHIVES = ("androidx.test:monitor:1.8.0:aar", "androidx.test.espresso:espresso-idling-resource:3.7.0:aar")
MODEL = "shakespeare-73m"
ANDROID = "org.robolectric:android-all-instrumented:14-robolectric-10818077-i7"


def built() -> list[str]:
    """Give the class path of what draws."""
    with folder_alone():
        to = "-Dmdep.outputFile=target/classpath.txt"
        done = maven("-Pscreens", "package", "-DskipTests", "dependency:build-classpath", to)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    needed = (DEMO / "screens" / "target" / "classpath.txt").read_text("utf-8").strip()
    own = ("screens/target/test-classes", "app/target/classes", "edgespec/target/classes")
    return [*(str(DEMO / name) for name in own), *needed.split(":")]


def fetched(folder: Path, artifact: str) -> Path:
    """Make an artifact of Maven's, in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    before = set(folder.iterdir())
    what = ("dependency:copy", f"-Dartifact={artifact}", f"-DoutputDirectory={folder}")
    done = maven("-Pscreens", "-pl", "screens", *what)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return next(iter(set(folder.iterdir()) - before))


def resources(folder: Path) -> Path:
    """Give the app's resources, compiled, in a folder that tells Robolectric where they are."""
    compiled, told = folder / "resources.apk", folder / "told" / "com" / "android" / "tools"
    apk.run("aapt", "package", "-f", "-M", apk.manifest(folder), "-S", DEMO / "app" / "src" / "main" / "res", "-I",
            apk.FRAMEWORK, "--min-sdk-version", str(apk.MIN_SDK), "--target-sdk-version", str(apk.TARGET_SDK),
            "-F", compiled)  # fmt: skip
    told.mkdir(parents=True)
    names = {"merged_manifest": folder / "AndroidManifest.xml", "resource_apk": compiled, "custom_package": apk.PACKAGE}
    (told / "test_config.properties").write_text("".join(f"android_{name}={value}\n" for name, value in names.items()))
    return folder / "told"


def draw(output: Path, bundles: Mapping[str, Path]) -> str:
    """Write the pictures, with a bundle for what each screen does -> what the app said."""
    library = native_library().path
    assert library is not None, native_library().reason
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        classes = [str(resources(folder)), *built()]
        for number, artifact in enumerate(ARCHIVES):
            with zipfile.ZipFile(fetched(folder / "archives", artifact)) as archive:
                classes.append(archive.extract("classes.jar", folder / str(number)))
        fetched(folder / "android", ANDROID)
        java = ["java", "-Xmx1g", "-XX:+UseSerialGC", "-Drobolectric.offline=true"]
        java += [f"-Drobolectric.dependency.dir={folder / 'android'}", f"-Djava.library.path={library.parent}"]
        java += [f"-Dedgespec.{name}={path}" for name, path in {**bundles, "pictures": output}.items()]
        output.mkdir(parents=True, exist_ok=True)
        env = environment(os.pathsep.join(classes))
        java += ["org.junit.runner.JUnitCore", "dev.edgespec.app.Screens"]
        done = subprocess.run(java, capture_output=True, text=True, env=env, timeout=apk.LIMIT)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        return done.stdout


def main() -> None:
    """Draw them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    given = parser.parse_args()
    if lost := apk.missing():
        sys.exit(f"not installed: {', '.join(lost)}")
    with tempfile.TemporaryDirectory() as scratch:
        bundles = {"bundle": Path(scratch) / "bundle"}
        how = ("--quick", "--method", "speculative", "--draft", "builtin:shakespeare-draft", "--operators", "native")
        apk.run("edgespec", "export", f"builtin:{MODEL}", *how, "-o", bundles["bundle"])
        bundles["talking"] = talking(bundles["bundle"], Path(scratch) / "talking")
        sys.stdout.write(draw(given.output.resolve(), bundles))


if __name__ == "__main__":
    main()
