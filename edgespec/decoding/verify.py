"""Which guesses stand: one function for chains and trees, deterministic and sampled guesses.

p is the target's distribution at a row, q the draft's.  All of it is lossless: the emitted tokens have the target's
distribution, and where matching applies they are the tokens that plain decoding emits.  Lossy rules must be asked for
(``accept.Accept``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.accept import EXACT, Accept, JudgedRows
from edgespec.decoding.noise import ACCEPT, BLOCK, RESIDUAL, Noise
from edgespec.decoding.proposal import Proposal, Verdict


class Rows(JudgedRows, Protocol):
    """What verification asks of the rows of a target pass (see ``sampling.RowSampler``)."""

    @property
    def matching(self) -> bool:
        """Whether sampled guesses too are verified by matching: greedy, or coupled sampling."""
        ...

    @property
    def block(self) -> bool:
        """Whether sampled chains are verified as a block."""
        ...

    def choose(self, row: int) -> int:
        """The token that plain decoding emits there."""
        ...

    def position(self, row: int) -> int:
        """Index, in the sequence, of the token that the row predicts."""
        ...


def verify(proposal: Proposal, rows: Rows, noise: Noise, accept: Accept = EXACT) -> Verdict:
    """Verify ``proposal`` against the rows of the target's pass over it.

    Args:
        proposal: the guesses; ``probs`` None = deterministic.
        rows: row 0 follows the pending token, row i + 1 follows node i.
        noise: the request's randomness (acceptance and residual draws).
        accept: which guesses stand.

    Returns:
        The accepted root path and the token after it.

    Raises:
        EdgespecError: a row that was needed has NaN or infinite logits.
    """
    chain = proposal.parents is None
    forced = min(accept.min_block, len(proposal)) if chain else 0  # guesses that stand unseen
    if accept.rule != "exact":
        return _relax(proposal, rows, accept, forced)
    if proposal.probs is None or rows.matching:
        return _match(proposal, rows, forced)
    if chain and rows.block:
        return _block(proposal.tokens, proposal.probs, rows, noise, forced)
    return _reject(proposal, proposal.probs, rows, noise, forced)


def children(proposal: Proposal, node: int) -> Sequence[int]:
    """Nodes whose parent is ``node`` (-1 = the pending token), in the drafter's order."""
    if proposal.parents is None:
        return range(node + 1, min(node + 2, len(proposal)))
    return [i for i in range(node + 1, len(proposal)) if proposal.parents[i] == node]


def reached(proposal: Proposal, path: Sequence[int]) -> int:
    """Depths at which a guess was put to the test, given the accepted ``path``: its own and that of the refused one."""
    last = path[-1] if path else -1
    return len(path) + (1 if children(proposal, last) else 0)


def _match(proposal: Proposal, rows: Rows, forced: int) -> Verdict:
    """Descend while plain decoding would have emitted the guess.

    For a one-hot q this equals rejection sampling: accepted with probability p(guess), and the residual is p without
    the guess.  With q drawn by the target's own Gumbel noise it is drafter-invariant speculative sampling
    (Daliri, Musco, Suresh, arXiv 2408.07978).
    """
    if proposal.parents is None:
        path = forced
        for guess in proposal.tokens[forced:].tolist():
            token = rows.choose(path)
            if token != guess:
                return Verdict(range(path), token)
            path += 1
        return Verdict(range(path), rows.choose(path))
    nodes: list[int] = []
    node = -1
    while True:
        token = rows.choose(node + 1)
        node = next((i for i in children(proposal, node) if proposal.tokens[i] == token), -1)
        if node < 0:
            return Verdict(nodes, token)
        nodes.append(node)


