"""What the tests of the engine share: both kinds of operators, and engines that have seen nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.runtimes.files.manifest import Operators
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
