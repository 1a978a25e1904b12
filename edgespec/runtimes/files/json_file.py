"""Bounded readers for untrusted JSON files: bundles, models, adapters, heads, profiles, caches.

Input that is too large, too deep, not finite, ambiguous or against the schema raises an error of the caller's kind,
which names the expectation.
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from edgespec.errors import BundleError, EdgespecError

MOST_BYTES = 32 << 20
MOST_DEPTH = 48
_DIGITS = 64  # of a number

if TYPE_CHECKING:
    from pydantic import BaseModel

Made = TypeVar("Made", bound="BaseModel")
Kind = type[EdgespecError]


def open_regular(path: Path) -> BufferedReader:
    """Open the file at ``path`` to read it; reject a pipe, a device or a socket at once, also through links.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    file = os.fdopen(os.open(path, flags), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(None, "is not a regular file")
    return file


def read_regular(path: Path, most: int) -> bytes:
    """Read the file at ``path``; reject a pipe, a device or a socket before reading, also through links.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
        ValueError: it is larger than ``most`` bytes.
    """
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"more than {most} bytes")
    return data


def parse_json(text: str | bytes, infinite: bool = False) -> Any:
    """Parse ``text`` as JSON and return its value.

    Args:
        text: of UTF-8.
        infinite: infinities are taken as transformers writes them: ``Infinity`` (version 4), and an object
            ``{"__float__": "Infinity"}`` (version 5).

    Raises:
        ValueError: no UTF-8 or JSON; too large or too deep; NaN or an infinity; an object with a key twice.
    """
    if len(text) > MOST_BYTES:
        raise ValueError(f"{len(text)} bytes, expected at most {MOST_BYTES}")
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    try:
        value = json.loads(
            text,
            object_pairs_hook=_with_infinities if infinite else _object,
            parse_constant=_infinity if infinite else _constant,
            parse_int=_integer,
            parse_float=_real,
        )
    except RecursionError:
        raise ValueError(f"nested more than {MOST_DEPTH} deep") from None
    if "\\ud" in text or "\\uD" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except (UnicodeEncodeError, RecursionError):
            raise ValueError("a text with half a character") from None
    level: list[Any] = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MOST_DEPTH):
        below = (item for held in level for item in (held.values() if isinstance(held, dict) else held))
        level = [item for item in below if isinstance(item, (dict, list))]
        if not level:
            return value
    raise ValueError(f"nested more than {MOST_DEPTH} deep")


def read_json(
    path: Path, kind: Kind = BundleError, hint: str | None = None, what: str = "", infinite: bool = False
) -> Any:
    """Read the JSON file at ``path`` and return its value.

    Args:
        path, kind, hint: the file, and of the error.
        what: the file is expected to be, for the error, as in "not a device profile: ".
        infinite: see ``parse_json``.

    Raises:
        kind: not there, or see ``parse_json``.
    """
    try:
        return parse_json(read_regular(path, MOST_BYTES), infinite)
    except OSError as error:
        raise kind(f"{path}: cannot be read: {error.strerror or error}", hint) from error
    except ValueError as error:  # of JSON, of UTF-8
        raise kind(f"{path}: {what}not readable as JSON: {error}", hint) from error


def read_object(
    path: Path, kind: Kind = BundleError, hint: str | None = None, infinite: bool = False
) -> dict[str, Any]:
    """Read the JSON object in the file at ``path``; arguments of ``read_json``.

    Raises:
        kind: see ``read_json``; or the file holds something else.
    """
    found = read_json(path, kind, hint, infinite=infinite)
    if not isinstance(found, dict):
        raise kind(f"{path}: expected a JSON object, got {type(found).__name__}", hint)
    return found


def validated(model: type[Made], data: Any, where: object, kind: Kind = BundleError, hint: str | None = None) -> Made:
    """Validate a JSON value by the schema ``model``.

    Raises:
        kind: the first thing that does not fit, by its place in the file ``where``.
    """
    from pydantic import ValidationError  # not at import: a help page reads no file

    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(str(part) for part in first["loc"])
        said = first["msg"].removeprefix("Value error, ")
        raise kind(f"{where}: {f'{at}: ' if at else ''}{said}", hint) from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice[:60]!r} comes twice in one object")
    return found


def _with_infinities(pairs: list[tuple[str, Any]]) -> Any:
    found = _object(pairs)
    return _infinity(str(found["__float__"])) if found.keys() == {"__float__"} else found


def _infinity(name: str) -> float:
    return float(name) if name in ("Infinity", "-Infinity") else _constant(name)


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _integer(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def _real(digits: str) -> float:
    value = float(digits)
    if value - value != 0:
        raise ValueError(f"{digits[:60]} is too large for a number")
    return value
