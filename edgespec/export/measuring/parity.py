"""How far a written model is from its source, on text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.export.architectures import Architecture
from edgespec.export.architectures.descriptions import as_used_for
from edgespec.export.emit.fill import Errors
from edgespec.export.measuring.reading import Reading
from edgespec.export.quantization.reference import reference_logits
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot

ROWS = 64  # positions whose logits are compared


def parity_report(
    arch: Architecture,
    errors: Errors,
    slot: Slot,
    tokens: Sequence[int],
    progress: Callable[[int], None] | None = None,
    read: Reading | None = None,
) -> dict[str, Any]:
    """Compare the graph with the float32 source on one text.

    Args:
        arch: the source, streamed layer by layer, as transformers runs it on a text of this length.
        read: of an encoder-decoder: the source that the slot attends over.

    Returns a JSON object: relative weight error by layer, logit error, top-1 agreement, perplexity of both;
    ``high_precision``, the same of the high planes of int8 weights.
    """
    rows = compared_rows(tokens)
    floats = read.reference(arch.encoder) if read is not None and arch.encoder is not None else None
    exact = reference_logits(as_used_for(arch, len(tokens)), tokens, rows.tolist(), progress, floats)  # [R, vocab]
    own = arch.tensors
    own_errors = {name: sums for name, sums in errors.items() if name in own}
    return compared(exact, rows, slot, tokens, errors, own_errors, read)


def compared_rows(tokens: Sequence[int]) -> NDArray[np.int64]:  # [R]
    """Choose the positions of a text that are compared."""
    return np.unique(np.linspace(0, len(tokens) - 2, ROWS).astype(np.int64))


def compared(
    exact: NDArray[np.float32],  # [R, vocab]
    rows: NDArray[np.int64],  # [R]
    slot: Slot,
    tokens: Sequence[int],
    errors: Errors,
    own: Errors,
    read: Reading | None = None,
) -> dict[str, Any]:
    """Compare a written model with exact logits.

    Args:
        own: errors of the model's matrices, without those of heads.
        read: the source that the slot attends over; None = none.
    """
    tokens, following = list(tokens), np.asarray(tokens)[rows + 1]
    found = {
        "positions": len(rows),
        "weight_error_by_layer": error_by_layer(errors, slot.model.facts.layers),
        "weight_error": relative_error(own.values()),
        **compare_logits(exact, plain_logits(slot, tokens, rows), following),
    }
    if slot.planes:
        model = slot.model
        graph = next(name for name, graph in model.part.graphs.items() if graph == model.graph)
        high = open_slot(Model(model.folder, model.part.at_high_precision(), graph, model.threads, model.kv))
        if read is not None:
            read.attend(high.model.folder, high.model.part, high, high.model.threads)
        found["high_precision"] = compare_logits(exact, plain_logits(high, tokens, rows), following)
        high.close()
    return found


def compare_logits(
    exact: NDArray[np.float32],  # [R, vocab]
    ours: NDArray[np.float32],  # [R, vocab]
    following: NDArray[np.int64],  # [R]: the token after each row
) -> dict[str, float]:
    """How far logits are from the exact ones, and the perplexity of both."""
    difference = ours - exact
    return {
        "logit_rms_error": float(np.sqrt(np.mean(np.square(difference)))),
        "logit_max_error": float(np.abs(difference).max()),
        "logit_std": float(exact.std()),
        "kl": divergence(exact, ours),
        "top1_agreement": float((ours.argmax(-1) == exact.argmax(-1)).mean()),
        "perplexity": _perplexity(ours, following),
        "perplexity_source": _perplexity(exact, following),
    }


def plain_logits(slot: Slot, tokens: list[int], rows: NDArray[np.int64]) -> NDArray[np.float32]:  # [R, vocab]
    """Compute the logits of rows of a text, each in a separate pass."""
    found = []
    for row in rows.tolist():
        same = slot.follow(tokens[:row])
        slot.prefill(tokens[same:row])
        found.append(slot.forward(np.asarray(tokens[row : row + 1], np.int64)).logits[0].copy())
    return np.stack(found)


def error_by_layer(errors: Errors, layers: int) -> list[float]:
    """Relative error (root of the ratio of squares) of each layer's matrices together."""
    groups: list[list[tuple[float, float]]] = [[] for _ in range(layers)]
    for name, sums in errors.items():
        words = name.split(".")
        if "layers" in words[:-1]:  # names of heads also contain numbers
            groups[int(words[words.index("layers") + 1])].append(sums)
    return [relative_error(group) for group in groups]


def relative_error(sums: Any) -> float:
    """Root of the ratio of summed squares, of (squared error, sum of squares) each."""
    sums = list(sums)
    norm = sum(pair[1] for pair in sums)
    return math.sqrt(sum(pair[0] for pair in sums) / norm) if norm else 0.0


def divergence(exact: NDArray[np.float32], ours: NDArray[np.float32]) -> float:  # [R, vocab] both
    """Mean KL(exact || ours) in nats."""
    p, q = log_softmax(exact), log_softmax(ours)
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:  # [.., vocab] both
    """Logarithms of the probabilities."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def _perplexity(logits: NDArray[np.float32], following: NDArray[np.int64]) -> float:  # [R, vocab], [R]
    chosen = log_softmax(logits)[np.arange(len(following)), following]
    return float(np.exp(min(-chosen.mean(), 700.0)))
