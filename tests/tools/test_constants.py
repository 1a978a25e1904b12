"""C++, Kotlin and Rust have the constants of Python."""

from __future__ import annotations

from tools.generate_constants import HEADER, KOTLIN, RUST, header, kotlin, rust


def test_the_generated_files_are_current() -> None:
    """Otherwise: ``python -m tools.generate_constants``."""
    assert HEADER.read_text("utf-8") == header()
    assert KOTLIN.read_text("utf-8") == kotlin()
    assert RUST.read_text("utf-8") == rust()
