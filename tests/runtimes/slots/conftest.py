"""Fixtures of the tests of slots: both kinds of operators, and the embedded model with random heads."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from edgespec.export.source.source import resolve
from edgespec.runtimes.files.formats import Format
from edgespec.runtimes.files.manifest import Operators
from tests.conftest import OPERATORS, TARGET, use_operators
from tests.support.planned import PLANS, Planned, with_heads


@pytest.fixture(params=OPERATORS)
def operators(request: pytest.FixtureRequest) -> Operators:
    """Run every test with both kinds, by default."""
    return use_operators(request)


@pytest.fixture(scope="session")
def planner(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Planned]:
    """(operators, name of ``PLANS``, format) -> the embedded model with random heads."""
    made: dict[tuple[str, ...], Planned] = {}

    def get(layout: Operators, name: str, form: Format = "fp32") -> Planned:
        key = layout, name, form
        if key not in made:
            made[key] = with_heads(tmp_path_factory.mktemp("heads"), resolve(TARGET), PLANS[name], form, layout)
        return made[key]

    return get


@pytest.fixture
def planned(planner: Callable[..., Planned], operators: Operators) -> Callable[..., Planned]:
    return lambda name, form="fp32": planner(operators, name, form)
