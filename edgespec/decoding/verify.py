"""Which guesses stand: one function for chains and trees, deterministic and sampled guesses.

p is the target's distribution at a row, q the draft's.  All of it is lossless: the emitted tokens have the target's
distribution, and where matching applies they are the tokens that plain decoding emits.  Lossy rules must be asked for
(``accept.Accept``).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.accept import EXACT, Accept, relax
from edgespec.decoding.block import verify_block
from edgespec.decoding.noise import ACCEPT, RESIDUAL, Noise
from edgespec.decoding.proposal import Proposal, Verdict
from edgespec.decoding.rows import Rows
from edgespec.decoding.sampling import draw


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
    forced = min(accept.min_block, len(proposal)) if chain and accept.min_block else 0  # guesses that stand unseen
    if accept.rule != "exact":
        return relax(proposal, rows, accept, forced)
    if proposal.probs is None or rows.matching:
        return _match(proposal, rows, forced)
    if chain and rows.block:
        return verify_block(proposal.tokens, proposal.probs, rows, noise, forced)
    return _reject(proposal, proposal.probs, rows, noise, forced)


def keeps_text(proposal: Proposal, rows: Rows, accept: Accept, exact_trees: bool) -> bool:
    """Whether the tokens of this round are the very ones of plain decoding, not only of its distribution.

    Args:
        proposal: the guesses.
        rows: of the pass over them.
        accept: which of them stood.
        exact_trees: the target's rows of trees have the bits of chains.  Where attention adds them up in another order,
            near-ties may differ.
    """
    same_rows = proposal.parents is None or exact_trees
    return accept.lossless and same_rows and (proposal.probs is None or rows.matching)


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
        node = next((i for i in proposal.children(node) if proposal.tokens[i] == token), -1)
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
        below = proposal.children(node)
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
            return Verdict(path, draw(p, noise.uniform(position, RESIDUAL)))
        path.append(node)
