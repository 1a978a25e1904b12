"""The Rust crates over the C interface: built from C++, their own tests, and the text that Python writes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from edgespec.engine.loading import load
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.runtimes.ort.native_library import native_library
from tests.support.required import need

ROOT = Path(__file__).resolve().parents[3]
CRATES, EXAMPLE = ROOT / "rust", ROOT / "examples" / "rust"
PROMPT = "My lord,"


@pytest.mark.nightly
@pytest.mark.usefixtures("native")
def test_the_crates(tmp_path: Path) -> None:
    need("cargo", "to build the crates")
    folder, library = tmp_path / "bundle", native_library().path
    assert library is not None
    export_model(  # with golden vectors, which the crates' tests compare
        ExportOptions("builtin:shakespeare", folder, ["speculative", "self-spec"], "int8", quick=True, threads=1,
                      draft="builtin:shakespeare-draft", operators="native")
    )  # fmt: skip

    def cargo(crate: Path, *words: str, **more: str) -> str:
        place = {**os.environ, "EDGESPEC_BUNDLE": str(folder), "CARGO_TARGET_DIR": str(tmp_path / "target"), **more}
        done = subprocess.run(["cargo", *words], cwd=crate, env=place, capture_output=True, text=True, timeout=1800)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        return done.stdout

    for crate in (CRATES, EXAMPLE):
        cargo(crate, "fmt", "--check")
        cargo(
            crate,
            "clippy",
            "--locked",
            "--all-targets",
            "--",
            "-D",
            "warnings",
            EDGESPEC_LIBRARY_DIR=str(library.parent),
        )
    assert "6 passed" in cargo(CRATES, "test", "--locked", "--jobs", "2")  # of the C++ that build.rs compiles
    with load(folder, threads=1) as engine:
        text = engine.generate(PROMPT, method="ar", max_new_tokens=40).text
    written = cargo(
        EXAMPLE, "run", "-q", "--locked", "--", str(folder), PROMPT, "40", EDGESPEC_LIBRARY_DIR=str(library.parent)
    )
    assert written == f"{text}\n"
