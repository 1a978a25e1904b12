"""A dozen of ``tests.stress.changes``, whose long run is its own command."""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest

from edgespec.runtimes.files.checked import FileStat
from tests.stress.changes import Bench, make_bench, old_cache_copied_back

CASES = 12


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Bench:
    """Made once."""
    request.getfixturevalue("native")
    return make_bench(tmp_path_factory.mktemp("changes"))


def test_no_change_is_called_exact_or_lossless(bench: Bench) -> None:
    made = [bench.run(random.Random(seed)) for seed in range(CASES)]
    assert [case for case in made if case.wrong] == []
    assert Counter(case.kind for case in made).keys() == {"bundle", "cache", "session"}


def test_an_old_cache_that_is_copied_back_changes_nothing(bench: Bench) -> None:
    assert old_cache_copied_back(bench).wrong == ""


def test_changes_would_be_seen(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """With only size and time of modification, some changes are called exact, and these cases report it."""

    def of(cls: type[FileStat], found: os.stat_result) -> FileStat:
        return cls(0, 0, found.st_size, found.st_mtime_ns)

    monkeypatch.setattr(FileStat, "of", classmethod(of))
    assert any(bench.run(random.Random(seed)).wrong for seed in range(CASES))
