"""Bundles of older schemas are read as they were."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.engine.loading import load
from edgespec.errors import BundleError
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.manifest import MANIFEST, SCHEMA, Operators
from edgespec.runtimes.files.migration import OLDEST
from tests.conftest import PROMPTS, THREADS
from tests.support.older import schema_2

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
