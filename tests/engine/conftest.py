"""What the tests of the engine share: both kinds of operators, and engines that have seen nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.runtimes.files.manifest import Operators
from edgespec.runtimes.slots.slot import Slot
from tests.conftest import OPERATORS, use_operators

Get = Callable[..., Engine]


@pytest.fixture(params=OPERATORS)
def operators(request: pytest.FixtureRequest) -> Operators:
    """Use each kind of operators in turn: the engine's tests hold for both."""
    return use_operators(request)


@pytest.fixture
def fresh(bundle: Callable[..., Path], operators: Operators) -> Callable[..., Engine]:
    """Return a function that loads a new engine over a bundle of format ``form``."""

    def get(form: str = "int4", **settings: Any) -> Engine:
        return load(bundle(form), threads=1, **{"operators": operators, **settings})

    return get


@pytest.fixture
def prefills(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Slot, list[int]]]:
    """Slot and tokens of every call that fills one with any."""
    seen: list[tuple[Slot, list[int]]] = []
    prefill = Slot.prefill

    def noted(self: Slot, tokens: Sequence[int]) -> None:
        if len(tokens):
            seen.append((self, [int(token) for token in tokens]))
        prefill(self, tokens)

    monkeypatch.setattr(Slot, "prefill", noted)
    return seen
