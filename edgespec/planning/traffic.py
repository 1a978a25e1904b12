"""Bytes that a pass or a draft step reads: of weights, and of keys and values for every token before it."""

from __future__ import annotations

from collections.abc import Callable

from edgespec.planning.weights import group_bytes, matrix_bytes
from edgespec.runtimes.files.attention import default_attention
from edgespec.runtimes.files.formats import KV_BLOCK, Attention, Format
from edgespec.runtimes.files.kv import ATTENTION
from edgespec.runtimes.files.manifest import HeadGroup, ModelFacts, ModelPart, Operators, SkipSetPart

_LARGE = 4096  # rows and columns of a matrix whose padding does not count

# What a multiply-add of attention takes, in bytes read, by how keys are multiplied: what a row more takes at depth 8192
# of the 1B shape while 21 GB/s are read (docs/dev/measurements.md, several rows over a long context); that of ONNX
# Runtime was 4.5 times as much as native float16 keys took on another machine.
MULTIPLY_BYTES = {"float": 0.23, "integer": 0.10, "stock": 2.2}


def weight_size(form: Format, operators: Operators) -> float:
    """Bytes of a weight of a large matrix, scales included."""
    return matrix_bytes(form, _LARGE, _LARGE, operators == "native") / _LARGE**2


def layer_size(part: ModelPart, operators: Operators) -> float:
    """Mean bytes of a weight of the layers."""
    if part.kept is not None:
        return part.kept.layers
    size, fine = weight_size(part.format, operators), part.fine or 0.0
    return (1 - fine) * size + fine * weight_size("int8", operators) if fine else size


def head_size(part: ModelPart, operators: Operators) -> float:
    """Bytes of a weight of the LM head."""
    return part.kept.head if part.kept is not None else weight_size(part.head_format or part.format, operators)


def head_weights(part: ModelPart) -> int:
    """Weights of the LM head; a cut one has fewer rows."""
    facts = part.facts
    rows = part.head_vocab.size if part.cut and part.head_vocab else facts.vocab
    return rows * facts.hidden


def layer_weights(facts: ModelFacts, own: int | None = None) -> int:
    """Weights of all layers, embeddings and LM head apart.

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


def verify_curve(part: ModelPart, rows: float, operators: Operators, v: Callable[[float], float]) -> float:
    """Time of the matrices of a pass over n rows, relative to one row.

    More rows go to more experts, of which each then gets few rows.  ``v``: the same of matrices that all rows go
    through.
    """
    mixed = part.facts.experts
    if mixed is None:
        return v(rows)
    one, every = read_bytes(part, operators), 3 * part.facts.hidden * mixed.inner * len(mixed.layers)
    each, few = every * layer_size(part, operators), mixed.chosen - mixed.always
    others = mixed.distinct(rows) - mixed.always
    return ((one - each * few) * v(rows) + each * others * v(rows * few / max(others, 1.0))) / one


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


def attention_bytes(facts: ModelFacts, kv: float, rows: float, operators: Operators, attention: Attention) -> float:
    """Count attention's cost of a pass per token before it, in bytes read.

    It reads keys and values once for all rows, or multiplies for each of them, whichever takes longer.
    """
    again = 1 + facts.shared / max(facts.kv_layers, 1)  # layers that read other layers' keys
    multiplies = 2 * facts.heads * sum(facts.dims) * again
    how = "float" if ATTENTION[attention].keys in ("f32", "f16") else "integer"
    return max(kv * again, rows * multiplies * MULTIPLY_BYTES["stock" if operators == "stock" else how])


def kept_share(part: ModelPart, skip: SkipSetPart, operators: Operators) -> tuple[float, float]:
    """Compute the share of a pass that a self-draft reads: (share of the weights, share of the keys and values)."""
    facts = part.facts
    per_layer = layer_weights(part.facts) / facts.layers
    attention = min(_attention_weights(facts), per_layer)
    left_out = len(skip.attention) * attention + len(skip.mlp) * (per_layer - attention)
    high = len(skip.high_attention) * attention + len(skip.high_mlp) * (per_layer - attention)
    head = head_weights(part) * min(skip.head_rows or facts.vocab, facts.vocab) / facts.vocab
    high += head * skip.high_head
    whole = read_bytes(part, operators)
    low = part.low_bytes if operators == "native" and not part.high_alone else 0
    saved = left_out * layer_size(part, operators)
    if low:
        saved += (head_weights(part) - head) * head_size(part, operators)
    saved += low * high / (layer_weights(facts) + head_weights(part))
    return max(1 - saved / whole, 0.02), 1 - len(skip.attention) / facts.layers


def head_pass_bytes(part: ModelPart, group: HeadGroup, operators: Operators) -> int:
    """Bytes of weights that computing a group of heads reads: its own, and once the LM head that they share."""
    native, rows = operators == "native", part.head_vocab.size if part.head_vocab else part.facts.vocab
    shared = 0 if group.own else matrix_bytes(part.head_format or part.format, rows, part.facts.hidden, native)
    return group_bytes(part, group, native) + shared


def early_exit_cost_ratio(part: ModelPart, layer: int, operators: Operators) -> float:
    """Compute the share of a pass that the layers below an exit, and the exit, read."""
    below = layer_weights(part.facts) * layer / part.facts.layers * layer_size(part, operators)
    ask = part.facts.hidden**2 * weight_size(part.format, operators)
    head = head_weights(part) * head_size(part, operators)
    return (below + ask + head) / read_bytes(part, operators)


def _attention_weights(facts: ModelFacts) -> int:
    return facts.hidden * facts.head_dim * (2 * facts.heads + 2 * facts.kv_heads)
