"""The vectors that other runtimes are tested with are what this core computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.make_vectors import FOLDER, MAKERS, main

WITHIN = 1e-12


def same(stored: Any, made: Any) -> bool:
    """Equal up to the last bits of logarithms, which processors may give otherwise."""
    if isinstance(stored, float) and isinstance(made, float):
        return stored == made or abs(stored - made) <= WITHIN * max(1.0, abs(stored))
    if isinstance(stored, list) and isinstance(made, list):
        return len(stored) == len(made) and all(same(*both) for both in zip(stored, made, strict=True))
    if isinstance(stored, dict) and isinstance(made, dict):
        return stored.keys() == made.keys() and all(same(stored[name], made[name]) for name in stored)
    return type(stored) is type(made) and stored == made


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vectors")
    main(folder)
    return folder


@pytest.mark.parametrize("name", MAKERS)
def test_the_core_still_computes_them(made: Path, name: str) -> None:
    stored = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    again = json.loads((made / f"{name}.json").read_text("utf-8"))
    assert len(stored) == len(again)
    for before, now in zip(stored, again, strict=True):
        assert same(before, now), f"was {before}, is {now}; if that is meant: python tools/make_vectors.py"
