"""Settings are declared once: what is generated from the declarations is current, and every range is kept."""

from __future__ import annotations

import json
from dataclasses import MISSING, replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli.common import make_settings
from edgespec.cli.method_settings import HELP, NAMES
from edgespec.declared import declared
from edgespec.decoding.beams import BeamOptions
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.settings import DraftOptions, Settings
from edgespec.errors import InvalidRequest
from edgespec.server.requests import OWN_SETTINGS, Extension
from tests.cli.conftest import Command, command, demo  # noqa: F401
from tools.generate_settings import ROOT, generated

KINDS = (Settings, SamplingParams, DraftOptions, BeamOptions)
EVERY = [(kind, one, found) for kind in KINDS for one, found in declared(kind)]


def test_generated_files_are_current() -> None:
    """``python -m tools.generate_settings`` writes them."""
    for name, text in generated().items():
        assert (ROOT / name).read_text("utf-8") == text, name


@pytest.mark.parametrize(("kind", "one", "found"), EVERY, ids=[one.name for _, one, _ in EVERY])
def test_a_value_outside_its_range_is_refused_by_name(kind: Any, one: Any, found: Any) -> None:
    wrong: list[Any] = [object()] if found.values.words != "anything" else []
    wrong += [found.values.least - 1] if found.values.least is not None else []
    wrong += [found.values.most + 1] if found.values.most is not None else []
    wrong += ["no such choice"] if found.values.choices else []
    wrong += [True] if found.values.kind in (int, float) else []  # Python takes it for 1
    for value in wrong:
        with pytest.raises(InvalidRequest, match=f"^{one.name} is .*: expected "):
            replace(kind(), **{one.name: value})
    assert found.help
    assert one.default is not MISSING or one.default_factory is not MISSING


def test_at_most_eight_rare_settings() -> None:
    assert len(NAMES) <= 8
    assert len({*NAMES, *HELP}) == len(NAMES) + len(HELP)


def test_a_request_takes_what_is_declared_for_it() -> None:
    assert {one.name for _, one, found in EVERY if found.server} == set(OWN_SETTINGS)
    shape = Extension.model_json_schema()["properties"]
    for name, found in OWN_SETTINGS.items():
        assert shape[name]["description"] == found.help
        (kind, _) = shape[name]["anyOf"]
        assert kind.get("enum", []) == list(found.values.choices)
        assert kind.get("minimum") == found.values.least
    assert json.loads(Extension().model_dump_json(exclude_none=True)).keys() == {"show_drafts", "reasoning"}


OPTIONAL = [
    (one.name, found) for _, one, found in EVERY if found.option and one.name not in ("method", "fallback", "grammar")
]


@pytest.mark.parametrize(("name", "found"), OPTIONAL, ids=[name for name, _ in OPTIONAL])
def test_an_option_reaches_the_settings(name: str, found: Any) -> None:
    options: dict[str, Any] = {"no_fallback": False, "method_settings": {}}
    values = {
        "stop": ("x",),
        "accept": "typical",
        "acceptance": "coupled",
        "source_language": "en",
        "target_language": "de",
        "beams": 3,
    }
    value = values.get(name, 3 if found.values.kind is int else 0.5)
    plain, changed = make_settings(None, options), make_settings(None, options | {name: value})
    assert plain == Settings().changed(method=None)
    assert changed != plain


def test_parts_are_changed_by_their_fields() -> None:
    made = Settings().changed(temperature=0.5, branch=3, gamma=2, stop="x", beams=2)
    assert (made.sampling.temperature, made.drafts.branch, made.gamma) == (0.5, (3,), 2)
    assert (made.stop, made.beams) == (("x",), BeamOptions(2))
    assert made.changed(beams=1).beams is None
    assert made.changed() is made
    assert made.changed(sampling=SamplingParams(top_k=2), temperature=1.0).sampling == SamplingParams(1.0, 2)
    with pytest.raises(InvalidRequest, match="unknown setting 'temprature'"):
        made.changed(temprature=1.0)


def test_plain_decoding_has_two_names(command: Command, demo: Path) -> None:  # noqa: F811
    assert Settings(method="plain") == Settings().changed(method="plain") == Settings(method="ar")
    asked = ("run", demo, "--prompt", "ROMEO:", "--max-new-tokens", 8, "--json", "--method")
    plain, named = command(*asked, "plain").json, command(*asked, "ar").json
    assert (plain["tokens"], plain["method_used"]) == (named["tokens"], "ar")
    assert command("bench", demo, "--method", "plain", "--max-prompts", 1, "--repeats", 1, "--json").code == 0
