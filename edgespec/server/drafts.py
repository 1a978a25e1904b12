"""Report accepted and rejected draft tokens in a stream, for requests with ``show_drafts``.

Clients that do not know the event field ``edgespec`` can ignore it: the text is in its usual place as well.
"""

from __future__ import annotations

from typing import Any

from edgespec.engine.result import Chunk
from edgespec.runtimes.text.codec import TextCodec


class Drafts:
    """Follows one text and separates accepted draft tokens, rejected ones and the model's own tokens.

    Args:
        codec: of the bundle.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._tokens: list[int] = []  # the last tokens, the context of a rejected draft token

    def add(self, chunk: Chunk) -> dict[str, Any] | None:
        """Add a chunk of the text -> its round's texts and counts, or None if nothing was decoded.

        ``accepted`` plus ``own`` is the generated piece, including thoughts and tool calls.  ``refused`` is not in it.
        """
        item = chunk.round
        if item is None:
            return self._said("", "", chunk.text) if chunk.text else None
        accepted = "".join(chunk.pieces[: item.accepted])
        refused = ""
        if item.rejected and len(chunk.pieces) == len(item.tokens):  # a stop string may have cut the round
            before = self._tokens + item.tokens[: item.accepted]
            refused = self._codec.continuation(before, item.rejected)
        self._tokens = (self._tokens + item.tokens)[-8:]
        said = self._said(accepted, refused, chunk.text[len(accepted) :])
        return said | {"tokens": len(chunk.pieces), "drafted": len(item.drafted), "accepted": item.accepted}

    def _said(self, accepted: str, refused: str, own: str) -> dict[str, Any]:
        texts = {"accepted": accepted, "refused": refused, "own": own}
        return {"texts": texts, "tokens": 0, "drafted": 0, "accepted": 0}
