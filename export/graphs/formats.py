"""The stock weight formats: how a matrix is stored and which ONNX operators multiply by it.

Every format computes each row of its input on its own: what a token's logits are never depends on the drafts beside it.
Per-tensor activation scales (``quantize_dynamic``) break that rule and are not offered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from edgespec.export.graphs.graph import MICROSOFT, GraphBuilder, WeightFile
from edgespec.export.quantization.quantizers import QUANTIZERS, DirectLevels, LevelSource
from edgespec.export.quantization.quantizers import levels as quantize
from edgespec.export.source.source import Checkpoint

Errors = dict[str, tuple[float, float]]  # tensor name -> sum of squared errors, sum of squares


class LinearFormat(Protocol):
    """One weight format.

    Attributes:
        name: as in ``--format``.
        joins: whether matrices can be stored as one.
        min_rows: fewest rows that may reach a matrix.
    """

    name: str
    joins: bool
    min_rows: int

    def store(self, file: WeightFile, source: Checkpoint, name: str, parts: Sequence[str], errors: Errors) -> None:
        """Write the checkpoint's matrices ``parts`` [n_i, k], stacked along n, under ``name``."""
        ...

    def multiply(self, graph: GraphBuilder, x: str, name: str, k: int, n: int, bias: str | None) -> str:
        """Emit x [.., k] @ weight.T + bias -> [.., n]."""
        ...

    def lookup(self, graph: GraphBuilder, ids: str, name: str, k: int, n: int) -> str:
        """Emit the rows ``ids`` [1, T] of a stored matrix [n, k] -> float32 [1, T, k]; for tied embeddings."""
        ...

    def can_lookup(self, k: int, tied: bool) -> bool:
        """Whether ``lookup`` suits an embedding of this width, stored for the LM head too if ``tied``."""
        ...


