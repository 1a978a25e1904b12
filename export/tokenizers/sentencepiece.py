"""A sentencepiece model as a tokenizer.json.

The same pieces from the same text: Kudo and Richardson 2018, https://arxiv.org/abs/1808.06226.  Two things are as in
transformers, not as in sentencepiece: control and user-defined symbols are found in a text before anything else, and
what lies between them is normalised by itself.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from edgespec.errors import ExportError
from edgespec.export.tokenizers.sentencepiece_file import (
    BPE,
    CONTROL,
    NORMAL,
    UNIGRAM,
    UNKNOWN,
    USER_DEFINED,
    SentencePieceModel,
    read_sentencepiece,
)

SPACE = "\u2581"
MANY = 1 << 20  # leading spaces that decoding drops where sentencepiece drops all of them
NEVER = 1000.0  # so much below the least score, a piece is in no best segmentation

Described = dict[str, Any]  # of tokenizer.json


def convert_sentencepiece(file: Path, config: dict[str, Any]) -> tuple[Described, SentencePieceModel]:
    """tokenizer.json, without added tokens and BOS, of a tokenizer.model.

    Args:
        file: the tokenizer.model.
        config: tokenizer_config.json; ``legacy`` (default true): a space is put before every section between special
            tokens, else before the text alone; ``add_prefix_space``: whether at all.

    Raises:
        ExportError: a model of words or characters, or options that no tokenizer.json can say.
    """
    model = read_sentencepiece(file)
    _refuse_unknown(file, model)
    prefix = config.get("add_prefix_space")
    prefix = model.dummy_prefix if prefix is None else bool(prefix)
    legacy = config.get("legacy") is not False
    described: Described = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": {"type": "Sequence", "normalizers": _normalizers(model, prefix and legacy)},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": _decoders(model, prefix)},
        "model": _bpe(model) if model.kind == BPE else _unigram(model),
    }
    if prefix and not legacy:
        described["pre_tokenizer"] = {
            "type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False,
        }  # fmt: skip
    return described, model


def symbols(model: SentencePieceModel) -> dict[int, tuple[str, bool]]:
    """Tokens that are found in a text as they stand: id -> (text, whether it is special)."""
    found = {
        number: (piece.text, piece.kind != USER_DEFINED)
        for number, piece in enumerate(model.pieces)
        if piece.kind in (CONTROL, UNKNOWN, USER_DEFINED) and piece.text
    }
    # runs of spaces are met as U+2581 only: merges and scores find them
    return {number: item for number, item in found.items() if item[1] or SPACE not in item[0]}


def _refuse_unknown(file: Path, model: SentencePieceModel) -> None:
    if model.kind not in (UNIGRAM, BPE):
        kind = {3: "words", 4: "characters"}.get(model.kind, f"kind {model.kind}")
        raise ExportError(f"{file}: a sentencepiece model of {kind}; expected BPE or unigram")
    for there, what in (
        (model.suffix, "spaces as the ends of words (treat_whitespace_as_suffix)"),
        (not model.escape, "spaces that are not escaped (escape_whitespaces false)"),
        (model.denormalizes, "a denormalisation of decoded text"),
    ):
        if there:
            raise ExportError(
                f"{file}: a sentencepiece model with {what}, which is not supported",
                "give a model folder with a tokenizer.json",
            )


def _normalizers(model: SentencePieceModel, prefix: bool) -> list[Described]:
    found: list[Described] = []
    if model.charsmap:
        found.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(model.charsmap).decode()})
    if model.trim:
        found.append(_replace(Regex=rf"\A +|[ {SPACE}]+\z", by=""))
        found.append(_replace(Regex=" {2,}", by=" "))
    if prefix:
        found.append({"type": "Prepend", "prepend": SPACE})
    return [*found, _replace(String=" ", by=SPACE)]


def _decoders(model: SentencePieceModel, prefix: bool) -> list[Described]:
    found = [_replace(String=SPACE, by=" ")]
    if model.byte_fallback:
        found.append({"type": "ByteFallback"})
    found.append({"type": "Fuse"})
    if model.trim or prefix:
        found.append({"type": "Strip", "content": " ", "start": MANY if model.trim else 1, "stop": 0})
    return found


def _replace(*, by: str, **pattern: str) -> Described:
    return {"type": "Replace", "pattern": pattern, "content": by}


def _unigram(model: SentencePieceModel) -> Described:
    never = min((piece.score for piece in model.pieces if piece.kind == NORMAL), default=0.0) - NEVER
    kept = (NORMAL, USER_DEFINED)
    return {
        "type": "Unigram",
        "unk_id": model.unk,
        "vocab": [[piece.text, piece.score if piece.kind in kept else never] for piece in model.pieces],
        "byte_fallback": model.byte_fallback,
    }


def _bpe(model: SentencePieceModel) -> Described:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": model.pieces[model.unk].text,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": model.byte_fallback,
        "ignore_merges": False,
        "vocab": {piece.text: number for number, piece in enumerate(model.pieces)},
        "merges": [list(pair) for pair in merges(model)],
    }


def merges(model: SentencePieceModel) -> list[tuple[str, str]]:
    """Pairs of pieces that make a piece, the best score first: sentencepiece merges whatever makes the best piece."""
    known = {piece.text: piece.score for piece in model.pieces if piece.kind in (NORMAL, USER_DEFINED)}
    found = [
        (score, cut, text)
        for text, score in known.items()
        for cut in range(1, len(text))
        if text[:cut] in known and text[cut:] in known
    ]
    found.sort(key=lambda item: (-item[0], -item[1]))
    return [(text[:cut], text[cut:]) for _, cut, text in found]
