"""Profiles of passes: what is counted follows from the model's shape; no test asserts a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from edgespec.engine.engine import Engine
from edgespec.errors import InvalidRequest
from edgespec.reports.measuring import profile_passes
from edgespec.runtimes.ort.native_library import PARTS, Roofs


@pytest.mark.parametrize("operators", ["native"], indirect=True)
def test_parts_of_a_pass(engine: Callable[..., Engine]) -> None:
    target = engine()
    facts = target.bundle.manifest.target.facts
    found = profile_passes(target, rows=(1, 4), depth=50, turns=1)
    assert (list(found.counts), found.depth) == ([1, 4], 50)
    one, four = (found.counts[rows] for rows in (1, 4))
    for counts in (one, four):
        assert counts.passes == 1
        assert list(counts.parts) == list(PARTS)
        assert sum(part.seconds for part in counts.parts.values()) == pytest.approx(counts.inside)
        assert counts.inside < counts.wall
    assert four.parts["linear"].macs == 4 * one.parts["linear"].macs
    assert four.parts["linear"].bytes == one.parts["linear"].bytes  # weights are read once
    assert one.parts["head"].macs >= facts.vocab * facts.hidden
    tokens = one.parts["attention"].macs / (2 * facts.kv_layers * facts.heads * -(-facts.head_dim // 16) * 16)
    assert tokens == 51
    shown = found.as_dict()
    assert [row["rows"] for row in shown["passes"]] == [1, 4]
    assert shown["passes"][0]["v"] == 1
    assert all(row["least_ms"] > 0 and row["python_ms"] > 0 for row in shown["passes"])
    target.generate("ROMEO:", max_new_tokens=4)  # is not counted: a profile begins with nothing
    assert profile_passes(target, rows=(2,), depth=8, turns=1).counts[2].passes == 1


def test_stock_operators_are_refused(engine: Callable[..., Engine]) -> None:
    with pytest.raises(InvalidRequest, match="native operators"):
        profile_passes(engine())


def test_the_higher_roof_counts() -> None:
    roofs = Roofs(bandwidth=10.0, dots=100.0)
    assert roofs.seconds(20, 100) == 2.0
    assert roofs.seconds(20, 400) == 4.0
