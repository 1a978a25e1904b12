"""What a drafter is: what it proposes, and its hooks.

A drafter sees a request in this order: ``begin``; ``absorb`` while the prompt is read; then in every round ``prefill``,
``propose``, ``observe`` and ``timed``.  Control asks it for a ``forecast`` first, and times its ``dry_step`` before the
first request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.noise import Noise
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.stats import RoundTime
from edgespec.decoding.target import Pass, Target

NOTHING: frozenset[str] = frozenset()
HIDDEN, AUX_HIDDEN = frozenset({"hidden"}), frozenset({"aux_hidden"})
_OFF = 1e-3  # how far the probabilities of a guess may sum from 1


class HeadStart:
    """What drafting has already run of the pass that verifies a chain; the drafter that gives one overrides all."""

    left: float = 1.0  # share of the target's layers that the pass still runs

    def truncated(self, rows: int) -> HeadStart:
        """Keep the first ``rows`` rows, the pending token's included."""
        raise NotImplementedError

    def check(self, target: Target, proposal: Proposal) -> None:
        """Refuse what is not of ``proposal``, or what ``target`` cannot go on from, by a ``ValueError``."""
        raise NotImplementedError

    def forward(self, target: Target, tokens: NDArray[np.int64], best: bool) -> Pass:
        """Run the rest of the pass over ``tokens`` int64 [n]; ``best`` as for ``GreedyTarget.forward_best``."""
        raise NotImplementedError


@dataclass(slots=True)  # made in every round: a frozen one takes three times as long
class Proposal:
    """Guessed tokens hanging off the pending token, in topological order (parents before children).

    A chain is the tree in which every node follows the one before; the empty proposal is plain decoding.

    Attributes:
        tokens: int64 [n], the guesses.
        parents: int64 [n], index of each node's parent, -1 = the pending token; None = a chain.
        probs: float [n, vocab], the draft distribution q each token was drawn from; None = a deterministic guess.
        replacement: whether siblings were drawn with replacement; without, q is renormalised after each rejection.
        bucket: a small label of how sure the drafter is; adaptive control keeps one acceptance record per label.
        head_start: layers of the pass that ran while the guesses were made (chains only); a proposal without guesses
            may carry it too.
    """

    tokens: NDArray[np.int64]
    parents: NDArray[np.int64] | None = None
    probs: NDArray[np.floating] | None = None
    replacement: bool = True
    bucket: int = 0
    head_start: HeadStart | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def empty(self) -> bool:
        """Whether it has nothing to verify and nothing to go on from."""
        return not len(self.tokens) and self.head_start is None

    def parent(self, node: int) -> int:
        """Return the index of the parent of ``node``; -1 is the pending token."""
        return node - 1 if self.parents is None else int(self.parents[node])

    def depth(self, node: int) -> int:
        """Count the nodes on the path from the pending token to ``node``, itself included."""
        count = 0
        while node >= 0:
            node, count = self.parent(node), count + 1
        return count

    def children(self, node: int) -> Sequence[int]:
        """List the nodes whose parent is ``node`` (-1 = the pending token), in the drafter's order."""
        if self.parents is None:
            return range(node + 1, min(node + 2, len(self)))
        return [i for i in range(node + 1, len(self)) if self.parents[i] == node]

    def tested(self, path: Sequence[int]) -> int:
        """Count the depths whose guess was tested, given the accepted ``path``: its own, and the refused one's."""
        if self.parents is None:
            return min(len(path) + 1, len(self.tokens))
        return len(path) + bool(self.children(path[-1] if path else -1))

    def refused(self, path: Sequence[int]) -> list[int]:
        """List the tokens of the drafter's first choices below the accepted ``path``."""
        if self.parents is None:
            return self.tokens[len(path) :].tolist()
        tokens: list[int] = []
        below = self.children(path[-1] if path else -1)
        while below:
            tokens.append(int(self.tokens[below[0]]))
            below = self.children(below[0])
        return tokens

    @property
    def deepest(self) -> int:
        """Depth of the deepest guess; 0 = there is none."""
        return len(self) if self.parents is None else max(map(self.depth, range(len(self))), default=0)

    def check(self, vocab: int) -> None:
        """Refuse, by a ``ValueError``, what is no proposal over ``vocab`` tokens; the empty one passes."""
        tokens, parents, probs = self.tokens, self.parents, self.probs
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"guesses must be integers [n], got {tokens.dtype} {list(tokens.shape)}")
        if not len(tokens):
            return
        if tokens.min() < 0 or tokens.max() >= vocab:
            raise ValueError(f"a guess outside the vocabulary of {vocab}")
        # before anything walks up the tree: in a cycle it would walk for ever
        if parents is not None and (
            parents.shape != tokens.shape or (parents >= np.arange(len(parents))).any() or parents.min() < -1
        ):
            raise ValueError("parents must come before their children")
        if probs is None:
            return
        if probs.shape != (len(tokens), vocab):
            raise ValueError(f"draft probabilities must be of shape {(len(tokens), vocab)}, not {probs.shape}")
        # NaN fails the comparisons too; with a q that is no distribution, rejection would change the text's
        if not ((np.abs(probs.sum(1) - 1) < _OFF).all() and probs.min() >= 0):
            raise ValueError("draft probabilities must be finite, at least 0 and sum to 1 for each guess")

    def pruned(self, leaves: Sequence[int]) -> Proposal:
        """Cut everything below ``leaves``."""
        if self.parents is None:
            return self.truncated(leaves[0] + 1) if leaves else self
        dead: set[int] = set()
        for node in range(len(self)):
            parent = self.parent(node)
            if parent in leaves or parent in dead:
                dead.add(node)
        return self._only([node for node in range(len(self)) if node not in dead])

    def truncated(self, budget: int) -> Proposal:
        """Cut nodes deeper than ``budget``."""
        if self.parents is None:
            if len(self) <= budget:
                return self
            probs = None if self.probs is None else self.probs[:budget]
            start = None if self.head_start is None else self.head_start.truncated(budget + 1)
            return Proposal(self.tokens[:budget], None, probs, self.replacement, self.bucket, start)
        return self._only([i for i in range(len(self)) if self.depth(i) <= budget])

    def _only(self, kept: list[int]) -> Proposal:
        """Keep the nodes ``kept``, ascending, whose parents are among them."""
        assert self.parents is not None
        if len(kept) == len(self):
            return self
        new = {-1: -1} | {old: at for at, old in enumerate(kept)}
        parents = np.array([new[int(self.parents[i])] for i in kept], np.int64)
        probs = None if self.probs is None else self.probs[kept]
        return Proposal(self.tokens[kept], parents, probs, self.replacement, self.bucket)


