"""Reading a prompt by pieces, so that other requests need not wait for all of it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from edgespec.decoding.loop import Driven, Piece, PrefillRequest, Round
from edgespec.decoding.target import Pass
from edgespec.engine.pool import SessionPool
from edgespec.engine.prompt_cache import KeptPrompt
from edgespec.engine.sessions import Session
from edgespec.engine.sharing import FIRST, PrefillBudget

Step = PrefillRequest | Pass | Round


class PromptReading:
    """The part of a request that reads its prompt.

    Args:
        session: of the request.
        sessions: where it is from; their texts may be copied from while they run, if they are driven ``together``.
        paces: how fast the target and a draft read.
        kept: what the disk has of the prompt.

    Attributes:
        read_at: when a piece was read last, by ``time.perf_counter``; 0 = none was.
        next: the step that comes next, where that is known.
    """

    def __init__(
        self,
        session: Session,
        sessions: SessionPool,
        paces: tuple[PrefillBudget, PrefillBudget],
        kept: KeptPrompt,
    ) -> None:
        self._session, self._sessions, self._paces, self.kept = session, sessions, paces, kept
        self.read_at = 0.0
        self.next: Step | None = None

    def read(self, asked: PrefillRequest, rounds: Driven, tokens: Sequence[int]) -> Step:
        """Read a piece of ``tokens`` -> the generator's next step."""
        pace, target, start = self._paces[asked.draft], self._session.target, time.perf_counter()
        taken = self._sessions.catch_up(self._session, tokens) if asked.anywhere else 0
        left = asked.left - taken
        rows = left if left <= FIRST else pace.rows(target.chunk, self._sessions.busy < 2)
        if not asked.draft:
            held, rows = len(target.tokens), self.kept.rows(rows)
            rows = target.end_of_piece(tokens, held + min(rows, left)) - held
        found = rounds.send(Piece(min(rows, left), taken))
        self.read_at = time.perf_counter()
        if isinstance(found, PrefillRequest) and found.draft == asked.draft:  # and nothing else was done
            pace.took(rows, self.read_at - start)
        return found
