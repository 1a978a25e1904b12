"""Stored responses that clients may fetch and continue, in memory: bounded, and separate for each owner."""

from __future__ import annotations

from collections import Counter, OrderedDict

MOST_BYTES, BYTES_OF_ONE = 64 << 20, 16 << 20  # of all that is kept; of one owner


class Stored:
    """Keeps the latest responses, as JSON."""

    def __init__(self) -> None:
        # by owner, the oldest response first, and the owner whose latest response is the oldest
        self._kept: OrderedDict[str, OrderedDict[str, tuple[bytes, bytes]]] = OrderedDict()
        self._bytes: Counter[str] = Counter()  # of each owner

    def put(self, owner: str, id_: str, response: bytes, conversation: bytes) -> None:
        """Keep a response and the conversation that ends with it; the oldest ones make room."""
        size = len(response) + len(conversation)
        self.remove(owner, id_)
        if size > BYTES_OF_ONE:
            return
        self._kept.setdefault(owner, OrderedDict())[id_] = response, conversation
        self._kept.move_to_end(owner)
        self._bytes[owner] += size
        while self._bytes[owner] > BYTES_OF_ONE:
            self.remove(owner, next(iter(self._kept[owner])))
        while self._bytes.total() > MOST_BYTES:
            oldest = next(iter(self._kept))
            self.remove(oldest, next(iter(self._kept[oldest])))

    def get(self, owner: str, id_: str) -> tuple[bytes, bytes] | None:
        """Look up a response and its conversation; None = not stored, or of another owner."""
        return self._kept.get(owner, OrderedDict()).get(id_)

    def remove(self, owner: str, id_: str) -> bool:
        """Delete a response -> whether it existed."""
        if (found := self._kept.get(owner, OrderedDict()).pop(id_, None)) is None:
            return False
        self._bytes[owner] -= sum(map(len, found))
        if not self._kept[owner]:
            del self._kept[owner], self._bytes[owner]
        return True
