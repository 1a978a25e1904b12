"""The small files of a model folder, written for a GGUF file: configuration, tokenizer, chat template."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from edgespec.export.source.gguf.config import Metadata
from edgespec.export.source.gguf.tokenizer import describe_tokenizer, tokenizer_settings

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
BESIDE = ("generation_config.json", "calibration.txt")
ENDS = ("eos", "eot", "eom")  # of a text, a turn, a message


def write_small_files(folder: Path, file: Path, metadata: Metadata, config: dict[str, Any]) -> list[str]:
    """Write what a model folder holds besides weights; returns notes.

    A tokenizer.json beside the GGUF file is taken instead of the file's own tokenizer.

    Args:
        folder: an empty folder.
        file: the GGUF file.
        metadata: of the file.
        config: what becomes config.json.

    Raises:
        ExportError: the tokenizer is of a kind that is not supported, or damaged.
    """
    notes = []
    _write(folder / "config.json", config)
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ENDS]
    found = sorted({int(number) for number in ends if number is not None})
    _write(folder / "generation_config.json", {"eos_token_id": found} if found else {})
    taken: tuple[str, ...] = BESIDE
    if (file.parent / TOKENIZER[0]).is_file():
        notes.append(f"the tokenizer is {TOKENIZER[0]} beside the file, not the file's own")
        taken = (*TOKENIZER, *BESIDE)
    else:
        _write(folder / TOKENIZER[0], describe_tokenizer(file, metadata))
        _write(folder / TOKENIZER[1], tokenizer_settings(metadata))
    for name in taken:
        if (file.parent / name).is_file():
            shutil.copyfile(file.parent / name, folder / name)
    return notes


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")
