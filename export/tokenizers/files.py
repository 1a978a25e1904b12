"""The tokenizer of a source model, whatever files it comes in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.errors import ExportError
from edgespec.export.tokenizers.added_tokens import (
    AddedToken,
    Described,
    added_tokens,
    explicit_tokens,
    place,
    surround,
    vocabulary,
)
from edgespec.runtimes.text.codec import TextCodec
from edgespec.runtimes.text.special import SPECIAL_TOKENS_FILE, read_object, special_name

if TYPE_CHECKING:
    from edgespec.export.tokenizers.sentencepiece_file import SentencePieceModel

SENTENCEPIECE = ("tokenizer.model", "spiece.model")
VOCAB, MERGES = "vocab.json", "merges.txt"


def open_codec(folder: Path) -> TextCodec:
    """The tokenizer of a model folder: its tokenizer.json, or one made of tokenizer.model or vocab.json and merges.txt.

    Raises:
        BundleError: none of these, or a tokenizer.json that cannot be read.
        ExportError: files that cannot be converted; the message says why.
    """
    described = convert(folder)
    if described is None:
        return _completed(folder)
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(json.dumps(described))
    except Exception as error:  # the library raises a plain Exception
        raise ExportError(f"{folder}: its tokenizer cannot be converted: {error}", "download it again") from error
    return TextCodec(folder, tokenizer)


def convert(folder: Path) -> Described | None:
    """A tokenizer.json for a folder that has none; None where nothing is to be converted."""
    if (folder / "tokenizer.json").is_file():
        return None
    config = read_object(folder / "tokenizer_config.json")
    for name in SENTENCEPIECE:
        if (folder / name).is_file():
            return _sentencepiece(folder / name, config)
    if (folder / VOCAB).is_file() and (folder / MERGES).is_file():
        return _byte_level(folder, config)
    return None


def _completed(folder: Path) -> TextCodec:
    """The tokenizer.json of a folder, with tokens that only other files add, as in transformers."""
    from tokenizers import AddedToken as Added

    codec = TextCodec(folder)
    tokenizer, added = codec.tokenizer, explicit_tokens(folder, codec.config)
    missing = [number for number, token in sorted(added.items()) if tokenizer.token_to_id(token.text) is None]
    for number in missing:
        if number != tokenizer.get_vocab_size(with_added_tokens=True):
            return codec  # of another vocabulary: tokens get ids in order
        tokenizer.add_tokens([Added(normalized=False, **_flags(added[number]))])
    return TextCodec(folder, tokenizer) if missing else codec


def _flags(token: AddedToken) -> dict[str, Any]:
    """A token as the library's arguments."""
    return {"content" if name == "text" else name: value for name, value in vars(token).items()}


def _sentencepiece(file: Path, config: dict[str, Any]) -> Described:
    from edgespec.export.tokenizers.sentencepiece import convert_sentencepiece, symbols

    folder = file.parent
    described, model = convert_sentencepiece(file, config)
    base = {number: AddedToken(text, special) for number, (text, special) in symbols(model).items()}
    place(described, added_tokens(folder, config, base, vocabulary(described)))
    _surround(folder, described, config, model)
    return described


def _byte_level(folder: Path, config: dict[str, Any]) -> Described:
    from edgespec.export.tokenizers.byte_level import convert_byte_level

    model_type = read_object(folder / "config.json").get("model_type")
    described = convert_byte_level(folder, config, model_type)
    place(described, added_tokens(folder, config, {}, vocabulary(described)))
    _surround(folder, described, config, None)
    return described


def _surround(folder: Path, described: Described, config: dict[str, Any], model: SentencePieceModel | None) -> None:
    """BOS and EOS around a text, as the configuration says; sentencepiece models begin with BOS if it says nothing."""
    other, known = read_object(folder / SPECIAL_TOKENS_FILE), vocabulary(described)
    wanted: list[str | None] = []
    for key, default, own in (
        ("bos", model is not None, model.bos if model else -1),
        ("eos", False, model.eos if model else -1),
    ):
        name = special_name(config, other, f"{key}_token")
        if name is None and f"{key}_token" not in config and model and 0 <= own < len(model.pieces):
            name = model.pieces[own].text
        asked = config.get(f"add_{key}_token")
        add = default if asked is None else bool(asked)
        if add and name is None and asked:
            raise ExportError(f"{folder}: add_{key}_token is set, but no {key}_token is named")
        wanted.append(name if add and name in known else None)
    surround(described, wanted[0], wanted[1])
