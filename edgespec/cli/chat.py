"""What ``edgespec run --chat`` gives to the model's template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.json_file import parse_json, read_json


def template_options(given: Sequence[str]) -> dict[str, Any]:
    """Options of a template from KEY=VALUE; a value is JSON (``false``, ``3``), and text where it is no JSON.

    Raises:
        InvalidRequest: without a key or a value.
    """
    found: dict[str, Any] = {}
    for item in given:
        key, equals, value = item.partition("=")
        if not equals or not key.isidentifier():
            raise InvalidRequest(f"--template-option {item!r}: expected KEY=VALUE", "as in enable_thinking=false")
        try:
            found[key] = parse_json(value)
        except ValueError:
            found[key] = value
    return found


def read_tools(file: Path | None) -> list[dict[str, Any]] | None:
    """Functions that the model may call, from a JSON file: a list of JSON schemas; None = none.

    Raises:
        InvalidRequest: no such file, or something else in it.
    """
    if file is None:
        return None
    hint = 'give a list such as [{"type": "function", "function": {"name": ..., "parameters": ...}}]'
    tools = read_json(file, InvalidRequest, hint)
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidRequest(f"{file}: expected a list of JSON schemas", hint)
    return tools