def _reject(proposal: Proposal, probs: NDArray[np.floating], rows: Rows, noise: Noise, forced: int) -> Verdict:
    """Speculative sampling: Leviathan et al. arXiv 2211.17192 Algorithm 1, Chen et al. arXiv 2302.01318 Algorithm 2.

    Several children of one node are tried in turn against what is left of p: recursive rejection sampling (SpecInfer
    arXiv 2305.09781 with replacement, Sequoia arXiv 2402.12374 without).  They are tried in the order of drawing, as
    their q given the earlier ones is known in that order only.
    """
    path = list(range(forced))
    node = forced - 1
    while True:
        row = node + 1
        below = children(proposal, node)
        if not below:
            return Verdict(path, rows.choose(row))  # bonus
        position = rows.position(row)
        p = rows.distribution(row)  # float64 [vocab]
        tried: list[int] = []
        node = -1
        for sibling, child in enumerate(below):
            token = int(proposal.tokens[child])
            q = np.asarray(probs[child], np.float64)  # [vocab]
            if tried and not proposal.replacement:
                q = q.copy()
                q[tried] = 0
                total = q.sum()
                q = q / total if total > 0 else q
            if q[token] <= 0:
                continue  # cannot have been drawn from q: no evidence either way, so p is left as it is
            # u q < p instead of u < p / q: q may be tiny; strict, because u may be 0 and p = 0 must never pass.
            if noise.uniform(position, ACCEPT + sibling) * q[token] < p[token]:
                node = child
                break
            tried.append(token)
            residual = np.maximum(p - q, 0)
            left = residual.sum()
            if left > 0:  # all zero: p and q are equal but for rounding, and p itself is the right fall-back
                p = residual / left
        if node < 0:
            return Verdict(path, _draw(p, noise.uniform(position, RESIDUAL)))
        path.append(node)


def _block(
    tokens: NDArray[np.int64],  # [n]
    probs: NDArray[np.floating],  # [n, vocab]
    rows: Rows,
    noise: Noise,
    forced: int,
) -> Verdict:
    """Block verification of a chain: Sun et al. arXiv 2403.10444, Algorithm 2.

    The guesses are judged together: the longest beginning that passes stands, even where one before it did not.  On
    average no fewer stand than by judging them one after the other.
    """
    start, length = rows.position(0), len(tokens)
    stand = forced
    held = 1.0  # p_i of the paper: the chance that at least the first i guesses stand
    left: NDArray[np.float64] | None = None  # [vocab], not normalised: what follows if exactly `stand` guesses do
    for i in range(forced, length + 1):
        # a guess that q cannot have drawn is no evidence: the chain ends before it
        ends = i == length or probs[i, tokens[i]] <= 0
        residual, passes = None, held
        if not ends:
            p = rows.distribution(i)  # float64 [vocab]
            q = np.asarray(probs[i], np.float64)  # [vocab]
            residual = np.maximum(held * p - q, 0)
            mass = float(residual.sum())
            passes = mass / (mass + 1 - held) if mass > 0 or held < 1 else 1.0
            if mass <= 0:  # p and q are equal but for rounding: p is the right fall-back
                residual = p
        if i == forced or noise.uniform(rows.position(i - 1), BLOCK + start) < passes:
            stand, left = i, residual
        if ends:
            break
        mine, drafts = held * float(p[tokens[i]]), float(q[tokens[i]])
        held = 1.0 if mine >= drafts else mine / drafts
        if held <= 0:
            break  # nothing longer can stand, and its rows are not looked at
    if left is None:
        return Verdict(range(stand), rows.choose(stand))
    return Verdict(range(stand), _draw(left, noise.uniform(rows.position(stand), RESIDUAL)))


def _relax(proposal: Proposal, rows: Rows, accept: Accept, forced: int) -> Verdict:
    """The longest path of guesses that a lossy rule accepts, the one of most merit among equally long ones.

    Only rows of accepted guesses are looked at.
    """
    best, best_merit = list(range(forced)), 0.0
    open_paths = [(best, 0.0)]  # depth first, the drafter's first choices first
    while open_paths:
        path, merit = open_paths.pop()
        if (len(path), merit) > (len(best), best_merit):
            best, best_merit = path, merit
        node = path[-1] if path else -1
        if not (below := children(proposal, node)):
            continue
        judge = accept.judge(rows, node + 1)
        for child in reversed(below):
            gained = judge(int(proposal.tokens[child]))
            if gained is not None:
                open_paths.append(([*path, child], merit + gained))
    return Verdict(best, rows.choose(best[-1] + 1 if best else 0))


def _draw(p: NDArray[np.float64], u: float) -> int:
    """A token from ``p`` float64 [vocab], which need not be normalised, by inversion of ``u`` in [0, 1)."""
    mass = np.cumsum(p)
    # "right" skips tokens of no mass; rounding may still reach past the end.
    token = int(np.searchsorted(mass, u * mass[-1], side="right"))
    return token if token < len(p) else int(np.flatnonzero(p)[-1])
