"""What stands between the loop and a drafter: nothing that a drafter does can break a request or change its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.drafter import Drafter
from edgespec.decoding.monitor import PLAIN, Drop
from edgespec.decoding.noise import Noise
from edgespec.decoding.proposal import EMPTY, Proposal, Verdict
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.stats import Stats
from edgespec.decoding.target import LayeredTarget, Pass, Resume, Target

_OFF = 1e-3  # how far the probabilities of a guess may sum from 1


class Guard:
    """A drafter that cannot break the request: it is dropped at its first failure, and the reason is kept.

    One that chooses among several (``drafters.switch``) loses the one that failed, and goes on with the others.
    """

    def __init__(self, drafter: Drafter, stats: Stats, eos: frozenset[int], target: Target) -> None:
        self._drafter: Drafter | None = drafter
        self._timed = getattr(drafter, "timed", None)
        self._stats = stats
        self._eos = eos
        self._vocab = target.vocab_size
        self._layered = isinstance(target, LayeredTarget)
        self._trees = getattr(target, "trees", True)
        self.proposer = PLAIN  # of the last proposal

    def _drop(self, where: str, error: Exception) -> None:
        name = getattr(self._drafter, "name", type(self._drafter).__name__)
        drop = Drop(name, where, f"{type(error).__name__}: {error}")
        self._stats.monitor.drops.append(drop)
        if lose := getattr(self._drafter, "lose", None):
            try:
                if lose(str(drop)):
                    return
            except Exception as second:  # then the whole of it goes
                drop = replace(drop, error=f"{drop.error}; {type(second).__name__}: {second}")
        self._drafter = self._timed = None
        self._stats.dropped_reason = str(drop)

    # Every Exception is caught, EdgespecError too: a draft model that yields NaN raises one, and if it was the target
    # that failed below a self-draft, its next pass will say so.
    def begin(self, tokens: list[int], params: SamplingParams, noise: Noise) -> None:
        try:
            if watch := getattr(self._drafter, "watch", None):
                watch(self._stats.monitor.control)
            if bind := getattr(self._drafter, "bind", None):
                bind(params, noise)
            if begin := getattr(self._drafter, "begin", None):
                begin(tokens)
        except Exception as error:
            self._drop("begin", error)

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        if self._drafter is None:
            return EMPTY
        try:
            proposal = self._drafter.propose(tokens, budget)
            if len(proposal):
                self.proposer = str(getattr(self._drafter, "proposer", self._drafter.name))
                proposal = _checked(proposal, budget, self._eos, self._vocab)
            if proposal.parents is not None and not self._trees:
                raise ValueError("a tree of guesses, but this target takes chains")
            if proposal.resume is None:
                return proposal if len(proposal) else EMPTY
            if not self._layered:
                raise ValueError("layers have run ahead, but the target cannot resume a pass")
            _check_resume(proposal, proposal.resume)
            return proposal
        except Exception as error:
            self._drop("propose", error)
            return EMPTY

    def observe(self, proposal: Proposal, verdict: Verdict, output: Pass) -> None:
        if self._drafter is None:
            return
        try:
            self._drafter.observe(proposal, verdict, output)
        except Exception as error:
            self._drop("observe", error)

    def timed(self, proposal: Proposal, draft_ms: float, verify_ms: float, rows: int) -> None:
        """What proposing took, and the pass over ``rows`` rows: those of this request, or of several."""
        shared = rows > len(proposal) + 1
        timed = getattr(self._drafter, "timed_shared", None) if shared else self._timed
        if timed is None:
            return
        try:
            if shared:
                timed(proposal, draft_ms, verify_ms, rows)
            else:
                timed(proposal, draft_ms, verify_ms)
        except Exception as error:
            self._drop("timed", error)


def _checked(proposal: Proposal, budget: int, eos: frozenset[int], vocab: int) -> Proposal:
    """The proposal within ``budget`` and without guesses below an EOS.

    Raises:
        ValueError: it is not a proposal over this vocabulary, or its probabilities are not finite.
    """
    tokens, parents, probs = proposal.tokens, proposal.parents, proposal.probs
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(f"guesses must be integers [n], got {tokens.dtype} {list(tokens.shape)}")
    if tokens.min() < 0 or tokens.max() >= vocab:
        raise ValueError(f"a guess outside the vocabulary of {vocab}")
    # before anything walks up the tree: in a circle it would walk for ever
    if parents is not None and (parents.shape != tokens.shape or _out_of_order(parents)):
        raise ValueError("parents must come before their children")
    if probs is not None and probs.shape != (len(tokens), vocab):
        raise ValueError(f"draft probabilities must be of shape {(len(tokens), vocab)}, not {probs.shape}")
    # NaN fails the comparison too; with a q that is no distribution, rejection would change the text's
    if probs is not None and not (np.abs(probs.sum(1) - 1) < _OFF).all():
        raise ValueError("draft probabilities must be finite and sum to 1 for each guess")
    proposal = proposal.truncated(budget)
    tokens, parents = proposal.tokens, proposal.parents
    ends = [i for i, token in enumerate(tokens.tolist()) if token in eos] if eos else []
    if not ends:
        return proposal
    if parents is None:
        return proposal.truncated(ends[0] + 1)
    return _pruned(proposal, ends)


def _check_resume(proposal: Proposal, resume: Resume) -> None:
    """Rows that are to be run on must be the proposal's, and numbers: in the target's pass they would be its failure.

    Raises:
        ValueError: they are not.
    """
    if proposal.parents is not None or len(resume.hidden) != len(proposal) + 1:
        raise ValueError(f"expected {len(proposal) + 1} rows of a chain to resume, got {len(resume.hidden)}")
    if not np.isfinite(resume.hidden.sum()):
        raise ValueError("the hidden states to resume from must be finite")


def _out_of_order(parents: NDArray[np.int64]) -> bool:
    return bool((parents >= np.arange(len(parents))).any() or parents.min() < -1)


def _pruned(proposal: Proposal, leaves: Sequence[int]) -> Proposal:
    """The tree without anything below ``leaves``."""
    cut, kept = set(leaves), {-1: -1}
    dead: set[int] = set()
    for node in range(len(proposal)):
        parent = proposal.parent(node)
        if parent in cut or parent in dead:
            dead.add(node)
        else:
            kept[node] = len(kept) - 1
    alive = [node for node in kept if node >= 0]
    parents = np.array([kept[proposal.parent(node)] for node in alive], np.int64)
    probs = None if proposal.probs is None else proposal.probs[alive]
    return Proposal(proposal.tokens[alive], parents, probs, proposal.replacement, proposal.bucket)
