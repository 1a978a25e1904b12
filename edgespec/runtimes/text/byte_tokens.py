"""Decode bytes written as tokens (<0xE2>), including incomplete characters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"


class ByteTokens:
    """Decodes text with incomplete characters, for tokenizers with byte fallback.

    Characters next to an incomplete one stay, as in sentencepiece.  The library would write U+FFFD for every byte of a
    run that contains one incomplete character, and so take back text that was complete.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = {number for number, token in added.items() if token.special}
        named = {f"<0x{value:02X}>": value for value in range(256)}
        self._values = {name: value for name, value in named.items() if tokenizer.token_to_id(name) is not None}

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ByteTokens | None:
        """Make the decoder of ``tokenizer``; None if it has no byte fallback."""
        decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else None  # only its JSON
        return cls(tokenizer) if any(kind == "ByteFallback" for kind in decoder_kinds(decoder)) else None

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, special tokens left out."""
        kept = (self._tokenizer.id_to_token(token) for token in tokens if token not in self._special)
        names = list(self._separated(name for name in kept if name is not None))
        return str(self._tokenizer.decoder.decode(names))

    def _separated(self, names: Iterable[str]) -> Iterator[str]:
        """Replace incomplete bytes by U+FFFD, so that the library sees only whole characters."""
        run: list[str] = []
        for name in names:
            if name in self._values:
                run.append(name)
                continue
            yield from self._repaired(run)
            run = []
            yield name
        yield from self._repaired(run)

    def _repaired(self, run: list[str]) -> Iterator[str]:
        data, at = bytes(self._values[name] for name in run), 0
        while at < len(data):
            size = _character(data[at : at + 4])
            yield from run[at : at + size] if size else [REPLACEMENT]
            at += size or 1


def bytes_of(name: str) -> bytes:
    """Return the bytes of a token's name, in sentencepiece's form (<0xE2>) or GPT-2's; empty = neither."""
    if match := re.fullmatch("<0x([0-9A-F]{2})>", name):
        return bytes.fromhex(match[1])
    values = {char: value for value, char in enumerate(byte_texts())}
    return bytes(values[char] for char in name) if all(char in values for char in name) else b""


@lru_cache(maxsize=1)
def byte_texts() -> tuple[str, ...]:
    """Return the characters that represent the bytes in byte-level vocabularies such as GPT-2's."""
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    more = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printed else next(more)) for byte in range(256))


def _character(data: bytes) -> int:
    """Return the number of bytes of the character that begins here; 0 = none does."""
    for size in range(1, len(data) + 1):
        try:
            data[:size].decode("utf-8")
        except UnicodeDecodeError:
            continue
        return size
    return 0


def decoder_kinds(decoder: dict[str, Any] | None) -> Iterator[str]:
    """Iterate over the kinds of ``decoder`` of tokenizer.json and of its parts."""
    if decoder is not None:
        yield decoder["type"]
        for part in decoder.get("decoders", ()):
            yield from decoder_kinds(part)
