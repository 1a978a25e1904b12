"""The Rust crate over the C interface: its own tests, and the text that Python writes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.engine.loading import load
from edgespec.runtimes.ort.native_library import native_library
from tests.conftest import TARGET
from tests.support.required import need

CRATE = Path(__file__).resolve().parents[3] / "examples" / "rust"
PROMPT = "My lord,"


@pytest.mark.nightly
@pytest.mark.usefixtures("native")
def test_the_crate(tmp_path: Path) -> None:
    need("cargo", "to build the crate")
    folder, library = tmp_path / "bundle", native_library().path
    assert library is not None
    export = [sys.executable, "-m", "edgespec", "export", TARGET, "--quick", "-o", str(folder)]
    subprocess.run(export, check=True, capture_output=True, timeout=300)
    place = {**os.environ, "EDGESPEC_LIBRARY_DIR": str(library.parent), "EDGESPEC_BUNDLE": str(folder),
             "CARGO_TARGET_DIR": str(tmp_path / "target")}  # fmt: skip

    def cargo(*words: str) -> str:
        done = subprocess.run(["cargo", *words], cwd=CRATE, env=place, capture_output=True, text=True, timeout=1800)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        return done.stdout

    assert "3 passed" in cargo("test", "--locked", "--jobs", "2")
    with load(folder, threads=1) as engine:
        text = engine.generate(PROMPT, method="ar", max_new_tokens=40).text
    assert cargo("run", "--quiet", "--locked", "--", str(folder), PROMPT, "40") == f"{text}\n"
