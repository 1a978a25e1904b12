"""Bundles of older schemas are read as they were."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from edgespec.engine.loading import load
from edgespec.errors import BundleError
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.formats import FORMER
from edgespec.runtimes.files.manifest import MANIFEST, SCHEMA, Manifest, Operators, read_manifest
from edgespec.runtimes.files.migration import OLDEST, RENAMED, parts, with_old_names
from tests.conftest import PROMPTS, THREADS
from tests.support.older import schema_2, schema_5

LENGTH = 12
METHODS = "ar", "speculative", "self-spec", "medusa"


def texts(bundle: Path, operators: Operators) -> list[list[int]]:
    with load(bundle, threads=THREADS, operators=operators) as engine:
        return [engine.generate(PROMPTS[0], method=method, max_new_tokens=LENGTH).tokens for method in METHODS]


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("layout, operators", [("stock", "stock"), ("native", "stock"), ("stock", "native")])
def test_a_bundle_of_schema_2_decodes_as_one_of_today(
    bundles: Callable[..., Path], tmp_path: Path, layout: Operators, operators: Operators
) -> None:
    """Its ports have other names, and its other graphs name weights of the wrong layout, which are converted."""
    today = bundles(layout)
    older = schema_2(today, tmp_path / "older")
    manifest = Bundle.open(older).manifest
    assert manifest.schema_version == SCHEMA
    assert manifest.target.converted == manifest.target.weights == "model.data"
    assert texts(older, operators) == texts(today, operators)


def test_a_schema_before_the_oldest_is_refused(bundles: Callable[..., Path], tmp_path: Path) -> None:
    data = json.loads((bundles("stock") / MANIFEST).read_text("utf-8"))
    (tmp_path / MANIFEST).write_text(json.dumps(data | {"schema_version": OLDEST - 1}), "utf-8")
    with pytest.raises(BundleError, match=f"schema {OLDEST - 1} is older .* reads from schema {OLDEST} on"):
        Bundle.open(tmp_path)


def read(folder: Path, data: dict[str, Any]) -> Manifest:
    (folder / MANIFEST).write_text(json.dumps(data), "utf-8")
    return read_manifest(folder)


@pytest.mark.parametrize("place", ["target", "draft"])
@pytest.mark.parametrize("key", ["format", "head_format"])
@pytest.mark.parametrize("form", sorted(FORMER))
def test_a_bundle_in_a_format_of_the_past_says_what_to_do(tmp_path: Path, place: str, key: str, form: str) -> None:
    older = next(data for data in schema_5() if isinstance(data.get(place), dict))
    older[place][key] = form
    with pytest.raises(BundleError, match=f"weights in {form}, a format that this edgespec no longer has") as caught:
        read(tmp_path, older)
    assert "export the model again" in str(caught.value.hint)


@pytest.mark.parametrize("number", range(len(schema_5())))
def test_a_manifest_of_schema_5_is_the_same_with_the_names_of_today(tmp_path: Path, number: int) -> None:
    older = schema_5()[number]
    found = read(tmp_path, older)
    today = found.model_dump(mode="json", exclude_none=True)
    again = read(tmp_path, today)
    assert (found.schema_version, found.stored_schema, again.stored_schema) == (SCHEMA, 5, SCHEMA)
    assert [getattr(found, name) for name in Manifest.model_fields] == [
        getattr(again, name) for name in Manifest.model_fields
    ]
    assert json.dumps(with_old_names(today)) == json.dumps(older)  # in the same order, as hashes need it


@pytest.mark.parametrize("place, old", [(place, old) for place, names in RENAMED.items() for old in names])
def test_only_older_schemas_have_the_old_name_of_a_key(tmp_path: Path, place: str, old: str) -> None:
    new = RENAMED[place][old]
    older = next(data for data in schema_5() if any(old in part for part in parts(data, place)))
    assert not any(new in part for part in parts(older, place))
    today = read(tmp_path, older).model_dump(mode="json", exclude_none=True)
    values = [[part.get(name) for part in parts(data, place)] for data, name in ((older, old), (today, new))]
    assert values[0] == values[1]
    assert any(value is not None for value in values[0])
    both = deepcopy(older)
    for data, name in ((today, old), (both, new)):
        part = next(part for part in parts(data, place) if old in part or new in part)
        part[name] = part.get(old, part.get(new))
        with pytest.raises(BundleError, match=rf"{old}: Extra inputs are not permitted"):
            read(tmp_path, data)
