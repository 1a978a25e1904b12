"""Model-free drafting: tokens that followed the same context earlier in this text are likely to follow again.

Prompt lookup copies the tokens after the most recent occurrence of the last tokens.  Here a map of n-grams is asked one
draft token at a time instead, for the most frequent next token, in the text and the draft so far (the idea of
llama.cpp's lookup decoding).

A first draft token after 1, 2, 3-4, 10+ equal tokens is right in .2-.4, .4-.5, .4-.7, .6-.98 of the cases.  Once a
draft token was right, the next is usually right more often.  So n starts at 1, and the length of the match decides how
far to draft.  The defaults come from the replay on four texts in docs/dev/log.md.

A store (``ngram_stores``) is asked if the text has no match, or one of one or two tokens that is shorter than the
store's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from edgespec.decoding.drafter import Drafter, DraftRequest
from edgespec.decoding.proposal import EMPTY, Proposal
from edgespec.decoding.settings import DraftOptions
from edgespec.decoding.text import INSERTED, Text
from edgespec.drafters.ngram_stores import NGramStore
from edgespec.drafters.registry import Parts
from edgespec.runtimes.files.manifest import MethodPart

_LONGEST = 32  # a match is measured no further back
_BUCKETS = (2, 3, 5, 10, 16)  # match lengths at which the next bucket starts
# acceptance by bucket and position, where nothing was measured: between plain prose and texts that repeat themselves
_RATES = dict(enumerate(((0.3, 0.65), (0.5, 0.75), (0.6, 0.8), (0.7, 0.85), (0.75, 0.9), (0.85, 0.93))))
_SHIFT = 32  # bits of a token in a packed key
_TOKEN = (1 << _SHIFT) - 1
_COUNT = (1 << 20) - 1  # low bits of an index entry: how often its only continuation was seen
_STORED = len(_BUCKETS) + 1  # first bucket of guesses from a store
_SHORT = 2  # a match of the text no longer than this gives way to a longer one of a store


class NGram(Drafter):
    """Drafts from the text itself, and from a store; the index costs O(n_max) and about 0.4 KB per token.

    At least ``n_min`` equal tokens count as a match.  For a match longer than ``n_max``, the longest key, the most
    recent occurrence is preferred.  It drafts only tokens that followed in at least a ``share`` of the cases.  Matches
    in a store have separate buckets.
    """

    name = "ngram"
    cheap = True

    def __init__(self, n_min: int = 1, n_max: int = 4, share: float = 0.6, store: NGramStore | None = None) -> None:
        self.n_min, self.n_max, self.rates = n_min, n_max, _RATES
        self.share = share
        self.store = store
        self._lead: list[int] = []  # source of an encoder-decoder, placed before the text
        self._clear()

    def _clear(self) -> None:
        self._text: list[int] = []  # the lead, followed by the text
        self._source: Text | None = None  # what it was read from
        # For each n, key of n tokens -> (index after its most recent occurrence) << 20 | (how often the token there
        # followed it); once a second token followed, _more has the counts of all.
        self._last: list[dict[int, int]] = [{} for _ in range(self.n_max + 1)]
        self._more: list[dict[int, dict[int, int]]] = [{} for _ in range(self.n_max + 1)]

    def begin(self, request: DraftRequest) -> None:
        """Index the prompt; an earlier request's index stays if the prompt continues its text.

        The encoder's source comes first in the index: names, numbers and quotes recur in its translation or summary.
        """
        if self._lead != (lead := list(request.source)):
            self._clear()
            self._lead = lead
        self._follow(request.tokens)

    def _follow(self, tokens: Sequence[int]) -> None:
        """Make the index one of ``tokens``; if these are not a continuation, it is rebuilt."""
        lead, known = len(self._lead), max(len(self._text) - len(self._lead), 0)
        # of the text of the round before the beginning is known: it only grows
        if tokens is not self._source and tokens[:known] != self._text[lead:]:
            self._clear()
            known = 0
        self._source = tokens if isinstance(tokens, Text) else None
        if len(self._text) < lead:
            for token in self._lead:
                self._push(token)
        for at in range(known, len(tokens)):
            self._push(tokens[at])

    def _push(self, token: int) -> None:
        """Index that a token followed the text."""
        text, at, key = self._text, len(self._text), 0
        for n in range(1, min(self.n_max, at) + 1):
            key |= (text[at - n] & _TOKEN) << (_SHIFT * (n - 1))
            if n < self.n_min:
                continue
            last = self._last[n]
            entry = last.get(key)
            if entry is None:
                last[key] = at << 20 | 1
                continue
            more = self._more[n].get(key)
            if more is not None:
                more[token] = more.get(token, 0) + 1
            elif text[entry >> 20] != token:
                self._more[n][key] = {text[entry >> 20]: entry & _COUNT, token: 1}
            last[key] = at << 20 | min((entry & _COUNT) + 1, _COUNT)
        text.append(token)

    def _match(self, tail: Sequence[int]) -> tuple[int, int]:
        """Find the longest indexed key that ends ``tail`` -> (n, key); (0, 0) if there is none."""
        key, found = 0, (0, 0)
        for n in range(1, min(self.n_max, len(tail)) + 1):
            key |= (tail[-n] & _TOKEN) << (_SHIFT * (n - 1))
            if n >= self.n_min:
                if key not in self._last[n]:  # then no longer key is there either
                    break
                found = (n, key)
        return found

    def _likely(self, tail: Sequence[int]) -> int:
        """Find the token that mostly followed the end of ``tail``, by the longest key that is sure enough; else -1."""
        n, key = self._match(tail)
        while n >= self.n_min:
            latest = self._text[self._last[n][key] >> 20]
            more = self._more[n].get(key)
            if more is None:
                return latest
            most = max(more.values())
            if most >= self.share * sum(more.values()):
                return latest if more[latest] == most else next(t for t, count in more.items() if count == most)
            n -= 1
            key &= (1 << (_SHIFT * n)) - 1
        return -1

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        """Guess a chain whose bucket says where it is from and how sure that is."""
        self._follow(tokens)
        matched, guesses = self._from_text(budget)
        if self.store is not None and (not guesses or matched <= _SHORT):
            stored = self._from_store(self.store, matched if guesses else 0, budget)
            if len(stored):
                return stored
        if not guesses:
            return EMPTY
        return Proposal(np.array(guesses, np.int64), bucket=bisect_right(_BUCKETS, matched))

    def _from_text(self, budget: int) -> tuple[int, list[int]]:
        """Guess from the text itself -> (length of the match, guesses)."""
        text = self._text
        n, key = self._match(text[-self.n_max :])
        if n == 0:
            return 0, []
        start, end = self._last[n][key] >> 20, len(text)
        matched = n
        while matched < min(_LONGEST, start) and text[start - matched - 1] == text[end - matched - 1]:
            matched += 1
        guesses: list[int] = []
        tail = text[-self.n_max :]
        for _ in range(min(budget, matched + 1)):
            token = self._likely(tail)
            if not 0 <= token < INSERTED:
                break
            tail.append(token)
            guesses.append(token)
        return matched, guesses

    def _from_store(self, store: NGramStore, beyond: int, budget: int) -> Proposal:
        """Guess from the store, if it knows more than the last ``beyond`` tokens: at most two a token matched."""
        tail = self._text[-store.n_max :]
        hit = store.likely(tail, self.share)
        if hit is None or hit.n <= beyond:
            return EMPTY
        # what was seen once is as sure as the text is close to the store's; else length and count are alike good
        bucket = _STORED + (0 if hit.seen == 1 else hit.n + (hit.seen >= 4) + (hit.seen >= 16))
        guesses: list[int] = []
        most = min(budget, 2 * hit.n)
        while hit is not None and len(guesses) < most:
            guesses.append(hit.token)
            tail = [*tail[1 - store.n_max :], hit.token]
            hit = store.likely(tail, self.share)
        return Proposal(np.array(guesses, np.int64), bucket=bucket)


def build(parts: Parts, part: MethodPart, options: DraftOptions) -> NGram:
    """N-gram drafting for a bundle."""
    return NGram(store=parts.store)