EMPTY = Proposal(np.empty(0, np.int64))


@dataclass(slots=True)
class Verdict:
    """The outcome of verifying a proposal.

    Attributes:
        path: accepted nodes of the proposal, from the pending token down.
        next_token: the token after them: recovered (a guess was rejected) or bonus (all were accepted).
    """

    path: Sequence[int] = ()
    next_token: int = -1


@dataclass(frozen=True)
class DraftRequest:
    """A request as its drafter sees it."""

    tokens: list[int]  # the prompt, or all text so far where a drafter is taken up in the middle; read only
    params: SamplingParams = field(default_factory=SamplingParams)  # how the request samples
    noise: Noise = field(default_factory=Noise)  # its randomness, for drafters that draw their guesses
    source: Sequence[int] = ()  # what an encoder-decoder was given to read: another text with the same tokens


class Drafter:
    """Guesses what follows; it never owns a loop over rounds (``loop.decode`` does).

    A drafter overrides ``propose``, and whatever else it needs.  An exception in a hook costs the request its
    drafter; the distribution of its text stays the same.
    """

    name: str = "drafter"  # the method, as the bundle and the command line call it
    cheap: bool = False  # proposing costs next to nothing, so that control may see a proposal before it decides on it
    steps_at_once: bool = False  # proposing costs the same however deep the proposal
    chooses: bool = False  # it decides itself, within its budget, how many guesses are worth a row of the pass
    caught_up: bool = True  # false if its last proposal first had to read tokens that it missed while it was not asked
    # acceptance by bucket and position, to be expected of it where nothing was measured
    rates: Mapping[int, Sequence[float]] = {}
    stops: bool = False  # ``propose_until`` drafts no further than pays

    @property
    def wants(self) -> frozenset[str]:
        """States of the target that ``observe`` needs: ``HIDDEN``, ``AUX_HIDDEN``; the latter of every token."""
        return NOTHING

    @property
    def reason(self) -> str:
        """What it has to say about this request, in words."""
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

    def observe(self, proposal: Proposal, verdict: Verdict, output: Pass) -> None:
        """Learn from a round: the proposal as it was cut, and what was accepted of it, which the next ``tokens``
        hold.

        Row 0 of ``output`` follows the pending token, row i + 1 node i.
        """

    def timed(self, proposal: Proposal, time: RoundTime) -> None:
        """Learn what the round took; every drafter has observed it, so that the target may run passes now."""

    def dry_step(self, first: bool = False) -> bool:
        """Run one draft step, which is timed before the first request; False = there is no such step.

        ``first``: that of a round, where it is another one.
        """
        return False


class Proposer(Protocol):
    """What ``engine.generate(..., proposer=...)`` takes.

    It may also have: ``name`` (else its class's); ``cheap = False``, if it is expensive, so that it is asked only where
    its guesses help; ``wants_hidden = True``, if ``observe`` needs ``output.hidden`` (None still where a graph cannot
    say hidden states); ``bind(params, noise)``, called with how a request samples, ``begin(tokens)``, called with the
    prompt, and ``observe(proposal, verdict, output)``, called after every round.
    """

    def propose(self, tokens: list[int], budget: int) -> Sequence[int] | Proposal | None:
        """Guess what follows ``tokens``, a copy of prompt and text so far; guesses beyond ``budget`` >= 1 are cut.

        Returns token ids, in order, none to pass; or a ``Proposal``, for trees and for guesses drawn from a
        distribution: the text has the model's distribution only if they were drawn from the ``probs`` it reports.
        """
