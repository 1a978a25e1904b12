"""Tokens added to a vocabulary, from all the files that may name them, put into a tokenizer.json."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.errors import ExportError
from edgespec.export.tokenizers.described import Described
from edgespec.runtimes.text.special import NAMED, SPECIAL_TOKENS_FILE, read_object, special_name


@dataclass(frozen=True)
class AddedToken:
    """A token that is found in a text before anything else; the last four are as in tokenizer.json.

    Attributes:
        text: what is found, and how the token is called.
        special: decoding leaves it out.
    """

    text: str
    special: bool
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


def added_tokens(
    folder: Path, config: dict[str, Any], base: dict[int, AddedToken], vocab: dict[str, int]
) -> dict[int, AddedToken]:
    """All added tokens by id: of the vocabulary itself, added_tokens.json, added_tokens_decoder, then named ones.

    Args:
        folder: the model's.
        config: its tokenizer_config.json.
        base: those of the vocabulary itself.
        vocab: token -> id of the vocabulary.  A named token that has no id gets the next one, as in transformers, if
            it is one that a model writes or reads: not for padding, masks and the like.

    Raises:
        ExportError: an id that is no id, or two tokens of one name.
    """
    found = base | explicit_tokens(folder, config)
    ids = {token.text: number for number, token in found.items()}
    if len(ids) < len(found):
        twice = next(token.text for number, token in found.items() if ids[token.text] != number)
        raise ExportError(f"{folder}: the added token {twice!r} has two ids", "repair tokenizer_config.json")
    for text, needed in _named(folder, config).items():
        number = ids.get(text, vocab.get(text, -1))
        if number in found:
            found[number] = AddedToken(**vars(found[number]) | {"special": True})
        elif number >= 0 or needed:
            ids[text] = number = number if number >= 0 else max([*vocab.values(), *found]) + 1
            found[number] = AddedToken(text, special=True)
    return found


def explicit_tokens(folder: Path, config: dict[str, Any]) -> dict[int, AddedToken]:
    """Added tokens that added_tokens.json or added_tokens_decoder give an id.

    Raises:
        ExportError: an id that is no id, or a token without text.
    """
    found: dict[int, AddedToken] = {}
    for text, number in read_object(folder / "added_tokens.json").items():
        found[_id(number, text, folder)] = AddedToken(text, special=False)
    decoder = config.get("added_tokens_decoder")
    for number, item in decoder.items() if isinstance(decoder, dict) else ():
        found[_id(number, item, folder)] = _described(item, folder)
    return found


def place(described: Described, added: dict[int, AddedToken]) -> None:
    """Write added tokens into a tokenizer.json, each with its own id; the vocabulary grows to hold them.

    Raises:
        ExportError: an id far beyond the vocabulary.
    """
    model, gone = described["model"], set[str]()
    for number, token in sorted(added.items()):
        if isinstance(model["vocab"], dict):
            gone |= _place_in_map(model["vocab"], number, token.text)
        else:
            _place_in_list(model["vocab"], number, token.text)
    if gone:
        merges = model["merges"]
        model["merges"] = [pair for pair in merges if not gone.intersection((*pair, "".join(pair)))]
    described["added_tokens"] = [
        {
            "id": number,
            "content": token.text,
            "single_word": token.single_word,
            "lstrip": token.lstrip,
            "rstrip": token.rstrip,
            "normalized": False,  # a normalised one would begin with the space that the normaliser puts before
            "special": token.special,
        }
        for number, token in sorted(added.items())
    ]


def vocabulary(described: Described) -> dict[str, int]:
    """Token -> id of the model in a tokenizer.json."""
    vocab = described["model"]["vocab"]
    return vocab if isinstance(vocab, dict) else {item[0]: number for number, item in enumerate(vocab)}


def surround(described: Described, before: str | None, after: str | None) -> None:
    """Let encoding put a BOS before and an EOS after the text; None = not."""
    known = vocabulary(described)
    parts = [part for part in (before, "$A", after) if part is not None]

    def template(sequences: tuple[str, ...]) -> list[Described]:
        found: list[Described] = []
        for number, name in enumerate(sequences):
            for part in parts:
                kind = "Sequence" if part == "$A" else "SpecialToken"
                found.append({kind: {"id": name if part == "$A" else part, "type_id": number}})
        return found

    tokens = {part: {"id": part, "ids": [known[part]], "tokens": [part]} for part in parts if part != "$A"}
    if tokens:
        described["post_processor"] = {
            "type": "TemplateProcessing",
            "single": template(("A",)),
            "pair": template(("A", "B")),
            "special_tokens": tokens,
        }


def _place_in_map(vocab: dict[str, int], number: int, text: str) -> set[str]:
    """Give a token its id; returns the tokens that gave way."""
    if vocab.get(text) == number:
        return set()
    gone = {name for name, at in vocab.items() if at == number}
    for name in gone:
        del vocab[name]
    vocab[text] = number
    return gone


def _place_in_list(vocab: list[list[Any]], number: int, text: str) -> None:
    if number >= len(vocab) + (1 << 16):
        raise ExportError(f"the added token {text!r} has id {number}, far beyond the {len(vocab)} tokens before it")
    never = min(score for _, score in vocab)
    while len(vocab) <= number:
        vocab.append([f"<edgespec-no-token-{len(vocab)}>", never])
    vocab[number][0] = text


def _named(folder: Path, config: dict[str, Any]) -> dict[str, bool]:
    """Names of tokens that have a part to play -> whether it is one that needs an id; in the files' order."""
    other = read_object(folder / SPECIAL_TOKENS_FILE)
    found = {special_name(config, other, key): key in ("bos_token", "eos_token") for key in reversed(NAMED)}
    for source in (config, other):
        for key in ("additional_special_tokens", "extra_special_tokens"):
            more = source.get(key)
            items = list(more.values()) if isinstance(more, dict) else more if isinstance(more, list) else []
            found |= {item.get("content") if isinstance(item, dict) else item: True for item in items}
    return {text: needed for text, needed in found.items() if isinstance(text, str) and text}


def _id(number: Any, of: object, folder: Path) -> int:
    try:
        found = int(number)
    except (TypeError, ValueError):
        found = -1
    if found < 0:
        raise ExportError(f"{folder}: the added token {of!r} has id {number!r}: expected a number from 0")
    return found


def _described(item: Any, folder: Path) -> AddedToken:
    """An entry of added_tokens_decoder: a string, or an object with content and flags."""
    if isinstance(item, str):
        return AddedToken(item, special=True)
    if not isinstance(item, dict) or not isinstance(item.get("content"), str):
        raise ExportError(f"{folder}: added_tokens_decoder has {item!r}: expected a token with its content")
    flags = {key: bool(item.get(key, False)) for key in ("special", "lstrip", "rstrip", "single_word")}
    return AddedToken(item["content"], **flags)
