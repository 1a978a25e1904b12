"""vocab.json and merges.txt (byte-level BPE, as of GPT-2 and Qwen2) as a tokenizer.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgespec.errors import ExportError
from edgespec.runtimes.files.json_file import read_json

Described = dict[str, Any]  # of tokenizer.json

# How Qwen2 cuts text into words: its documented pattern, a fact of the model.
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
FAMILIES = {"GPT2Tokenizer": "gpt2", "CodeGenTokenizer": "gpt2", "Qwen2Tokenizer": "qwen2"}
GENERIC = (None, "PreTrainedTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend")


def convert_byte_level(folder: Path, config: dict[str, Any], model_type: str | None) -> Described:
    """tokenizer.json, without added tokens and BOS, of a folder with vocab.json and merges.txt.

    Args:
        folder: the model's.
        config: its tokenizer_config.json; ``tokenizer_class`` says how text is cut into words.
        model_type: of config.json, where the class does not say it.

    Raises:
        ExportError: unreadable files, or a class whose words nobody here knows.
    """
    family = _family(folder, config.get("tokenizer_class"), model_type)
    prefix = bool(config.get("add_prefix_space", False))
    byte_level = {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": family == "gpt2"}
    words: Described = byte_level
    if family == "qwen2":
        split = {"type": "Split", "pattern": {"Regex": QWEN2_WORDS}, "behavior": "Isolated", "invert": False}
        words = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": {"type": "NFC"} if family == "qwen2" else None,
        "pre_tokenizer": words,
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": _read_vocab(folder / "vocab.json"),
            "merges": _read_merges(folder / "merges.txt"),
        },
    }


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
