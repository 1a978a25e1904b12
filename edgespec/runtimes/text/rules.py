"""Apply the rules of generation_config.json as a constraint of sampling, so that every method follows them.

For each prefix they define the allowed next tokens, as a grammar does (``decoding.sampling.Constraint``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.sampling import Constraint
from edgespec.runtimes.files.seq2seq_format import WritingRules


class RuledText:
    """A constraint that applies a model's generation rules, with the same meaning as in transformers.

    Args:
        rules: of the model.
        vocab: tokens of the model.
        ends: tokens that end a text.
        prompt: tokens that the text begins with; lengths count them.
        length: maximum length in tokens, beginning included; ``forced_eos_token_id`` is its last.
        beside: another constraint that also applies.
    """

    scored = False  # log-probabilities are the model's

    def __init__(
        self,
        rules: WritingRules,
        vocab: int,
        ends: Collection[int],
        prompt: int,
        length: int,
        beside: Constraint | None = None,
    ) -> None:
        self._rules, self._prompt, self._beside = rules, prompt, beside
        self._ends = [token for token in ends if token < vocab]
        self._last = length - 1 if rules.forced_eos_token_id is not None else None
        self._always = np.ones(vocab, np.bool_)
        single = [words[0] for words in rules.bad_words_ids if len(words) == 1 and words[0] not in self._ends]
        self._always[[token for token in (*rules.suppress_tokens, *single) if token < vocab]] = False
        self._longer = [words for words in rules.bad_words_ids if len(words) > 1]

    @staticmethod
    def needed(rules: WritingRules) -> bool:
        """Whether the rules restrict the allowed tokens."""
        said = (
            rules.suppress_tokens,
            rules.begin_suppress_tokens,
            rules.bad_words_ids,
            rules.no_repeat_ngram_size,
            rules.min_length,
        )
        return any(said) or rules.min_new_tokens > 0 or rules.forced_eos_token_id is not None

    def allowed(self, prefix: Sequence[int], row: NDArray[np.float32] | None = None) -> NDArray[np.bool_] | None:
        """See Constraint."""
        if len(prefix) == self._last:
            mask = np.zeros_like(self._always)
            mask[self._rules.forced_eos_token_id] = True
            return mask
        banned = list(self._banned(prefix))
        mask = self._always
        if banned:
            mask = mask.copy()
            mask[[token for token in banned if token < len(mask)]] = False
        other = self._beside.allowed(prefix, row) if self._beside else None
        return mask if other is None else mask & other[: len(mask)]

    def forced(self, prefix: Sequence[int], most: int) -> list[int]:
        """See Constraint."""
        if len(prefix) == self._last:
            return [int(self._rules.forced_eos_token_id or 0)][:most]
        return self._beside.forced(prefix, most) if self._beside else []

    def _banned(self, prefix: Sequence[int]) -> Iterator[int]:
        """Yield the tokens that may not follow this prefix, except those that are never allowed."""
        rules, size = self._rules, len(prefix)
        if size < max(rules.min_length, self._prompt + rules.min_new_tokens):
            yield from self._ends
        if size == self._prompt:
            yield from rules.begin_suppress_tokens
        for words in self._longer:
            if size >= len(words) - 1 and list(prefix[size - len(words) + 1 :]) == words[:-1]:
                yield words[-1]
        if 0 < rules.no_repeat_ngram_size <= size:
            yield from _repeats(prefix, rules.no_repeat_ngram_size)


def _repeats(prefix: Sequence[int], count: int) -> list[int]:
    """List the tokens that would repeat an earlier sequence of ``count`` tokens."""
    tokens = np.array(prefix, np.int64)
    last = tokens[len(tokens) - count + 1 :]  # [count - 1]
    windows = np.lib.stride_tricks.sliding_window_view(tokens, count)  # [n, count]
    same = (windows[:, :-1] == last).all(axis=1)
    return [int(token) for token in windows[same, -1]]
