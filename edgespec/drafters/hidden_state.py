"""Drafters with a small decoder that is conditioned on hidden states of the target.

EAGLE-3 (Li et al., arXiv 2503.01840) and P-EAGLE (arXiv 2602.01469), which drafts all tokens in one pass; the layer for
multi-token prediction that some checkpoints hold (arXiv 2412.19437), which sees only the last hidden state; DFlash
(arXiv 2602.06036): a block of draft tokens in one pass; DSpark (arXiv 2607.05147): such a block, corrected one token at
a time, with a confidence for each; Gemma 4's assistants, which have no cache: they read the target's keys and values.

Auxiliary hidden states are the target's residual stream after some of its layers, concatenated.  Row i of the first
two's draft cache combines token i + 1 with the target's state at token i.  So n tokens and the states of all except the
pending one make n - 1 rows, and the last row predicts the first draft token.  Further steps use the drafter's own
tokens and hidden states, and their rows are dropped after the round.  Rows of accepted tokens are computed again from
the target's states, as in training.  Rows of a block's drafter use only those states.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.drafter import AUX_HIDDEN, DraftRequest
from edgespec.decoding.proposal import EMPTY, Proposal, Verdict
from edgespec.decoding.settings import DraftOptions
from edgespec.decoding.target import Output, Target, common_prefix
from edgespec.drafters.draft_cache import CorrectedBlockCache, draft_cache_of
from edgespec.drafters.registry import Parts
from edgespec.drafters.sampling_drafts import DrawingDrafter, rows_of
from edgespec.errors import EdgespecError
from edgespec.runtimes.files.manifest import MethodPart
from edgespec.runtimes.slots.slot import Slot

MOST_OWED = 64  # rows whose states are kept while nothing is proposed, looked at four times on the way
ROUND = 12  # rows that a round may leave to be read, and its guesses be timed


class HiddenStateDrafter(DrawingDrafter):
    """Draws chains or trees (``draw.widths_of``) from a drafter that is conditioned on the target.

    Invariant: the cache holds the rows before ``_at``, or of ``deferred_rows`` more, and ``_states`` with ``_later``
    the auxiliary hidden states of row ``_at`` and all after it, up to the row before the pending token.
    """

    wants = AUX_HIDDEN
    follows_others = True  # a row needs its token and states, from any guess

    def __init__(self, target: Target, slot: Slot, name: str = "eagle", branch: tuple[int, ...] | None = None) -> None:
        self.name, self.target, self.slot, self.branch = name, target, slot, branch or (1,)
        self.vocab = target.vocab_size
        self.cache = draft_cache_of(target, slot, self.branch)
        self.deferred_rows = self.cache.deferred_rows
        self.steps_at_once, self.chooses = self.cache.at_once, self.cache.chooses
        self._tokens: list[int] = []  # committed, the pending one last
        self._at, self._states = 0, self.cache.no_states  # first row, [rows, k * hidden]
        self._later: list[NDArray[np.float32]] = []  # [n, k * hidden] each: of rounds since, not joined yet
        self._sound = False  # nothing failed since the cache was right
        # whether continuing from another slot also needs states, because the target does not read a single token again
        self.stateful = bool(self.deferred_rows and target.stateful)

    def forecast(self, budget: int) -> tuple[int | None, list[int] | None]:
        return None, rows_of(self.branch, budget)

    # -- the prompt ----------------------------------------------------------------------------------------------------

    def begin(self, request: DraftRequest) -> int | None:
        """Keep the rows that are still right, and the states that the next rows need."""
        super().begin(request)
        self._join()
        tokens, states, first = request.tokens, self._states, self._at
        known = min(common_prefix(self._tokens, tokens), first + len(states), len(tokens) - 1)
        if not self._sound:
            known = 0
            self.cache.crop(0)
        self._at = at = self.cache.kept(tokens)
        self._states = states[at - first : known - first] if first <= at < known else self.cache.no_states
        self._tokens, self._sound = list(tokens), True
        if self.slot.on_begin is not None:
            self.slot.on_begin(self, self.cache.names(tokens))
            if len(self.cache) < self._at:  # the restored rows are incomplete
                self._at, self._states = self.cache.kept(tokens), self.cache.no_states
        return self.known

    @property
    def known(self) -> int:
        """Count the tokens of the prompt whose hidden states it needs no more."""
        return self._at + len(self._states)

    def absorb(self, first: int, aux_hidden: NDArray[np.float32]) -> None:
        """Append rows of the prompt, except the last one if that one predicts the first draft token."""
        if first > self.known:  # a target with states may read known tokens again
            raise EdgespecError(f"auxiliary hidden states of token {first}: expected those of token {self.known}")
        self._states = np.concatenate((self._states, aux_hidden[self.known - first :]))
        self._settle()
        if self.slot.on_read is not None:
            self.slot.on_read()

    # -- parts of a text that are stored elsewhere, in addition to the rows in the slot -------------------------------

    def flush_pending(self, tokens: Sequence[int]) -> list[int]:
        """Make all rows of a text that has ended but the deferred ones -> names of the text's rows."""
        if self._sound:
            self._join()
            known = min(common_prefix(self._tokens, tokens), len(tokens) - 1)
            self._states, self._tokens = self._states[: max(known - self._at, 0)], list(tokens)
            self._settle()
            self.cache.crop(self._at)
        return self.cache.names(tokens)

    def state(self) -> NDArray[np.uint8]:  # [bytes]
        """Copy the states for the row after the slot's last one; empty if they are not known."""
        complete = len(self._states) == self.deferred_rows and self._at == len(self.cache)
        return (self._states if complete else self.cache.no_states).reshape(-1).view(np.uint8).copy()

    def put_state(self, state: NDArray[np.uint8]) -> bool:  # [bytes]
        """Continue from the slot's rows and the ``state`` after them -> whether its size is right."""
        rows, columns = self.deferred_rows if self.stateful else 0, self.cache.no_states.shape[1]
        if state.nbytes != 4 * rows * columns:
            return False
        self._at, self._states = len(self.cache), state.view(np.float32).reshape(rows, columns)
        return True

    # -- rounds --------------------------------------------------------------------------------------------------------

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        """Draw a chain or tree; none where it was not shown all of the text, or where its context ends."""
        self._join()
        length, rows = min(budget, self.slot.context - len(tokens)), len(tokens) - 1
        if length < 1 or rows < 1 or not self._complete(tokens):
            return EMPTY
        self._sound = False
        start = min(len(self.cache), rows - self.deferred_rows)
        self.caught_up = rows - start <= ROUND
        self.cache.crop(start)
        made = self.cache.draw(self._states[start - self._at :], self.how(tokens), length)
        self.cache.crop(rows)
        self.cache.name(tokens, start)
        self._states = self._states[len(self._states) - self.deferred_rows :]
        self._at, self._sound = rows - self.deferred_rows, True
        return made

    def observe(self, proposal: Proposal, verdict: Verdict, output: Output) -> None:
        """Keep the hidden states of the rows that were kept."""
        if not self._sound or output.aux_hidden is None:
            return
        kept = [0, *(node + 1 for node in verdict.path)] if len(proposal) else slice(None)
        self._later.append(output.aux_hidden[kept].copy())
        self._tokens += [*proposal.tokens[list(verdict.path)].tolist(), verdict.next_token]
        if len(self._later) >= MOST_OWED // 4:
            self._join()
            self._settle(MOST_OWED)

    @property
    def reason(self) -> str:
        return "" if self._sound else "the drafter was not shown this text from its beginning"

    def benchmark_step(self, first: bool = False) -> bool:
        if first:
            return self.cache.try_first()
        self.cache.try_once()
        return True

    def _complete(self, tokens: list[int]) -> bool:
        """Tell whether the cache and the kept states reach up to the pending token."""
        return self._sound and self._at + len(self._states) == len(tokens) - 1 and self._tokens[-1] == tokens[-1]

    def _join(self) -> None:
        """Join what rounds have brought to the states."""
        if self._later:
            self._states, self._later = np.concatenate((self._states, *self._later)), []

    def _settle(self, most: int = 1) -> None:
        """Append the rows whose states are kept, except the deferred ones, if there are at least ``most``."""
        rows = len(self._states) - self.deferred_rows
        if rows < most:
            return
        self.cache.crop(self._at)
        tokens = self._tokens[self._at + 1 : self._at + 1 + rows]
        self.cache.append(tokens, self._states[:rows])
        self.cache.name(self._tokens, self._at)
        self._at, self._states = self._at + rows, self._states[rows:]


def build(parts: Parts, part: MethodPart, options: DraftOptions) -> HiddenStateDrafter:
    """Draft by the bundle's drafter."""
    slot = parts.draft("drafter")
    assert slot.model.part.decoder is not None
    made = HiddenStateDrafter(parts.target, slot, slot.model.part.decoder.kind, options.branch)
    if isinstance(made.cache, CorrectedBlockCache):
        made.cache.threshold, made.cache.costs = options.threshold, parts.costs()
    return made
