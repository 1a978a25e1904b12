"""Both kinds of operators, and bundles of random models with every method."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.runtimes.files.formats import Format
from edgespec.runtimes.files.manifest import Operators
from tests.conftest import OPERATORS, THREADS, fixed_skip_set, use_operators
from tests.support.checkpoints import make_heads

HEADS = ("medusa", "blockwise", "paradecode")
# a short text: what acceptance is does not matter
MEASURED = "There was nothing left to do but wait, and so she sat down beside the boat. " * 4


@pytest.fixture(params=OPERATORS)
def operators(request: pytest.FixtureRequest) -> Operators:
    """Whatever asks for operators holds for both kinds, unless it says otherwise."""
    return use_operators(request)


def engine_of(folder: Path, source: str, operators: Operators, form: Format, heads: Sequence[str] = HEADS,
              context: int | None = None) -> Engine:  # fmt: skip
    """Export a model with every method and load it; the draft is the model itself, so that much is accepted."""
    (folder / "text.txt").write_text(MEASURED, "utf-8")
    made = [str(make_heads(folder / kind, kind, source)) for kind in heads]
    options = ExportOptions(
        source, folder / "bundle", ["speculative", "self-spec", "swift", *heads], form, heads=made, draft=source,
        context=context, calibration=folder / "text.txt", skip_set=fixed_skip_set(folder, source), threads=THREADS,
        operators=operators,
    )  # fmt: skip
    export_model(options, golden=False)
    return load(options.output, threads=THREADS, operators=operators)
