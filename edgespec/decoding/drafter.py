"""Base class of drafters: the hooks that the decoding loop calls.

A drafter sees a request in this order: ``begin``; ``absorb`` while the prompt is read; then in every round ``prefill``,
``propose``, ``observe`` and ``timed``.  Control asks it for a ``forecast`` first, and times its ``benchmark_step``
before the first request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.noise import Noise
from edgespec.decoding.proposal import Proposal, Verdict
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.stats import RoundTime
from edgespec.decoding.target import Output, Pass

NOTHING: frozenset[str] = frozenset()
HIDDEN, AUX_HIDDEN = frozenset({"hidden"}), frozenset({"aux_hidden"})


@dataclass(frozen=True)
class DraftRequest:
    """A request as its drafter sees it."""

    tokens: list[int]  # the prompt, or all text so far if the drafter joins in the middle; read only
    params: SamplingParams = field(default_factory=SamplingParams)  # how the request samples
    noise: Noise = field(default_factory=Noise)  # its randomness, for drafters that draw their guesses
    source: Sequence[int] = ()  # input of an encoder-decoder's encoder, which distinguishes texts with the same tokens


class Drafter:
    """Proposes the next tokens; it never owns a loop over rounds (``loop.decode`` does).

    A drafter overrides ``propose``, and any other hook that it needs.  An exception in a hook costs the request its
    drafter; the distribution of its text stays the same.
    """

    name: str = "drafter"  # the method, as the bundle and the command line call it
    cheap: bool = False  # proposing costs next to nothing, so that control may see a proposal before it decides on it
    steps_at_once: bool = False  # proposing costs the same for any depth of the proposal
    chooses: bool = False  # it decides itself, within its budget, how many guesses are worth a row of the pass
    caught_up: bool = True  # false if its last proposal first had to read tokens that it missed while it was not asked
    # acceptance by bucket and position, to be expected of it where nothing was measured
    rates: Mapping[int, Sequence[float]] = {}
    stops: bool = False  # ``propose_until`` stops drafting where more draft tokens are not worth it
    # proposing runs layers of the pass that verifies, even where it ends without a guess; ``rest`` is what is left
    runs_ahead: bool = False
    follows_others: bool = False  # `observe` gets the rounds of other drafters as they get them

    @property
    def wants(self) -> frozenset[str]:
        """States of the target that ``observe`` needs: ``HIDDEN``, ``AUX_HIDDEN``; the latter of every token."""
        return NOTHING

    @property
    def reason(self) -> str:
        """Message about this request."""
        return ""

    def begin(self, request: DraftRequest) -> int | None:
        """Begin a request -> how many of the prompt's first tokens it needs no auxiliary states of; None = all."""
        return None

    def absorb(self, first: int, aux_hidden: NDArray[np.float32]) -> None:
        """Take the auxiliary states of tokens ``first`` and on of the prompt, [n, k * hidden], to be copied."""

    def prefill(self, tokens: list[int], most: int) -> int:
        """Read at most ``most`` tokens that the next proposal needs -> how many are left.

        Return 0 if no proposal is due, or if the remaining read is short.  ``most`` is 0 where a round only asks.
        """
        return 0

    def forecast(self, budget: int) -> tuple[int | None, list[int] | None]:
        """Say what is known of the next proposal before it is made; None = not known.

        That is its ``Proposal.bucket``, and [budget + 1] the rows of the pass over it cut at each depth.
        """
        return None, None

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        """Guess what follows committed ``tokens`` (read only; the pending one is last), ``budget`` >= 1 deep at most.

        With ``probs`` set, whether a guess is offered must not depend on the draw of that guess (stop after a weak
        token, never before it), or verification would not be lossless.
        """
        raise NotImplementedError

    def propose_until(self, tokens: list[int], budget: int, least_gain: Callable[[int], float]) -> Proposal:
        """Do the same, and stop where a guess more is expected to gain fewer tokens than ``least_gain`` of the depth.

        Control calls it where ``stops`` is set.
        """
        return self.propose(tokens, budget)

    def rest(self, whole: Pass) -> Pass:
        """Return what is left of the pass over the last proposal, or over its first guesses; see ``runs_ahead``."""
        return whole

    def observe(self, proposal: Proposal, verdict: Verdict, output: Output) -> None:
        """Learn from a round: the proposal as it was cut, and what was accepted of it, which the next ``tokens``
        hold.

        Row 0 of ``output`` follows the pending token, row i + 1 node i.
        """

    def timed(self, proposal: Proposal, time: RoundTime) -> None:
        """Learn what the round took; every drafter has observed it, so that the target may run passes now."""

    def benchmark_step(self, first: bool = False) -> bool:
        """Run one draft step, which is timed before the first request; False = there is no such step.

        ``first``: that of a round, where it is another one.
        """
        return False
