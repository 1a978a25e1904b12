"""The command line says the defaults of the library."""

from __future__ import annotations

from dataclasses import fields

import click
import pytest

from edgespec.cli.app import cli
from edgespec.cli.common import SAMPLING
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.settings import Settings
from edgespec.runtimes.options import LoadOptions


@pytest.mark.parametrize("defaults", [SamplingParams(), LoadOptions(), Settings()], ids=lambda one: type(one).__name__)
def test_options_have_the_defaults_of_their_fields(defaults: SamplingParams | LoadOptions | Settings) -> None:
    command = cli.get_command(click.Context(cli), "run")
    assert command is not None
    given = command.make_context("run", ["bundle"], resilient_parsing=True).params
    same = [name for field in fields(defaults) if (name := field.name) in given and name not in ("accept", *SAMPLING)]
    assert {name: given[name] for name in same} == {name: getattr(defaults, name) for name in same}
    assert len(same) > 1
    assert {name: given[name] for name in SAMPLING} == dict.fromkeys(SAMPLING)  # the model's own, else the fields'
