"""What a drafter that is conditioned on a target makes of a text: entries in a slot, and chains or trees after them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.noise import Noise
from edgespec.decoding.proposal import Proposal
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.target import Pass, TappedTarget
from edgespec.drafters.drawing.chain import draw_chain
from edgespec.drafters.drawing.tree import draw_tree
from edgespec.drafters.given import Given, Rows
from edgespec.runtimes.slots.slot import Slot

FIRST_ROWS = 3  # of the first step that is timed: the pending token and two accepted guesses


class Entries:
    """An entry for every token but the first, of that token and what was tapped of the target at the token before.

    Args:
        target: gives embeddings of tokens.
        slot: of the drafter; a token of it stands for an entry.
        branch: guesses per node, see ``speculative.DraftModel``.
    """

    held = 1  # rows that are left to the pass that guesses

    def __init__(self, target: TappedTarget, slot: Slot, branch: tuple[int, ...] = (1,)) -> None:
        decoder = slot.model.part.decoder
        assert decoder is not None
        self.target, self.slot, self.branch = target, slot, branch
        # of the target's embedding, which is an assistant's tap, too
        hidden = decoder.columns // 2 if decoder.reads else slot.model.facts.hidden
        self._given = Given(target, decoder.columns, hidden)
        self.no_taps = np.zeros((0, decoder.columns - hidden), np.float32)
        self._states = np.zeros((0, 0), np.float32)  # [1 + n, hidden]: its own, of the last token and of guesses

    def __len__(self) -> int:
        return len(self.slot.tokens)

    def crop(self, entries: int) -> None:
        """Forget all but the first so many."""
        del self.slot.tokens[entries:]

    def kept(self, same: int, rows: int) -> int:
        """How many are still right, the others are forgotten.

        Args:
            same: tokens at the beginning of the text that are as they were.
            rows: its tokens but the pending one.
        """
        found = max(min(same - self.held, len(self), rows - self.held), 0)
        self.crop(found)
        return found

    def absorb(self, tokens: Sequence[int], taps: Rows) -> None:
        """Append those of tokens [n] and taps [n, k * hidden]."""
        self.slot.absorb_given(self._given(tokens, taps))

    def draw(self, tokens: Sequence[int], taps: Rows, length: int, params: SamplingParams, noise: Noise) -> Proposal:
        """Append the last entries, and guess after them; those of guesses are appended, too.

        Args:
            tokens: committed ones, the pending one last.
            taps: [n, k * hidden], of what the last n tokens make entries with.
            length: most levels of the tree, at least 1.
            params: how the request samples.
            noise: its randomness.
        """
        vocab = self.target.vocab_size

        def run(guess: int | None, best: bool) -> Pass:
            owed, given = (tokens[-len(taps) :], taps) if guess is None else ([guess], self._states)
            output = self._forward(owed, given, guess is not None, best)
            self._keep(len(owed))
            return output

        def step(guess: int | None) -> Rows:
            return self._whole(run(guess, False).logits)[-1]

        def best(guess: int | None) -> tuple[int, float]:
            found = run(guess, True).best
            assert found is not None
            return int(found[0][-1]), float(found[1][-1])

        def level(nodes: Sequence[int], guesses: Sequence[int], parents: Sequence[int]) -> Rows:
            if nodes[0] < 0 or len(self.branch) == 1:  # a comb goes on after its first choices
                return step(None if nodes[0] < 0 else guesses[nodes[0]])[None]
            above = np.array(parents, np.int64)
            root = self._states[:1]
            output = self._forward(guesses, self._states[above + 1], True, parents=above)
            assert output.hidden is not None
            self._states = np.concatenate((root, output.hidden))
            return self._whole(output.logits[list(nodes)])

        if self.branch == (1,):
            return draw_chain(step, tokens, length, vocab, params, noise, best=best)
        return draw_tree(level, tokens, self.branch, length, vocab, params, noise)

    def try_once(self) -> None:
        """One step of nothing, to be timed."""
        self.slot.forward_given(self._given([0], np.zeros((1, 1), np.float32)), True, True)

    def try_first(self) -> bool:
        """The first step of a round, over what was accepted before; False = it takes what another does."""
        taps = np.zeros((FIRST_ROWS, self.no_taps.shape[1]), np.float32)
        self.slot.forward_given(self._given([0] * FIRST_ROWS, taps), False, True)
        return True

    def _keep(self, rows: int) -> None:
        """Append the entries of the last pass."""
        self.slot.keep(range(rows))

    def _forward(
        self,
        tokens: Sequence[int],
        given: Rows,
        recycled: bool,
        best: bool = False,
        parents: NDArray[np.int64] | None = None,  # [n]
    ) -> Pass:
        """Run rows of tokens [n] and taps or its own hidden states [n, any]; the state of the last is kept."""
        output = self.slot.forward_given(self._given(tokens, given), recycled, best, parents)
        assert output.hidden is not None
        self._states = output.hidden[-1:].copy()
        return output

    def _whole(self, logits: Rows) -> Rows:
        """[n, vocab] of ``logits`` [n, any]: tokens without a column cannot be guessed."""
        columns = self.slot.head_tokens
        whole = np.full((len(logits), self.target.vocab_size), -np.inf, np.float32)
        whole[:, slice(logits.shape[1]) if columns is None else columns] = logits
        return whole
