"""Translate texts between the tokenizers of a target and its draft.

A draft with another tokenizer (Timor et al., arXiv 2502.05202) reads the target's text as its own tokens, and what it
writes becomes tokens of the target.  Both sides are compared as bytes.  A token of the draft that stands for the same
bytes as one of the target's is shared: the intersection of the vocabularies.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.text import INSERTED
from edgespec.errors import BundleError
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.manifest import Matching
from edgespec.runtimes.text.byte_tokens import byte_texts, decoder_kinds
from edgespec.runtimes.text.codec import TextCodec
from edgespec.runtimes.text.growing import Divides, GrowingTokens, divides

ALONE, NO_TEXT = -1, -2  # a draft's token of a text that no token of the target is; one without a text
_TAIL = 8  # the target's tokens before a guess that its tokenizer also reads
_SPACE = "\u2581"  # of sentencepiece


class Pieces:
    """The bytes of a vocabulary's tokens, as they are in the middle of a text.

    Attributes:
        known: whether they can be found: the tokenizer is byte-level, or sentencepiece's.
        special: names of special tokens, by id.
    """

    def __init__(self, codec: TextCodec) -> None:
        self.codec, tokenizer = codec, codec.tokenizer
        decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else None
        kinds = set(decoder_kinds(decoder))
        self._byte_level = "ByteLevel" in kinds
        self.known = self._byte_level or "Metaspace" in kinds or _SPACE in json.dumps(decoder, ensure_ascii=False)
        added = tokenizer.get_added_tokens_decoder()
        self.special = {number: token.content for number, token in added.items() if token.special}
        self._added = {number: token.content.encode() for number, token in added.items() if not token.special}
        unknown = codec.token_id(getattr(tokenizer.model, "unk_token", None))
        self._none = {unknown} if unknown is not None and not self._byte_level else set()
        self._bytes: dict[int, bytes | None] = {}

    def of(self, token: int) -> bytes | None:
        """Return the bytes of a token; None for a special one, and for an id without a token."""
        if token not in self._bytes:
            self._bytes[token] = self._find(token)
        return self._bytes[token]

    def _find(self, token: int) -> bytes | None:
        if token in self.special or token in self._none:
            return None
        if token in self._added:
            return self._added[token]
        name: str | None = self.codec.tokenizer.id_to_token(token)
        if not name:
            return None
        if self._byte_level:
            values = [_VALUES.get(char, -1) for char in name]
            return None if min(values) < 0 else bytes(values)
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes.fromhex(name[3:5])
        return name.replace(_SPACE, " ").encode("utf-8", "replace")

    def is_byte(self, token: int) -> bool:
        """Whether a token is only the fallback for a byte."""
        name: str = self.codec.tokenizer.id_to_token(token) or ""
        return not self._byte_level and len(name) == 6 and name.startswith("<0x")

    def encode(self, text: str) -> list[int]:
        """Tokenize a text without tokens around it."""
        return self.codec.encode(text, special=False)

    @cached_property
    def divides(self) -> Divides:
        """Where texts may be cut."""
        return divides(self.codec.tokenizer)

    def joined(self, tokens: Iterable[int]) -> bytes:
        """Join the bytes of tokens; special ones have their names."""
        return b"".join(self.of(token) or self.special.get(token, "").encode() for token in tokens)


_VALUES = {char: value for value, char in enumerate(byte_texts())}


@dataclass(frozen=True)
class Translation:
    """The tokenizers of a target and its draft.

    Attributes:
        target, draft: bytes of their tokens.
        targets: int64 [the draft's vocabulary], the token of the target that each token stands for, ``ALONE`` or
            ``NO_TEXT``.
        prefix: tokens of the draft before a text.
        vocab: tokens of the target.
        begin: the target's token at the beginning of a text; None = it has none.
        matching: how guesses are made where they are verified by matching (``TranslationPart``).
    """

    target: Pieces
    draft: Pieces
    targets: NDArray[np.int64]
    prefix: tuple[int, ...]
    vocab: int
    begin: int | None = None
    matching: Matching = "strings"

    @cached_property
    def drafts(self) -> NDArray[np.int64]:  # [vocab]
        """The token of the draft that each token of the target stands for; -1 = it is not shared."""
        found = np.full(self.vocab, -1, np.int64)
        shared = np.flatnonzero(self.targets >= 0)
        found[self.targets[shared]] = shared
        return found

    @cached_property
    def named(self) -> dict[int, int]:
        """Special tokens of the target, and those of the draft with the same names."""
        ids = {name: number for number, name in self.draft.special.items()}
        return {number: ids[name] for number, name in self.target.special.items() if name in ids}

    def guesses(self, before: Sequence[int], drafted: Sequence[int]) -> list[int]:
        """Tokenize for the target what the draft wrote.

        The text is tokenized with the end of the text before it.  Where the target's tokens would then cross the place
        between them, or the text ends within a character, shared tokens are taken as they are.

        Args:
            before: tokens of the target, [n].
            drafted: tokens of the draft after them, [k], each with a text; the last one may be a special one.

        Returns:
            tokens of the target.
        """
        ended: list[int] = []
        written = list(drafted)
        if written and self.draft.of(written[-1]) is None:
            token = int(self.targets[written.pop()])
            ended = [token] if token >= 0 else []
        if not written:
            return ended
        guess = self.draft.joined(written)
        tail = self._tail(before)
        whole = tail + guess
        half = incomplete(whole)
        found = None if half and all(self.targets[written] >= 0) else self._tokens(tail, whole[: len(whole) - half])
        if found is None:
            found = []
            for token in self.targets[written].tolist():
                if token < 0:
                    return found
                found.append(token)
        return found + ended if not half else found

    def _tail(self, before: Sequence[int]) -> bytes:
        """Return the bytes of the last tokens of a text, from one that begins with a whole character on."""
        last: list[bytes] = []
        for token in reversed(before[-_TAIL:]):
            piece = None if token >= INSERTED else self.target.of(token)
            if piece is None:
                break
            last.append(piece)
        while last and (last[-1][:1] >= b"\x80" and last[-1][:1] < b"\xc0"):
            last.pop()
        return b"".join(reversed(last))

    def _tokens(self, tail: bytes, whole: bytes) -> list[int] | None:
        """Return the tokens of a text after its beginning ``tail``; None where a token crosses that place."""
        try:
            tokens = self.target.encode(whole.decode())
        except UnicodeDecodeError:
            return None
        pieces = [self.target.joined([token]) for token in tokens]
        joined = b"".join(pieces)
        at, size = 0, int(joined.startswith(b" " + whole[:2]))  # some begin a text with a space
        size += len(tail)
        while at < len(pieces) and size > 0:
            size -= len(pieces[at])
            at += 1
        found = b"".join(pieces[at:])
        return tokens[at:] if not size and found and whole[len(tail) :].startswith(found) else None


class TranslatedText:
    """The draft's tokens of a text of the target that grows.

    Special tokens become the draft's of the same name, or else text.  A part of a character at the end becomes the
    same part's tokens, if they are shared.

    Attributes:
        tokens: of the draft.
        complete: whether all of the text is in them.
    """

    def __init__(self, translation: Translation) -> None:
        self._translation = translation
        self.tokens: list[int] = list(translation.prefix)
        self.complete = True
        self._count = 0  # tokens of the target
        self._held: list[int] = []  # tokens of the target that end within a character
        self._whole = len(self.tokens)  # tokens of the draft before those of the held ones
        self._growing: GrowingTokens | None = None

    def append(self, tokens: Sequence[int]) -> None:
        """Append tokens of the target."""
        del self.tokens[self._whole :]
        target, named, begin = self._translation.target, self._translation.named, self._translation.begin
        run: list[bytes] = [target.of(token) or b"" for token in self._held]
        held, self._held = self._held, []
        for token in tokens:
            first, self._count = not self._count, self._count + 1
            if token >= INSERTED or (first and token == begin):
                continue
            piece = target.of(token)
            if piece is None and token not in named:
                piece = target.special.get(token, "").encode()
            if piece is not None:
                run.append(piece)
                held.append(token)
                continue
            self._text(b"".join(run))
            self.tokens.append(named[token])
            run, held, self._growing = [], [], None
        half, end = incomplete(b"".join(run[-4:])), len(run)
        while half > 0:
            end -= 1
            half -= len(run[end])
        self._text(b"".join(run[:end]))
        self._held, self._whole = held[end:], len(self.tokens)
        more = self._translation.drafts[self._held].tolist()
        self.complete = min(more, default=0) >= 0
        if self.complete:
            self.tokens += more

    def _text(self, data: bytes) -> None:
        if not data:
            return
        if self._growing is None:
            draft = self._translation.draft
            self._growing = GrowingTokens(draft.encode, draft.divides, self.tokens)
        self._growing.append(data.decode("utf-8", "replace"))


def incomplete(data: bytes) -> int:
    """Count the bytes at the end that begin a character and do not complete it."""
    for size in range(1, min(3, len(data)) + 1):
        first = data[-size]
        if first >= 0xC0:
            need = 2 if first < 0xE0 else 3 if first < 0xF0 else 4
            return size if first < 0xF8 and size < need and _begins(data[-size:]) else 0
        if first < 0x80:
            return 0
    return 0


def _begins(data: bytes) -> bool:
    """Whether bytes are the beginning of a character."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return False


def translate(
    target: TextCodec,
    draft: TextCodec,
    sizes: tuple[int, int],
    begin: int | None = None,
    end: int | None = None,
    ends: Iterable[int] = (),
) -> Translation:
    """Compare two vocabularies.

    Args:
        target, draft: the tokenizers.
        sizes: tokens of the models, which may be more than those of their tokenizers.
        begin, end: the target's tokens at the beginning and end of a text.
        ends: the draft's, of which the first without a namesake stands for it.
    """
    own, other, vocab = Pieces(target), Pieces(draft), sizes[0]
    ids: dict[bytes, int] = {}
    for token in range(vocab - 1, -1, -1):  # of equal ones the first; a byte's fallback only without another
        piece = own.of(token)
        if piece and not (own.is_byte(token) and piece in ids):
            ids[piece] = token
    targets = np.full(sizes[1], NO_TEXT, np.int64)
    takers: dict[int, int] = {}  # by token of the target
    for token in sorted(range(sizes[1]), key=other.is_byte):
        if piece := other.of(token):
            found = ids.get(piece, ALONE)
            targets[token] = found if takers.setdefault(found, token) == token else ALONE
    known = {name: number for number, name in own.special.items() if number < vocab}
    for token, name in other.special.items():
        if token < sizes[1]:
            targets[token] = known.get(name, NO_TEXT)
    if end is not None and end not in targets:
        first = next((token for token in ends if token < sizes[1] and targets[token] == NO_TEXT), None)
        if first is not None:
            targets[first] = end
    return Translation(own, other, targets, tuple(draft.encode("")), vocab, begin)


def open_translation(bundle: Bundle, target: TextCodec) -> Translation:
    """Open what a bundle knows of a draft with another tokenizer; ``target``: the target's.

    Raises:
        BundleError: tokens that are none of the target's, or one twice.
    """
    manifest = bundle.manifest
    part, draft, vocab = manifest.translation, manifest.draft, manifest.target.facts.vocab
    assert part is not None
    assert draft is not None
    size, file = draft.facts.vocab, bundle.path / part.tokens
    targets = np.fromfile(file, "<i4").astype(np.int64)
    shared = targets[targets >= 0]
    sound = len(targets) == size and targets.max() < vocab and targets.min() >= NO_TEXT
    if not sound or len(np.unique(shared)) < len(shared) or max(part.prefix, default=0) >= size:
        raise BundleError(
            f"{file}: expected {size} different tokens below {vocab}, as int32", "export the bundle again"
        )
    codec = TextCodec(file.parent, checked=bundle.checked)
    begin = manifest.tokenizer.bos
    return Translation(Pieces(target), Pieces(codec), targets, tuple(part.prefix), vocab, begin, part.matching)
