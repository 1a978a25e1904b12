"""Building an n-gram store: count, keep what is sure and often needed, write it whole or not at all."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.drafters.ngram_store.store import ENTRY_BYTES, HEADER_BYTES, MULTIPLIER, N_MAX, StoreFacts, is_store
from edgespec.errors import StoreError
from edgespec.runtimes.files.staged import staged

MAX_BYTES = 64 << 20
_SHARE = 0.5  # a token that followed less often than this is never guessed
_TOP = np.iinfo(np.uint16).max


@dataclass(frozen=True)
class Entries:
    """Rows of a store.

    Attributes:
        keys: uint64 [n].
        tokens: int32 [n], what mostly followed.
        seen: int64 [n], how often that did.
        of: int64 [n], how often anything did.
        lengths: int8 [n], tokens of the n-gram.
    """

    keys: NDArray[np.uint64]
    tokens: NDArray[np.int32]
    seen: NDArray[np.int64]
    of: NDArray[np.int64]
    lengths: NDArray[np.int8]

    def __len__(self) -> int:
        return len(self.keys)

    def taken(self, rows: NDArray[np.intp]) -> Entries:
        """Those of the given ``rows`` [m]."""
        return Entries(self.keys[rows], self.tokens[rows], self.seen[rows], self.of[rows], self.lengths[rows])


def count(texts: Sequence[NDArray[np.int32]], report: Callable[[int, int], None] | None = None) -> Entries:
    """Every n-gram with a token that followed it in half of the cases or more, ascending by key.

    Of the longest n-grams all are kept, so that text that comes again word for word is found; of shorter ones those
    that occurred twice: what followed a word once says little.  Takes about 140 bytes of memory a token.

    Args:
        texts: int32 [m] each; no n-gram goes from one into the next.
        report: called with (done, of).
    """
    sizes = [len(text) for text in texts]
    tokens = np.concatenate([np.empty(0, np.int32), *texts])  # [t]
    places = np.arange(len(tokens)) - np.repeat(np.cumsum([0, *sizes])[:-1], sizes)  # [t]: index in its text
    keys = np.zeros(len(tokens), np.uint64)  # [t]: of the n tokens before each place
    found: list[Entries] = []
    for n in range(1, N_MAX + 1):
        before = np.zeros(len(tokens), np.uint64)
        before[n:] = tokens[:-n]
        keys = (keys ^ (before + np.uint64(1))) * np.uint64(MULTIPLIER)
        keys ^= keys >> np.uint64(32)
        inside = places >= n
        found.append(_grouped(keys[inside], tokens[inside], n))
        if report:
            report(n, N_MAX)
    joined = [np.concatenate([getattr(part, name) for part in found]) for name in Entries.__dataclass_fields__]
    entries = Entries(*joined)
    entries = entries.taken(np.argsort(entries.keys, kind="stable"))
    return entries.taken(np.flatnonzero(_starts(entries.keys)))


def _grouped(keys: NDArray[np.uint64], tokens: NDArray[np.int32], n: int) -> Entries:
    """The entries of one length; ``keys`` [m] were followed by ``tokens`` [m]."""
    order = np.lexsort((tokens, keys))
    keys, tokens = keys[order], tokens[order]
    pairs = np.flatnonzero(_starts(keys) | _starts(tokens))  # where a new (key, token) begins
    times = np.diff(np.append(pairs, len(keys)))
    keys, tokens = keys[pairs], tokens[pairs]
    groups = np.flatnonzero(_starts(keys))  # where a new key begins among the pairs
    if not len(groups):
        return Entries(keys, tokens, times, times, np.empty(0, np.int8))
    of = np.add.reduceat(times, groups)
    best = np.maximum.reduceat(times << 32 | np.arange(len(times)), groups) & 0xFFFFFFFF
    seen = times[best]
    least = 1 if n == N_MAX else 2
    kept = np.flatnonzero((seen >= _SHARE * of) & (of >= least))
    return Entries(keys[groups], tokens[best], seen, of, np.full(len(groups), n, np.int8)).taken(kept)


def _starts(values: NDArray[np.uint64] | NDArray[np.int32]) -> NDArray[np.bool_]:
    """bool [m]: whether each of the sorted ``values`` [m] differs from the one before."""
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
        vocab: tokens of the vocabulary.
        vocabulary: SHA-256 of the tokenizer's vocabulary, hex digits.
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
    if not len(entries):
        raise StoreError(
            f"the texts have {sum(map(len, texts))} tokens and no n-gram worth keeping",
            f"give more text: at least {N_MAX + 1} tokens, or words that come again",
        )
    left_out = max(0, len(entries) - most)
    if left_out:
        worth = np.lexsort((-entries.lengths, -entries.seen))
        entries = entries.taken(np.sort(worth[:most]))
    by_length = tuple(int((entries.lengths == n).sum()) for n in range(1, N_MAX + 1))
    facts = StoreFacts(vocab, vocabulary, len(texts), sum(map(len, texts)), by_length, left_out)
    _write(output, entries, facts, overwrite)
    return facts


def refuse_existing(output: Path, overwrite: bool) -> None:
    """Refuse a name that is taken.

    Raises:
        StoreError: the output exists and is no store, or may not be replaced.
    """
    if not output.exists():
        return
    if not is_store(output):
        raise StoreError(f"{output}: exists and is not an n-gram store", "choose another name with -o")
    if not overwrite:
        raise StoreError(f"{output}: exists", "replace it with --overwrite, or choose another name with -o")


def _write(output: Path, entries: Entries, facts: StoreFacts, overwrite: bool) -> None:
    scale = np.minimum(1.0, _TOP / entries.of)  # [n]
    parts = (
        entries.keys.astype("<u8"),
        entries.tokens.astype("<i4"),
        np.maximum(1, entries.seen * scale).astype("<u2"),
        np.maximum(1, entries.of * scale).astype("<u2"),
    )
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.data)
    try:
        with staged(output, private=True) as path:  # it keeps what the texts say
            with path.open("wb") as file:
                file.write(facts.header(digest.digest()))
                for part in parts:
                    file.write(part.data)
            refuse_existing(output, overwrite)  # counting took a while
    except OSError as error:
        raise StoreError(f"{output}: cannot write it: {error.strerror}", "choose another place with -o") from error
