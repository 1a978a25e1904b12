"""What a drafter is, one that wraps others, and what a caller's own proposer must have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.monitor import Control
from edgespec.decoding.noise import Noise
from edgespec.decoding.proposal import Proposal, Verdict
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.target import Pass


class RoundTime(NamedTuple):
    """What a round took.

    Attributes:
        draft_ms: time of proposing.
        verify_ms: time of the target's pass.
        rows: rows of that pass, the pending token's included; more than the proposal's where others had rows in it.
        shared: whether other requests had rows in it.
    """

    draft_ms: float
    verify_ms: float
    rows: int
    shared: bool = False


class Drafter:
    """Guesses what follows; it never owns a loop over rounds (``loop.decode`` does).

    A drafter overrides ``propose``, and whatever else it needs.  The loop calls ``watch``, ``bind`` and ``begin`` when
    a request starts, then reads the prompt.  In every round it lets the drafter read what it needs, piece by piece
    (``prefill``), and calls ``propose``, ``observe`` and ``timed``.  An exception in any of them costs the request its
    drafter, never its text.

    Attributes:
        name: the method, as the bundle and the command line call it.
        cheap: proposing costs next to nothing, so that control may see a proposal before it decides on it.
        steps_at_once: proposing costs the same however deep the proposal.
        caught_up: its last proposal took no more than usual: it had not first to read what it missed while it rested.
    """

    name: str = "drafter"
    cheap: bool = False
    steps_at_once: bool = False
    caught_up: bool = True

    @property
    def proposer(self) -> str:
        """The method that made the last proposal: of a drafter around others, one of theirs."""
        return self.name

    @property
    def reason(self) -> str:
        """What it has to say about this request, in words."""
        return ""

    @property
    def wants_hidden(self) -> bool:
        """Whether ``observe`` needs the hidden states of passes."""
        return False

    @property
    def wants_taps(self) -> bool:
        """Whether it needs what is tapped of the target, of every token: see ``known`` and ``absorb``."""
        return False

    @property
    def next_bucket(self) -> int | None:
        """The ``Proposal.bucket`` that comes next; None = not known before it proposes."""
        return None

    def rows(self, budget: int) -> list[int] | None:
        """[budget + 1]: rows of the pass over the next proposal cut at each depth; None = not known before."""
        return None

    def watch(self, control: Control) -> None:
        """Write decisions and expectations there from now on, for statistics."""

    def set_width(self, width: int) -> None:
        """Passes hold the rows of so many requests like this one from now on, which draft one after the other."""

    def bind(self, params: SamplingParams, noise: Noise) -> None:
        """A request starts: how it samples, and its randomness, for drafters that draw their guesses."""

    def begin(self, tokens: list[int]) -> None:
        """Its prompt; read only."""

    def known(self, tokens: list[int]) -> int:
        """The prompt is about to be read: of how many of its first tokens nothing tapped is needed."""
        return len(tokens)

    def prefill(self, tokens: list[int], most: int) -> int:
        """Read at most so many tokens that the next proposal needs; returns how many are left.

        None are, where it will not be asked, or reads so few that nobody waits for it.  ``most`` is 0 where every round
        asks whether there are any.
        """
        return 0

    def absorb(self, first: int, taps: NDArray[np.float32]) -> None:
        """Tokens ``first`` and on of the prompt were read: what was tapped of them, [n, k * hidden], to be copied."""

    def require(self, speed: float) -> None:
        """Offer only proposals predicted to reach this speed; plain decoding's is 1."""

    def promised(self, budget: int) -> float:
        """Predicted speed of the next proposal, at least plain decoding's, 1."""
        return 1.0

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        """Guess what follows.

        Args:
            tokens: all committed tokens, the pending one last.  Read only.
            budget: deepest guess allowed, >= 1.

        With ``probs`` set, whether a guess is offered must not depend on the draw of that guess (stop after a weak
        token, never before it), or verification would not be lossless.
        """
        raise NotImplementedError

    def observe(self, proposal: Proposal, verdict: Verdict, output: Pass) -> None:
        """Learn from a round.

        Args:
            proposal: what was verified: the proposal as the loop cut it.
            verdict: what was accepted; the token list of the next ``propose`` holds it.
            output: the target's pass: row 0 follows the pending token, row i + 1 node i.
        """

    def timed(self, proposal: Proposal, time: RoundTime) -> None:
        """Learn what the round took; with the empty proposal, where it guessed nothing, what others' rows did."""

    def step_once(self) -> bool:
        """Run one draft step, which is timed before the first request; False = it has none to be timed."""
        return False

    def first_once(self) -> bool:
        """Run the first step of a round, as ``step_once``; False = it takes what any other does."""
        return False

    def learned(self) -> object:
        """A copy of what requests have shown of it, for one of its kind that begins elsewhere; None = nothing."""
        return None

    def go_on_from(self, learned: object) -> None:
        """Begin with what another one of its kind has ``learned``."""

    def lose(self, why: str) -> bool:
        """The drafter inside that is in use has failed: go on without it; False = there is none left."""
        return False


