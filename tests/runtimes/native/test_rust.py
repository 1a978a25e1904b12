"""The Rust crates over the C interface: built from C++, their own tests, and a chat as Python writes it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from edgespec.engine.loading import load
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.export.source.source import resolve
from edgespec.runtimes.ort.native_library import native_library
from tests.conftest import TARGET
from tests.support.checkpoints import write_adapter
from tests.support.required import need
from tests.support.rust_tokenizer import build

ROOT = Path(__file__).resolve().parents[3]
CRATES, EXAMPLE = ROOT / "rust", ROOT / "examples" / "rust"
TEMPLATE = """{% for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
LINES = ("My lord,", "What say you?")


@pytest.mark.nightly
@pytest.mark.usefixtures("native")
def test_the_crates(tmp_path: Path) -> None:
    need("cargo", "to build the crates")
    folder, library = tmp_path / "bundle", native_library().path
    assert library is not None
    export_model(  # with golden vectors, which the crates' tests compare
        ExportOptions(TARGET, folder, ["speculative", "self-spec"], "int8", quick=True, threads=1,
                      draft="builtin:shakespeare-draft", operators="native")
    )  # fmt: skip

    (folder / "chat_template.jinja").write_text(TEMPLATE, "utf-8")
    write_adapter(tmp_path / "adapter", json.loads((resolve(TARGET) / "config.json").read_text()))
    tokenizer = build(tmp_path / "tokenizer") / "libedgespec_tokenizer.so"
    used = {"EDGESPEC_BUNDLE": folder, "EDGESPEC_ADAPTER": tmp_path / "adapter", "EDGESPEC_TOKENIZER": tokenizer}

    def cargo(crate: Path, *words: str, **more: str) -> str:
        place = {**os.environ, "CARGO_TARGET_DIR": str(tmp_path / "target"), **more}
        place |= {name: str(path) for name, path in used.items()}
        how: dict[str, Any] = {"cwd": crate, "env": place, "input": "\n".join(LINES), "text": True, "timeout": 1800}
        done = subprocess.run(["cargo", *words], capture_output=True, **how)
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
    assert "13 passed" in cargo(CRATES, "test", "--locked", "--jobs", "2")  # of the C++ that build.rs compiles
    messages, answers = list[dict[str, str]](), []
    with load(folder, threads=1) as engine:
        for line in LINES:
            messages.append({"role": "user", "content": line})
            answers.append(engine.chat(messages, method="ar", max_new_tokens=400).text)
            messages.append({"role": "assistant", "content": answers[-1]})
    written = cargo(
        EXAMPLE, "run", "-q", "--locked", "--", str(folder), str(tokenizer), EDGESPEC_LIBRARY_DIR=str(library.parent)
    )
    assert written == "".join(f"{answer}\n" for answer in answers)
