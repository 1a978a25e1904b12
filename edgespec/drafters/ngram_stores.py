"""N-gram stores: what mostly followed one to four tokens in texts read earlier, in a file that is only mapped.

The file, little endian, without padding between its parts:

    256 bytes    header: magic, version, n_max, vocabulary size, texts (4 x uint32), entries, entries left out, tokens
                 read (3 x uint64), SHA-256 of the vocabulary, SHA-256 of everything after the header, entries by
                 length 1 to 4 (4 x uint64), zeros; the last 32 bytes are the SHA-256 of the 224 before them
    uint64 [n]   keys, ascending
    int32  [n]   the token that mostly followed
    uint16 [n]   how often it did (counts beyond 65535 are scaled down together)
    uint16 [n]   how often any token did

The key of tokens t_1 ... t_n takes the last first: h = 0; for t in t_n ... t_1: h = (h xor (t + 1)) *
0x9E3779B97F4A7C15 mod 2^64, h = h xor (h >> 32).  Two n-grams of one key would only make a wrong guess.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import StoreError
from edgespec.runtimes.files.staged import staged

MAGIC = b"EDGENGRM"
VERSION = 1
N_MAX = 4
HEADER_BYTES = 256
ENTRY_BYTES = 16
MULTIPLIER = 0x9E3779B97F4A7C15
MAX_BYTES = 64 << 20
ENTRY = np.dtype([("key", "u8"), ("token", "i4"), ("seen", "i8"), ("of", "i8"), ("n", "i1")])
"""A counted n-gram of ``n`` tokens: ``token`` mostly followed, ``seen`` times ``of`` all."""

_HEADER = struct.Struct("<8s4I3Q32s32s4Q")
_SIGNED = HEADER_BYTES - 32
_MASK = (1 << 64) - 1
_SHARE = 0.5  # a token that followed less often than this is never guessed
_TOP = np.iinfo(np.uint16).max
_AGAIN = "build it again: edgespec ngram build"


class Hit(NamedTuple):
    """Entry of a store: the last ``n`` tokens were followed ``seen`` of ``of`` times by ``token``."""

    n: int
    token: int
    seen: int
    of: int


@dataclass(frozen=True)
class StoreFacts:
    """Facts in a store's header."""

    vocab: int  # tokens of the vocabulary
    vocabulary: str  # SHA-256 of the tokenizer's vocabulary, hex digits
    texts: int  # how many were read
    tokens: int  # how many they have
    by_length: tuple[int, ...]  # entries for 1, 2, 3 and 4 tokens
    left_out: int  # entries that did not fit

    @property
    def entries(self) -> int:
        """Count all entries."""
        return sum(self.by_length)

    @property
    def file_bytes(self) -> int:
        """Compute the file's size."""
        return HEADER_BYTES + ENTRY_BYTES * self.entries

    def header(self, body: bytes) -> bytes:
        """Pack the header of a store whose part after it has the SHA-256 ``body``."""
        counts = VERSION, N_MAX, self.vocab, self.texts, self.entries, self.left_out, self.tokens
        packed = _HEADER.pack(MAGIC, *counts, bytes.fromhex(self.vocabulary), body, *self.by_length)
        packed = packed.ljust(_SIGNED, b"\0")
        return packed + hashlib.sha256(packed).digest()

    def as_dict(self) -> dict[str, Any]:
        """Give the facts as JSON; the keys are stable."""
        return {
            "version": VERSION,
            "vocab": self.vocab,
            "vocabulary": self.vocabulary,
            "texts": self.texts,
            "tokens": self.tokens,
            "entries": self.entries,
            "by_length": list(self.by_length),
            "left_out": self.left_out,
            "bytes": self.file_bytes,
        }