class Wrapper(Drafter):
    """A drafter around others.  Whatever it does not override is handed to all of them.

    Args:
        inside: the drafters that are told what happens.
    """

    def __init__(self, inside: Sequence[Drafter]) -> None:
        self.inside = list(inside)

    def tell(self, where: str, call: Callable[[Drafter], None]) -> None:
        """Call a hook of every drafter inside.

        Args:
            where: the hook's name.
            call: calls it on one of them.
        """
        for drafter in self.inside:
            call(drafter)

    @property
    def wants_hidden(self) -> bool:
        """Whether one of them does."""
        return any(drafter.wants_hidden for drafter in self.inside)

    @property
    def wants_taps(self) -> bool:
        """Whether one of them does."""
        return any(drafter.wants_taps for drafter in self.inside)

    def known(self, tokens: list[int]) -> int:
        return min([len(tokens), *(drafter.known(tokens) for drafter in self.inside)])

    def prefill(self, tokens: list[int], most: int) -> int:
        left: list[int] = []
        self.tell("prefill", lambda drafter: left.append(drafter.prefill(tokens, most)))
        return sum(left)

    def absorb(self, first: int, taps: NDArray[np.float32]) -> None:
        self.tell("absorb", lambda drafter: drafter.absorb(first, taps))

    def watch(self, control: Control) -> None:
        self.tell("watch", lambda drafter: drafter.watch(control))

    def set_width(self, width: int) -> None:
        self.tell("set_width", lambda drafter: drafter.set_width(width))

    def bind(self, params: SamplingParams, noise: Noise) -> None:
        self.tell("bind", lambda drafter: drafter.bind(params, noise))

    def begin(self, tokens: list[int]) -> None:
        self.tell("begin", lambda drafter: drafter.begin(tokens))

    def require(self, speed: float) -> None:
        self.tell("require", lambda drafter: drafter.require(speed))

    def observe(self, proposal: Proposal, verdict: Verdict, output: Pass) -> None:
        self.tell("observe", lambda drafter: drafter.observe(proposal, verdict, output))

    def timed(self, proposal: Proposal, time: RoundTime) -> None:
        self.tell("timed", lambda drafter: drafter.timed(proposal, time))


class Proposer(Protocol):
    """What ``engine.generate(..., proposer=...)`` takes.

    It may also have: ``name`` (else its class's); ``cheap = False``, if it is dear, so that it is asked only where its
    guesses pay; ``wants_hidden = True``, if ``observe`` needs ``output.hidden`` (None still where a graph cannot say
    hidden states); ``begin(tokens)``, called with the prompt; ``observe(proposal, verdict, output)``, called after
    every round, and ``bind(params, noise)``, as for any ``Drafter``.
    """

    def propose(self, tokens: list[int], budget: int) -> Sequence[int] | Proposal | None:
        """Guess what follows.

        Args:
            tokens: prompt and text so far, a copy.
            budget: most guesses, >= 1; more are cut.

        Returns:
            Token ids, in order; none to pass.  Or a ``Proposal``, for trees and for guesses drawn from a distribution;
            the text has the model's distribution only if they were drawn from the ``probs`` it reports.
        """
        ...
