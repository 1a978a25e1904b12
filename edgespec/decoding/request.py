"""What a request asks of the loop, the passes that the loop asks for, and the rounds it makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.accept import EXACT, Accept
from edgespec.decoding.proposal import Proposal
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.target import Resume
from edgespec.errors import InvalidRequest

Finish = Literal["eos", "length", "context"]


@dataclass(frozen=True)
class DecodeOptions:
    """What one request asks for.

    Attributes:
        max_new_tokens: most tokens to emit, >= 1.
        gamma: deepest guess of a proposal, >= 1.
        eos: tokens that end the text; the one that ended it is emitted.
        sampling: how tokens are chosen.
        logprobs: report the model's own log-probability of each emitted token.
        shadow: compare one round in so many with plain decoding (``Stats.monitor.shadow``); 0 = none.
        accept: which guesses stand.

    Raises:
        InvalidRequest: a count below 1.
    """

    max_new_tokens: int = 128
    gamma: int = 4
    eos: frozenset[int] = frozenset()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    logprobs: bool = False
    shadow: int = 0
    accept: Accept = EXACT

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or self.gamma < 1:
            raise InvalidRequest(
                f"expected max_new_tokens >= 1 and gamma >= 1, got max_new_tokens {self.max_new_tokens} "
                f"and gamma {self.gamma}"
            )


@dataclass(slots=True)
class PrefillRequest:
    """Some of the text is to be read.  Whoever drives the request sends how many tokens come next; None = all of them.

    Attributes:
        left: tokens to be read.
        draft: whether a draft model reads them, after the target; in the middle of a text, too, where it is taken up.
    """

    left: int
    draft: bool = False


@dataclass(slots=True)
class PassRequest:
    """A pass that a request wants.  Whoever drives it runs the pass, perhaps together with those of other requests.

    Attributes:
        tokens: int64 [n], the pending token and its guesses.
        parents: int64 [n], parent row of each row, -1 for row 0; None = a chain.
        resume: [n] rows whose first layers have run; None = all are to run.
        best: whether the likeliest token of each row and its logit are enough.
        ms: set by the driver: what the pass took.
        beside: set by the driver: rows of other requests in the same pass.
    """

    tokens: NDArray[np.int64]
    parents: NDArray[np.int64] | None
    resume: Resume | None
    best: bool
    ms: float = 0.0
    beside: int = 0


@dataclass(slots=True)
class Round:
    """One round, as a caller that streams sees it.

    Attributes:
        tokens: emitted: accepted guesses, then the recovered or bonus token (cut after EOS).
        drafted: all guesses that were verified, in the proposal's order.
        accepted: how many of ``tokens`` were guesses.
        path: indices of the accepted guesses in ``drafted``.
        rejected: the guesses that would have followed the accepted ones: in a tree, the drafter's first choices.
        logprobs: log-probability of each of ``tokens`` by the unadjusted model; None if not asked for.
        finish: why this round is the last; None = it is not.
    """

    tokens: list[int]
    drafted: list[int]
    accepted: int
    path: Sequence[int]
    rejected: list[int]
    logprobs: list[float] | None
    finish: Finish | None

    def add_guesses(self, proposal: Proposal) -> None:
        """Say what was guessed, of which ``path`` was accepted."""
        self.drafted = proposal.tokens.tolist()
        self.accepted = min(len(self.path), len(self.tokens))
        self.rejected = proposal.refused(self.path)
