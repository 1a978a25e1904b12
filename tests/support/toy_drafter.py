"""A toy target with taps, and the slot of a drafter that is conditioned on it, which records its inputs.

Tapped states of a row and the drafter's own hidden states name their source tokens, so a test can check every row that
the slot received.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.drafter import Drafter
from edgespec.decoding.loop import DecodeOptions, Round, decode
from edgespec.decoding.policy import Policy
from edgespec.decoding.stats import Stats
from edgespec.decoding.target import Output, Pass
from edgespec.runtimes.files.manifest_parts import DecoderPart, DrafterKind
from tests.support.reference import FunctionTarget
from tests.support.toy import hash_logits

VOCAB, HIDDEN, TAPS, MASK = 11, 3, 4, 9
Rows = NDArray[np.float32]


def named(tokens: Sequence[int], kind: str, width: int) -> Rows:
    """[width]: whole numbers that tell these tokens from others."""
    start = zlib.crc32(f"{kind} {[int(token) for token in tokens]}".encode())
    return np.array([zlib.crc32(bytes([at]), start) % 65536 for at in range(width)], np.float32)


def embedded(token: int) -> Rows:
    """[HIDDEN]: the token, and that it is one."""
    return np.array([token, token * token, 1], np.float32)


def likely(prefix: Sequence[int]) -> Rows:
    """[VOCAB]: the target's logits, which look at three tokens."""
    return hash_logits(3, VOCAB, 997)(tuple(prefix[-3:]))


def guessed(prefix: Sequence[int]) -> Rows:
    """[VOCAB]: the drafter's.  Every third time its second choice is the target's first, every seventh its third."""
    found, order = likely(prefix), np.argsort(-likely(prefix), kind="stable")
    for every, other in ((3, order[1]), (7, order[2])):
        if zlib.crc32(bytes([*prefix[-2:], every])) % every == 0:
            found[[order[0], other]] = found[[other, order[0]]]
            break
    return found


class TappedToy(FunctionTarget):
    """A target; tapped states of a row name all tokens up to it.  The next pass reuses the buffer of the taps.

    Attributes:
        asked: tokens whose embedding was asked for.
    """

    can = FunctionTarget.can | {"aux_hidden"}
    chunk = 7

    def __init__(self, context: int = 512) -> None:
        super().__init__(likely, VOCAB, context)
        self._buffer = np.zeros((64, TAPS), np.float32)
        self.asked: list[int] = []

    def embed(self, tokens: NDArray[np.int64]) -> Rows:
        self.asked += tokens.tolist()
        return np.array([embedded(int(token)) for token in tokens], np.float32)

    def read(self, tokens: Sequence[int], aux_hidden: bool = False) -> Iterator[Output]:
        for at in range(0, len(tokens), self.chunk):
            first = len(self.tokens)
            for output in super().read(tokens[at : at + self.chunk]):
                if aux_hidden:
                    prefixes = [self.tokens[: end + 1] for end in range(first, len(self.tokens))]
                    output.aux_hidden = self._tapped(prefixes)
                yield output

    def run(self, wanted: Pass) -> Output:
        output = super().run(wanted)
        if wanted.aux_hidden:
            assert wanted.tokens is not None
            above = range(-1, len(wanted.tokens) - 1) if wanted.parents is None else wanted.parents.tolist()
            output.aux_hidden = self._tapped([[*self.tokens, *path] for path in paths(wanted.tokens.tolist(), above)])
        return output

    def _tapped(self, prefixes: Sequence[Sequence[int]]) -> Rows:
        for row, prefix in zip(self._buffer, prefixes, strict=False):
            row[:] = named(prefix, "tap", TAPS)
        return self._buffer[: len(prefixes)]


def paths(tokens: Sequence[int], parents: Sequence[int]) -> list[list[int]]:
    """Give the tokens down to each row, its own the last; parent -1: nothing is before it."""
    found: list[list[int]] = []
    for token, parent in zip(tokens, parents, strict=True):
        found.append([*([] if parent < 0 else found[parent]), token])
    return found


