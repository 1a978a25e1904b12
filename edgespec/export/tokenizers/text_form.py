"""Find the tokens around the texts of an encoder-decoder, and the rules in its generation_config.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgespec.errors import ExportError
from edgespec.export.tokenizers.facts import GENERATION
from edgespec.export.tokenizers.generation import read_generation, writing_rules
from edgespec.runtimes.files.seq2seq_format import Place, TextForm
from edgespec.runtimes.text.codec import TextCodec
from edgespec.runtimes.text.languages import code_of
from edgespec.runtimes.text.sources import SourceTexts

# tokens that name a language: Marian, M2M-100, MADLAD-400, Whisper; then NLLB and mBART
_LANGUAGE = re.compile(
    r"^(>>[\w-]+<<|__[a-z]{2,4}__|<2[A-Za-z_-]{2,12}>|<\|[a-z]{2,3}\|>|[a-z]{2,3}_[A-Z][A-Za-z]{1,3})$"
)
_FIRST = (">>", "<2")  # prefixes of tokens that come before the source and name the target language


def text_form(folder: Path, config: Mapping[str, Any], codec: TextCodec, sources: TextCodec | None = None) -> TextForm:
    """Read the form of texts from an encoder-decoder's tokenizer and configuration.

    Args:
        folder: the model's.
        config: its config.json.
        codec: tokenizer of the decoder's texts.
        sources: of what the encoder reads, if it is another one.

    Raises:
        ExportError: no token that a decoder's text begins with, or rules that cannot be.
    """
    generation = read_generation(folder, config)
    tokens = _language_tokens(codec)
    languages = {code_of(token): number for token, number in tokens.items()}
    by_id = {number: code for code, number in languages.items()}
    source = _source(sources or codec, by_id)
    if any(token.startswith(_FIRST) for token in tokens):
        source.insert(source.index("text"), "to")
    start = _token(generation, config, "decoder_start_token_id", "bos_token_id")
    if start is None:
        raise ExportError(
            f"{folder}: expected decoder_start_token_id, the token that a text begins with, and found none",
            f"add it to {GENERATION}",
        )
    forced = _token(generation, config, "forced_bos_token_id")
    begin: list[Any] = [start]
    named = start if start in by_id else forced if forced in by_id else None  # a model of one target language
    if languages and "to" not in source and "from" in source:
        begin = ["to"] if start in by_id else [start, "to"]
    elif forced is not None:
        begin.append(forced)
    told = codec.config
    target = _known(told.get("tgt_lang") or told.get("target_lang"), languages)
    return TextForm(
        source=source,
        prefix_tokens=begin,
        languages=languages if {"from", "to"} & {*source, *begin} else {},
        prefixes=_prefixes(config),
        default_from=_known(told.get("src_lang") or told.get("source_lang"), languages),
        default_to=target if named is None else by_id[named],
        rules=writing_rules(folder, generation),
    )


def _known(name: Any, languages: Mapping[str, int]) -> str | None:
    """Return a language that the configuration names, if the model has it, or has none to choose from."""
    return name if isinstance(name, str) and name and (not languages or name in languages) else None


def surroundings(form: TextForm, codec: TextCodec) -> tuple[list[int], tuple[list[int], list[int]]]:
    """Return the first tokens of a decoder's text, and the tokens before and after the words of a source.

    If languages are required, use the model's first ones.

    Args:
        codec: of sources.
    """
    begin = [token if isinstance(token, int) else next(iter(form.languages.values())) for token in form.prefix_tokens]
    language = next(iter(form.languages), None)
    told = {name: language for name in ("from", "to") if form.needs(name)}
    around = SourceTexts(Path(), form, codec).encode("", told.get("from"), told.get("to"))
    at = form.source.index("text")
    return begin, (around[:at], around[at:])


def _language_tokens(codec: TextCodec) -> dict[str, int]:
    """Return the tokens that name a language, with their ids; bare codes only if they are special tokens."""
    special = {token.content for token in codec.tokenizer.get_added_tokens_decoder().values() if token.special}
    vocab = codec.tokenizer.get_vocab(with_added_tokens=True)
    found = {token: number for token, number in vocab.items() if _LANGUAGE.match(token)}
    found = {token: number for token, number in found.items() if token.startswith(_FIRST) or token in special}
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _source(codec: TextCodec, by_id: Mapping[int, str]) -> list[int | Place]:
    """Find the tokens that the tokenizer puts around a text; a language there is the source's."""
    whole, bare = codec.encode("a"), codec.encode("a", special=False)
    starts = [at for at in range(len(whole) - len(bare) + 1) if whole[at : at + len(bare)] == bare]
    begin = starts[0] if starts else 0
    places: list[int | Place] = ["from" if token in by_id else token for token in whole[:begin]]
    places.append("text")
    return [*places, *("from" if token in by_id else token for token in whole[begin + len(bare) :])]


def _token(generation: Mapping[str, Any], config: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        for described in (generation, config):
            value = described.get(name)
            if type(value) is int and value >= 0:
                return value
    return None


def _prefixes(config: Mapping[str, Any]) -> dict[str, str]:
    tasks = config.get("task_specific_params")
    found = tasks.items() if isinstance(tasks, dict) else ()
    return {
        name: task["prefix"] for name, task in found if isinstance(task, dict) and isinstance(task.get("prefix"), str)
    }
