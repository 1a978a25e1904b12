"""Convert sentencepiece models to a tokenizer.json.

The same pieces from the same text: Kudo and Richardson 2018, https://arxiv.org/abs/1808.06226.  Two things are as in
transformers, not as in sentencepiece.  Control and user-defined symbols are found in a text before anything else.  The
text between them is normalized piece by piece.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgespec.errors import ExportError, first_line
from edgespec.export.tokenizers.facts import Described, bpe_model, tokenizer_json

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # kinds of pieces
UNIGRAM, BPE = 1, 2  # kinds of models; 3 and 4 are words and characters
SPACE = "\u2581"
MANY = 1 << 20  # leading spaces that decoding drops where sentencepiece drops all of them
NEVER = 1000.0  # so far below the lowest score, a piece is in no best segmentation
SentencePiece = Any  # sentencepiece_model_pb2.ModelProto


def new_sentencepiece() -> SentencePiece:
    """Return an empty model."""
    try:
        from sentencepiece.sentencepiece_model_pb2 import ModelProto
    except ImportError as error:
        raise ExportError("sentencepiece models need the package sentencepiece", "pip install sentencepiece") from error
    return ModelProto()


def read_sentencepiece(file: Path) -> SentencePiece:
    """Read a tokenizer.model."""
    model = new_sentencepiece()
    try:
        model.ParseFromString(file.read_bytes())
        texts = [piece.piece for piece in model.pieces]
    except Exception as error:  # protobuf's own types
        raise ExportError(
            f"{file}: expected a sentencepiece model, got something else: {first_line(error)}", "download it again"
        ) from error
    if not any(texts):
        raise ExportError(f"{file}: expected a sentencepiece model, got one without pieces", "download it again")
    unknown, count = model.trainer_spec.unk_id, len(texts)
    if not 0 <= unknown < count:
        raise ExportError(f"{file}: names token {unknown} as unknown, but has {count} pieces")
    return model


def describe_sentencepiece(file: Path, model: SentencePiece, config: dict[str, Any]) -> Described:
    """Return tokenizer.json, without added tokens and BOS.

    Args:
        config: tokenizer_config.json; ``legacy`` (default true): a space is put before every section between special
            tokens, otherwise only before the text; ``add_prefix_space``: whether at all.
    """
    _refuse_unknown(file, model)
    prefix = config.get("add_prefix_space")
    prefix = model.normalizer_spec.add_dummy_prefix if prefix is None else bool(prefix)
    legacy = config.get("legacy") is not False
    metaspace = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False}
    return tokenizer_json(
        _bpe(model) if model.trainer_spec.model_type == BPE else _unigram(model),
        normalizer={"type": "Sequence", "normalizers": _normalizers(model, prefix and legacy)},
        words=metaspace if prefix and not legacy else None,
        decoder={"type": "Sequence", "decoders": _decoders(model, prefix)},
    )


def symbols(model: SentencePiece) -> dict[int, tuple[str, bool]]:
    """Return tokens that are found in a text without normalization: id -> (text, whether it is special)."""
    found = {
        number: (piece.piece, piece.type != USER_DEFINED)
        for number, piece in enumerate(model.pieces)
        if piece.type in (CONTROL, UNKNOWN, USER_DEFINED) and piece.piece
    }
    # runs of spaces are met as U+2581 only: merges and scores find them
    return {number: item for number, item in found.items() if item[1] or SPACE not in item[0]}


def _refuse_unknown(file: Path, model: SentencePiece) -> None:
    form = model.trainer_spec.model_type
    if form not in (UNIGRAM, BPE):
        kind = {3: "words", 4: "characters"}.get(form, f"kind {form}")
        raise ExportError(f"{file}: a sentencepiece model of {kind}; expected BPE or unigram")
    for there, what in (
        (model.trainer_spec.treat_whitespace_as_suffix, "spaces as the ends of words (treat_whitespace_as_suffix)"),
        (not model.normalizer_spec.escape_whitespaces, "spaces that are not escaped (escape_whitespaces false)"),
        (model.denormalizer_spec.precompiled_charsmap, "a denormalisation of decoded text"),
    ):
        if there:
            raise ExportError(
                f"{file}: a sentencepiece model with {what}, which is not supported",
                "give a model folder with a tokenizer.json",
            )


def _normalizers(model: SentencePiece, prefix: bool) -> list[Described]:
    found: list[Described] = []
    if charsmap := model.normalizer_spec.precompiled_charsmap:
        found.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()})
    if model.normalizer_spec.remove_extra_whitespaces:
        found.append(_replace(Regex=rf"\A +|[ {SPACE}]+\z", by=""))
        found.append(_replace(Regex=" {2,}", by=" "))
    if prefix:
        found.append({"type": "Prepend", "prepend": SPACE})
    return [*found, _replace(String=" ", by=SPACE)]


def _decoders(model: SentencePiece, prefix: bool) -> list[Described]:
    trim = model.normalizer_spec.remove_extra_whitespaces
    found = [_replace(String=SPACE, by=" ")]
    if model.trainer_spec.byte_fallback:
        found.append({"type": "ByteFallback"})
    found.append({"type": "Fuse"})
    if trim or prefix:
        found.append({"type": "Strip", "content": " ", "start": MANY if trim else 1, "stop": 0})
    return found


def _replace(*, by: str, **pattern: str) -> Described:
    return {"type": "Replace", "pattern": pattern, "content": by}


def _unigram(model: SentencePiece) -> Described:
    never = min((piece.score for piece in model.pieces if piece.type == NORMAL), default=0.0) - NEVER
    kept = (NORMAL, USER_DEFINED)
    return {
        "type": "Unigram",
        "unk_id": model.trainer_spec.unk_id,
        "vocab": [[piece.piece, piece.score if piece.type in kept else never] for piece in model.pieces],
        "byte_fallback": model.trainer_spec.byte_fallback,
    }


def _bpe(model: SentencePiece) -> Described:
    tokens, fallback = [piece.piece for piece in model.pieces], model.trainer_spec.byte_fallback
    usable = [piece.type in (NORMAL, USER_DEFINED) for piece in model.pieces]
    found = merges(tokens, [-piece.score for piece in model.pieces], usable)
    vocab = {token: number for number, token in enumerate(tokens)}
    return bpe_model(vocab, found, unk_token=tokens[model.trainer_spec.unk_id], fuse_unk=True, byte_fallback=fallback)


def merges(tokens: Sequence[str], ranks: Sequence[float], usable: Sequence[bool]) -> list[list[str]]:
    """Make merges for a SentencePiece BPE vocabulary, which has none.

    At every step SentencePiece joins the two pieces that make the best token.  So every way to cut a token into two
    tokens is a merge, ranked as the token is.

    Args:
        ranks: of each token, the lowest first.
        usable: whether text can become it.
    """
    rank = {token: ranks[at] for at, token in enumerate(tokens) if usable[at]}
    found = [
        (its, -cut, token)  # of one rank, those with the longest left part first: runs of spaces are cut so
        for token, its in rank.items()
        for cut in range(1, len(token))
        if token[:cut] in rank and token[cut:] in rank
    ]
    found.sort(key=lambda item: item[:2])
    return [[token[:-cut], token[-cut:]] for _, cut, token in found]
