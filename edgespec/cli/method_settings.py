"""``--set NAME=VALUE``: what only one method, or one rule of acceptance, has to set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from edgespec.cli.groups import option

LIST = "list"


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (name.strip() for name in text.split(","))))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r} is not a number or several with commas between, like 2 or 3,2,1") from None


# name -> (how its text is read, what it is); the values are those of DraftOptions, SamplingParams, Accept and Settings
NAMES: dict[str, tuple[Callable[[str], Any], str]] = {
    "branch": (
        _numbers,
        "speculative, swift, eagle, mtp: guesses in a tree; 2 = two at every node along the first choices, "
        "3,2,1 = by depth",
    ),
    "nodes": (int, "medusa: most guesses of a tree, 1 to 64; else what is predicted to be fastest"),
    "threshold": (float, "paradecode: how sure an early exit must be, 0 to 1; else what the export found best"),
    "cycles": (int, "blockwise: passes that refine a block before it is verified, 0 to 16; else 0"),
    "kind": (str, "swift: the kind of text, such as chat or code; a skip set is kept for each; else text"),
    "search": (float, "swift: most time that its search may take, as a share; else 0.02"),
    "proposers": (_names, "chain: methods asked in turn, as in ngram,self-spec"),
    "verification": (str, "rejection of sampled guesses: token (the default), or block, of which more stand"),
    "min-block": (int, "lossy: at least so many guesses of a chain stand; else 0"),
    "shadow": (int, "compare one round in so many with plain decoding, 0 = none; else 16 where acceptance is lossy"),
}
_KNOWN = "\n".join(f"  {name:<13}{what}" for name, (_, what) in NAMES.items())


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
    try:
        value = NAMES[name][0](text)
        apply(Settings(), {name: value})
    except (ValueError, InvalidRequest) as error:
        raise ValueError(f"{item}: {error}; {name} is\n  {NAMES[name][1]}") from None
    return name, value


def _read(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> dict[str, Any]:
    """Settings by their Python names.

    Raises:
        click.BadParameter: no NAME=VALUE, an unknown name, or a value that the library refuses.
    """
    if LIST in given and not ctx.resilient_parsing:
        click.echo(_KNOWN)
        ctx.exit()
    found: dict[str, Any] = {}
    for item in given:
        try:
            name, value = read_setting(item)
        except ValueError as error:
            raise click.BadParameter(str(error), ctx, param) from None
        found[name] = value
    return found


def apply(settings: Any, given: Mapping[str, Any]) -> Any:
    """``Settings`` with these on top.

    Raises:
        InvalidRequest: a value outside its range.
    """
    from dataclasses import replace

    rest = dict(given)
    if "min-block" in rest:
        settings = settings.changed(accept=replace(settings.accept, min_block=rest.pop("min-block")))
    return settings.changed(**rest)


set_option = option(
    "--set",
    f"A setting of one method or rule; may be repeated.  Names: {', '.join(NAMES)}.  `--set list` explains them.",
    dest="method_settings",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_read,
    is_eager=True,
)
