"""The tokenizer of a GGUF file as a tokenizer.json: byte-level BPE ("gpt2") and SentencePiece BPE ("llama")."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.source.gguf.config import Metadata
from edgespec.export.tokenizers.added_tokens import AddedToken, place, surround
from edgespec.export.tokenizers.byte_level import GPT2, LLAMA3, QWEN2, TEKKEN, describe_byte_level
from edgespec.export.tokenizers.described import Described, build
from edgespec.export.tokenizers.sentencepiece import (
    BPE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    describe_sentencepiece,
    new_sentencepiece,
)

BESIDE = "put the model's tokenizer.json beside the file: it is then used instead"
# how text is cut into words, by llama.cpp's names
SPLITS = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", *GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": GPT2,
    "smollm": (r"\p{N}", *GPT2),
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "tekken": TEKKEN,
}
WHOLE = ("llama-bpe", "llama3", "llama-v3", "tekken")  # a piece that is a token needs no merges
BEGIN = ("llama-bpe", "llama3", "llama-v3")  # BOS, unless the file says otherwise


def describe_tokenizer(file: Path, metadata: Metadata) -> Described:
    """The tokenizer.json of a GGUF file.

    Raises:
        UnsupportedModel: a kind of tokenizer, or a way to split text, that is not supported.
        ExportError: no or inconsistent tokens.
    """
    kind = metadata.get("tokenizer.ggml.model")
    kinds = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in kinds:
        raise UnsupportedModel(
            f"{file}: tokenizer model {kind!r} is not supported; supported: {', '.join(kinds)}", BESIDE
        )
    tokens, types = _tokens(file, metadata)
    try:
        described = kinds[kind](file, metadata, tokens, types)
        # control tokens are special; text that is a user-defined one is never cut
        kept = (CONTROL, UNKNOWN, USER_DEFINED)
        added = {at: (token, its) for at, (token, its) in enumerate(zip(tokens, types, strict=True)) if its in kept}
        place(described, {at: AddedToken(token, its != USER_DEFINED) for at, (token, its) in added.items() if token})
        surround(described, *_ends(metadata, tokens))
        build(described, file)
    except ExportError:
        raise
    except Exception as error:  # of settings of unexpected types
        raise ExportError(f"{file}: its tokenizer is damaged: {error}", BESIDE) from error
    return described


def tokenizer_settings(metadata: Metadata) -> dict[str, Any]:
    """What tokenizer_config.json says."""
    tokens = metadata["tokenizer.ggml.tokens"]
    found: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if number is not None and 0 <= number < len(tokens):
            found[f"{name}_token"] = tokens[number]
    if isinstance(template := metadata.get("tokenizer.chat_template"), str):
        found["chat_template"] = template
    return found | {"add_bos_token": _begins(metadata)}


def _tokens(file: Path, metadata: Metadata) -> tuple[list[str], list[int]]:
    """The tokens by id and their types, without the unused ones at the end, which only fill the embedding."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ExportError(f"{file}: has no tokenizer.ggml.tokens", BESIDE)
    types = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ExportError(f"{file}: has {len(tokens)} tokens and {len(types)} token types", BESIDE)
    size = len(tokens)
    while size > 1 and types[size - 1] == UNUSED:
        size -= 1
    return tokens[:size], types[:size]


def _byte_level(file: Path, metadata: Metadata, tokens: list[str], types: list[int]) -> Described:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in SPLITS:
        raise UnsupportedModel(
            f"{file}: pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported; supported: {', '.join(SPLITS)}",
            BESIDE,
        )
    vocab, merges = {token: number for number, token in enumerate(tokens)}, metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ExportError(f"{file}: has no tokenizer.ggml.merges", BESIDE)
    pairs = [[merge[:at], merge[at + 1 :]] for merge in merges if (at := merge.find(" ", 1)) > 0]
    if len(pairs) != len(merges):
        raise ExportError(f"{file}: a merge of its tokenizer is not two tokens", "download it again")
    return describe_byte_level(vocab, pairs, SPLITS[name], ignore_merges=name in WHOLE)


def _sentencepiece(file: Path, metadata: Metadata, tokens: list[str], types: list[int]) -> Described:
    gemma = str(metadata.get("general.architecture")).startswith("gemma")
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) < len(tokens):
        raise ExportError(f"{file}: has no tokenizer.ggml.scores for its {len(tokens)} tokens", BESIDE)
    model = new_sentencepiece()
    for at, (token, score, kind) in enumerate(zip(tokens, scores, types, strict=False)):
        if gemma:  # runs of spaces are stored as such, and not the scores but the order of tokens says what is merged
            token, score = "\u2581" * len(token) if token and not token.strip(" ") else token, -at
        model.pieces.add(piece=token, score=score, type=kind)
    unknown = int(metadata.get("tokenizer.ggml.unknown_token_id", 0))
    model.trainer_spec.model_type, model.trainer_spec.byte_fallback = BPE, True
    model.trainer_spec.unk_id = unknown if 0 <= unknown < len(tokens) else 0
    model.normalizer_spec.remove_extra_whitespaces = False
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    return describe_sentencepiece(file, model, {"add_prefix_space": prefix})


def _begins(metadata: Metadata) -> bool:
    """Whether BOS is put in front of a text."""
    own = metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in BEGIN
    return bool(metadata.get("tokenizer.ggml.add_bos_token", own))


def _ends(metadata: Metadata, tokens: list[str]) -> tuple[str | None, str | None]:
    """BOS in front of a text, and EOS behind it, where the model wants them."""
    bos, eos = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos"))
    return (
        tokens[int(bos)] if bos is not None and _begins(metadata) else None,
        tokens[int(eos)] if eos is not None and metadata.get("tokenizer.ggml.add_eos_token", False) else None,
    )
