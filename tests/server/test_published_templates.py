"""Conversations by the templates of widely used models: as transformers writes them, and the same in three APIs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from edgespec.runtimes.text.codec import TextCodec
from tests.support.chats import FOLDER
from tests.support.published_templates import CONVERSATIONS, download, open_codec, rows

OWN = sorted(file.stem for file in FOLDER.glob("*.jinja"))


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    pytest.importorskip("transformers", reason="needs transformers")
    return open_codec(tmp_path_factory.mktemp("codec"))


@pytest.mark.parametrize("name", OWN)
def test_the_same_text_in_three_apis(codec: TextCodec, name: str) -> None:
    found = dict(rows((FOLDER / f"{name}.jinja").read_text("utf-8"), codec))
    assert {name: marks for name, marks in found.items() if set(marks) - set("=r")} == {}
    assert found["a question"] == "==="


@pytest.mark.nightly
def test_the_table_of_published_templates(codec: TextCodec, tmp_path: Path) -> None:
    """EDGESPEC_TEMPLATES names a folder with the package's file, where there is one."""
    try:
        templates = download(Path(os.environ.get("EDGESPEC_TEMPLATES") or tmp_path))
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no package with chat templates: {error}")
    found = {name: dict(rows(template, codec)) for name, template in templates.items()}
    cells = {(name, chat): marks for name, row in found.items() for chat, marks in row.items()}
    assert len(found) >= 70
    assert len(CONVERSATIONS) >= 12
    assert {where: marks for where, marks in cells.items() if set(marks) - set("=r")} == {}
    whole = [name for name, row in found.items() if all(marks == "===" for marks in row.values())]
    assert len(whole) >= 58
