"""Options that say which guesses are made and which of them stand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from edgespec.decoding.accept import Accept

F = TypeVar("F", bound=Callable[..., Any])


def _rule(ctx: click.Context, param: click.Parameter, value: str) -> Accept:
    """An acceptance rule."""
    from edgespec.decoding.accept import Accept
    from edgespec.errors import InvalidRequest

    try:
        return Accept.parse(value)
    except InvalidRequest as error:
        raise click.BadParameter(str(error), ctx, param) from error


def _branch(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Whole numbers with commas between."""
    from edgespec.decoding.settings import DraftOptions
    from edgespec.errors import InvalidRequest

    if value is None:
        return None
    try:
        return DraftOptions(branch=tuple(int(part) for part in value.split(","))).branch
    except ValueError:
        text = f"{value!r} is not a number or several with commas between, like 2 or 3,2,1"
        raise click.BadParameter(text, ctx, param) from None
    except InvalidRequest as error:
        raise click.BadParameter(str(error), ctx, param) from error


def rule_options(function: F) -> F:
    """Shape of the guesses and acceptance."""
    for option in reversed(
        [
            click.option(
                "--verification",
                type=click.Choice(["token", "block"]),
                default="token",
                show_default=True,
                help="How rejection judges a chain: token by token, or as a block, of which more stands.",
            ),
            click.option(
                "--branch",
                metavar="N[,N...]",
                callback=_branch,
                help="Trees of a draft model's guesses: 2 = so many candidates along its first choices; "
                "3,2,1 = a full tree by depth.  [default: a chain]",
            ),
            click.option(
                "--nodes",
                type=click.IntRange(1, 64),
                help="Most guesses of a medusa tree.  [default: what is predicted to be fastest here]",
            ),
            click.option(
                "--threshold",
                type=click.FloatRange(0, 1),
                help="How sure an early exit of paradecode must be.  [default: what the export found best]",
            ),
            click.option(
                "--cycles",
                type=click.IntRange(0, 16),
                help="Passes that refine a block of blockwise before it is verified.  [default: 0]",
            ),
            click.option(
                "--accept",
                metavar="RULE",
                callback=_rule,
                default="exact",
                show_default=True,
                help="Which guesses stand.  Lossy: typical, top-k:K, distance:D, all.",
            ),
            click.option(
                "--min-block",
                type=click.IntRange(min=0),
                default=0,
                show_default=True,
                help="Lossy: at least so many guesses of a chain stand; 0 is off.",
            ),
        ]
    ):
        function = option(function)
    return function


def make_accept(options: dict[str, Any]) -> Accept:
    """The acceptance rule of ``rule_options``."""
    accept: Accept = options["accept"]
    return replace(accept, min_block=options["min_block"])
