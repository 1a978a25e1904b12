"""C++, Rust and TypeScript have the constants of Python."""

from __future__ import annotations

from tools.generate_constants import HEADER, RUST, TYPESCRIPT, header, rust, typescript


def test_the_generated_files_are_current() -> None:
    """Otherwise: ``python -m tools.generate_constants``."""
    assert HEADER.read_text("utf-8") == header()
    assert RUST.read_text("utf-8") == rust()
    assert TYPESCRIPT.read_text("utf-8") == typescript()
