"""Small audio-input and speech models of random weights, and the embedded one that knows spoken digits, as bundles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from tests.support.snac import write_orpheus
from tests.support.whisper import torch_model, write_whisper


@pytest.fixture(scope="session")
def model() -> Any:
    pytest.importorskip("torch", reason="needs edgespec[train]")
    pytest.importorskip("transformers", reason="needs transformers")
    return torch_model()


@pytest.fixture(scope="session")
def sound() -> NDArray[np.float32]:
    """9.3 s: four windows of 2 s and a part of one, or more."""
    rng = np.random.default_rng(4)
    found = rng.standard_normal(148_800) * np.abs(np.sin(np.arange(148_800) / 5000)) / 5
    return np.asarray(found, np.float32)


@pytest.fixture(scope="session")
def whisper_bundle(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whisper")
    source = write_whisper(folder / "model", model)
    export_model(ExportOptions(str(source), folder / "bundle", [], "fp32", threads=1), golden=False)
    return folder / "bundle"


@pytest.fixture(scope="session")
def engine(whisper_bundle: Path) -> Iterator[Engine]:
    with load(whisper_bundle, threads=1) as made:
        yield made


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export the embedded model in int8, with its draft."""
    folder = tmp_path_factory.mktemp("digits") / "digits"
    draft = "builtin:spoken-digits-draft"
    export_model(
        ExportOptions("builtin:spoken-digits", folder, ["speculative"], "int8", draft=draft, threads=1), golden=False
    )
    return folder


@pytest.fixture(scope="session")
def orpheus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export a model that writes codes of speech, which is its own draft."""
    folder = tmp_path_factory.mktemp("orpheus")
    source = write_orpheus(folder / "model")
    export_model(ExportOptions(str(source), folder / "bundle", ["self-spec", "speculative"], "fp32", draft=str(source),
                           threads=1, trials=1), golden=False)  # fmt: skip
    return folder / "bundle"
