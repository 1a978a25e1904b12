"""Declare settings, a line each: default, range, help text, and the places where one shows.

``tools/generate_settings.py`` writes the files that repeat these declarations: the ``TypedDict`` of all
settings, the command line's table, and the page of the reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar

from edgespec.errors import InvalidRequest, unknown_name

Options = TypeVar("Options")
METHOD_NAMES = {"plain": "ar"}  # names of methods that are accepted -> those of bundles and results


@dataclass(frozen=True)
class Range:
    """The values that a setting may have; None too, where it is the default.

    Attributes:
        words: a description, as in ``an integer >= 1``.
        holds: whether a value is one.
        kind: their type in JSON: int, float, str or bool; None = they have none.
        least, most: of a number; None = no bound.
        choices: of a text; empty = any.
    """

    words: str
    holds: Callable[[Any], bool]
    kind: type | None = None
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()


def whole(value: Any, least: float = 0, most: float = math.inf) -> bool:
    """Tell whether a value is a whole number in a range."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def count(least: int = 0, most: int | None = None, words: str = "") -> Range:
    """Return the range of whole numbers from ``least`` to ``most``."""
    said = words or (f"an integer >= {least}" if most is None else f"a whole number from {least} to {most}")
    return Range(said, lambda value: whole(value, least, math.inf if most is None else most), int, least, most)


def number(words: str, least: float = -math.inf, most: float = math.inf, above: bool = False) -> Range:
    """Return the range of finite numbers from ``least`` to ``most``; ``above``: without ``least``."""

    def holds(value: Any) -> bool:
        if isinstance(value, bool):
            return False
        return math.isfinite(value) and least <= value <= most and not (above and value == least)

    lowest, highest = (bound if math.isfinite(bound) else None for bound in (least, most))
    return Range(words, holds, float, lowest, highest)


def choice(*names: str) -> Range:
    """Return the range of some names."""
    return Range(f"one of {', '.join(names)}", lambda value: value in names, str, choices=names)


FLAG = Range("True or False", lambda value: isinstance(value, bool), bool)
NAME = Range("a name", lambda value: isinstance(value, str), str)
ANY = Range("anything", lambda value: True)


@dataclass(frozen=True)
class Setting:
    """A declaration.

    Attributes:
        values: its range.
        help: one line, without a full stop.
        option: the command line's option, as in ``--top-k``; empty = it has none.
        set: reads the text of ``--set NAME=TEXT``; None = it is no such name.
        server: whether requests have it in the field ``edgespec``.
        takes: the type that callers may give, where it is wider than the field's.
        adapt: makes a value of what a caller gave and the value so far.
        shown: text of the default, where the field's says little.
    """

    values: Range
    help: str
    option: str = ""
    set: Callable[[str], Any] | None = None
    server: bool = False
    takes: str = ""
    adapt: Callable[[Any, Any], Any] | None = None
    shown: str = ""


def setting(
    default: Any, values: Range, help: str, *, field_options: Mapping[str, Any] | None = None, **how: Any
) -> Any:
    """Declare a field of a dataclass as a setting.

    Args:
        default: of the field; a class or a function is called for it.
        values: its range.
        help: one line, without a full stop.
        field_options: for ``dataclasses.field``.
        **how: the other attributes of ``Setting``.
    """
    made = {"default_factory": default} if callable(default) else {"default": default}
    return field(**made, metadata={"setting": Setting(values, help, **how)}, **(field_options or {}))


def declared(kind: Any) -> Iterator[tuple[Field[Any], Setting]]:
    """Yield the fields of a dataclass that are settings, with their declarations."""
    for one in fields(kind):
        if (found := one.metadata.get("setting")) is not None:
            yield one, found


def check(options: Any) -> None:
    """Refuse, by an ``InvalidRequest``, a dataclass with a field outside its range."""
    for one, found in declared(type(options)):
        value = getattr(options, one.name)
        if value is None and one.default is None:
            continue
        try:
            holds = found.values.holds(value)
        except (AttributeError, OverflowError, TypeError):  # of another type, or an integer beyond every float
            holds = False
        if not holds:
            none = ", or None" if one.default is None else ""
            raise InvalidRequest(f"{one.name} is {value!r}: expected {found.values.words}{none}")


def copy_with(options: Options, what: str, changes: Mapping[str, Any], omit: frozenset[str] = frozenset()) -> Options:
    """Copy a dataclass with fields changed; fields of the dataclasses in it may be given directly.

    Args:
        options: the dataclass.
        what: its fields are called in messages, as in ``setting``.
        changes: values by name; ``Setting.adapt`` may change them.
        omit: fields that may not be given.

    Raises:
        InvalidRequest: an unknown name, or a value outside its range.
    """
    if not changes:
        return options
    own = {one.name: one for one in fields(options)}  # type: ignore[arg-type]
    parts = {name: getattr(options, name) for name, one in own.items() if one.metadata.get("part")}
    inner = {one.name: name for name, part in parts.items() for one in fields(part)}
    known = own.keys() - omit | inner.keys()
    if unknown := [name for name in changes if name not in known]:
        raise unknown_name(what, unknown[0], known)
    made: dict[str, Any] = {}
    for name in own.keys() & changes.keys():
        made[name] = _adapted(own[name], changes[name], getattr(options, name))
    for part in parts:
        some = {name: value for name, value in changes.items() if inner.get(name) == part and name not in own}
        if some:
            made[part] = copy_with(made.get(part, parts[part]), what, some)
    return replace(options, **made)  # type: ignore[type-var]


def _adapted(one: Field[Any], value: Any, before: Any) -> Any:
    found = one.metadata.get("setting")
    return value if found is None or found.adapt is None else found.adapt(value, before)


def part(kind: type) -> Any:
    """Declare a field that is a dataclass of settings, whose fields callers may give directly."""
    assert is_dataclass(kind)
    return field(default_factory=kind, metadata={"part": True})


__all__ = ["ANY", "FLAG", "MISSING", "NAME", "Range", "Setting", "check", "choice", "copy_with", "count", "declared",
           "number", "part", "setting", "whole"]  # fmt: skip
