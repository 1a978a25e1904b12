"""Help in groups: what people need first stands first, what few need has a heading of its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from edgespec.cli.method_settings import NAMES

F = TypeVar("F", bound=Callable[..., Any])
COMMON, OUTPUT = "Common options", "Output"


PATH = click.Path(path_type=Path)
COUNT = click.IntRange(min=1)
THREADS = click.IntRange(1, 512)


def option(
    names: str, text: str, kind: Any = None, default: Any = None, *, dest: str | None = None, **more: Any
) -> Callable[[F], F]:
    """Make an option whose help shows its default.

    Args:
        names: as they are typed, with spaces between.
        text: of its help.
        kind: a type; names to choose from; ``bool`` = a flag.
        default: None = none.
        dest: the parameter of the function; None = as the option is called.
        more: for ``click.option``.
    """
    if kind is bool:
        more["is_flag"] = True
    elif kind is not None:
        more["type"] = click.Choice(kind) if isinstance(kind, (list, tuple)) else kind
    if default is not None:
        more = {"default": default, "show_default": True} | more
    return click.option(*names.split(), *([dest] if dest else []), help=text, **more)


def group(name: str, *options: Callable[[F], F]) -> Callable[[F], F]:
    """Options of a command under one heading, in this order; headings stand in the order of the decorators."""

    def add(function: F) -> F:
        before = len(getattr(function, "__click_params__", []))
        for option in reversed(options):
            function = option(function)
        for param in function.__click_params__[before:]:  # type: ignore[attr-defined]
            param.heading = name
        return function

    return add


class GroupedCommand(click.Command):
    """A command whose help has a section for each group; options of no group are common ones."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections: common options first, output last."""
        for heading, params in self.sections(ctx).items():
            found = [record for param in params if (record := param.get_help_record(ctx)) is not None]
            records = [(re.sub(r" (INTEGER|FLOAT)( RANGE)?$", " N", names), text) for names, text in found]
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, and say where settings of one method went that are typed as options."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name.lstrip("-")
            if name in NAMES and any(param.name == "method_settings" for param in self.params):
                text = f"{error.option_name} is a setting of one method: --set {name}=VALUE"
                raise click.UsageError(text, ctx) from None
            raise

    def sections(self, ctx: click.Context) -> dict[str, list[click.Parameter]]:
        """Parameters by heading, in the order of the help."""
        found: dict[str, list[click.Parameter]] = {COMMON: []}
        params = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        for param in params:
            heading = OUTPUT if "--help" in param.opts else getattr(param, "heading", COMMON)
            found.setdefault(heading, []).append(param)
        return found | {OUTPUT: found.pop(OUTPUT)}  # last
