"""The vectors that other runtimes are tested with are what this core computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from edgespec.runtimes.files.facts import Part
from edgespec.runtimes.files.manifest import Manifest
from tools.make_vectors import FOLDER, MAKERS, main


def same(stored: Any, made: Any) -> bool:
    """Equal up to the last bits of logarithms, which processors may give otherwise."""
    if isinstance(stored, float) and isinstance(made, float):
        return stored == made or abs(stored - made) <= 1e-12 * max(1.0, abs(stored))
    if isinstance(stored, list) and isinstance(made, list):
        return len(stored) == len(made) and all(map(same, stored, made))
    if isinstance(stored, dict) and isinstance(made, dict):
        return stored.keys() == made.keys() and all(same(stored[name], made[name]) for name in stored)
    return type(stored) is type(made) and stored == made


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vectors")
    main(folder)
    return folder


def set_keys(part: BaseModel, found: dict[str, set[str]]) -> None:
    """Keys that are set in any part of a manifest, by the part's class."""
    found.setdefault(type(part).__name__, set()).update(part.model_fields_set)
    for value in part.__dict__.values():
        for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]:
            if isinstance(one, BaseModel):
                set_keys(one, found)


def test_manifests_have_every_key_that_there_is(made: Path) -> None:
    """What another runtime reads of these, it can read of every bundle: none may ignore a key that it does not know."""
    found: dict[str, set[str]] = {}
    for case in json.loads((made / "manifests.json").read_text("utf-8")):
        set_keys(Manifest.model_validate(case["manifest"]), found)
    parts = [one for one in Part.__subclasses__() if one.__module__.startswith("edgespec.runtimes.files.")]
    assert found == {one.__name__: set(one.model_fields) for one in parts}


@pytest.mark.parametrize("name", MAKERS)
def test_the_core_still_computes_them(made: Path, name: str) -> None:
    stored = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    again = json.loads((made / f"{name}.json").read_text("utf-8"))
    assert len(stored) == len(again)
    for before, now in zip(stored, again, strict=True):
        assert same(before, now), f"was {before}, is {now}; if that is meant: python tools/make_vectors.py"