class NGramStore:
    """An opened store: mapped, never changed, shared by all users.

    Without ``check``, which compares the SHA-256 of all of it, opening takes the same time for any size.

    Raises:
        StoreError: not a store, damaged, truncated or newer than this version.
    """

    n_max = N_MAX

    def __init__(self, path: Path, check: bool = True) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                head = file.read(HEADER_BYTES)
                self.facts, body = _read_header(path, head)
                size = path.stat().st_size
                if size != self.facts.file_bytes:
                    word = "truncated" if size < self.facts.file_bytes else "altered"
                    raise StoreError(f"{path}: {word}: expected {self.facts.file_bytes} bytes, got {size}", _AGAIN)
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # a NUL in its name
            why = error.strerror if isinstance(error, OSError) else error
            raise StoreError(f"{path}: cannot read it: {why}", "expected an n-gram store") from error
        if check and (got := hashlib.sha256(memoryview(mapped)[HEADER_BYTES:]).digest()) != body:
            raise StoreError(
                f"{path}: altered: expected SHA-256 {body.hex()[:12]}..., got {got.hex()[:12]}...",
                f"copy it again, or {_AGAIN}",
            )
        n = self.facts.entries
        self._keys: NDArray[np.uint64] = np.frombuffer(mapped, "<u8", n, HEADER_BYTES)  # [n]
        self._next: NDArray[np.int32] = np.frombuffer(mapped, "<i4", n, HEADER_BYTES + 8 * n)  # [n]
        self._seen: NDArray[np.uint16] = np.frombuffer(mapped, "<u2", n, HEADER_BYTES + 12 * n)  # [n]
        self._of: NDArray[np.uint16] = np.frombuffer(mapped, "<u2", n, HEADER_BYTES + 14 * n)  # [n]

    def require(self, vocabulary: str, vocab: int) -> None:
        """Refuse a tokenizer that this store was not made with, by a ``StoreError`` that names both values.

        ``vocabulary``: SHA-256 of the tokenizer's vocabulary, hex digits; ``vocab``: its number of tokens.
        """
        mine = self.facts
        if (mine.vocabulary, mine.vocab) != (vocabulary, vocab):
            raise StoreError(
                f"{self.path}: was built with another tokenizer: its vocabulary is {mine.vocabulary[:12]}... "
                f"({mine.vocab} tokens), the model's {vocabulary[:12]}... ({vocab} tokens)",
                "build one for this model: edgespec ngram build TEXT... --tokenizer BUNDLE",
            )

    def likely(self, tail: Sequence[int], share: float) -> Hit | None:
        """Find the token after the longest known suffix of ``tail``, if its share is at least ``share``; else None."""
        key, keys = 0, []
        for token in reversed(tail[-N_MAX:]):
            key = (key ^ (token + 1)) * MULTIPLIER & _MASK
            key ^= key >> 32
            keys.append(key)
        wanted = np.array(keys, np.uint64)  # [<= n_max]
        places = np.minimum(self._keys.searchsorted(wanted), len(self._keys) - 1)
        found = self._keys[places] == wanted
        for n in range(len(keys), 0, -1):
            if found[n - 1]:
                at = places[n - 1]
                seen, of = int(self._seen[at]), int(self._of[at])
                if seen >= share * of:
                    return Hit(n, int(self._next[at]), seen, of)
        return None


def is_store(path: Path) -> bool:
    """Tell whether a file begins like a store, damaged or not."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _read_header(path: Path, head: bytes) -> tuple[StoreFacts, bytes]:
    """Read a file's first bytes -> (facts, SHA-256 of what follows)."""
    if not head.startswith(MAGIC):
        raise StoreError(f"{path}: not an n-gram store", "make one with: edgespec ngram build")
    if len(head) < HEADER_BYTES:
        raise StoreError(f"{path}: truncated: expected {HEADER_BYTES} bytes or more, got {len(head)}", _AGAIN)
    _, version, n_max, vocab, texts, entries, left_out, tokens, vocabulary, body, *by_length = _HEADER.unpack_from(head)
    if version != VERSION:
        raise StoreError(
            f"{path}: a store of version {version}; this edgespec reads version {VERSION}",
            "use the edgespec that built it, or build it again",
        )
    signed = hashlib.sha256(head[:_SIGNED]).digest() == head[_SIGNED:]
    if not signed or n_max != N_MAX or entries != sum(by_length) or not entries:
        raise StoreError(f"{path}: altered: its header does not match its checksum", _AGAIN)
    return StoreFacts(vocab, vocabulary.hex(), texts, tokens, tuple(by_length), left_out), body


# -- building ----------------------------------------------------------------------------------------------------------


def count(texts: Sequence[NDArray[np.int32]], report: Callable[[int, int], None] | None = None) -> NDArray[np.void]:
    """Count n-grams with a token that followed them in half of the cases or more -> ``ENTRY`` [n], ascending by key.

    All of the longest n-grams are kept, so that text that repeats word for word is found.  Shorter ones are kept if
    they occurred twice, because a single occurrence predicts little.  Takes about 140 bytes of memory per token.

    ``texts``: int32 [m] each, no n-gram spans two of them; ``report`` is called with (done, of).
    """
    sizes = [len(text) for text in texts]
    tokens = np.concatenate([np.empty(0, np.int32), *texts])  # [t]
    places = np.arange(len(tokens)) - np.repeat(np.cumsum([0, *sizes])[:-1], sizes)  # [t]: index in its text
    keys = np.zeros(len(tokens), np.uint64)  # [t]: of the n tokens before each place
    found: list[NDArray[np.void]] = []
    for n in range(1, N_MAX + 1):
        before = np.zeros(len(tokens), np.uint64)
        before[n:] = tokens[:-n]
        keys = (keys ^ (before + np.uint64(1))) * np.uint64(MULTIPLIER)
        keys ^= keys >> np.uint64(32)
        inside = places >= n
        found.append(_grouped(keys[inside], tokens[inside], n))
        if report:
            report(n, N_MAX)
    entries = np.concatenate(found)
    entries = entries[np.argsort(entries["key"], kind="stable")]
    return entries[_starts(entries["key"])]


