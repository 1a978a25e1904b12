"""Drafters: one short file a method.  A drafter guesses; it never owns a loop over rounds (``decode`` does).

A drafter may also have these methods; the loop calls those that exist, in this order, at the start of a request:

``bind(params: SamplingParams, noise: Noise) -> None``
    how this request samples, and its randomness: for drafters that draw their guesses;
``begin(tokens: list[int]) -> None``
    the prompt;

and after each round:

``timed(proposal: Proposal, draft_ms: float, verify_ms: float) -> None``
    what proposing and the target's pass over it took: for control that follows the clock.

``timed_shared(proposal: Proposal, draft_ms: float, verify_ms: float, rows: int) -> None``
    instead of ``timed`` where the pass held other requests' rows too: ``rows`` in all;
``watch(control: Control) -> None``
    before ``bind``: where it writes what it decides and expects, for statistics (``monitor.Control``);
``proposer: str``
    an attribute: the method that made the last proposal, where it is not ``name``.
``watched(rows: int, draft_ms: float, verify_ms: float) -> None``
    instead of ``timed``, where another drafter's proposal was verified (``Compose``).

``lose(why: str) -> bool``
    one of several drafters inside has failed: leave it out and go on; False = there is none left (``Switch``).

``step_once() -> None``
    one draft step, which is timed before the first request.

``rows(budget: int) -> list[int]``
    [budget + 1] rows of the pass that verifies its proposal cut at each depth, for trees whose shape is known before.

``wants_hidden = True`` says that ``observe`` needs the hidden states of passes; ``steps_at_once = True`` that proposing
costs the same however deep the proposal; ``trees = True`` that proposals may be trees.  ``cheap = True`` says that
proposing costs next to nothing, so that ``Adaptive`` may look at a proposal before it decides how much of it to verify.
"""

from __future__ import annotations

from typing import Protocol

from edgespec.decoding.proposal import Proposal, Verdict
from edgespec.decoding.target import Pass


class Drafter(Protocol):
    """Whatever guesses.  An exception in any of its methods costs the request its drafter, never its text."""

    @property
    def name(self) -> str:
        """The method, as the bundle and the command line call it."""
        ...

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        """Guess what follows.

        Args:
            tokens: all committed tokens, the pending one last.  Read only.
            budget: deepest guess allowed, >= 1.

        With ``probs`` set, whether a guess is offered must not depend on the draw of that guess (stop after a weak
        token, never before it), or verification would not be lossless.
        """
        ...

    def observe(self, proposal: Proposal, verdict: Verdict, output: Pass) -> None:
        """Learn from a round.

        Args:
            proposal: what was verified: the proposal as the loop cut it.
            verdict: what was accepted; the token list of the next ``propose`` holds it.
            output: the target's pass: row 0 follows the pending token, row i + 1 node i.
        """
        ...
