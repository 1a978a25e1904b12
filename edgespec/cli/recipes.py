"""``--recipe`` of commands: the option, its list, and what a recipe makes of the options of an export."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from edgespec.cli.common import option, table_console

if TYPE_CHECKING:
    from edgespec.planning.recipes import Recipe

F = TypeVar("F", bound=Callable[..., Any])
LIST = "list"


def recipe_option(what: str) -> Callable[[F], F]:
    """``--recipe NAME``; ``--recipe list`` shows all and ends.  ``what``: what is taken from it."""
    text = f"Take {what} from a recipe, a name or a JSON file; options that are given win.  `list` shows all."
    return option("--recipe", text, callback=_listed, is_eager=True)


def _listed(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value == LIST and not context.resilient_parsing:
        show_recipes()
        context.exit()
    return value


def show_recipes() -> None:
    """Print the recipes as a table."""
    from rich.table import Table

    from edgespec.planning.recipes import recipe_table

    table = Table(box=None, pad_edge=False)
    rows = recipe_table()
    shown = [title for title in rows[0] if title != "summary"]  # the name says it in short
    for title in shown:
        table.add_column(title, no_wrap=title == "recipe", overflow="fold")
    for row in rows:
        table.add_row(*(row[title] for title in shown))
    table_console().print(table)


def with_recipe(name: str, model: str, options: dict[str, Any]) -> tuple[Recipe, dict[str, Any]]:
    """Options of an export, defaults included, with a recipe's where none were given on the command line.

    The recipe's sizes are cut to the model's own.

    Raises:
        InvalidRequest: no such recipe.
        ExportError: a draft or heads are missing that the recipe's methods need; unreadable models.
    """
    from edgespec.export.source.source import BUILTIN
    from edgespec.planning.recipes import apply_recipe, check_parts, read_recipe

    recipe = read_recipe(name)
    source = click.get_current_context().get_parameter_source
    names = {"format": "form"}
    default = click.core.ParameterSource.DEFAULT
    given = {key: value for key, value in options.items() if source(names.get(key, key)) is not default}
    made = options | _fitted(apply_recipe(recipe, given), given, model, options["revision"])
    check_parts(recipe, made["methods"], bool(made["draft"]), bool(made["heads"]) or model.startswith(BUILTIN))
    return recipe, made


def _fitted(options: dict[str, Any], given: dict[str, Any], model: str, revision: str | None) -> dict[str, Any]:
    """Cut what a recipe asks for to what can be had: no more than the model's context and vocabulary, and coded keys
    only where native operators can measure them."""
    from edgespec.errors import UnsupportedModel
    from edgespec.export.bundle.model_part import open_described
    from edgespec.export.source.source import resolve
    from edgespec.runtimes.ort.native_library import native_library

    found = dict(options)
    if "attention" not in given and native_library().path is None:
        found["attention"] = ()
    try:
        arch = open_described(resolve(model, revision, weights=False), None, text_only=True)
    except UnsupportedModel:
        return found  # the export uses transformers, or refuses it with a hint
    if "context" not in given and found.get("context", 0) > arch.most_context:
        found["context"] = None
    for key in ("draft_vocab", "head_vocab"):
        if key not in given and (found.get(key) or 0) >= arch.facts.vocab:
            found[key] = None
    return found
