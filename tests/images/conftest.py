"""The embedded model that reads print, exported once."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model

PRINT = Path(__file__).parents[1] / "data" / "print"
SAID = {file.stem: file.read_text("utf-8").rstrip("\n") for file in sorted(PRINT.glob("*.txt"))}  # of NAME.png


@pytest.fixture(scope="session")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export it in int8, with its draft."""
    folder = tmp_path_factory.mktemp("reader") / "reader"
    draft = "builtin:reader-draft"
    export_model(
        ExportOptions("builtin:reader", folder, ["speculative"], "int8", draft=draft, threads=1, quick=True),
        golden=False,
    )
    return folder
