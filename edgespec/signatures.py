"""Signatures and docstrings that name every setting, of functions that take settings by name.

A type checker reads ``**changes: Unpack[SettingsChanges]``.  ``help``, notebooks and ``inspect`` read these.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from edgespec.declared import declared

Function = TypeVar("Function", bound=Callable[..., Any])
_ENTRY = re.compile(r"(\*{0,2}\w+(?:, \*{0,2}\w+)*): (.+)")
_WIDTH = 116  # of a docstring's lines


class ModelsOwn:
    """A default that the model gives: shown in a signature, and never passed on."""

    def __repr__(self) -> str:
        return "<the model's>"


def takes(*sources: type, omit: Iterable[str] = (), model: Iterable[str] = ()) -> Callable[[Function], Function]:
    """Show the fields of dataclasses as keywords of a function, in the place of its ``**changes``.

    Args:
        sources: dataclasses whose docstrings describe their ``Attributes``; a ``TypedDict`` among them has wider types
            for some of the names.
        omit: fields that the function does not take.
        model: fields whose default is the model's own value, where it has one.
    """
    wider = {name: kind for one in sources if not dataclasses.is_dataclass(one) for name, kind in _types(one).items()}
    fields: dict[str, inspect.Parameter] = {}
    told: dict[str, str] = {}
    for source in sources:
        if dataclasses.is_dataclass(source):
            told |= described(source)
            for field in dataclasses.fields(source):
                if field.name not in omit and not field.name.startswith("_"):
                    fields[field.name] = _parameter(field, wider.get(field.name, field.type), field.name in model)

    def shown(function: Function) -> Function:
        own = inspect.signature(function)
        first = [one for one in own.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        known = {one.name for one in first}
        added = [one for name, one in fields.items() if name not in known]
        function.__signature__ = own.replace(parameters=[*first, *added])  # type: ignore[attr-defined]
        function.__doc__ = _with_entries(function.__doc__, {one.name: told[one.name] for one in added})
        return function

    return shown


def described(source: Any) -> dict[str, str]:
    """Read what a docstring says of each parameter or attribute -> name to text."""
    found = {one.name: setting.help for one, setting in declared(source)} if dataclasses.is_dataclass(source) else {}
    for block in _sections(inspect.getdoc(source) or ""):
        for entry in re.split(r"\n(?=\S)", block):
            if match := _ENTRY.fullmatch(" ".join(entry.split())):
                for name in match[1].split(", "):
                    found[name.lstrip("*")] = match[2]
    return found


def _sections(doc: str) -> list[str]:
    """Take the bodies of Args and Attributes out of a docstring, without their indentation."""
    found = re.findall(r"^(?:Args|Attributes):\n((?:(?: +.*)?\n?)+)", doc, re.M)
    return [textwrap.dedent(block).strip() for block in found]


def _types(source: type) -> dict[str, Any]:
    return {name: getattr(kind, "__forward_arg__", kind) for name, kind in source.__annotations__.items()}


def _parameter(field: dataclasses.Field[Any], kind: Any, model: bool) -> inspect.Parameter:
    default: Any = field.default if field.default is not dataclasses.MISSING else None
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    default = ModelsOwn() if model else default
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _with_entries(doc: str | None, entries: dict[str, str]) -> str | None:
    """Write entries into a docstring in the place of ``**changes``, or of nothing if it has none."""
    if doc is None:  # python -OO
        return None
    lines = [
        textwrap.fill(f"{name}: {text}", _WIDTH, initial_indent="    ", subsequent_indent=" " * 8)
        for name, text in entries.items()
    ]
    written = "\n".join(lines)
    changed, count = re.subn(
        r"^ {4}\*\*\w+: .*(?:\n {8}.*)*", lambda _: written, inspect.cleandoc(doc), count=1, flags=re.M
    )
    assert count == 1, "a docstring without **changes"
    return changed
