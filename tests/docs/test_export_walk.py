"""The walk through an export in CONTRIBUTING names functions and classes that their files define."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEP = re.compile(r"`(\w+)`\s+\(`([\w/.]+\.(?:py|cpp|h))`\)")


def steps() -> list[tuple[str, str]]:
    """Return the names of the walk with their files."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    walk = text[text.index("\n### An export") :].partition("\n## ")[0]
    return list(dict.fromkeys(STEP.findall(walk)))


@pytest.mark.parametrize(("name", "file"), steps())
def test_a_step_exists(name: str, file: str) -> None:
    source = (ROOT / file).read_text("utf-8")
    assert re.search(rf"(def|class|struct) {name}\b|^\w[^;]*\b{name}\(", source, re.MULTILINE), f"{file} has no {name}"


def test_an_export_is_walked() -> None:
    named = {name for name, _ in steps()}
    assert {"export_model", "load_source", "open_models", "plan_model", "fuse", "make_manifest"} <= named