class BlockFormat:
    """int4 / int8: MatMulNBits, blocks of 32, integer arithmetic (accuracy level 4)."""

    joins = True
    min_rows = 0

    def __init__(self, bits: int, chosen: LevelSource | None = None) -> None:
        self.bits = bits
        self.chosen = chosen or DirectLevels(QUANTIZERS["rtn"])
        self.name = f"int{bits}"

    def store(self, file: WeightFile, source: Checkpoint, name: str, parts: Sequence[str], errors: Errors) -> None:
        n, k = stacked_shape(source, parts)
        blocks = -(-k // quantize.BLOCK)
        scales: list[NDArray[np.float32]] = []  # small beside the levels: kept until those are written

        def levels() -> Iterator[NDArray[np.uint8]]:
            for part in parts:
                for piece, (level, scale) in self.chosen.pieces(source, part, self.bits):
                    scales.append(scale)
                    approximation = quantize.dequantize_block(level, scale, k, self.bits)
                    add_error(errors, part, *quantize.squared_error(piece, approximation))
                    yield quantize.pack_levels(level, self.bits)

        file.put(f"{name}.levels", (n, blocks, quantize.BLOCK * self.bits // 8), np.uint8, levels())
        file.put(f"{name}.scales", (n, blocks), np.float32, scales)
        file.alias(f"{name}.rows", f"{name}.levels", (n, blocks * quantize.BLOCK * self.bits // 8))

    def multiply(self, graph: GraphBuilder, x: str, name: str, k: int, n: int, bias: str | None) -> str:
        inputs = [x, graph.stored(f"{name}.levels"), graph.stored(f"{name}.scales")]
        if bias:
            inputs += ["", "", bias]
        return graph.node(
            "MatMulNBits",
            inputs,
            domain=MICROSOFT,
            K=k,
            N=n,
            bits=self.bits,
            block_size=quantize.BLOCK,
            accuracy_level=4,
        )

    def lookup(self, graph: GraphBuilder, ids: str, name: str, k: int, n: int) -> str:
        return graph.node(
            "GatherBlockQuantized",
            [graph.stored(f"{name}.rows"), ids, graph.stored(f"{name}.scales")],
            domain=MICROSOFT,
            bits=self.bits,
            block_size=quantize.BLOCK,
            gather_axis=0,
            quantize_axis=1,
        )

    def can_lookup(self, k: int, tied: bool) -> bool:
        return k % quantize.BLOCK == 0


class ChannelFormat:
    """w8a8: activations quantized per token to uint8, weights per channel to int8 (7 bits)."""

    name = "w8a8"
    joins = True
    min_rows = 1  # ONNX Runtime's ReduceMax over zero rows is wrong

    def store(self, file: WeightFile, source: Checkpoint, name: str, parts: Sequence[str], errors: Errors) -> None:
        n, k = stacked_shape(source, parts)
        scales: list[NDArray[np.float32]] = []

        def columns() -> Iterator[NDArray[np.int8]]:
            matrix, at = np.empty((k, n), np.int8), 0
            for part in parts:
                for piece in source.pieces(part):
                    levels, scale = quantize.quantize_channel(piece)
                    matrix[:, at : at + len(piece)] = levels.T
                    scales.append(scale)
                    add_error(errors, part, *quantize.squared_error(piece, quantize.dequantize_channel(levels, scale)))
                    at += len(piece)
            yield matrix

        file.put(f"{name}.levels", (k, n), np.int8, columns())
        file.put(f"{name}.scales", (n,), np.float32, scales)

    def multiply(self, graph: GraphBuilder, x: str, name: str, k: int, n: int, bias: str | None) -> str:
        levels, scale = graph.once(("quantized", x), lambda: self._activation(graph, x))
        # uint8 x int8: the int8 x int8 kernel of ONNX Runtime is 25 times slower
        middle = graph.constant("middle", np.array(128, np.uint8))
        product = graph.node("MatMulInteger", [levels, graph.stored(f"{name}.levels"), middle])
        product = graph.node("Cast", [product], to=TensorProto.FLOAT)
        y = graph.node("Mul", [graph.node("Mul", [product, graph.stored(f"{name}.scales")]), scale])
        return graph.node("Add", [y, bias]) if bias else y

    def _activation(self, graph: GraphBuilder, x: str) -> tuple[str, str]:
        """uint8 levels [.., k] of x and the scale [.., 1] of each row."""
        last = graph.constant("last_axis", np.array([-1], np.int64))
        largest = graph.node("ReduceMax", [graph.node("Abs", [x]), last], keepdims=1)
        largest = graph.node("Max", [largest, graph.constant("tiny", np.array(1e-12, np.float32))])
        scale = graph.node("Mul", [largest, graph.constant("one_127th", np.array(1 / 127, np.float32))])
        rounded = graph.node("Round", [graph.node("Div", [x, scale])])
        shifted = graph.node("Add", [rounded, graph.constant("middle_float", np.array(128, np.float32))])
        levels = graph.node("Cast", [shifted], to=TensorProto.UINT8)
        return levels, scale

    def lookup(self, graph: GraphBuilder, ids: str, name: str, k: int, n: int) -> str:
        # the matrix lies as [k, n] for the multiplication: gather columns rather than store it twice
        columns = graph.node("Gather", [graph.stored(f"{name}.levels"), ids], axis=1)  # [k, 1, T]
        rows = graph.node("Transpose", [columns], perm=[1, 2, 0])
        scale = graph.node("Gather", [graph.stored(f"{name}.scales"), ids])
        scale = graph.node("Unsqueeze", [scale, graph.constant("last_axis", np.array([-1], np.int64))])
        return graph.node("Mul", [graph.node("Cast", [rows], to=TensorProto.FLOAT), scale])

    def can_lookup(self, k: int, tied: bool) -> bool:
        return tied  # rows of its own are cheaper to gather than columns


class FloatFormat:
    """fp32: the reference format."""

    name = "fp32"
    joins = False  # its [k, n] matrix is written whole: two would be held at once
    min_rows = 0

    def store(self, file: WeightFile, source: Checkpoint, name: str, parts: Sequence[str], errors: Errors) -> None:
        (part,) = parts
        n, k = source.shape(part)

        def columns() -> Iterator[NDArray[np.float32]]:
            matrix, at = np.empty((k, n), np.float32), 0
            for piece in source.pieces(part):
                matrix[:, at : at + len(piece)] = piece.T
                at += len(piece)
                add_error(errors, part, 0.0, quantize.squared_error(piece, piece)[1])
            yield matrix

        file.put(name, (k, n), np.float32, columns())

    def multiply(self, graph: GraphBuilder, x: str, name: str, k: int, n: int, bias: str | None) -> str:
        y = graph.node("MatMul", [x, graph.stored(name)])
        return graph.node("Add", [y, bias]) if bias else y

    def lookup(self, graph: GraphBuilder, ids: str, name: str, k: int, n: int) -> str:
        columns = graph.node("Gather", [graph.stored(name), ids], axis=1)  # [k, 1, T]
        return graph.node("Transpose", [columns], perm=[1, 2, 0])

    def can_lookup(self, k: int, tied: bool) -> bool:
        return tied  # rows of its own are cheaper to gather than columns


class EmbeddingTable:
    """An embedding of its own, [vocab, k]: float32, or int8 with a scale per row."""

    def __init__(self, exact: bool) -> None:
        self.exact = exact

    def store(self, file: WeightFile, source: Checkpoint, name: str) -> None:
        """Write the table of the checkpoint's matrix ``name``."""
        n, k = source.shape(name)
        if self.exact:
            file.put(f"{name}.table", (n, k), np.float32, source.pieces(name))
            return
        scales: list[NDArray[np.float32]] = []

        def levels() -> Iterator[NDArray[np.int8]]:
            for piece in source.pieces(name):
                rows, scale = quantize.quantize_channel(piece, quantize.EMBEDDING_LEVELS)
                scales.append(scale)
                yield rows

        file.put(f"{name}.table", (n, k), np.int8, levels())
        file.put(f"{name}.table_scales", (n, 1), np.float32, scales)

    def lookup(self, graph: GraphBuilder, ids: str, name: str) -> str:
        """Emit the rows ``ids`` [1, T] -> float32 [1, T, k]."""
        rows = graph.node("Gather", [graph.stored(f"{name}.table"), ids])
        if self.exact:
            return rows
        scale = graph.node("Gather", [graph.stored(f"{name}.table_scales"), ids])
        return graph.node("Mul", [graph.node("Cast", [rows], to=TensorProto.FLOAT), scale])


def linear_format(name: str, chosen: LevelSource | None = None) -> LinearFormat:
    """The stock format of that name; ``chosen`` gives the levels of block formats (None = round to nearest)."""
    formats: dict[str, Any] = {
        "int4": lambda: BlockFormat(4, chosen),
        "int8": lambda: BlockFormat(8, chosen),
        "w8a8": ChannelFormat,
        "fp32": FloatFormat,
    }
    made: LinearFormat = formats[name]()
    return made


def stacked_shape(source: Checkpoint, parts: Sequence[str]) -> tuple[int, int]:
    """(n, k) of matrices [n_i, k] stacked along n."""
    return sum(source.shape(part)[0] for part in parts), source.shape(parts[0])[1]


def add_error(errors: Errors, name: str, error: float, norm: float) -> None:
    """Add to the squared error, and the sum of squares, of a matrix."""
    before = errors.get(name, (0.0, 0.0))
    errors[name] = before[0] + error, before[1] + norm
