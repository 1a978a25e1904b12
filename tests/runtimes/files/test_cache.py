"""The cache between runs is listed, and stays below a limit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgespec.runtimes.files import cache as module
from edgespec.runtimes.files.cache import (
    LIMIT,
    cache_folder,
    describe,
    entries,
    keep_within,
    remove,
    set_limit,
    size_limit,
    touch,
)

LONG_AGO = 1_000_000.0


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the test a separate cache; return its folder."""
    folder = tmp_path / "own"
    folder.mkdir()
    monkeypatch.setenv("EDGESPEC_CACHE", str(folder))
    return folder


def conversion(folder: Path, name: str, size: int, used: float) -> Path:
    """Put a conversion of ``size`` bytes, last used at time ``used``, into the cache; its weights are in ``folder``."""
    weights = folder / f"{name}.data"
    weights.write_bytes(b"w")
    made = cache_folder() / f"{name}-stock"
    made.mkdir()
    (made / "model.data").write_bytes(bytes(size))
    describe(made, weights, {}, made.name)
    os.utime(made, (used, used))
    return made


def test_each_kind_is_listed_and_parts_are_not(tmp_path: Path, own: Path) -> None:
    conversion(tmp_path, "a", 1000, LONG_AGO)
    for name in ("profiles/1.json", "skip-sets/2.json", "tokenizers/3", "devices.json", "digests/4.json", "rows.json",
                 "passes/6.json", "x", "prompts/5/ab-512.keys", "prompts/5/ab-530-cd.end",
                 ".b-stock.part-1/model.data"):  # fmt: skip
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).write_text("12345")
    found = {entry.kind: entry for entry in entries()}
    assert set(found) == set(module.KINDS)
    assert found["profiles"].bytes == 5
    assert (found["prompts"].bytes, found["prompts"].tokens) == (10, 256 + 18)
    assert found["weights"].source == str(tmp_path / "a.data")
    assert (found["weights"].used, found["weights"].gone) == (LONG_AGO, False)


@pytest.mark.parametrize("change", ["deleted", "changed"])
def test_weights_of_a_bundle_that_is_gone(tmp_path: Path, change: str) -> None:
    conversion(tmp_path, "a", 10, LONG_AGO)
    if change == "deleted":
        (tmp_path / "a.data").unlink()
    else:
        (tmp_path / "a.data").write_bytes(b"other")
    assert [entry.gone for entry in entries()] == [True]


def test_beyond_the_limit_what_is_gone_goes_first_then_the_oldest(tmp_path: Path) -> None:
    made = {
        name: conversion(tmp_path, name, 1000, LONG_AGO + at) for at, name in enumerate(("old", "new", "gone", "used"))
    }
    (tmp_path / "gone.data").unlink()
    touch(made["used"])
    size = sum(entry.bytes for entry in entries())
    assert [entry.path for entry in set_limit(size - 1)] == [made["gone"]]
    assert [entry.path for entry in set_limit(2500)] == [made["old"]]
    assert [entry.path for entry in set_limit(1)] == [made["new"]]  # what was just used may be being opened
    assert [entry.path for entry in entries()] == [made["used"]]
    os.utime(made["used"], (LONG_AGO, LONG_AGO))
    assert keep_within(made["used"]) == []  # nor kept entries of any size
    assert [entry.path for entry in keep_within()] == [made["used"]]
    assert sorted(path.name for path in cache_folder().iterdir()) == ["limit"]


def test_limits_are_kept(own: Path) -> None:
    assert size_limit() == LIMIT
    set_limit(5000)
    assert size_limit() == 5000
    set_limit(None)
    assert size_limit() is None
    (own / "limit").write_text("nonsense")
    assert size_limit() == LIMIT


def test_what_cannot_be_removed_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = conversion(tmp_path, "a", 10, LONG_AGO)
    (entry,) = entries()

    def refuse(self: Path, target: Path) -> Path:
        raise PermissionError("a process has it open")

    monkeypatch.setattr(Path, "rename", refuse)
    assert not remove(entry)
    assert sorted(path.name for path in made.iterdir()) == ["model.data", "origin.json"]
