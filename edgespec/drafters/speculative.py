"""A separate small model (Leviathan arXiv 2211.17192, Chen arXiv 2302.01318).

It shares the target's vocabulary; ``other_tokenizer`` is for those that do not.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.drafter import DraftRequest
from edgespec.decoding.proposal import EMPTY, Proposal
from edgespec.decoding.target import BEST, Output, Pass, SkipSet, Target
from edgespec.decoding.text import INSERTED, Text
from edgespec.drafters.sampling_drafts import Draw, DrawingDrafter, draw_chain, draw_tree, rows_of, spread, widths_of

# Tokens that the draft has not seen are fed in one pass with the pending one up to this many, because each row also
# costs an LM head; more are prefilled first.  After full acceptance there are two: the last draft token and the bonus
# token.
_FEED = 4
_BEHIND = 32  # if the draft missed at least this many tokens, it reads them by pieces before it drafts
# a short head is used while at most one in _COMMON of the text's last _TAIL tokens is beyond it
_TAIL, _COMMON = 128, 8


class Speculative(DrawingDrafter):
    """Draws chains or trees (``draw.widths_of``) from a draft model.

    The draft's slot follows the committed tokens by longest common prefix, so that accepted, refused and never run
    guesses need no special cases.  The draft's vocabulary may differ from the target's, ``vocab``, by padding.

    A draft whose LM head was cut has ``columns`` logits a row, fewer than its vocabulary, and ``head_tokens`` int64
    [columns] says which tokens they are (None: the first ones); it never guesses another.

    ``head_rows``: the tokens, the first of the vocabulary, that the LM head scores while the text consists of them, as
    in FR-Spec (arXiv 2502.14856): vocabularies made by merging pairs begin with the frequent ones, and the head is a
    large part of a small model.  0 = all.
    """

    name = "speculative"

    def __init__(self, model: Target, vocab: int, branch: tuple[int, ...] | None = None, head_rows: int = 0) -> None:
        self.model, self.vocab, self.branch = model, vocab, branch or (1,)
        # `follow` may take back kept tokens: states that cannot be cropped stay at the committed tokens
        model.revocable = True
        # its likeliest token may not be one of its padding, which the target does not know
        self._greedy = BEST in model.can and model.vocab_size <= vocab
        columns: int = getattr(model, "columns", model.vocab_size)
        self._columns: NDArray[np.int64] | None = None  # [columns]: the token of each, where some have none
        if columns < model.vocab_size:
            named: NDArray[np.int64] | None = getattr(model, "head_tokens", None)
            self._columns = np.arange(columns) if named is None else named
        short = 0 < head_rows < columns == model.vocab_size and {BEST, "skip"} <= model.can
        self._short = SkipSet(head_rows=head_rows) if short else None
        self._head = self._short  # of the next passes; None = all of it
        self._least = 0  # tokens that are read by pieces; 0 = the slot may hold another text
        self._text: Text | None = None
        self._common = 0  # number of its tokens that the slot begins with

    def forecast(self, budget: int) -> tuple[int | None, list[int] | None]:
        return None, rows_of(self.branch, budget)

    def begin(self, request: DraftRequest) -> None:
        super().begin(request)
        self._least, self._text = 0, None

    def prefill(self, tokens: list[int], most: int) -> int:
        """Read tokens by pieces, except the last ones, which ``propose`` reads."""
        model = self.model
        own = self._own(tokens)
        if not self._least:
            self._follow(own)
            self._least = _FEED
        known = len(model.tokens)  # it may also hold rejected draft tokens, but few
        left = len(own) - 1 - known
        if left < _FEED:
            self._least = max(self._least, _BEHIND)
        if left < self._least:
            return 0
        if most:
            if len(own) >= model.context or self._unknown(own[known:]):
                self._least = sys.maxsize  # it proposes nothing
                return 0
            model.prefill(own[known : known + min(left, most)])
        return max(left - most, 0)

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        """Draw a chain or tree; less deep than ``budget`` where the draft's own context ends."""
        model, own = self.model, self._own(tokens)
        length = min(budget, model.context - len(own))
        if length < 1 or not own:
            return EMPTY
        known = self._follow(own)
        if self._unknown(own[known:]):
            return EMPTY
        self.caught_up = len(own) - known <= _FEED
        if not self.caught_up:
            model.prefill(own[known:-1])
            known = len(own) - 1
        if self._short is not None:
            rare = sum(self._short.head_rows <= token < INSERTED for token in own[-_TAIL:])
            self._head = self._short if rare * _COMMON <= min(len(own), _TAIL) else None
        return self._draw(tokens, own[known:], length)

    def _draw(self, tokens: list[int], owed: list[int], length: int) -> Proposal:
        """Draw guesses; ``owed``: tokens of the draft that its slot does not hold yet."""
        return (self._chain if self.branch == (1,) else self._tree)(self.how(tokens), owed, length)

    def _own(self, tokens: list[int]) -> list[int]:
        """Return the draft's tokens of a text; only the last of those of the round before may differ."""
        return tokens

    def _fed(self, guess: int) -> int:
        """Return the draft's token of a guess."""
        return guess

    def _unknown(self, tokens: list[int]) -> bool:
        """Tell whether there is a padding row of the target's vocabulary, which the draft lacks; images are no such."""
        most = self.model.vocab_size
        return max(tokens) >= most and any(most <= token < INSERTED for token in tokens)

    def _follow(self, tokens: list[int]) -> int:
        """Crop the slot to its common prefix with all except the pending token; returns the length.

        A prefix that was common in the round before still is: a text only grows, and a request has exclusive slots.
        """
        model = self.model
        if tokens is not self._text:
            self._text = tokens if isinstance(tokens, Text) else None
            self._common = model.follow(tokens[:-1])
            return self._common
        held, most = model.tokens, min(len(model.tokens), len(tokens) - 1)
        same = min(self._common, most)
        while same < most and held[same] == tokens[same]:
            same += 1
        self._common = model.crop(same)
        return self._common

    def _chain(self, how: Draw, owed: list[int], length: int) -> Proposal:
        """Sample a chain of draft tokens."""

        def step(guess: int | None) -> NDArray[np.float32]:
            feed = owed if guess is None else [self._fed(guess)]
            return self._run(feed, len(feed))[0]

        def best(guess: int | None) -> tuple[int, float]:
            return self._best(owed if guess is None else [self._fed(guess)])

        return draw_chain(step, how, length, choose=best if self._greedy else None)

    def _best(self, feed: Sequence[int]) -> tuple[int, float]:
        """Run a chain of rows, which the slot keeps -> the likeliest token after it, and its logit."""
        found = self._pass(feed, best=True).best
        assert found is not None
        self.model.keep(range(len(feed)))
        return int(found[0][-1]), float(found[1][-1])

    def _tree(self, how: Draw, owed: list[int], length: int) -> Proposal:
        """Draw a tree: of siblings at the cost of their chain, or a full one, whose nodes run again at every depth."""
        model, siblings = self.model, len(self.branch) == 1
        levels = len(widths_of(self.branch, length))

        def level(nodes: Sequence[int], guesses: Sequence[int], parents: Sequence[int]) -> NDArray[np.float32]:
            if nodes[0] < 0:
                # the rows of a tree need a common root: the pending token, which therefore stays out of the slot
                return self._run(owed, len(owed) - (not siblings and levels > 1))
            if siblings:
                return self._run([self._fed(guesses[nodes[0]])], 1)
            above = np.array([-1, *(parent + 1 for parent in parents)], np.int64)  # [1 + guesses]
            logits = self._pass([owed[-1], *map(self._fed, guesses)], above).logits
            rows = self._whole(logits[[node + 1 for node in nodes]])
            first, path = nodes[0], [0]
            while first >= 0:
                path.insert(1, first + 1)
                first = parents[first]
            if len(path) == levels:  # the deepest that is run: what the first choices were stays for the next round
                model.keep(path)
            return rows

        return draw_tree(level, how, self.branch, length)

    def _run(self, feed: Sequence[int], kept: int) -> NDArray[np.float32]:
        """Run a chain of rows, of which the slot keeps the first ``kept`` -> logits float32 [1, vocab] after it."""
        logits = self._pass(feed).logits[-1:]
        self.model.keep(range(kept))
        return self._whole(logits)

    def _pass(self, feed: Sequence[int], parents: NDArray[np.int64] | None = None, best: bool = False) -> Output:
        return self.model.run(Pass(np.array(feed, np.int64), parents, int(best), skip=self._head))

    def _whole(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        columns = self._columns if self._head is None else slice(0, self._head.head_rows)
        return logits if columns is None else spread(logits, columns, self.model.vocab_size)

    def benchmark_step(self, first: bool = False) -> bool:
        if first:
            return False
        self._pass([0])
        return True