def _grouped(keys: NDArray[np.uint64], tokens: NDArray[np.int32], n: int) -> NDArray[np.void]:
    """Count what followed n-grams of one length: ``keys`` [m] were followed by ``tokens`` [m]."""
    order = np.lexsort((tokens, keys))
    keys, tokens = keys[order], tokens[order]
    pairs = np.flatnonzero(_starts(keys) | _starts(tokens))  # where a new (key, token) begins
    times = np.diff(np.append(pairs, len(keys)))
    keys, tokens = keys[pairs], tokens[pairs]
    groups = np.flatnonzero(_starts(keys))  # where a new key begins among the pairs
    entries = np.empty(len(groups), ENTRY)
    if len(groups):
        best = np.maximum.reduceat(times << 32 | np.arange(len(times)), groups) & 0xFFFFFFFF
        entries["key"], entries["token"], entries["n"] = keys[groups], tokens[best], n
        entries["seen"], entries["of"] = times[best], np.add.reduceat(times, groups)
    least = 1 if n == N_MAX else 2
    return entries[(entries["seen"] >= _SHARE * entries["of"]) & (entries["of"] >= least)]


def _starts(values: NDArray[np.uint64] | NDArray[np.int32]) -> NDArray[np.bool_]:
    """Mark which of the sorted ``values`` [m] differ from the one before -> bool [m]."""
    first = np.ones(len(values), np.bool_)
    first[1:] = values[1:] != values[:-1]
    return first


def build_store(
    output: Path,
    texts: Sequence[NDArray[np.int32]],
    vocab: int,
    vocabulary: str,
    max_bytes: int = MAX_BYTES,
    overwrite: bool = False,
    report: Callable[[int, int], None] | None = None,
) -> StoreFacts:
    """Build a store of tokenized texts.

    Where the size does not hold all, the n-grams that occurred most often stay, the longer ones first.

    Args:
        output: the file to write; readable by its owner only, for it keeps what the texts say.
        texts: int32 [m] each.
        vocab, vocabulary: as in ``StoreFacts``.
        max_bytes: largest file.
        overwrite: replace an older store of that name; anything that is not a store is never replaced.
        report: called with (done, of).

    Raises:
        StoreError: the output exists, the texts or the size hold nothing, or the disk cannot take the file.
    """
    refuse_existing(output, overwrite)
    most = (max_bytes - HEADER_BYTES) // ENTRY_BYTES
    if most < 1:
        least = HEADER_BYTES + ENTRY_BYTES
        raise StoreError(f"a store of {max_bytes} bytes holds nothing: expected {least} bytes or more")
    entries = count(texts, report)
    total = sum(map(len, texts))
    if not len(entries):
        raise StoreError(
            f"the texts have {total} tokens and no n-gram worth keeping",
            f"give more text: at least {N_MAX + 1} tokens, or words that come again",
        )
    left_out = max(0, len(entries) - most)
    if left_out:
        worth = np.lexsort((-entries["n"], -entries["seen"]))
        entries = entries[np.sort(worth[:most])]
    by_length = tuple(int((entries["n"] == n).sum()) for n in range(1, N_MAX + 1))
    facts = StoreFacts(vocab, vocabulary, len(texts), total, by_length, left_out)
    _write(output, entries, facts, overwrite)
    return facts


def refuse_existing(output: Path, overwrite: bool) -> None:
    """Raise StoreError for an output that exists and is not a store, or may not be replaced."""
    if not output.exists():
        return
    if not is_store(output):
        raise StoreError(f"{output}: exists and is not an n-gram store", "choose another name with -o")
    if not overwrite:
        raise StoreError(f"{output}: exists", "replace it with --overwrite, or choose another name with -o")


def _write(output: Path, entries: NDArray[np.void], facts: StoreFacts, overwrite: bool) -> None:
    scale = np.minimum(1.0, _TOP / entries["of"])  # [n]
    parts = (
        entries["key"].astype("<u8"),
        entries["token"].astype("<i4"),
        np.maximum(1, entries["seen"] * scale).astype("<u2"),
        np.maximum(1, entries["of"] * scale).astype("<u2"),
    )
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.data)
    try:
        with staged(output, private=True) as path:  # it contains parts of the texts
            with path.open("wb") as file:
                file.write(facts.header(digest.digest()))
                for part in parts:
                    file.write(part.data)
            refuse_existing(output, overwrite)  # counting took a while
    except OSError as error:
        raise StoreError(f"{output}: cannot write it: {error.strerror}", "choose another place with -o") from error
