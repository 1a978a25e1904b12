"""Write training texts with native operators: the model in int8, many texts in a pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edgespec.decoding.target import Pass
from edgespec.export.bundle.model import write_model
from edgespec.export.bundle.model_part import ModelSpec
from edgespec.export.quantization.quantizer import QUANTIZERS, DirectLevels
from edgespec.export.training.target import Source
from edgespec.runtimes.files.formats import LONGEST_PASS
from edgespec.runtimes.slots.native_batch import NativeBatch
from edgespec.runtimes.slots.shared import Model


class NativeWriter:
    """A model that writes texts, as ``Target`` does: rows of several texts share a pass.

    Args:
        source: the model.
        folder: an empty one, for its weights in int8.
        threads: None = the default.

    Raises:
        EdgespecError: native operators cannot run this model.
    """

    device = torch.device("cpu")

    def __init__(self, source: Source, folder: Path, threads: int | None) -> None:
        self.source, self.facts = source, source.arch.facts
        part = write_model(folder, source.arch, ModelSpec("int8"), DirectLevels(QUANTIZERS["rtn"])).part
        self._model = Model(folder, part, "native", threads)
        self._batch: NativeBatch | None = None

    def attend(self, sources: NDArray[np.int64] | None) -> None:
        """See ``Target``; the model of a writer reads no sources."""

    def follow(self, tokens: Tensor, cache: NativeBatch | None = None) -> tuple[Tensor, NativeBatch]:
        """Read tokens [B, T] after those of a cache -> logits [B, 1, vocab] after the last one, and the cache."""
        given = tokens.numpy()
        if cache is None:
            self.close()
            cache = self._batch = NativeBatch(self._model, len(given))
        together, rows = LONGEST_PASS // len(given), np.zeros((0, 0), np.float32)
        for at in range(0, given.shape[1], together):
            part = given[:, at : at + together]
            found = cache.run([(slot, Pass(row)) for slot, row in zip(cache.slots, part, strict=True)])
            for slot in cache.slots:
                slot.keep(range(part.shape[1]))
            rows = np.stack([output.logits[-1] for output in found])
        return torch.from_numpy(rows)[:, None], cache

    def logits(self, hidden: Tensor) -> Tensor:
        """Return what ``follow`` gave."""
        return hidden

    def close(self) -> None:
        """Free the texts."""
        if self._batch is not None:
            self._batch.close()
            self._batch = None
