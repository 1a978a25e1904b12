"""Reading JSON files that must hold an object."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from edgespec.errors import ExportError


def read_object(file: Path, hint: str) -> dict[str, Any]:
    """The object in a JSON file.

    Args:
        file: such as config.json.
        hint: what to do where it is missing.

    Raises:
        ExportError: missing, not valid JSON, or not an object.
    """
    if not file.is_file():
        raise ExportError(f"{file.parent}: has no {file.name}", hint)
    try:
        found = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ExportError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ExportError(f"{file}: expected a JSON object, got {type(found).__name__}")
    return found
