"""What the steps of a drafter read that is conditioned on the target's hidden states.

A round's first step also takes in what was accepted before; a further one goes on from its own hidden state::

    eagle       first: all, with the matrix that fuses         further: all but that matrix
    mtp         all                                            all
    assistant   all but the matrix back to the target's width  all
    dflash      the block, and before it the entries: the matrix that fuses, and keys and values of all layers
"""

from __future__ import annotations

from edgespec.drafters.registry import ASSISTANT, DFLASH, EAGLE
from edgespec.planning.speed.curves import CURVES
from edgespec.planning.speed.passes import line, rising
from edgespec.planning.speed.traffic import (
    fuse_weights,
    kv_token_bytes,
    layer_size,
    read_bytes,
    weight_size,
)
from edgespec.runtimes.files.formats import Attention
from edgespec.runtimes.files.manifest import ModelPart, Operators

FIRST_ROWS = 3  # of a drafter's first step: the pending token and two accepted guesses


def step_bytes(part: ModelPart, first: bool, operators: Operators) -> float:
    """Bytes of weights of a step, times what its rows take over one row.

    Args:
        part: the drafter.
        first: of a round.
        operators: that compute it.
    """
    decoder, facts = part.decoder, part.facts
    assert decoder is not None
    curve, layers = rising(CURVES[operators][part.format]), layer_size(part, operators)
    fuse = fuse_weights(part) * weight_size(part.head_format or part.format, operators)
    every = float(read_bytes(part, operators))
    if decoder.kind == DFLASH:
        block = (every - fuse) * (line(curve, decoder.block or 1) if first else 1.0)
        # keys and values of entries come out of one matrix with queries, which nobody needs
        entries = fuse + facts.layers * facts.hidden * facts.head_dim * (facts.heads + 2 * facts.kv_heads) * layers
        return block + (entries * line(curve, FIRST_ROWS) if first else 0.0)
    if decoder.kind == ASSISTANT:
        return every - (decoder.columns // 2 * facts.hidden * layers if first else 0.0)
    if first:
        return every * line(curve, FIRST_ROWS)
    return every - (fuse if decoder.kind == EAGLE else 0.0)


def token_bytes(part: ModelPart, target: ModelPart, operators: Operators, attention: Attention | None) -> float:
    """Bytes of keys and values of a token: the drafter's own, or those of the target's layers that it reads."""
    reads = part.decoder.reads if part.decoder else []
    if not reads:
        return kv_token_bytes(part, operators)
    dims = target.facts.dims
    return kv_token_bytes(target, operators, attention) * sum(dims[at] for at in reads) / sum(dims)
