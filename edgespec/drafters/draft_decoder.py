"""A small decoder conditioned on hidden states of the target, which guesses.

EAGLE-3 (Li et al., arXiv 2503.01840); the layer for multi-token prediction that some checkpoints hold
(arXiv 2412.19437), which sees the last hidden state alone; DFlash (arXiv 2602.06036): a block of guesses in one pass;
Gemma 4's assistants, which have no entries: they read the target's keys and values.

An entry i of the first two is made of token i + 1 and of what was tapped of the target at token i, so that n tokens and
the taps of all but the pending one make n - 1 entries; the last of them gives the first guess.  It goes on with its own
guesses and its own hidden states, and what it made of those is forgotten after the round: entries of accepted guesses
are made again, of true taps, which is what it was trained on.  Entries of a block's drafter are made of taps alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.drafter import Drafter
from edgespec.decoding.noise import Noise
from edgespec.decoding.proposal import EMPTY, Proposal, Verdict
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.settings import DraftOptions
from edgespec.decoding.target import Pass, TappedTarget, common_prefix
from edgespec.drafters.drawing.tree import rows_of
from edgespec.drafters.kinds import entries_of
from edgespec.drafters.parts import Parts
from edgespec.errors import EdgespecError
from edgespec.runtimes.files.manifest import MethodPart
from edgespec.runtimes.slots.slot import Slot

MOST_OWED = 64  # rows whose taps are kept while nothing is proposed, looked at four times on the way
ROUND = 12  # rows that a round may leave to be read, and its guesses be timed


class DraftDecoder(Drafter):
    """Draws chains or trees from a drafter that is conditioned on the target.

    Invariant: the slot holds the entries of the rows before ``_at``, or of ``held`` more, and ``_taps`` with ``_later``
    the taps of row ``_at`` and all after it, up to the row before the pending token.

    Args:
        target: gives taps, and embeddings of tokens.
        slot: of the drafter; a token of it stands for an entry.
        branch: guesses per node, see ``speculative.DraftModel``.
    """

    wants_taps = True

    def __init__(
        self, target: TappedTarget, slot: Slot, name: str = "eagle", branch: tuple[int, ...] | None = None
    ) -> None:
        self.name, self.target, self.slot, self.branch = name, target, slot, branch or (1,)
        self.entries = entries_of(target, slot, self.branch)
        self.held, self.steps_at_once = self.entries.held, not self.entries.held
        self._tokens: list[int] = []  # committed, the pending one last
        self._at, self._taps = 0, self.entries.no_taps  # first row, [rows, k * hidden]
        self._later: list[NDArray[np.float32]] = []  # [n, k * hidden] each: of rounds since, not joined yet
        self._sound = False  # nothing failed since the entries were right
        self.bind(SamplingParams(), Noise())

    def bind(self, params: SamplingParams, noise: Noise) -> None:
        """Draft as this request samples."""
        self.params, self.noise = params, noise

    def rows(self, budget: int) -> list[int]:  # [budget + 1]
        return rows_of(self.branch, budget)

    # -- the prompt ----------------------------------------------------------------------------------------------------

    def known(self, tokens: list[int]) -> int:
        """Rows whose entries are kept: entry i needs token i + 1, too, where entries are made of tokens."""
        same = common_prefix(self._tokens, tokens) if self._sound else 0
        self._at = self.entries.kept(same, len(tokens) - 1)
        self._tokens, self._taps, self._sound = list(tokens), self.entries.no_taps, True
        self._later = []
        return self._at

    def absorb(self, first: int, taps: NDArray[np.float32]) -> None:
        """Make entries of the rows of the prompt, but for the last where that one gives the first guess."""
        known = self._at + len(self._taps)  # a target with states may read again what is known here
        if first > known:
            raise EdgespecError(f"taps of token {first}: expected those of token {known}")
        self._taps = np.concatenate((self._taps, taps[known - first :]))
        self._settle()

    # -- rounds --------------------------------------------------------------------------------------------------------

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        """A chain or tree; none where it was not shown all of the text, or where its context ends."""
        self._join()
        length, rows = min(budget, self.slot.context - len(tokens)), len(tokens) - 1
        if length < 1 or rows < 1 or not self._complete(tokens):
            return EMPTY
        self._sound = False
        start = min(len(self.entries), rows - self.held)
        self.caught_up = rows - start <= ROUND
        self.entries.crop(start)
        made = self.entries.draw(tokens, self._taps[start - self._at :], length, self.params, self.noise)
        self.entries.crop(rows)
        self._at, self._taps, self._sound = rows - self.held, self._taps[len(self._taps) - self.held :], True
        return made

    def observe(self, proposal: Proposal, verdict: Verdict, output: Pass) -> None:
        """Keep the taps of the rows that were kept."""
        if not self._sound or output.taps is None:
            return
        kept = [0, *(node + 1 for node in verdict.path)] if len(proposal) else slice(None)
        self._later.append(output.taps[kept].copy())
        self._tokens += [*proposal.tokens[list(verdict.path)].tolist(), verdict.next_token]
        if len(self._later) >= MOST_OWED // 4:
            self._join()
            self._settle(MOST_OWED)

    @property
    def reason(self) -> str:
        return "" if self._sound else "the drafter was not shown this text from its beginning"

    def step_once(self) -> bool:
        self.entries.try_once()
        return True

    def first_once(self) -> bool:
        return self.entries.try_first()

    def _complete(self, tokens: list[int]) -> bool:
        """Whether entries and taps reach up to the pending token."""
        return self._sound and self._at + len(self._taps) == len(tokens) - 1 and self._tokens[-1] == tokens[-1]

    def _join(self) -> None:
        """Add what rounds have brought to the taps."""
        if self._later:
            self._taps, self._later = np.concatenate((self._taps, *self._later)), []

    def _settle(self, most: int = 1) -> None:
        """Make entries of the rows with taps, but for those held back, where there are as many as ``most``."""
        rows = len(self._taps) - self.held
        if rows < most:
            return
        self.entries.crop(self._at)
        tokens = self._tokens[self._at + 1 : self._at + 1 + rows]
        self.entries.absorb(tokens, self._taps[:rows])
        self._at, self._taps = self._at + rows, self._taps[rows:]


def build(parts: Parts, part: MethodPart, options: DraftOptions) -> DraftDecoder:
    """Drafting by the bundle's drafter."""
    slot = parts.draft("drafter")
    assert slot.model.part.decoder is not None
    return DraftDecoder(parts.target, slot, slot.model.part.decoder.kind, options.branch)
