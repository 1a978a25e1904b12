"""What tests of benchmarks share: running one, and bundles for it."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgespec.decoding.rows import RowSampler
from edgespec.engine.sessions import Session

Run = Callable[..., Any]


@pytest.fixture
def text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """(benchmark, arguments) -> what it prints; ``changes`` are constants of the benchmark that make it short."""

    def run(name: str, *arguments: object, **changes: Any) -> str:
        module = importlib.import_module(f"benchmarks.{name}")
        for constant, value in changes.items():
            monkeypatch.setattr(module, constant, value)
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        # some replace these for the rest of their process
        monkeypatch.setattr(RowSampler, "choose", RowSampler.choose)
        monkeypatch.setattr(Session, "_bare", Session._bare)
        capsys.readouterr()
        module.main()
        return capsys.readouterr().out

    return run


@pytest.fixture
def figures(text: Callable[..., str]) -> Run:
    """The one JSON object that a benchmark prints."""
    return lambda *arguments, **changes: json.loads(text(*arguments, **changes))


@pytest.fixture
def small(bundles: Callable[..., Path]) -> Path:
    """A bundle with every method."""
    return bundles("stock")


@pytest.fixture
def native_bundle(native: None, bundles: Callable[..., Path]) -> Path:
    """The same for native operators."""
    return bundles("native")
