"""Measures the quality that a weight format loses, before a bundle is written.

The model reads a text in float32 twice: with its own weights, and with weights as they come back from the format.
Above ``MEASURED`` parameters rounding would take minutes.  There every matrix gets random errors of the size that
rounding a part of its rows makes, a layer at a time, and the result is called an estimate.
"""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from edgespec.export.architectures import Architecture
from edgespec.export.architectures.descriptions import as_used_for
from edgespec.export.bundle.model_part import counted
from edgespec.export.measuring.mixer import block_matrices
from edgespec.export.measuring.parity import log_softmax
from edgespec.export.measuring.reading import Reading
from edgespec.export.measuring.variants import Rounded
from edgespec.export.quantization.levels import BLOCKS, FOUR_BITS, Array
from edgespec.export.quantization.quantizer import QUANTIZERS
from edgespec.export.quantization.reference import SequenceOps, reference_rows
from edgespec.export.source.source import Checkpoint
from edgespec.runtimes.files.formats import Format

TEXTS, LENGTH = 2, 192  # sequences that are compared, and maximum tokens of each
FEW_TEXTS, SHORT = 1, 128  # the same of a model that is only estimated
LOGITS = 1 << 26  # the most values of the logits of all compared positions: they bound the positions
MEASURED = 300_000_000  # parameters: rounding more of them takes more than half a minute on two cores
EVERY = 16  # an estimate rounds one row of 16
TOGETHER = 32  # rows of logits whose probabilities are in memory at once


@dataclass(frozen=True)
class Loss:
    """Quality loss of a format on a text."""

    perplexity: float  # relative change: .01 = one percent more; may be negative, as texts are short
    kl: float  # divergence of its predictions from the source's, nats per token
    positions: int  # that were compared; 0 = nothing is lost by definition
    estimated: bool = False

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the keys are stable."""
        return {"perplexity_loss": self.perplexity, "kl": self.kl, "positions": self.positions,
                "estimated": self.estimated}  # fmt: skip


NOTHING = Loss(0.0, 0.0, 0)
Progress = Callable[[int, int, str], None]  # sub-layers done, of, what


class Noised(Rounded):
    """A checkpoint whose matrices have random errors as large as rounding makes them in some of their rows."""

    def rounded(self, name: str, rows: Array) -> Array:  # [r, k] both
        if name not in self._matrices or not len(rows):
            return rows
        sample = rows[:: EVERY if len(rows) >= EVERY else 1]
        error, norm = super().rounded(name, sample) - sample, float(np.square(sample).mean())
        share = math.sqrt(float(np.square(error).mean()) / norm) if norm else 0.0
        draw = np.random.default_rng(zlib.crc32(name.encode()))
        noise = draw.random(rows.shape, np.float32) - np.float32(0.5)  # of deviation 1 / sqrt(12)
        return rows + noise * (np.sqrt(12 * np.square(rows).mean(1, keepdims=True)) * np.float32(share))


def measure_losses(
    arch: Architecture,
    texts: NDArray[np.int64],  # [S, T]
    forms: Sequence[Format],
    progress: Progress = lambda done, of, what: None,
    read: Reading | None = None,
) -> dict[Format, Loss]:
    """Measure formats in blocks on texts; of a large model estimate what they lose.

    Args:
        arch: the model in float32.
        texts: sequences of tokens, each from an empty past.
        forms: formats in blocks.
        progress: receives the number of finished sub-layers.
        read: the source of an encoder-decoder, for every sequence.
    """
    large = is_large(arch)
    texts = texts[:FEW_TEXTS, :SHORT] if large else texts[:TEXTS, :LENGTH]
    made = as_used_for(arch, texts.shape[1])
    wanted = max(1, min(texts.shape[1] - 1, LOGITS // (arch.facts.vocab * len(texts))))
    rows = np.unique(np.linspace(0, texts.shape[1] - 2, wanted).astype(np.int64))
    of = 2 * arch.facts.layers

    def logits(number: int, what: str, source: Checkpoint | None, floats: Array | None) -> Array:  # [S, R, vocab]
        def report(done: int) -> None:
            progress(number * of + done, (1 + len(forms)) * of, what)

        given = None if floats is None else np.repeat(floats, len(texts), 0)
        found: Array = SequenceOps(made, texts, rows.tolist(), report, source, given).run(made.trace())
        return found

    encoder = arch.encoder if read is not None else None
    floats = None if encoder is None or read is None else read.reference(encoder)
    exact, following, losses = logits(0, "source in fp32", None, floats), texts[:, rows + 1], dict[Format, Loss]()
    kind, matrices = Noised if large else Rounded, block_matrices(arch)
    for number, form in enumerate(forms, 1):
        # a search of scales takes long, and gains next to nothing where levels are fine
        quantizer = QUANTIZERS["mse" if form in FOUR_BITS else "rtn"]
        source = cast(Checkpoint, kind(arch.source, matrices, quantizer, BLOCKS[form]))  # reads as one does
        if encoder is not None and read is not None:
            rounded = copy.copy(encoder)
            names = frozenset(name for name, shape in encoder.tensors.items() if len(shape) == 2)
            rounded.source = cast(Checkpoint, kind(encoder.source, names, quantizer, BLOCKS[form]))
            floats = reference_rows(rounded, read.content)
        losses[form] = compare(exact, logits(number, f"in {form}", source, floats), following, large)
    return losses


def is_large(arch: Architecture) -> bool:
    """Whether a model is too large to be measured in seconds."""
    return counted(arch).parameters > MEASURED


def compare(
    exact: Array,  # [S, R, vocab]
    ours: Array,  # [S, R, vocab]
    following: NDArray[np.int64],  # [S, R], the token after each position
    estimated: bool = False,
) -> Loss:
    """Compare predictions with the source's."""
    vocab, nats, divergence = exact.shape[-1], 0.0, 0.0
    flat, theirs, tokens = exact.reshape(-1, vocab), ours.reshape(-1, vocab), following.reshape(-1)
    for start in range(0, len(flat), TOGETHER):
        own = slice(start, start + TOGETHER)
        p, q = log_softmax(flat[own]), log_softmax(theirs[own])
        at = np.arange(len(p)), tokens[own]
        nats += float((p[at] - q[at]).sum())
        divergence += float((np.exp(p) * (p - q)).sum())
    count = len(flat)
    return Loss(math.expm1(min(nats / count, 50.0)), max(0.0, divergence / count), count, estimated)
