"""Reading JSON files that must hold an object."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgespec.errors import ExportError
from edgespec.runtimes.files import json_file


def read_object(file: Path, hint: str) -> dict[str, Any]:
    """The object in a JSON file; numbers may be infinite, as transformers writes them.

    Args:
        file: such as config.json.
        hint: what to do where it is missing.

    Raises:
        ExportError: missing, not valid JSON, or not an object.
    """
    if not file.is_file():
        raise ExportError(f"{file.parent}: has no {file.name}", hint)
    return json_file.read_object(file, ExportError, infinite=True)
