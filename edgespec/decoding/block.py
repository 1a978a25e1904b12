"""Block verification: the guesses of a drawn chain judged together."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.noise import BLOCK, RESIDUAL, Noise
from edgespec.decoding.proposal import Verdict
from edgespec.decoding.rows import Rows
from edgespec.decoding.sampling import draw


def verify_block(
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
    return Verdict(range(stand), draw(left, noise.uniform(rows.position(stand), RESIDUAL)))
