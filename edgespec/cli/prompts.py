"""Where ``bench`` and ``verify`` take their prompts from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.errors import InvalidRequest

if TYPE_CHECKING:
    from edgespec.engine import Engine, Prompt


def read_prompts(engine: Engine, file: Path | None, limit: int) -> list[Prompt]:
    """Prompts of a file, or those of the bundle's golden vectors.

    A .jsonl file has objects with ``prompt`` (or Spec-Bench's ``turns``); any other file has a prompt a line.

    Raises:
        InvalidRequest: the file cannot be read or has no prompts.
    """
    if file is None:
        prompts: list[Prompt] = [vector.prompt for vector in engine.bundle.manifest.golden]
        if not prompts:
            raise InvalidRequest("this bundle has no prompts of its own", "give some with --prompts FILE")
        return prompts[:limit]
    try:
        lines = [line for line in file.read_text("utf-8-sig").splitlines() if line.strip()]
        texts = [_of_json(json.loads(line)) for line in lines] if file.suffix == ".jsonl" else lines
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise InvalidRequest(
            f"{file}: cannot read prompts: {error}", "one prompt a line, or .jsonl with `prompt`"
        ) from error
    if not texts:
        raise InvalidRequest(f"{file}: has no prompts", "one prompt a line, or .jsonl with `prompt`")
    return list(texts[:limit])


def _of_json(item: dict[str, object]) -> str:
    turns = item.get("turns")
    return str(turns[0] if isinstance(turns, list) else item["prompt"])
