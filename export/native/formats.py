"""The weight formats in the packed layout of native operators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.export.architectures.base import Architecture
from edgespec.export.graphs.formats import EmbeddingTable, Errors, add_error
from edgespec.export.graphs.graph import WeightFile
from edgespec.export.heads.description import is_head
from edgespec.export.quantization.quantizers import QUANTIZERS, DirectLevels, LevelSource
from edgespec.export.quantization.quantizers import levels as quantize
from edgespec.export.source.source import Checkpoint
from edgespec.export.storage.layout import PACKED_KINDS
from edgespec.runtimes.files.manifest import Format
from edgespec.runtimes.files.packing import Kind, Packed


class NativeFormat:
    """One weight format, as native operators read it.

    Args:
        form: of the model's matrices.
        arch: the model.
        head_form: of its LM heads, and of the embedding tied to one.
        chosen: chooses levels and scales; None = round to nearest.
    """

    def __init__(self, form: Format, arch: Architecture, head_form: Format, chosen: LevelSource | None = None) -> None:
        self.form, self.arch, self.head_form = form, arch, head_form
        self.chosen = chosen or DirectLevels(QUANTIZERS["rtn"])

    def kind(self, name: str) -> Kind:
        """How the matrix ``name`` is stored."""
        return PACKED_KINDS[self.head_form if is_head(name, self.arch) else self.form]

    def can_lookup(self, k: int, tied: bool) -> bool:
        """Whether an embedding of this width is stored as a matrix rather than as rows, as the stock graphs do."""
        return k % quantize.BLOCK == 0 if self.form in ("int4", "int8") else tied

    def store(
        self,
        file: WeightFile,
        source: Checkpoint,
        name: str,
        parts: Sequence[str],
        n: int,
        k: int,
        head_dim: int,
        errors: Errors,
    ) -> None:
        """Write the checkpoint's matrices ``parts``, stacked to [n, k], packed, under ``name``.packed."""
        packed = Packed(self.kind(parts[0]), n, k, head_dim, tuple((part, source.shape(part)[0]) for part in parts))
        file.packed[name] = packed
        if packed.kind == "f32":
            data = packed.pack_floats(_floats(source, parts, errors))
        elif packed.kind == "c8":
            data = packed.pack_channels(_channels(source, parts, errors))
        else:
            data = packed.pack_blocks(_blocks(source, parts, 4 if packed.kind == "q4" else 8, self.chosen, errors))
        file.put(f"{name}.packed", (packed.nbytes,), np.uint8, data)

    def store_rows(self, file: WeightFile, source: Checkpoint, name: str) -> list[str]:
        """Write an embedding that is only looked up; returns its entries: rows, and their scales if quantized."""
        exact = self.form == "fp32"
        if not file.has(f"{name}.table"):
            EmbeddingTable(exact).store(file, source, name)
        return [f"{name}.table"] if exact else [f"{name}.table", f"{name}.table_scales"]


def _floats(source: Checkpoint, parts: Sequence[str], errors: Errors) -> Iterator[NDArray[np.float32]]:
    for part in parts:
        for piece in source.pieces(part):
            add_error(errors, part, 0.0, quantize.squared_error(piece, piece)[1])
            yield piece


def _channels(
    source: Checkpoint, parts: Sequence[str], errors: Errors
) -> Iterator[tuple[NDArray[np.int8], NDArray[np.float32]]]:
    for part in parts:
        for piece in source.pieces(part):
            levels, scale = quantize.quantize_channel(piece)
            add_error(errors, part, *quantize.squared_error(piece, quantize.dequantize_channel(levels, scale)))
            yield levels, scale


def _blocks(
    source: Checkpoint, parts: Sequence[str], bits: int, chosen: LevelSource, errors: Errors
) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.float32]]]:
    for part in parts:
        for piece, (levels, scale) in chosen.pieces(source, part, bits):
            approximation = quantize.dequantize_block(levels, scale, piece.shape[1], bits)
            add_error(errors, part, *quantize.squared_error(piece, approximation))
            yield levels, scale
