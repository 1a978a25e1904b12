"""tokenizer.json, as the tokenizers library reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.errors import ExportError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Described = dict[str, Any]


def tokenizer_json(
    model: Described, *, normalizer: Described | None, words: Described | None, decoder: Described
) -> Described:
    """A tokenizer without added tokens; ``words``: how text is cut before the model."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": normalizer,
        "pre_tokenizer": words,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }


def bpe_model(vocab: dict[str, int], merges: list[list[str]], **options: Any) -> Described:
    """A BPE model; ``options``: what differs from a byte-level one."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **options,
        "vocab": vocab,
        "merges": merges,
    }


def build(described: Described, source: Path) -> Tokenizer:
    """The tokenizer.

    Raises:
        ExportError: the library refuses it.
    """
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(json.dumps(described))
    except Exception as error:  # the library raises a plain Exception
        raise ExportError(f"{source}: its tokenizer cannot be converted: {error}", "download it again") from error
