"""Which tokens may come where in a transcript, as Whisper (arXiv 2212.04356) was trained to write it.

With timestamps a text is a row of segments, ``<|0.00|> words <|2.48|>``: a time where each begins and one where it
ends.  The rules are those of OpenAI's reference (github.com/openai/whisper, decoding.py, ``ApplyTimestampRules``,
``SuppressBlank`` and ``SuppressTokens``).  They look at the tokens so far and at the model's row there, which those
decide: every lossless method stays so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class SpeechRules:
    """A constraint (``sampling.Constraint``) for the text of one window of sound."""

    vocab: int  # logits of a row
    prompt: int  # tokens before the text
    eos: int  # the token that ends a text; those of words are below it
    first_time: int  # the token of 0.00 s; each later one up to the end of the vocabulary adds 20 ms
    timestamps: bool = True  # whether the text has them
    no_timestamps: int | None = None  # the token that says of a text that it has none, which is never written
    suppress_tokens: tuple[int, ...] = ()  # tokens that are never written
    begin_suppress_tokens: tuple[int, ...] = ()  # tokens that do not begin a text
    max_initial_timestamp_index: int | None = 50  # the latest a text may begin, in steps of 20 ms; None = whenever
    scored: bool = True  # log-probabilities are those under the rules

    @cached_property
    def _always(self) -> NDArray[np.bool_]:  # [vocab]
        mask = np.ones(self.vocab, np.bool_)
        mask[list(self.suppress_tokens)] = False
        if self.timestamps and self.no_timestamps is not None:
            mask[self.no_timestamps] = False
        return mask

    def allowed(self, prefix: Sequence[int], row: NDArray[np.float32] | None = None) -> NDArray[np.bool_]:
        """See Constraint."""
        mask = self._always.copy()
        text = prefix[self.prompt :]
        if not len(text):
            mask[list(self.begin_suppress_tokens)] = False
        if self.timestamps:
            self._pair(mask, text)
            if row is not None:
                self._prefer_times(mask, row)
        return mask

    def forced(self, prefix: Sequence[int], most: int) -> list[int]:
        """See Constraint: nothing is left without a choice."""
        return []

    def _pair(self, mask: NDArray[np.bool_], text: Sequence[int]) -> None:
        """Leave to ``mask`` [vocab] what may follow ``text``: times in pairs, and none before another."""
        first = self.first_time
        if not len(text):
            mask[:first] = False
            if self.max_initial_timestamp_index is not None:
                mask[first + self.max_initial_timestamp_index + 1 :] = False
            return
        ends = text[-1] >= first
        opens = ends and (len(text) < 2 or text[-2] >= first)  # that time begins a segment: words come next
        if opens:
            mask[first:] = False
        elif ends:  # after the end of a segment comes the beginning of another, or the end of the text
            mask[: self.eos] = False
        latest = next((token for token in reversed(text) if token >= first), None)
        if latest is not None:  # a segment may begin where one ends, but not end where it begins
            mask[first : latest + (0 if ends and not opens else 1)] = False

    def _prefer_times(self, mask: NDArray[np.bool_], row: NDArray[np.float32]) -> None:
        """Allow only timestamps if their total probability exceeds that of every other token."""
        row = np.where(mask[: len(row)], row, np.float32(-np.inf)).astype(np.float64)
        times, others = row[self.first_time :], row[: self.first_time]
        top = times.max(initial=-np.inf)
        if top > -np.inf and top + np.log(np.exp(times - top).sum()) > others.max():
            mask[: self.first_time] = False
