"""Read the special tokens named in tokenizer_config.json and special_tokens_map.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgespec.errors import BundleError
from edgespec.runtimes.files import json_file

SPECIAL_TOKENS_FILE = "special_tokens_map.json"
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def special_name(config: dict[str, Any], other: dict[str, Any], key: str) -> str | None:
    """Return the text of the special token called ``key``, such as ``bos_token``; None = there is none.

    Args:
        config: tokenizer_config.json: what it says counts, null too.
        other: special_tokens_map.json, for what the first does not mention.
    """
    value = config[key] if key in config else other.get(key)
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) and value else None


def read_object(path: Path, infinite: bool = False) -> dict[str, Any]:
    """Read the JSON object in the file at ``path``, empty if it does not exist; ``infinite``: see ``parse_json``.

    Raises:
        BundleError: the file is not JSON.
    """
    if not path.is_file():
        return {}
    data = json_file.read_json(path, BundleError, "download it again", infinite=infinite)
    return data if isinstance(data, dict) else {}
