"""Bytes that a pass or a draft step reads: of weights, and of keys and values for every token before it."""

from __future__ import annotations

from edgespec.planning.weights import matrix_bytes
from edgespec.runtimes.files.attention import default_attention
from edgespec.runtimes.files.formats import KV_BLOCK, Attention, Format
from edgespec.runtimes.files.kv import ATTENTION
from edgespec.runtimes.files.manifest import ModelFacts, ModelPart, Operators

_LARGE = 4096  # rows and columns of a matrix whose padding does not count


def weight_size(form: Format, operators: Operators) -> float:
    """Bytes of a weight of a large matrix, scales included."""
    return matrix_bytes(form, _LARGE, _LARGE, operators == "native") / _LARGE**2


def layer_size(part: ModelPart, operators: Operators) -> float:
    """Mean bytes of a weight of the layers."""
    if part.bytes_per_weight is not None:
        return part.bytes_per_weight.layers
    size, fine = weight_size(part.format, operators), part.int8_fraction or 0.0
    return (1 - fine) * size + fine * weight_size("int8", operators) if fine else size


def head_size(part: ModelPart, operators: Operators) -> float:
    """Bytes of a weight of the LM head."""
    return (
        part.bytes_per_weight.head
        if part.bytes_per_weight is not None
        else weight_size(part.head_format or part.format, operators)
    )


def head_weights(part: ModelPart) -> int:
    """Weights of the LM head; a cut one has fewer rows."""
    facts = part.facts
    rows = part.head_vocab.size if part.cut and part.head_vocab else facts.vocab
    return rows * facts.hidden


def layer_weights(facts: ModelFacts, own: int | None = None) -> int:
    """Count the weights of all layers, without embeddings and LM head.

    ``own``: weights of the LM head of a drafter conditioned on a model, which has no embedding; None = of a model.
    """
    outside = facts.vocab * (facts.hidden * (1 if facts.tied else 2) + facts.layers * facts.layer_embedding)
    if own is not None:
        outside = own
    if facts.parameters > outside:
        return facts.parameters - outside
    return facts.layers * (_attention_weights(facts) + 3 * facts.hidden * facts.intermediate)


def pass_weights(facts: ModelFacts, own: int | None = None) -> float:
    """Those of them that a pass over a row reads: of experts the chosen ones."""
    weights, mixed = layer_weights(facts, own), facts.experts
    if mixed is None:
        return weights
    each = 3 * facts.hidden * mixed.inner * len(mixed.layers)
    return weights - each * mixed.count + each * mixed.distinct(1)


def fuse_weights(part: ModelPart) -> int:
    """Weights of the matrix that a drafter applies to the target's hidden states; it has the format of LM heads."""
    decoder, hidden = part.decoder, part.facts.hidden
    if decoder is None:
        return 0
    return (decoder.columns - (0 if decoder.fusing.joined else hidden)) * hidden


def read_bytes(part: ModelPart, operators: Operators) -> int:
    """Bytes of weights that a pass over a row reads: only chosen experts, and only rows of a separate embedding.

    For a drafter all matrices; not every step reads each (``costs``).
    """
    rest, head = layer_size(part, operators), head_size(part, operators)
    own, fuse = head_weights(part), fuse_weights(part)
    layers = pass_weights(part.facts, own if part.decoder else None)
    return round((layers - fuse) * rest + (own + fuse) * head)


def kv_token_bytes(part: ModelPart, operators: Operators, attention: Attention | None = None) -> int:
    """Bytes of keys and values of one token; stock operators keep float32."""
    facts = part.facts
    if operators == "stock":
        return facts.kv_bytes_per_token
    return ATTENTION[attention or default_attention(part)].block_bytes(facts) // KV_BLOCK


def _attention_weights(facts: ModelFacts) -> int:
    return facts.hidden * facts.head_dim * (2 * facts.heads + 2 * facts.kv_heads)
