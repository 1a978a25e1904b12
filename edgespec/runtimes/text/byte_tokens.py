"""Bytes written as tokens (<0xE2>), where they make no character."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"


class ByteTokens:
    """Decoding for tokenizers with byte fallback, of text with bytes that make no character.

    As in sentencepiece, characters beside a broken one stay; the library writes U+FFFD for every byte in a row of which
    one is broken, so that text which was complete would be taken back.
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
        decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else None  # its JSON alone
        return cls(tokenizer) if any(kind == "ByteFallback" for kind in _kinds(decoder)) else None

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        kept = (self._tokenizer.id_to_token(token) for token in tokens if token not in self._special)
        names = list(self._separated(name for name in kept if name is not None))
        return str(self._tokenizer.decoder.decode(names))

    def _separated(self, names: Iterable[str]) -> Iterator[str]:
        """Tokens with U+FFFD instead of broken bytes, so that the library sees whole characters only."""
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


def _character(data: bytes) -> int:
    """Bytes of the character that begins here; 0 = none does."""
    for size in range(1, len(data) + 1):
        try:
            data[:size].decode("utf-8")
        except UnicodeDecodeError:
            continue
        return size
    return 0


def _kinds(decoder: dict[str, Any] | None) -> Iterator[str]:
    """Iterate over the kinds of ``decoder`` of tokenizer.json and of its parts."""
    if decoder is not None:
        yield decoder["type"]
        for part in decoder.get("decoders", ()):
            yield from _kinds(part)
