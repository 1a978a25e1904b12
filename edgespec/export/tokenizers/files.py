"""Open the tokenizer of a source model, in any of its file formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgespec.errors import BundleError, ExportError, first_line
from edgespec.export.tokenizers.facts import Described, build
from edgespec.export.tokenizers.renumbered import convert_renumbered, convert_source
from edgespec.export.tokenizers.sentencepieces import describe_sentencepiece, read_sentencepiece, symbols
from edgespec.export.tokenizers.tekken import TEKKEN, describe_tekken
from edgespec.export.tokenizers.vocabulary import (
    AddedToken,
    added_tokens,
    explicit_tokens,
    place,
    read_byte_level,
    surround,
    vocabulary,
)
from edgespec.export.tokenizers.word_pieces import WORDS, describe_word_pieces
from edgespec.runtimes.text.codec import TextCodec
from edgespec.runtimes.text.special import SPECIAL_TOKENS_FILE, read_object, special_name

SENTENCEPIECE = ("tokenizer.model", "spiece.model")
VOCAB, MERGES = "vocab.json", "merges.txt"


def open_codec(folder: Path) -> TextCodec:
    """Open a model folder's tokenizer: tokenizer.json, or one converted from other files.

    Raises:
        BundleError: none of these, or a tokenizer.json that cannot be read.
        ExportError: files that cannot be converted; the message says why.
    """
    described = convert(folder)
    return _completed(folder) if described is None else TextCodec(folder, build(described, folder))


def open_source_codec(folder: Path) -> TextCodec | None:
    """Open the tokenizer of an encoder-decoder's sources; None = they use that of ``open_codec``."""
    described = convert_source(folder, read_object(folder / "tokenizer_config.json"))
    return None if described is None else TextCodec(folder, build(described, folder))


def convert(folder: Path) -> Described | None:
    """Return a tokenizer.json for a folder that has none; None = there are no files to convert."""
    if (folder / "tokenizer.json").is_file():
        return None
    config = read_object(folder / "tokenizer_config.json")
    if (described := convert_renumbered(folder, config)) is not None:
        return described
    for name in SENTENCEPIECE:
        if (folder / name).is_file():
            return _sentencepiece(folder / name, config)
    if (folder / VOCAB).is_file() and (folder / MERGES).is_file():
        return _byte_level(folder, config)
    if (folder / WORDS).is_file():
        return describe_word_pieces(folder, config)
    return describe_tekken(folder / TEKKEN) if (folder / TEKKEN).is_file() else None


def _completed(folder: Path) -> TextCodec:
    """Return the tokenizer.json of a folder, with tokens that only other files add, as in transformers."""
    from tokenizers import AddedToken as Added
    from tokenizers import Tokenizer

    codec = _opened(folder)
    size, added = codec.vocab_size, explicit_tokens(folder, codec.config)
    missing = [number for number, token in sorted(added.items()) if codec.token_id(token.text) is None]
    if not missing or missing != list(range(size, size + len(missing))):
        return codec  # or of another vocabulary: tokens get ids in order
    tokenizer = Tokenizer.from_str(codec.tokenizer.to_str())  # codecs share theirs
    tokenizer.add_tokens([Added(normalized=False, **_flags(added[number])) for number in missing])
    return TextCodec(folder, tokenizer)


def _opened(folder: Path) -> TextCodec:
    try:
        return TextCodec(folder)
    except BundleError as error:
        if folder.suffix != ".gguf":
            raise
        reason = first_line(error.__cause__ or error)  # the folder is a temporary one, with the name of the file
        raise ExportError(f"{folder.name}: its tokenizer cannot be used: {reason}", "download it again") from error


def _flags(token: AddedToken) -> dict[str, Any]:
    return {"content" if name == "text" else name: value for name, value in vars(token).items()}


def _sentencepiece(file: Path, config: dict[str, Any]) -> Described:
    folder, model = file.parent, read_sentencepiece(file)
    described = describe_sentencepiece(file, model, config)
    base = {number: AddedToken(text, special) for number, (text, special) in symbols(model).items()}
    place(described, added_tokens(folder, config, base, vocabulary(described)))
    ends = model.trainer_spec.bos_id, model.trainer_spec.eos_id
    own = [model.pieces[number].piece if 0 <= number < len(model.pieces) else None for number in ends]
    _surround(folder, described, config, {"bos": own[0], "eos": own[1]})
    return described


def _byte_level(folder: Path, config: dict[str, Any]) -> Described:
    described = read_byte_level(folder, config, read_object(folder / "config.json", infinite=True).get("model_type"))
    place(described, added_tokens(folder, config, {}, vocabulary(described)))
    _surround(folder, described, config, {})
    return described


def _surround(folder: Path, described: Described, config: dict[str, Any], own: dict[str, str | None]) -> None:
    """Add BOS and EOS around texts as configured; sentencepiece models begin with BOS by default.

    Args:
        own: tokens that a sentencepiece model names; empty = it is none.
    """
    other, known = read_object(folder / SPECIAL_TOKENS_FILE), vocabulary(described)
    wanted: list[str | None] = []
    for key, default in (("bos", bool(own)), ("eos", False)):
        name = special_name(config, other, f"{key}_token")
        if name is None and f"{key}_token" not in config:
            name = own.get(key)
        asked = config.get(f"add_{key}_token")
        add = default if asked is None else bool(asked)
        if add and name is None and asked:
            raise ExportError(f"{folder}: add_{key}_token is set, but no {key}_token is named")
        wanted.append(name if add and name in known else None)
    surround(described, wanted[0], wanted[1])
