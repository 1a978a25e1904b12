"""Settings of one method or rule: the names of ``--set``, which `/set` of a chat knows as well."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

LIST = "list"


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (name.strip() for name in text.split(","))))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r} is not a number or several with commas between, like 2 or 3,2,1") from None


def _early(text: str) -> bool | str:
    return {"true": True, "false": False}.get(text, text)


# name -> (how its text is read, what it is); the values are those of DraftOptions, SamplingParams, Accept and Settings
NAMES: dict[str, tuple[Callable[[str], Any], str]] = {
    "branch": (
        _numbers,
        "draft models, self-drafting, eagle, mtp: guesses in a tree; 2 = two at every node along the first choices, "
        "3,2,1 = by depth",
    ),
    "nodes": (int, "medusa: maximum number of guesses in a tree, 1 to 64; else the fastest prediction"),
    "threshold": (
        float,
        "early exits: how sure one must be, 0 to 1; else what the export found best. dspark: how sure a guess "
        "must be; else as sure as is worth a row",
    ),
    "cycles": (int, "blockwise: passes that refine a block before it is verified, 0 to 16; else 0"),
    "kind": (
        str,
        "skip-set search: kind of text, such as chat or code; a skip set is kept for each; else text",
    ),
    "search": (float, "skip-set search: largest fraction of the decoding time; else 0.02"),
    "proposers": (_names, "chain: methods asked in turn, as in ngram,self-spec"),
    "verification": (str, "rejection of sampled guesses: token (the default), or block, which accepts more"),
    "guidance-scale": (float, "guidance: weight of the prompt against the negative prompt; 1 = none"),
    "negative-prompt": (str, "guidance: what the text is to be unlike; else the prompt's last token"),
    "length-penalty": (float, "beams: score of a text over its length to this power; else the model's own, or 1"),
    "early-stopping": (_early, "beams: true, false or never, when a search ends; else the model's own, or false"),
    "min-block": (int, "lossy: minimum number of accepted guesses of a chain; else 0"),
    "shadow": (int, "compare one round in N with plain decoding, 0 = none; else 16 if acceptance is lossy"),
}
BEAM_NAMES = ("length-penalty", "early-stopping")
_KNOWN = "\n".join(f"  {name:<16}{what}" for name, (_, what) in NAMES.items())


def read_setting(item: str) -> tuple[str, Any]:
    """(name, value) of NAME=VALUE.

    Raises:
        ValueError: it is not that, the name is unknown, or the library refuses the value.
    """
    from edgespec.decoding.settings import Settings
    from edgespec.errors import InvalidRequest

    name, equals, text = item.partition("=")
    if not equals or name not in NAMES:
        what = f"no setting {name!r}" if equals else f"{item!r}: expected NAME=VALUE"
        raise ValueError(f"{what}; the names are\n{_KNOWN}")
    read, what = NAMES[name]
    try:
        value = read(text)
        apply(Settings(), {name: value})
    except (ValueError, InvalidRequest) as error:
        raise ValueError(f"{item}: {error}; {name} is\n  {what}") from None
    return name, value


def read_settings(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> dict[str, Any]:
    """Read what ``--set`` was given; `list` explains the names, and the command ends."""
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
    from dataclasses import replace

    from edgespec.decoding.beams import BeamOptions

    rest = dict(given)
    searched = {name.replace("-", "_"): rest.pop(name) for name in BEAM_NAMES if name in rest}
    if searched:
        settings = settings.changed(beams=replace(settings.beams or BeamOptions(), **searched))
    if "min-block" in rest:
        settings = settings.changed(accept=replace(settings.accept, min_block=rest.pop("min-block")))
    return settings.changed(**{name.replace("-", "_"): value for name, value in rest.items()})
