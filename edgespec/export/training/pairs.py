"""Prepare the sources for an encoder-decoder's training texts; needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import TrainingError
from edgespec.export.architectures import Architecture
from edgespec.export.bundle.model_part import source_of
from edgespec.export.quantization.calibration_text import read_calibration
from edgespec.export.tokenizers.files import open_source_codec
from edgespec.export.tokenizers.text_form import surroundings, text_form
from edgespec.runtimes.text.codec import TextCodec

MOST = 256  # tokens of a source
PIECE = (8, 64)  # tokens of a piece of the model's own calibration text
HELD_SHARE = 0.1  # of that text, at its end


@dataclass(frozen=True)
class Reader:
    """The inputs of an encoder-decoder."""

    codec: TextCodec  # tokenizer of its sources
    begin: list[int]  # tokens that a generated text begins with
    around: tuple[list[int], list[int]]  # tokens before and after the words of a source
    most: int  # tokens of the words
    own: str  # the calibration text of the model, or that of edgespec

    @classmethod
    def open(cls, path: Path, arch: Architecture, codec: TextCodec) -> Reader:
        """Describe the sources of the model in a folder; if languages are required, use the model's first ones.

        Raises:
            TrainingError: it does not read text.
        """
        source, own = source_of(arch), open_source_codec(path)
        if source is None or source.kind != "text":
            raise TrainingError(f"{path}: expected a model that reads text", "draft by another size of its family")
        text = read_calibration(None, path, codec).text
        form = text_form(path, arch.source.config, codec, own)
        begin, around = surroundings(form, own or codec)
        return cls(own or codec, begin, around, min(MOST, source.max_rows) - sum(map(len, around)), text)

    def sources(
        self, texts: Sequence[str], count: int, held: int, seed: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return sources to train on, [count, S], and others to measure on, [held, R]; -1 fills a row after its end.

        Args:
            texts: a source each; without any they are pieces of the model's calibration text.
            count: how many; they are repeated if there are too few.  0 = all of them.

        Raises:
            TrainingError: too few texts.
        """
        numbers = np.random.Generator(np.random.PCG64([seed, 3]))
        if not texts:
            tokens = self.codec.encode(self.own, special=False)
            edge = int(len(tokens) * (1 - HELD_SHARE))
            return self._pieces(tokens[:edge], count, numbers), self._pieces(tokens[edge:], held, numbers)
        known = list(dict.fromkeys(texts))
        if len(known) <= held:
            raise TrainingError(
                f"the data has {len(known)} different sources: expected more than the {held} that are measured on",
                "give more text, a source a line, or a smaller --held-out",
            )
        words = [self.codec.encode(known[at], special=False) for at in numbers.permutation(len(known))]
        return self._filled([words[held:][at % (len(words) - held)] for at in range(count or len(words) - held)]), (
            self._filled(words[:held])
        )

    def _pieces(self, tokens: Sequence[int], count: int, numbers: np.random.Generator) -> NDArray[np.int64]:
        sizes = np.minimum(numbers.integers(*PIECE, count), min(self.most, len(tokens) - 1))
        starts = [int(numbers.integers(len(tokens) - size)) for size in sizes]
        return self._filled([tokens[at : at + size] for at, size in zip(starts, sizes, strict=True)])

    def _filled(self, words: Sequence[Sequence[int]]) -> NDArray[np.int64]:  # [N, S]
        before, behind = self.around
        rows = [[*before, *each[: self.most], *behind] for each in words]
        found = np.full((len(rows), max(map(len, rows))), -1, np.int64)
        for row, tokens in zip(found, rows, strict=True):
            row[: len(tokens)] = tokens
        return found
