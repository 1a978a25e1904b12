"""Responses that clients may ask for again and go on from, in memory: bounded, and each owner's apart."""

from __future__ import annotations

from collections import OrderedDict

MOST_BYTES, BYTES_OF_ONE = 64 << 20, 16 << 20  # of all that is kept; of one owner


class Stored:
    """Keeps the latest responses, as JSON."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], tuple[bytes, bytes]] = OrderedDict()

    def put(self, owner: str, id_: str, response: bytes, conversation: bytes) -> None:
        """Keep a response and the conversation that ends with it; the oldest ones make room."""
        self._kept[owner, id_] = response, conversation
        while self._bytes(owner) > BYTES_OF_ONE:
            del self._kept[next(key for key in self._kept if key[0] == owner)]
        while self._bytes() > MOST_BYTES:
            self._kept.popitem(last=False)

    def get(self, owner: str, id_: str) -> tuple[bytes, bytes] | None:
        """Look up a response, and the conversation; None = it is not kept, or it is somebody else's."""
        return self._kept.get((owner, id_))

    def remove(self, owner: str, id_: str) -> bool:
        """Forget one -> whether it was there."""
        return self._kept.pop((owner, id_), None) is not None

    def _bytes(self, owner: str | None = None) -> int:
        return sum(len(one) + len(two) for (whose, _), (one, two) in self._kept.items() if owner in (None, whose))
