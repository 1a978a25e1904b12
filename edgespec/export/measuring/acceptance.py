"""Measure how often the target accepts a draft, exactly and many positions at a time.

Appended rows make it cheap.  The target's KV cache holds a text.  For each sampled position p a short chain runs in
slots AFTER the text, with the positions p, p+1, ... and a mask that shows it only the text before p and its own rows:

::

   slots:    text[0] ... text[p-1] | text[p] ...  | root  d1  d2 | root' d1' ...
   root:        1    ...     1     |    0    ...  |  1    0   0  |  0 ...
   d1:          1    ...     1     |    0    ...  |  1    1   0  |  0 ...

Every row sees exactly what it would see in the real loop: the full model's KV of the committed prefix, and the draft's
own KV of the chain.  One pass scores all positions.  (One gated pass over a whole text would let the draft read its own
KV of the prefix: it ranks skip sets wrongly.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.drafter import Drafter, DraftRequest
from edgespec.decoding.target import Output, Pass, SkipSet
from edgespec.runtimes.slots.slot import Slot

MAX_ROWS = 96  # rows of one pass: bounds the scratch space
FIRST = 8  # positions before this have too little context to be typical


@dataclass(frozen=True)
class Acceptance:
    """Counts by draft position."""

    offered: tuple[int, ...]  # chains whose earlier guesses were all accepted
    accepted: tuple[int, ...]  # those of them whose guess was accepted too

    @property
    def rates(self) -> list[float]:
        """P(accepted | offered) of each position; 0 where nothing was offered."""
        return [a / o if o else 0.0 for a, o in zip(self.accepted, self.offered, strict=True)]


class ChainScorer:
    """Greedy continuations of the target at sampled positions of a text, and how well a draft guesses them.

    Args:
        target: the full model; its slot is overwritten.
    """

    def __init__(self, target: Slot, tokens: Sequence[int], positions: int, gamma: int) -> None:
        self.gamma, self.vocab = gamma, target.vocab_size
        self.tokens = list(tokens)
        last = len(self.tokens) - 1
        self.positions = np.unique(np.linspace(min(FIRST, last), last, positions).astype(np.int64))  # [P]
        # roots and the target's own continuation: chains[:, j + 1] is what follows chains[:, :j + 1]
        self.chains = np.zeros((len(self.positions), gamma + 1), np.int64)
        self.chains[:, 0] = np.asarray(self.tokens, np.int64)[self.positions]
        for depth in range(gamma):
            self.chains[:, depth + 1] = self._argmax(target, depth + 1, None)[:, depth]

    def score(self, draft: Slot, skip: SkipSet | None = None, gamma: int | None = None) -> Acceptance:
        """Run a draft (another model, or the target with sub-layers left out) over every chain.

        Args:
            draft: its slot is overwritten.
            gamma: score only the first guesses; None = all.
        """
        gamma = gamma or self.gamma
        guessed = self._argmax(draft, gamma, skip)  # [P, gamma]
        return counted(guessed == self.chains[:, 1 : gamma + 1])

    def score_drafter(self, drafter: Drafter) -> Acceptance:
        """Let a drafter guess after every position, greedily; its model reads the text."""
        drafter.begin(DraftRequest(self.tokens))
        guessed = np.full((len(self.positions), self.gamma), -1, np.int64)  # [P, gamma]
        for row, at in zip(guessed, self.positions.tolist(), strict=True):
            made = drafter.propose(self.tokens[: at + 1], self.gamma).tokens
            row[: len(made)] = made
        return counted(guessed == self.chains[:, 1:])

    def confidence(self, draft: Slot, skip: SkipSet | None = None) -> tuple[list[float], list[bool]]:
        """Run a draft as ``score`` does -> its probability of each tested guess, and whether that was right."""
        chances, right = list[float](), list[bool]()
        wanted = iter(self.chains[:, 1:].reshape(-1, self.gamma))
        for output in self.passes(draft, self.gamma, skip):
            logits = output.logits.astype(np.float64)  # [rows, vocab]
            shares = 1 / np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)
            for found, sure in zip(
                logits.argmax(-1).reshape(-1, self.gamma), shares.reshape(-1, self.gamma), strict=True
            ):
                matches = found == next(wanted)
                tested = self.gamma if matches.all() else int(matches.argmin()) + 1
                chances += sure[:tested].tolist()
                right += matches[:tested].tolist()
        return chances, right

    def _argmax(self, slot: Slot, depth: int, skip: SkipSet | None) -> NDArray[np.int64]:  # [P, depth]
        found = []
        for output in self.passes(slot, depth, skip):
            best = output.logits.argmax(-1)
            if slot.model.part.cut and slot.head_tokens is not None:  # columns of a cut LM head
                best = slot.head_tokens[best]
            found.append(best.reshape(-1, depth))
        return np.concatenate(found)

    def passes(self, slot: Slot, depth: int, skip: SkipSet | None = None, hidden: bool = False) -> Iterator[Output]:
        """Run the first ``depth`` rows of all chains, as many chains per pass as fit; a chain's rows are adjacent."""
        slot.prefill(self.tokens[slot.follow(self.tokens) :])
        room = slot.model.facts.context + slot.model.part.extra_rows - len(self.tokens)
        batch = max(1, min(MAX_ROWS, room) // depth)
        for start in range(0, len(self.positions), batch):
            at = self.positions[start : start + batch]  # [p]
            rows = np.arange(len(at) * depth).reshape(len(at), depth)
            parents = np.where(np.arange(depth) > 0, rows - 1, -1)  # [p, depth]
            # a draft with a smaller vocabulary never proposes a larger token id, so nothing after one counts
            chains = np.minimum(self.chains[start : start + batch, :depth], slot.vocab_size - 1)
            yield slot.run(Pass(chains.ravel(), parents.ravel(), 0, hidden, visible=np.repeat(at, depth), skip=skip))


def counted(right: NDArray[np.bool_]) -> Acceptance:  # [chains, guesses]
    """Count along chains, each up to its first wrong guess."""
    reached = np.concatenate([np.ones((len(right), 1), bool), np.cumprod(right, 1)[:, :-1].astype(bool)], 1)
    return Acceptance(tuple(reached.sum(0).tolist()), tuple((reached & right).sum(0).tolist()))
