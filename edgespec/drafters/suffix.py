"""A suffix automaton of a growing text: the longest end of the text that stood in it before, and what followed.

Blumer et al. 1985; as a drafter the idea of SAM-Decoding (arXiv 2411.10666).  A state is a set of strings that end at
the same places; its link is the state of its longest end that has more places.  So the link of the whole text's state
is the longest end of the text that occurred before, and there is nothing else to keep.  Only committed tokens are
pushed: nothing is ever taken back.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

_SHIFT = 32  # bits of a token in a packed key
_LOW = (1 << _SHIFT) - 1
_WALK = 32  # links along which a push notes where their strings last ended


class SuffixAutomaton:
    """At most two states a token; a push is O(1) amortised and costs about 0.11 KB.

    A state's first transition lies in arrays, as most states have one only; the others are in one hash from
    (state, token), which also chains the tokens of a state.

    Attributes:
        matched: tokens of the longest end of the text that occurred before; 0 = none did.
        after: index of the token after its most recent earlier occurrence.  Exact unless that occurrence was the end
            of a text with more than 32 longer repeated ends, as in a loop: then an older one.
    """

    def __init__(self) -> None:
        self.matched = self.after = 0
        self._size = 0  # of the text
        self._whole = 0  # state of the whole text
        # of each state: its longest string's length, its link, the index after its latest end, first transition
        self._length, self._link, self._end = array("i", [0]), array("i", [-1]), array("i", [0])
        self._token, self._to = array("i", [-1]), array("i", [0])
        self._head = array("i", [-1])  # the latest token among the other transitions
        self._others: dict[int, int] = {}  # state, token -> target, 1 + next token of the chain

    def __len__(self) -> int:
        return self._size

    def push(self, token: int) -> None:
        """Append ``token`` to the text."""
        length, link, end, first, to = self._length, self._link, self._end, self._token, self._to
        others = self._others
        self._size = size = self._size + 1
        whole = self._new(size, 0, size)
        state = self._whole
        self._whole = whole
        target = -1
        while state >= 0:
            if first[state] == token:
                target = to[state]
                break
            if first[state] < 0:
                first[state], to[state] = token, whole
            else:
                key = state << _SHIFT | token
                if (entry := others.get(key)) is not None:
                    target = entry >> _SHIFT
                    break
                others[key] = whole << _SHIFT | (self._head[state] + 1)
                self._head[state] = token
            state = link[state]
        if target >= 0 and length[target] != length[state] + 1:
            target = self._split(state, token, target)
        link[whole] = target = max(target, 0)
        self.matched, self.after = length[target], end[target]
        for _ in range(_WALK):
            if target <= 0:
                break
            end[target] = size
            target = link[target]

    def _new(self, length: int, link: int, end: int) -> int:
        """A state without transitions."""
        self._length.append(length)
        self._link.append(link)
        self._end.append(end)
        self._token.append(-1)
        self._to.append(0)
        self._head.append(-1)
        return len(self._length) - 1

    def _split(self, state: int, token: int, target: int) -> int:
        """Part ``target``'s strings up to ``state``'s and ``token`` from its longer ones -> their new state."""
        copy = self._new(self._length[state] + 1, self._link[target], self._end[target])
        self._token[copy], self._to[copy] = self._token[target], self._to[target]
        self._head[copy] = self._head[target]
        for other, entry in list(self._chain(target)):
            self._others[copy << _SHIFT | other] = entry
        self._link[target] = copy
        while state >= 0:
            if self._token[state] == token:
                if self._to[state] != target:
                    break
                self._to[state] = copy
            else:
                key = state << _SHIFT | token
                entry = self._others[key]  # a shorter end goes on wherever a longer one does
                if entry >> _SHIFT != target:
                    break
                self._others[key] = copy << _SHIFT | (entry & _LOW)
            state = self._link[state]
        return copy

    def _chain(self, state: int) -> Iterator[tuple[int, int]]:
        """(token, entry) of the other transitions of a state."""
        token = self._head[state]
        while token >= 0:
            entry = self._others[state << _SHIFT | token]
            yield token, entry
            token = (entry & _LOW) - 1
