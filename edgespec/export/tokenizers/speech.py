"""Read the transcript format of a speech model: special tokens by name, rules from generation_config.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from edgespec.errors import ExportError, first_line
from edgespec.export.tokenizers.facts import GENERATION, read_if_sound
from edgespec.runtimes.files.speech import SpeechPart
from edgespec.runtimes.text.codec import TextCodec

_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
_TASKS = ("translate", "transcribe")
_SEVERAL = 51_865  # tokens of the smallest vocabulary of a model that knows several languages


def speech_part(folder: Path, config: Mapping[str, Any], codec: TextCodec) -> SpeechPart:
    """Read the tokens and rules of Whisper's transcripts.

    Args:
        folder: the model's.
        config: its config.json.
        codec: its tokenizer.

    Raises:
        ExportError: a tokenizer without the tokens that a transcript begins with, or rules that cannot be.
    """
    generation = read_if_sound(folder / GENERATION)
    told = {**config, **{key: value for key, value in generation.items() if value is not None}}
    found: dict[str, Any] = {
        "start": _named(folder, codec, "startoftranscript"),
        "no_timestamps": _named(folder, codec, "notimestamps"),
        "previous": codec.token_id("<|startofprev|>"),
        "no_speech": codec.token_id("<|nospeech|>") or codec.token_id("<|nocaptions|>"),  # as older ones call it
        "suppress_tokens": _tokens(told, "suppress_tokens"),
        "begin_suppress_tokens": _tokens(told, "begin_suppress_tokens"),
        "max_initial_timestamp_index": told.get("max_initial_timestamp_index"),
    }
    if told.get("is_multilingual", told.get("vocab_size", 0) >= _SEVERAL):
        found["tasks"] = {task: _named(folder, codec, task) for task in _TASKS}
        found["languages"] = _languages(codec, found["start"], min(found["tasks"].values()))
    try:
        return SpeechPart(**found)
    except ValidationError as error:
        raise ExportError(f"{folder / GENERATION}: {first_line(error)}", "repair this setting, or delete it") from error


def _named(folder: Path, codec: TextCodec, name: str) -> int:
    token = codec.token_id(f"<|{name}|>")
    if token is None:
        raise ExportError(
            f"{folder}: expected a tokenizer with the token <|{name}|>, and it has none", "download its files again"
        )
    return token


def _tokens(told: Mapping[str, Any], name: str) -> list[Any]:
    found = told.get(name)
    return [token for token in found if token != -1] if isinstance(found, list) else []


def _languages(codec: TextCodec, start: int, end: int) -> dict[str, int]:
    """Return the language tokens: those between the start of a transcript and the tokens of tasks."""
    named = ((token, codec.tokenizer.id_to_token(token) or "") for token in range(start + 1, end))
    return {match[1]: token for token, name in named if (match := _LANGUAGE.fullmatch(name))}
