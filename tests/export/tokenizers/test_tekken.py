"""Tokenizers of tekken.json cut words as ranks say, with special tokens in front."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.errors import ExportError
from edgespec.export.tokenizers.files import open_codec
from edgespec.export.tokenizers.vocabulary import TEKKEN
from edgespec.runtimes.text.byte_tokens import byte_texts

SPECIAL = ["<unk>", "<s>", "</s>", "[INST]"]
TEXTS = ["the theatre then", "Überraschung über 12 Brücken", "  안녕 world!\n", "ththth", "[INST]the</s>"]


def write_tekken(folder: Path, tokens: list[bytes], **changes: Any) -> Path:
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(token).decode()} for rank, token in enumerate(tokens)]
    special = [{"rank": rank, "token_str": word, "is_control": True} for rank, word in enumerate(SPECIAL)]
    config = {"pattern": TEKKEN[0], "default_vocab_size": len(tokens) + 6 - 2, "default_num_special_tokens": 6}
    made = {"config": config, "vocab": vocab, "special_tokens": special} | changes
    (folder / "tekken.json").write_text(json.dumps(made), "utf-8")
    return folder


def tokens_of_bytes() -> list[bytes]:
    rng, found = np.random.default_rng(2), [bytes([byte]) for byte in range(256)]
    text = " ".join(TEXTS * 3).encode()
    while len(found) < 340:
        at, size = rng.integers(0, len(text) - 6), rng.integers(2, 6)
        piece = text[at : at + size]
        cuts = any(piece[:cut] in found and piece[cut:] in found for cut in range(1, len(piece)))
        if piece not in found and cuts:
            found.append(piece)
    return found


def merged(word: bytes, ranks: dict[bytes, int]) -> list[int]:
    """Merge the pair of the lowest rank, the first of several, until there is none."""
    if word in ranks:
        return [ranks[word]]
    parts = [bytes([byte]) for byte in word]
    while True:
        pairs = [(ranks.get(parts[at] + parts[at + 1], 1 << 30), at) for at in range(len(parts) - 1)]
        rank, at = min(pairs, default=(1 << 30, 0))
        if rank == 1 << 30:
            return [ranks[part] for part in parts]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_words_are_merged_by_rank(tmp_path: Path) -> None:
    tokens = tokens_of_bytes()
    codec = open_codec(write_tekken(tmp_path, tokens))
    ranks = {token: rank for rank, token in enumerate(tokens[:-2])}
    letters: Any = {letter: byte for byte, letter in enumerate(byte_texts())}
    cut: Any = codec.tokenizer.pre_tokenizer
    for text in TEXTS[:-1]:
        words = [bytes(letters[letter] for letter in word) for word, _ in cut.pre_tokenize_str(text)]
        assert b"".join(words) == text.encode()
        assert codec.encode(text, special=False) == [6 + rank for word in words for rank in merged(word, ranks)]
    assert codec.encode(TEXTS[-1]) == [1, 3, *(6 + rank for rank in merged(b"the", ranks)), 2]
    assert codec.decode([1, 3, 5, *codec.encode("안녕", special=False)]) == "안녕"


@pytest.mark.parametrize(
    "change", [{"special_tokens": None}, {"config": {}}, {"vocab": [{"token_bytes": "?"}]}, {"vocab": []}]
)
def test_what_is_no_tekken_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(ExportError, match=r"tekken\.json"):
        open_codec(write_tekken(tmp_path, tokens_of_bytes(), **change))
