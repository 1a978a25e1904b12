"""A draft model with another tokenizer than the target's (Timor et al., arXiv 2502.05202).

The draft reads the text as its own tokens.  Where guesses are verified by matching, what it writes is tokenized for the
target: string-level exact matching.  Rejection sampling needs the distribution that each guess was sampled from: there
the draft only guesses tokens that both vocabularies have (token-level intersection), and all others have q = 0.  The
export measures which of the two guesses more tokens that are right.

Coupled sampling gives a shared token the target's noise, so that the same token tends to be sampled.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.drafter import DraftRequest
from edgespec.decoding.proposal import EMPTY, Proposal
from edgespec.decoding.target import BEST, Target
from edgespec.decoding.text import Text
from edgespec.drafters.sampling_drafts import Draw, draw_chain, spread
from edgespec.drafters.speculative import Speculative
from edgespec.runtimes.text.translation import ALONE, TranslatedText, Translation


class OtherTokenizer(Speculative):
    """Draws chains, or trees of shared tokens, from a draft model with another tokenizer.

    While a chain is sampled by strings, the draft's tokens have the numbers of the target's that they stand for; those
    of a text that no token of the target is have numbers after the target's vocabulary.

    Args:
        model: the draft.
        translation: between the tokenizers.
        branch: see ``Speculative``; only chains are sampled by strings.
    """

    def __init__(self, model: Target, translation: Translation, branch: tuple[int, ...] | None = None) -> None:
        super().__init__(model, translation.vocab, branch)
        self.translation = translation
        targets, vocab = translation.targets, translation.vocab
        columns = np.arange(model.vocab_size) if self._columns is None else self._columns  # [columns]
        alone = np.flatnonzero(targets == ALONE)
        self._stop = vocab + len(alone)  # the number of all tokens without a text
        numbers = np.where(targets >= 0, targets, self._stop)
        numbers[alone] = vocab + np.arange(len(alone))
        self._numbers: NDArray[np.int64] = numbers  # [the draft's vocabulary]
        self._tokens = np.concatenate((translation.drafts, alone))  # [stop], of the draft; -1 = none
        self._scored = [
            (found, numbers[columns[found]])
            for found in map(np.flatnonzero, (targets[columns] >= 0, numbers[columns] < self._stop))
        ]  # shared columns, and all with a text
        self._ends = translation.target.special.keys()
        self._best_of_strings, self._greedy = BEST in model.can, False
        self._translated, self._read = TranslatedText(translation), list[int]()
        self._of: Text | None = None  # the text that was translated

    def begin(self, request: DraftRequest) -> None:
        super().begin(request)
        own = self._own(request.tokens)
        if own and (called := getattr(self.model, "on_begin", None)) is not None:
            called(self, list(own))

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        """Draw a chain or tree; none where the text ends within a character that the draft cannot be given."""
        self._own(tokens)
        return super().propose(tokens, budget) if self._translated.complete else EMPTY

    def own(self, tokens: list[int]) -> list[int]:
        """Translate a text into tokens of the draft."""
        return list(self._own(tokens))

    def _own(self, tokens: list[int]) -> list[int]:
        read = self._read
        if tokens is not self._of or len(read) > len(tokens):
            if read != tokens[: len(read)]:
                self._translated, self._read = TranslatedText(self.translation), []
            self._of = tokens if isinstance(tokens, Text) else None
        if new := tokens[len(self._read) :]:
            self._translated.append(new)
            self._read += new
        return self._translated.tokens

    def _draw(self, tokens: list[int], owed: list[int], length: int) -> Proposal:
        params = self.params
        matches = self.branch == (1,) and not params.rejects and params.constraint is None
        if self.translation.matching == "tokens" or not matches:
            return super()._draw(tokens, owed, length)

        def feed(guess: int | None) -> list[int]:
            return owed if guess is None else [self._fed(guess)]

        def step(guess: int | None) -> NDArray[np.float32]:
            logits = self.model.forward(np.array(feed(guess), np.int64)).logits[-1:]
            self.model.keep(range(len(feed(guess))))
            columns, numbers = self._scored[1]
            return spread(logits[:, columns], numbers, self._stop)[0]

        def best(guess: int | None) -> tuple[int, float]:
            token, logit = self._best(feed(guess))
            return int(self._numbers[token]), logit

        def worth(guess: int | None) -> bool:
            return guess is None or not (guess == self._stop or guess in self._ends)

        how = Draw(tokens, self._stop + 1, params, self.noise)
        drawn = draw_chain(step, how, length, choose=best if self._best_of_strings else None, worth=worth)
        drafted = [self._fed(guess) for guess in drawn.tokens.tolist() if guess != self._stop]
        guesses = self.translation.guesses(tokens, drafted)[:length]
        return Proposal(np.array(guesses, np.int64)) if guesses else EMPTY

    def _fed(self, guess: int) -> int:
        return int(self._tokens[guess])

    def _whole(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        columns, numbers = self._scored[0]
        return spread(logits[:, columns], numbers, self.vocab)
