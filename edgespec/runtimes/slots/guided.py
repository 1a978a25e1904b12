"""Classifier-free guidance (arXiv 2306.17806; for pictures 2207.12598): a target with two rows per position.

One row reads the prompt.  The other row reads a weaker or a negative prompt.  Both then read the same text.  The loop
verifies ``other + scale (asked - other)``, so that every method generates the text, or samples from the distribution,
of plain guided decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from edgespec.decoding.target import Ids, Output, Pass, Target
from edgespec.decoding.text import INSERTED

Both = Callable[[Pass, Pass], tuple[Output, Output]]
# fields of a pass that are asked of the half that reads the prompt
_FIELDS = frozenset({"parents", "hidden", "aux_hidden", "scored", "read", "offset", "inputs", "layers", "group"})


class Guided(Target):
    """A ``Target`` with guidance; drafters that need more of a target use ``asked``, and get its hidden states.

    Args:
        asked: a target whose text begins with a prompt of ``prompt`` tokens.
        other: another slot over the same model.
        instead: prompt of the other text, at least one token.
        scale: of the difference.
        both: runs a pass of each, whose arrays stay valid until the next pass; None = one after the other.
    """

    def __init__(
        self, asked: Target, other: Target, prompt: int, instead: Sequence[int], scale: float, both: Both | None = None
    ) -> None:
        self.asked, self.other, self._prompt, self._instead = asked, other, prompt, list(instead)
        self._scale, self._both, self._follows = np.float32(scale), both or self._in_turn, False
        self.vocab_size: int = asked.vocab_size
        self.context: int = asked.context - max(0, len(self._instead) - prompt)
        self.exact_trees, self.layers = asked.exact_trees, asked.layers
        self.can = asked.can & _FIELDS

    @property
    def tokens(self) -> list[int]:  # type: ignore[override]
        """See Target."""
        return self.asked.tokens

    def follow(self, tokens: Sequence[int]) -> int:
        """See Target."""
        self._follows = False
        return int(self.asked.follow(tokens))

    def crop(self, length: int) -> int:
        """See Target."""
        self._follows = False
        return int(self.asked.crop(length))

    def read(self, tokens: Sequence[int], aux_hidden: bool = False) -> Iterator[Output]:
        """See Target; the other half is read before the next pass."""
        self._follows = False
        return self.asked.read(tokens, aux_hidden)

    def run(self, wanted: Pass) -> Output:
        """See Target; a pass without logits of the LM head is one of ``asked`` alone."""
        self.check(wanted)
        if wanted.group or wanted.scored == 0:
            self._follows &= not wanted.read
            return self.asked.run(wanted)
        assert wanted.tokens is not None
        tokens, wanted = wanted.tokens, wanted._replace(top=0)
        other = Pass(self._others(tokens), wanted.parents, scored=wanted.scored)  # through all layers
        # no joint pass has a caption's rows, or begins within the model
        alone = tokens[0] >= INSERTED or wanted.inputs is not None
        asked, other_output = (self._in_turn if alone else self._both)(wanted, other)
        return replace(asked, logits=other_output.logits + self._scale * (asked.logits - other_output.logits))

    def keep(self, rows: Sequence[int]) -> None:
        """See Target."""
        self.asked.keep(rows)
        self.other.keep(rows)

    def _others(self, tokens: Ids) -> Ids:
        """Bring the other slot to the position of ``asked`` -> its rows, [n]."""
        begins = len(self.asked.tokens) < self._prompt  # the pending token is the prompt's last one
        if not self._follows:
            text = self._instead[:-1] if begins else [*self._instead, *self.asked.tokens[self._prompt :]]
            if left := text[self.other.follow(text) :]:
                self.other.prefill(left)
            self._follows = True
        return np.concatenate((self._instead[-1:], tokens[1:])) if begins else tokens

    def _in_turn(self, wanted: Pass, other: Pass) -> tuple[Output, Output]:
        asked = _copied(self.asked.run(wanted))
        return asked, self.other.run(other)


def _copied(output: Output) -> Output:
    """Copy an output that the next pass over the same model would overwrite."""
    hidden, tapped = (None if one is None else one.copy() for one in (output.hidden, output.aux_hidden))
    return replace(output, logits=output.logits.copy(), hidden=hidden, aux_hidden=tapped)
