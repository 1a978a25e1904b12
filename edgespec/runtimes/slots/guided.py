"""Classifier-free guidance (arXiv 2306.17806; of pictures 2207.12598): a target of two rows a position.

One row reads the prompt, the other one a prompt that says less or says what is not wanted; both read the same text
behind.  What the loop verifies is ``other + scale (asked - other)``, so that every method writes the text, or draws
from the distribution, of plain guided decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.target import Pass
from edgespec.decoding.text import INSERTED

Ids = NDArray[np.int64]
Both = Callable[[Ids, Ids, "Ids | None"], tuple[Pass, Pass]]


class _Asked:
    """An attribute or a method of the half that reads the prompt.

    A descriptor, as ``isinstance`` of a protocol does not see what ``__getattr__`` gives.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, guided: Guided, owner: type) -> Any:
        return getattr(guided.asked, self._name)

    def __set__(self, guided: Guided, value: Any) -> None:
        setattr(guided.asked, self._name, value)


class Guided:
    """See ``Target``; what drafters ask of a target beside that is asked of ``asked``, whose hidden states they get.

    Args:
        asked: a target whose text begins with the ``prompt``, so many tokens.
        other: another slot over the same model.
        instead: what the other's text begins with, at least one token.
        scale: of the difference.
        both: runs a pass of each, given rows of ``asked``, those of ``other`` and their parents, whose arrays stay as
            they are until the next pass; None = one after the other.
    """

    tokens: Any = _Asked()
    keep_hidden: Any = _Asked()
    keep_aux_hidden: Any = _Asked()
    aux_hidden_sink: Any = _Asked()
    embed: Any = _Asked()
    forward_heads: Any = _Asked()
    forward_layers: Any = _Asked()

    def __init__(
        self, asked: Any, other: Any, prompt: int, instead: Sequence[int], scale: float, both: Both | None = None
    ) -> None:
        self.asked, self.other, self._prompt, self._instead = asked, other, prompt, list(instead)
        self._scale, self._both, self._follows = np.float32(scale), both or self._in_turn, False
        self.vocab_size: int = asked.vocab_size
        self.context: int = asked.context - max(0, len(self._instead) - prompt)
        self.trees, self.exact_trees = getattr(asked, "trees", True), getattr(asked, "exact_trees", False)
        self.layers: int = getattr(asked, "layers", 0)

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

    def forward(self, tokens: Ids, parents: Ids | None = None) -> Pass:
        """See Target."""
        both = self._in_turn if tokens[0] >= INSERTED else self._both  # no joint pass has a caption's rows
        return self._mixed(*both(tokens, self._others(tokens), parents))

    def forward_from(self, tokens: Ids, hidden: NDArray[np.float32], layer: int, best: bool = False) -> Pass:
        """See LayeredTarget; the other half runs all layers."""
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
