"""How much of a model quantization loses, on texts that no quantizer has seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import numpy as np
from numpy.typing import NDArray

from edgespec.export.architectures import Architecture
from edgespec.export.measuring.mixer import block_matrices
from edgespec.export.measuring.parity import divergence
from edgespec.export.measuring.variants import Rounded
from edgespec.export.quantization.levels import Array, Blocks, Quantized, grouped, half
from edgespec.export.quantization.quantizer import Quantizer
from edgespec.export.quantization.reference import SequenceOps, split_sources
from edgespec.export.source.source import Checkpoint
from edgespec.runtimes.ort.session import default_threads
from edgespec.runtimes.slots.slot import PREFILL_CHUNK, Slot

LOGITS = 1 << 23  # of a sequence: they bound the positions that are compared
LEAST_POSITIONS = 64  # of a sequence, for any vocabulary size
ROWS = 256  # that a thread rounds at once

Figures = dict[str, dict[str, float]]  # by text: positions, kl, top1_agreement


class HeldOut:
    """Texts, and the unquantized model's predictions for them.

    Args:
        arch: the model in float32.
        texts: by name, sequences int64 [S, T], each from an empty past; a model is compared on each text separately.
        progress: called with the number of finished sub-layers, and of all.
        sources: int64 [S, R] or float32 [S, R, columns], input of the encoder of an encoder-decoder for each sequence
            of all texts.
    """

    def __init__(
        self,
        arch: Architecture,
        texts: Mapping[str, NDArray[np.int64]],
        progress: Callable[[int, int], None] = lambda done, of: None,
        sources: NDArray[np.int64] | Array | None = None,
    ) -> None:
        self.arch, self.texts, self._progress = arch, dict(texts), progress
        self._floats: Array | None = None  # [S, R, width], what the encoder gives
        if sources is not None and arch.encoder is not None:
            ids, given = split_sources(sources)
            self._floats = SequenceOps(arch.encoder, ids, floats=given).run(arch.encoder.trace())
        length = max(rows.shape[1] for rows in texts.values())
        wanted = min(length, max(LEAST_POSITIONS, LOGITS // arch.facts.vocab))
        self._positions = np.unique(np.linspace(0, length - 1, wanted).astype(np.int64))
        self._passes = 0
        self._exact = list(self._logits(arch.source))

    def of(self, slot: Slot, attend: Callable[[int], None] | None = None) -> Figures:
        """Measure a written model; ``attend``: lets it attend over the source of a sequence, by its number."""
        return self._compared(self._read(slot, attend))

    def q4_0(self) -> Figures:
        """Measure llama.cpp's rounding of every matrix that a bundle stores in blocks, with float32 activations."""
        source = Rounded(self.arch.source, block_matrices(self.arch), Q4_0, Blocks(4))

        return self._compared(self._logits(cast(Checkpoint, source)))  # reads as one does

    def _logits(self, source: Checkpoint) -> Iterator[Array]:  # [positions, vocab] of each sequence
        # one run reads every matrix once: what fills up shorter sequences comes after all that is compared
        length = max(rows.shape[1] for rows in self.texts.values())
        padded = [np.pad(rows, ((0, 0), (0, length - rows.shape[1]))) for rows in self.texts.values()]
        of, before = 2 * self.arch.facts.layers, self._passes
        self._passes += 1

        def progress(done: int) -> None:
            self._progress(before * of + done, 2 * of)

        ops = SequenceOps(self.arch, np.concatenate(padded), self._positions.tolist(), progress, source,
                          self._floats)  # fmt: skip
        found = ops.run(self.arch.trace())
        lengths = [rows.shape[1] for rows in self.texts.values() for _ in rows]
        return (own[self._positions < length] for own, length in zip(found, lengths, strict=True))

    def _read(self, slot: Slot, attend: Callable[[int], None] | None) -> Iterator[Array]:
        for number, row in enumerate(row for rows in self.texts.values() for row in rows):
            if attend is not None:
                attend(number)
            slot.follow([])
            found = []
            for start in range(0, len(row), PREFILL_CHUNK):
                part = row[start : start + PREFILL_CHUNK]
                own = self._positions[(self._positions >= start) & (self._positions < start + len(part))] - start
                found.append(slot.forward(part).logits[own].copy())
                slot.keep(range(len(part)))
            yield np.concatenate(found)

    def _compared(self, logits: Iterator[Array]) -> Figures:
        exact, figures = iter(self._exact), Figures()
        for name, rows in self.texts.items():
            pairs = [(next(exact), next(logits)) for _ in rows]
            counts = [len(theirs) for theirs, _ in pairs]
            figures[name] = {
                "positions": sum(counts),
                "kl": float(np.average([divergence(*pair) for pair in pairs], weights=counts)),
                "top1_agreement": float(
                    np.average([np.mean(a.argmax(-1) == b.argmax(-1)) for a, b in pairs], weights=counts)
                ),
            }
        return figures


def round_q4_0(weight: Array, form: Blocks) -> Quantized:  # [n, k]
    """Round as llama.cpp does (``quantize_row_q4_0_ref`` in ggml-quants.c, ``Q4_0`` in its package gguf)."""

    def rounded(rows: Array) -> Quantized:
        blocks = grouped(rows, form.size)
        largest = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)
        scales = largest / np.float32(-8)
        with np.errstate(divide="ignore"):
            inverse = np.where(scales == 0, 0, 1 / scales)
        levels = np.trunc(blocks.astype(np.float64) * inverse.astype(np.float64) + 8.5)
        return levels.clip(0, 15).astype(np.uint8), half(scales[..., 0])

    with ThreadPoolExecutor(default_threads()) as pool:  # numpy computes without the lock
        made = list(pool.map(rounded, np.array_split(weight, -(-len(weight) // ROWS))))
    return np.concatenate([levels for levels, _ in made]), np.concatenate([scales for _, scales in made])


Q4_0 = Quantizer("q4_0", lambda inputs: round_q4_0)