class ToySlot:
    """A drafter's slot.

    Args:
        block: rows of a drafter of blocks, whose entries hold only taps; None = it drafts token by token.
        known: what its LM head scores, column by column; None = all tokens.

    Attributes:
        held: [columns] each, rows of the entries, as they were given.
        passes: (what, rows, own hidden states, only the best), of every pass.
        strange: rows of guesses that were not given the hidden state of the row before.
    """

    context = 512
    on_read = on_begin = None

    def __init__(self, block: int | None = None, known: Sequence[int] | None = None) -> None:
        self.tokens: list[int] = []
        self.held: list[Rows] = []
        self.passes: list[tuple[str, int, bool, bool]] = []
        self.strange: list[Rows] = []
        self.head_tokens = None if known is None else np.array(known, np.int64)
        kind: DrafterKind = "dflash" if block else "eagle"
        decoder = DecoderPart(kind=kind, columns=HIDDEN + TAPS, block=block, mask=MASK)
        self.model = SimpleNamespace(
            part=SimpleNamespace(decoder=decoder, heads=[]), facts=SimpleNamespace(hidden=HIDDEN)
        )
        self._last: Rows = np.zeros((0, HIDDEN + TAPS), np.float32)  # rows of the last pass

    def run(self, wanted: Pass) -> Output:
        given, best, recycled = wanted.inputs, wanted.top > 0, not wanted.fused
        assert given is not None
        if wanted.read:
            self._note("absorb", given, False, False)
            self.keep(range(len(given)))
            return Output(np.zeros((0, VOCAB), np.float32))
        if wanted.block:
            self._note("block", given, True, best)
            return self._said(np.array([block_guesses(given[0, 0], at) for at in range(1, len(given))]), best)
        self._note("given", given, recycled, best)
        above = range(-1, len(given) - 1) if wanted.parents is None else wanted.parents.tolist()
        before = [int(row[0]) for row in self.held]  # tokens of the entries
        found = [[*before, *path] for path in paths([int(row[0]) for row in given], above)]
        for path, row in zip(found, given, strict=True):
            state = [*named(path[:-1], "own", HIDDEN), *[0] * (TAPS - HIDDEN)]
            if recycled and row[HIDDEN:].tolist() != state:
                self.strange.append(row)
        hidden = np.array([named(path, "own", HIDDEN) for path in found])
        rows = found if wanted.scored is None else found[len(found) - wanted.scored :]
        return self._said(np.array([guessed(path) for path in rows]), best, hidden)

    def crop(self, length: int) -> int:
        del self.tokens[length:]
        return len(self.tokens)

    def keep(self, rows: Sequence[int]) -> None:
        self.tokens += [0] * len(rows)
        self.held += list(self._last[rows])

    def _note(self, what: str, given: Rows, recycled: bool, best: bool) -> None:
        if not len(given):
            raise ValueError("a pass of no rows")
        del self.held[len(self.tokens) :]
        self.passes.append((what, len(given), recycled, best))
        self._last = given.copy()

    def _said(self, logits: Rows, best: bool, hidden: Rows | None = None) -> Output:
        columns = logits if self.head_tokens is None else logits[:, self.head_tokens]
        if not best:
            return Output(columns, hidden)
        at = columns.argmax(-1)
        ids = at if self.head_tokens is None else self.head_tokens[at]
        return Output(columns[:0], hidden, (ids, columns[np.arange(len(at)), at]))


def block_guesses(pending: float, at: int) -> Rows:
    """[VOCAB]: a block's logits in its row ``at``."""
    return hash_logits(5, VOCAB, 997)((int(pending), at)) / np.float32(200)


def rounds(
    target: FunctionTarget, drafter: Policy | Drafter, prompt: Sequence[int], count: int, **options: Any
) -> list[Round]:
    """Return the rounds of a request that loses no drafter."""
    stats = Stats()
    found = list(decode(target, drafter, prompt, DecodeOptions(max_new_tokens=count, **options), stats))
    assert stats.dropped_reason is None
    return found
