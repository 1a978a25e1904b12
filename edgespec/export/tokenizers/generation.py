"""Read generation_config.json: its values, and its rules for allowed tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from edgespec.errors import ExportError, first_line
from edgespec.export.tokenizers.facts import GENERATION, read_if_sound
from edgespec.runtimes.files.seq2seq_format import WritingRules
from edgespec.runtimes.text.rules import RuledText

OF_TOKENS = (
    "suppress_tokens",
    "begin_suppress_tokens",
    "bad_words_ids",
    "no_repeat_ngram_size",
    "min_length",
    "min_new_tokens",
    "forced_eos_token_id",
)
OF_TEXTS = "max_length", "num_beams", "length_penalty", "early_stopping"
_FIELDS = {"num_beams": "beams"}  # other keys are the names of the rules' fields


def read_generation(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Read generation_config.json without nulls; if it is missing, config.json, where older models have its values.

    Transformers falls back in the same way.
    """
    found = read_if_sound(folder / GENERATION)
    return {key: value for key, value in (found or config).items() if value is not None}


def decoder_rules(folder: Path, config: Mapping[str, Any]) -> WritingRules | None:
    """Read the rules for allowed tokens in a decoder's texts; None = there are none.

    Raises:
        ExportError: rules that cannot be.
    """
    rules = writing_rules(folder, read_generation(folder, config), OF_TOKENS)
    return rules if RuledText.needed(rules) else None


def writing_rules(
    folder: Path, generation: Mapping[str, Any], names: Collection[str] = OF_TOKENS + OF_TEXTS
) -> WritingRules:
    """Read the rules, with transformers' defaults.

    Args:
        names: keys of generation_config.json.
    """
    given = {_FIELDS.get(name, name): generation[name] for name in names if name in generation}
    for name in ("suppress_tokens", "begin_suppress_tokens"):
        if isinstance(given.get(name), list):
            given[name] = [token for token in given[name] if token != -1]
    if isinstance(given.get("forced_eos_token_id"), list):
        given["forced_eos_token_id"] = given["forced_eos_token_id"][0] if given["forced_eos_token_id"] else None
    try:
        return WritingRules(**given)
    except ValidationError as error:
        raise ExportError(f"{folder / GENERATION}: {first_line(error)}", "repair this setting, or delete it") from error
