"""The manifest is read strictly, and errors name the problem."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgespec.errors import BundleError
from edgespec.runtimes.files.manifest import MANIFEST, SCHEMA, Manifest, read_manifest


@pytest.fixture
def data(bundle: Callable[..., Path]) -> dict[str, Any]:
    """Read a sound manifest, as JSON."""
    found: dict[str, Any] = json.loads((bundle("int4") / MANIFEST).read_text("utf-8"))
    return found


def refused(folder: Path, content: object, *words: str) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / MANIFEST).write_text(text, "utf-8")
    with pytest.raises(BundleError) as caught:
        read_manifest(folder)
    for word in (str(folder / MANIFEST), *words):
        assert word in str(caught.value)


def test_a_manifest_survives_a_round_trip(bundle: Callable[..., Path], data: dict[str, Any]) -> None:
    manifest = read_manifest(bundle("int4"))
    assert manifest.schema_version == SCHEMA
    assert manifest.model_dump(mode="json", exclude_none=True) == data
    assert Manifest.model_validate(data) == manifest


@pytest.mark.parametrize("text", ["", "{", "not json", '{"schema_version": 1,}', "\ufeff{}"])
def test_broken_json(tmp_path: Path, text: str) -> None:
    refused(tmp_path, text, "not readable as JSON", "export the bundle again")


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BundleError, match="not readable as JSON"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("value", [[], 3, '"text"', None, {}, {"schema_version": "1"}, {"schema_version": None}])
def test_something_else_than_a_manifest(tmp_path: Path, value: object) -> None:
    refused(tmp_path, value, "expected an object with an integer schema_version")


def test_a_newer_schema(tmp_path: Path, data: dict[str, Any]) -> None:
    newer = {**data, "schema_version": SCHEMA + 1, "something_new": True}
    refused(tmp_path, newer, f"schema {SCHEMA + 1} is newer", "upgrade edgespec")


@pytest.mark.parametrize(
    "path",
    [(), ("target",), ("target", "facts"), ("target", "graphs", "plain"), ("methods", "ngram"), ("tokenizer",),
     ("files", "model.data"), ("methods", "self-spec", "skip")],
)  # fmt: skip
def test_an_unknown_key_is_named(tmp_path: Path, data: dict[str, Any], path: tuple[str, ...]) -> None:
    part = data
    for key in path:
        part = part[key]
    part["gama"] = 3
    refused(tmp_path, data, ".".join([*path, "gama"]))


@pytest.mark.parametrize(
    "path", [("target",), ("methods",), ("tokenizer",), ("target", "facts", "layers"), ("target", "weights")]
)
def test_a_missing_key_is_named(tmp_path: Path, data: dict[str, Any], path: tuple[str, ...]) -> None:
    part = data
    for key in path[:-1]:
        part = part[key]
    del part[path[-1]]
    refused(tmp_path, data, ".".join(path), "Field required")


@pytest.mark.parametrize(
    "path, value",
    [
        (("target", "facts", "layers"), 0),
        (("target", "facts", "context"), -1),
        (("target", "facts", "vocab"), "many"),
        (("target", "format"), "int3"),
        (("target", "min_rows"), -1),
        (("target", "extra_rows"), 0),
        (("methods", "ngram", "gamma"), 0),
        (("target", "facts", "rope"), {"dims": "x"}),
        (("target", "facts", "rope"), {"dims": "inf"}),
        (("target", "facts", "rope"), {"dims": 16.5}),
        (("target", "facts", "rope"), {"other_dims": [8, -1]}),
        (("tokenizer", "eos"), ["</s>"]),
    ],
)
def test_a_value_out_of_range_is_named(
    tmp_path: Path, data: dict[str, Any], path: tuple[str, ...], value: object
) -> None:
    part = data
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    refused(tmp_path, data, ".".join(path))
