"""Untrusted JSON: every invalid input is one error of the caller's kind."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel, Field

from edgespec.errors import ExportError, ProfileError
from edgespec.runtimes.files import json_file
from edgespec.runtimes.files.json_file import MOST_DEPTH, parse_json, read_json, read_object, validated


@pytest.mark.parametrize(
    "text", ["1", '"a"', '"\\ud83d\\ude00"', "null", "[]", '{"a": [1.5, {"b": -3}]}', f"{'[' * 40}{']' * 40}"]
)
def test_sound_values(text: str) -> None:
    import json

    assert parse_json(text) == parse_json(text.encode()) == json.loads(text)


@pytest.mark.parametrize(
    "text, said",
    [
        (b"", "Expecting value"),
        (b'{"a": 1', "Expecting"),
        (b"\xff\xfe{}", "utf-8"),
        (b"[" * 100_000, "deep"),
        (b"[" * (MOST_DEPTH + 2) + b"]" * (MOST_DEPTH + 2), "deep"),
        (b'["\\ud800"]', "half a character"),
        (b'{"a": NaN}', "NaN"),
        (b"[-Infinity]", "-Infinity"),
        (b"[1e999]", "too large"),
        (b"9" * 5000, "5000 digits"),
        (b'{"a": 1, "b": 2, "a": 3}', "'a' comes twice"),
    ],
)
def test_what_is_refused(text: bytes, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        parse_json(text)
    file = tmp_path / "some.json"
    file.write_bytes(text)
    with pytest.raises(ProfileError, match=rf"some\.json: no profile: not readable as JSON: .*{said}") as caught:
        read_json(file, ProfileError, "make one", "no profile: ")
    assert caught.value.hint == "make one"


def test_a_large_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "large.json"
    file.write_text("[1, 2, 3]")
    assert read_json(file) == [1, 2, 3]
    monkeypatch.setattr(json_file, "MOST_BYTES", 8)
    with pytest.raises(ExportError, match="more than 8 bytes"):
        read_json(file, ExportError)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="cannot be read: No such file"):
        read_json(tmp_path / "none.json", ExportError)
    with pytest.raises(ExportError, match="cannot be read: Is a directory"):
        read_json(tmp_path, ExportError)
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ExportError, match="expected a JSON object, got list"):
        read_object(tmp_path / "list.json", ExportError)


def test_a_schema_names_the_place() -> None:
    class Inner(BaseModel):
        size: int = Field(gt=0)

    class Outer(BaseModel):
        inner: list[Inner]

    assert validated(Outer, {"inner": [{"size": 3}]}, "here").inner[0].size == 3
    with pytest.raises(ExportError, match=r"here: inner\.1\.size: Input should be greater than 0"):
        validated(Outer, {"inner": [{"size": 3}, {"size": 0}]}, "here", ExportError)
