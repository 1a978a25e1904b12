"""Classifier-free guidance (arXiv 2306.17806; of pictures 2207.12598): a target of two rows a position.

One row reads the prompt, the other one a prompt that says less or says what is not wanted; both read the same text
behind.  What the loop verifies is ``other + scale (asked - other)``, so that every method writes the text, or draws
from the distribution, of plain guided decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.target import AuxHiddenSink, Heads, Pass, Target
from edgespec.decoding.text import INSERTED

Ids = NDArray[np.int64]
Both = Callable[[Ids, Ids, "Ids | None"], tuple[Pass, Pass]]


class Guided(Target):
    """See ``Target``; what drafters ask of a target beside that is asked of ``asked``, whose hidden states they get.

    Args:
        asked: a target whose text begins with the ``prompt``, so many tokens.
        other: another slot over the same model.
        instead: what the other's text begins with, at least one token.
        scale: of the difference.
        both: runs a pass of each, given rows of ``asked``, those of ``other`` and their parents, whose arrays stay as
            they are until the next pass; None = one after the other.
    """

    def __init__(
        self, asked: Target, other: Target, prompt: int, instead: Sequence[int], scale: float, both: Both | None = None
    ) -> None:
        self.asked, self.other, self._prompt, self._instead = asked, other, prompt, list(instead)
        self._scale, self._both, self._follows = np.float32(scale), both or self._in_turn, False
        self.vocab_size: int = asked.vocab_size
        self.context: int = asked.context - max(0, len(self._instead) - prompt)
        self.trees, self.exact_trees, self.layers = asked.trees, asked.exact_trees, asked.layers

    @property
    def tokens(self) -> list[int]:  # type: ignore[override]
        """See Target."""
        return self.asked.tokens

    @property
    def keep_hidden(self) -> bool:
        """See Target."""
        return self.asked.keep_hidden

    @keep_hidden.setter
    def keep_hidden(self, keep: bool) -> None:
        self.asked.keep_hidden = keep

    @property
    def keep_aux_hidden(self) -> bool:
        """See Target."""
        return self.asked.keep_aux_hidden

    @keep_aux_hidden.setter
    def keep_aux_hidden(self, keep: bool) -> None:
        self.asked.keep_aux_hidden = keep

    @property
    def aux_hidden_sink(self) -> AuxHiddenSink | None:
        """See Target."""
        return self.asked.aux_hidden_sink

    @aux_hidden_sink.setter
    def aux_hidden_sink(self, sink: AuxHiddenSink | None) -> None:
        self.asked.aux_hidden_sink = sink

    def embed(self, tokens: Ids) -> NDArray[np.float32]:
        """See Target."""
        return self.asked.embed(tokens)

    def forward_heads(self, group: str, hidden: NDArray[np.float32], top: int = 0) -> Heads:
        """See Target."""
        return self.asked.forward_heads(group, hidden, top)

    def forward_layers(
        self, rows: Ids | NDArray[np.float32], offset: int, first: int, last: int
    ) -> NDArray[np.float32]:
        """See Target."""
        return self.asked.forward_layers(rows, offset, first, last)

    def follow(self, tokens: Sequence[int]) -> int:
        """See Target."""
        self._follows = False
        return int(self.asked.follow(tokens))

    def crop(self, length: int) -> int:
        """See Target."""
        self._follows = False
        return int(self.asked.crop(length))

    def prefill(self, tokens: Sequence[int]) -> None:
        """See Target; the other half is read before the next pass."""
        self._follows = False
        self.asked.prefill(tokens)

    def forward(self, tokens: Ids, parents: Ids | None = None, best: bool = False) -> Pass:
        """See Target."""
        both = self._in_turn if tokens[0] >= INSERTED else self._both  # no joint pass has a caption's rows
        return self._mixed(*both(tokens, self._others(tokens), parents))

    def forward_from(self, tokens: Ids, hidden: NDArray[np.float32], layer: int, best: bool = False) -> Pass:
        """See Target; the other half runs all layers."""
        asked = _copied(self.asked.forward_from(tokens, hidden, layer, False))
        return self._mixed(asked, self.other.forward(self._others(tokens), None))

    def keep(self, rows: Sequence[int]) -> None:
        """See Target."""
        self.asked.keep(rows)
        self.other.keep(rows)

    def _others(self, tokens: Ids) -> Ids:
        """Let the other half stand where ``asked`` does -> its rows, [n]."""
        begins = len(self.asked.tokens) < self._prompt  # the pending token is the prompt's last one
        if not self._follows:
            text = self._instead[:-1] if begins else [*self._instead, *self.asked.tokens[self._prompt :]]
            if left := text[self.other.follow(text) :]:
                self.other.prefill(left)
            self._follows = True
        return np.concatenate((self._instead[-1:], tokens[1:])) if begins else tokens

    def _in_turn(self, tokens: Ids, others: Ids, parents: Ids | None) -> tuple[Pass, Pass]:
        asked = _copied(self.asked.forward(tokens, parents))
        return asked, self.other.forward(others, parents)

    def _mixed(self, asked: Pass, other: Pass) -> Pass:
        return replace(asked, logits=other.logits + self._scale * (asked.logits - other.logits))


def _copied(output: Pass) -> Pass:
    """Copy what the next pass over the same model writes over."""
    hidden, tapped = (None if one is None else one.copy() for one in (output.hidden, output.aux_hidden))
    return Pass(output.logits.copy(), hidden, aux_hidden=tapped)
