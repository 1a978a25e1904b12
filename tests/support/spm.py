"""Small sentencepiece models of several kinds, and texts full of what tokenizers stumble over."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import sentencepiece

NASTY = (
    "na\u00efve caf\u00e9 \u2014 \u201cquoted\u201d \u2026",
    "\u65e5\u672c\u8a9e\u306e\u6587\u7ae0\u3067\u3059\u3002\u6771\u4eac\u30bf\u30ef\u30fc",
    "emoji \U0001f600\U0001f469\u200d\U0001f680\U0001f1e9\U0001f1ea done",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd",
    "\u00dcn\u00efc\u00f6d\u00e9 \ufb01 \ufb02 \u00b2 \u00bd \u2103 \u2167",
    "  two  spaces\tand a tab ",
    "x\ny\n\nz",
    "e\u0301 a\u0308 \u0915\u094d\u0937\u093f \u0e44\u0e17\u0e22",
    "\u2581 a \u2581\u2581b\u2581",
)
RANGES = ((0x20, 0x7E), (0xA0, 0x2FFF), (0x4E00, 0x9FFF), (0x1F300, 0x1F6FF), (0x20, 0x20), (0x09, 0x0A))
IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "bpe", "byte_fallback": True, **IDENTITY},
    "no_prefix": {"model_type": "bpe", "byte_fallback": True, "add_dummy_prefix": False, **IDENTITY},
    "bpe_trimmed": {"model_type": "bpe", "normalization_rule_name": "identity"},
    "bpe_nfkc": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "nmt_nfkc"},
    "unigram": {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc"},
    "unigram_folded": {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc_cf"},
    "unigram_bytes": {"model_type": "unigram", "byte_fallback": True, **IDENTITY},
    "unigram_across_words": {"model_type": "unigram", "byte_fallback": True, "split_by_whitespace": False, **IDENTITY},
}


def sentences() -> list[str]:
    """Lines to train with: this repository's documents, and the nasty ones."""
    files = sorted((Path(__file__).resolve().parents[2] / "docs").glob("*.md"))
    lines = [line for file in files[:6] for line in file.read_text("utf-8").splitlines() if line.strip()]
    return [*lines[:600], *NASTY * 5]


def train(kind: str, vocab_size: int = 700, **more: Any) -> bytes:
    """Make a tokenizer.model."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences()),
        model_writer=written,
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        character_coverage=0.999,
        minloglevel=2,
        **{**KINDS[kind], **more},
    )
    return written.getvalue()


def texts(count: int, seed: int = 0) -> list[str]:
    """Texts of lines and random characters, joined by spaces and newlines, and the shortest ones."""
    chance = random.Random(seed)
    lines = sentences()

    def part() -> str:
        kind = chance.random()
        if kind < 0.5:
            return chance.choice(lines)
        if kind < 0.7:
            return chance.choice(NASTY)
        return "".join(chr(chance.randint(*chance.choice(RANGES))) for _ in range(chance.randint(1, 30)))

    made = [
        chance.choice(("", " ", "  ", "\n")).join(part() for _ in range(chance.randint(1, 4))) for _ in range(count)
    ]
    return [*made, "", " ", "   ", "\n", " a", "a ", "  a  b  ", "a" * 40, "\u2581"]
