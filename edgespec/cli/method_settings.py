"""Rare settings: the names of ``--set``, which `/set` of a chat knows as well, and help of all settings.

``settings.json`` is written by tools/generate_settings.py from the declarations in ``edgespec/decoding``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

LIST = "list"
_TABLE = json.loads((Path(__file__).parent / "settings.json").read_text("utf-8"))
HELP: dict[str, str] = _TABLE["options"]  # by option
NAMES: dict[str, str] = _TABLE["set"]  # help by name
_KNOWN = "\n".join(f"  {name:<16}{what}" for name, what in NAMES.items())


def read_setting(item: str) -> tuple[str, Any]:
    """Read NAME=VALUE -> the name, and the value.

    Raises:
        ValueError: it is not that, the name is unknown, or the library refuses the value.
    """
    from edgespec.decoding.settings import Settings, every_setting
    from edgespec.errors import InvalidRequest

    name, equals, text = item.partition("=")
    if not equals or name not in NAMES:
        what = f"no setting {name!r}" if equals else f"{item!r}: expected NAME=VALUE"
        if equals and f"--{name}" in HELP:
            what = f"{name!r} is an option: --{name} {text}"
        raise ValueError(f"{what}; the names are\n{_KNOWN}")
    read = next(found.set for one, found in every_setting() if one.name == name.replace("-", "_") and found.set)
    try:
        value = read(text)
        apply(Settings(), {name: value})
    except (ValueError, InvalidRequest) as error:
        raise ValueError(f"{item}: {error}; {name} is\n  {NAMES[name]}") from None
    return name, value


def read_settings(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> dict[str, Any]:
    """Read the values of ``--set``; `list` explains the names, and the command ends."""
    if LIST in given and not ctx.resilient_parsing:
        click.echo(_KNOWN)
        ctx.exit()
    try:
        return dict(map(read_setting, given))
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None


def apply(settings: Any, given: Mapping[str, Any]) -> Any:
    """Change ``Settings`` by these.

    Raises:
        InvalidRequest: a value outside its range.
    """
    from dataclasses import fields, replace

    from edgespec.decoding.beams import BeamOptions

    rest = {name.replace("-", "_"): value for name, value in given.items()}
    searched = {one.name: rest.pop(one.name) for one in fields(BeamOptions) if one.name in rest}
    if searched:
        settings = settings.changed(beams=replace(settings.beams or BeamOptions(), **searched))
    return settings.changed(**rest)
