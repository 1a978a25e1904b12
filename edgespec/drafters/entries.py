"""What a drafter that is conditioned on a target makes of a text: entries in a slot, and guesses after them."""

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
from edgespec.runtimes.slots.slot import Slot

Rows = NDArray[np.float32]
KEPT = 1 << 20  # bytes of embeddings that are kept: asking the target for some takes as long as a small drafter's step


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
        self.target, self.slot, self.branch, self._columns = target, slot, branch, decoder.columns
        # of the target's embedding, which is an assistant's tap, too
        self._hidden = decoder.columns // 2 if decoder.reads else slot.model.facts.hidden
        self.no_taps = np.zeros((0, decoder.columns - self._hidden), np.float32)
        self._states = np.zeros((0, 0), np.float32)  # [1 + n, hidden]: its own, of the last token and of guesses
        self._embedded: dict[int, Rows] = {}  # [hidden] of each token asked for lately

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

    def _given(self, tokens: Sequence[int], state: Rows) -> Rows:
        """[n, columns]: what the slot is given of tokens [n] and taps or hidden states [n, any]."""
        given = np.zeros((len(tokens), self._columns), np.float32)
        hidden, known = self._hidden, self._embedded
        if 4 * hidden * (len(known) + len(tokens)) > KEPT:
            known.clear()
        if new := [token for token in dict.fromkeys(tokens) if token not in known]:
            known.update(zip(new, self.target.embed(np.array(new, np.int64)), strict=True))
        for row, token in zip(given, tokens, strict=True):
            row[:hidden] = known[token]
        given[:, hidden : hidden + state.shape[1]] = state
        return given

    def _whole(self, logits: Rows) -> Rows:
        """[n, vocab] of ``logits`` [n, any]: tokens without a column cannot be guessed."""
        columns = self.slot.head_tokens
        whole = np.full((len(logits), self.target.vocab_size), -np.inf, np.float32)
        whole[:, slice(logits.shape[1]) if columns is None else columns] = logits
        return whole


class Blocks(Entries):
    """An entry for every token, of what was tapped of the target there alone, and a block of guesses in one pass.

    DFlash (arXiv 2602.06036).  The guesses of a block do not know each other: each is drawn from its own row.
    """

    held = 0

    @property
    def block(self) -> int:
        """Rows that the drafter was trained with: the pending token and guesses."""
        decoder = self.slot.model.part.decoder
        assert decoder is not None
        assert decoder.block is not None
        return decoder.block

    def draw(self, tokens: Sequence[int], taps: Rows, length: int, params: SamplingParams, noise: Noise) -> Proposal:
        if len(taps):
            self.absorb((), taps)
        length = min(length, self.block - 1)
        given = self._block(tokens[-1], length)
        if params.plain_greedy:
            found = self.slot.forward_block(given, best=True).best
            assert found is not None
            pairs = iter(zip(found[0].tolist(), found[1].tolist(), strict=True))
            return draw_chain(_none, tokens, length, self.target.vocab_size, params, noise, best=lambda _: next(pairs))
        rows = iter(self._whole(self.slot.forward_block(given).logits))
        return draw_chain(lambda _: next(rows), tokens, length, self.target.vocab_size, params, noise)

    def absorb(self, tokens: Sequence[int], taps: Rows) -> None:
        given = np.zeros((len(taps), self._columns), np.float32)
        given[:, self._columns - taps.shape[1] :] = taps
        self.slot.absorb_given(given)

    def try_once(self) -> None:
        self.slot.forward_block(self._block(0, self.block - 1), best=True)

    def _block(self, pending: int, length: int) -> Rows:
        """[1 + length, columns]: the pending token, and masks where guesses will be."""
        decoder = self.slot.model.part.decoder
        assert decoder is not None
        assert decoder.mask is not None
        return self._given([pending] + [decoder.mask] * length, np.zeros((1, 0), np.float32))


class Borrowed(Entries):
    """None of its own: each step reads the target's keys and values of all tokens but the pending one.

    Gemma 4's assistants.  Of what is tapped only the last row is looked at, by a round's first step.
    """

    _rows = 1  # of the target's tokens that are seen

    def __len__(self) -> int:
        return self.slot.context  # wherever it is asked, they are there

    def crop(self, entries: int) -> None: ...

    def kept(self, same: int, rows: int) -> int:
        return max(rows - self.held, 0)

    def absorb(self, tokens: Sequence[int], taps: Rows) -> None: ...

    def draw(self, tokens: Sequence[int], taps: Rows, length: int, params: SamplingParams, noise: Noise) -> Proposal:
        self._rows = len(tokens) - 1
        return super().draw(tokens, taps[-1:], length, params, noise)

    def try_once(self) -> None:
        self._rows = max(1, len(self._slot.tokens))
        self._forward([0], np.zeros((1, 1), np.float32), True, True)

    def _keep(self, rows: int) -> None: ...

    def _forward(
        self,
        tokens: Sequence[int],
        given: Rows,
        recycled: bool,
        best: bool = False,
        parents: NDArray[np.int64] | None = None,  # [n]
    ) -> Pass:
        output = self.slot.forward_over(self._slot, self._rows, self._given(tokens, given), recycled, best)
        assert output.hidden is not None
        self._states = output.hidden.copy()
        return output

    @property
    def _slot(self) -> Slot:
        assert isinstance(self.target, Slot)
        return self.target


def _none(guess: int | None) -> Rows:
    raise AssertionError("rows of a block are there at once")


def entries_of(target: TappedTarget, slot: Slot, branch: tuple[int, ...] = (1,)) -> Entries:
    """Those of the slot's kind."""
    decoder = slot.model.part.decoder
    if decoder and decoder.reads:
        return Borrowed(target, slot)
    return Blocks(target, slot) if decoder and decoder.block else Entries(target, slot, branch)
