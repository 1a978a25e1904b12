"""Byte-level BPE, as of GPT-2 and Qwen2, as a tokenizer.json: of vocab.json and merges.txt, or of a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgespec.errors import ExportError
from edgespec.export.tokenizers.described import Described, bpe_model, tokenizer_json
from edgespec.runtimes.files.json_file import read_json

# How models cut text into words before merging: documented patterns, facts of the models.
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = (rf"{_ENDINGS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",)
QWEN2 = (rf"{_ENDINGS}|{_WORDS}|\p{{N}}|{_REST}",)
GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
FAMILIES = {"GPT2Tokenizer": "gpt2", "CodeGenTokenizer": "gpt2", "Qwen2Tokenizer": "qwen2"}
GENERIC = (None, "PreTrainedTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend")


def describe_byte_level(
    vocab: dict[str, int],
    merges: list[list[str]],
    splits: Sequence[str] | None,
    *,
    prefix: bool = False,
    ignore_merges: bool = False,
) -> Described:
    """tokenizer.json, without added tokens and BOS.

    Args:
        vocab: token -> id.
        merges: pairs of tokens, in the order of their ranks.
        splits: regular expressions whose matches are words, one after the other; None = as in GPT-2.
        prefix: a space is put before the text.
        ignore_merges: a word that is a token needs no merges.
    """
    words: Described = {
        "type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": splits is None,
    }  # fmt: skip
    if splits is not None:
        cut = [
            {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False} for split in splits
        ]
        words = {"type": "Sequence", "pretokenizers": [*cut, words]}
    return tokenizer_json(
        bpe_model(vocab, merges, continuing_subword_prefix="", end_of_word_suffix="", ignore_merges=ignore_merges),
        normalizer={"type": "NFC"} if splits == QWEN2 else None,
        words=words,
        decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    )


def read_byte_level(folder: Path, config: dict[str, Any], model_type: str | None) -> Described:
    """tokenizer.json, without added tokens and BOS, of a folder with vocab.json and merges.txt.

    Args:
        folder: the model's.
        config: its tokenizer_config.json; ``tokenizer_class`` says how text is cut into words.
        model_type: of config.json, where the class does not say it.

    Raises:
        ExportError: unreadable files, or a class whose words nobody here knows.
    """
    splits = QWEN2 if _family(folder, config.get("tokenizer_class"), model_type) == "qwen2" else None
    vocab, merges = _read_vocab(folder / "vocab.json"), _read_merges(folder / "merges.txt")
    return describe_byte_level(vocab, merges, splits, prefix=bool(config.get("add_prefix_space", False)))


def _family(folder: Path, name: Any, model_type: str | None) -> str:
    if name in GENERIC:
        return "qwen2" if str(model_type).startswith("qwen") else "gpt2"
    family = FAMILIES.get(str(name).removesuffix("Fast"))
    if family is None:
        raise ExportError(
            f"{folder}: has vocab.json and merges.txt of a {name}; expected {', '.join(FAMILIES)}",
            "give a model folder with a tokenizer.json",
        )
    return family


def _read_vocab(file: Path) -> dict[str, int]:
    vocab = read_json(file, ExportError, "download it again")
    if not isinstance(vocab, dict) or not vocab or not all(type(number) is int for number in vocab.values()):
        raise ExportError(f"{file}: expected an object of token ids", "download it again")
    return vocab


def _read_merges(file: Path) -> list[list[str]]:
    """A pair a line; the first line may be a comment with the version."""
    try:
        lines = file.read_text("utf-8").split("\n")
    except ValueError as error:
        raise ExportError(f"{file}: not UTF-8 text: {error}", "download it again") from error
    pairs = [line.rstrip("\r").split(" ") for line in lines if line.strip() and not line.startswith("#version")]
    for pair in pairs:
        if len(pair) != 2:
            raise ExportError(f"{file}: expected two tokens a line, got {' '.join(pair)[:60]!r}", "download it again")
    return pairs
