"""Stock weight formats: the ONNX operators that multiply by a stored matrix.

Every format computes each row of its input separately, so a token's logits never depend on the drafts in the pass.
Per-tensor activation scales (``quantize_dynamic``) break that rule and are not offered.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from edgespec.export.emit.graph import FLOAT, MICROSOFT, UINT8, GraphBuilder
from edgespec.export.emit.plan import Matrix
from edgespec.export.quantization.levels import BLOCKS
from edgespec.runtimes.files.formats import Format, StockBlocks


class LinearFormat(Protocol):
    """One weight format."""

    def multiply(self, graph: GraphBuilder, x: str, name: str, k: int, n: int, bias: str | None) -> str:
        """Emit x [.., k] @ weight.T + bias -> [.., n]."""
        ...

    def lookup(self, graph: GraphBuilder, ids: str, name: str) -> str:
        """Emit the rows ``ids`` [1, T] of a stored matrix [n, k] -> float32 [1, T, k]; for tied embeddings."""
        ...


class BlockFormat:
    """MatMulNBits in integer arithmetic (accuracy level 4): int4 and int8 in blocks of 32, and a file's weights."""

    def __init__(self, blocks: StockBlocks) -> None:
        self.blocks = blocks

    def multiply(self, graph: GraphBuilder, x: str, name: str, k: int, n: int, bias: str | None) -> str:
        inputs = [x, graph.stored(f"{name}.levels"), graph.stored(f"{name}.scales"), *self._zeros(graph, name)]
        if bias:
            inputs += [*[""] * (5 - len(inputs)), bias]
        return graph.node("MatMulNBits", inputs, domain=MICROSOFT, K=k, N=n, bits=self.blocks.bits,
                          block_size=self.blocks.size, accuracy_level=4)  # fmt: skip

    def lookup(self, graph: GraphBuilder, ids: str, name: str) -> str:
        inputs = [graph.stored(f"{name}.rows"), ids, graph.stored(f"{name}.scales"), *self._zeros(graph, name)]
        return graph.node("GatherBlockQuantized", inputs, domain=MICROSOFT, bits=self.blocks.bits,
                          block_size=self.blocks.size, gather_axis=0, quantize_axis=1)  # fmt: skip

    def _zeros(self, graph: GraphBuilder, name: str) -> list[str]:
        return [graph.stored(f"{name}.zeros")] if self.blocks.zeros else []


class ChannelFormat:
    """w8a8: activations quantized per token to uint8, weights per channel to int8 (7 bits)."""

    def multiply(self, graph: GraphBuilder, x: str, name: str, k: int, n: int, bias: str | None) -> str:
        levels, scale = graph.once(("quantized", x), lambda: self._activation(graph, x))
        # uint8 x int8: the int8 x int8 kernel of ONNX Runtime is 25 times slower
        middle = graph.constant("middle", np.array(128, np.uint8))
        product = graph.node("MatMulInteger", [levels, graph.stored(f"{name}.levels"), middle])
        product = graph.node("Cast", [product], to=FLOAT)
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
        levels = graph.node("Cast", [shifted], to=UINT8)
        return levels, scale

    def lookup(self, graph: GraphBuilder, ids: str, name: str) -> str:
        # the matrix is stored as [k, n] for the multiplication: gather columns rather than store it twice
        columns = graph.node("Gather", [graph.stored(f"{name}.levels"), ids], axis=1)  # [k, 1, T]
        rows = graph.node("Transpose", [columns], perm=[1, 2, 0])
        scale = graph.node("Gather", [graph.stored(f"{name}.scales"), ids])
        scale = graph.node("Unsqueeze", [scale, graph.constant("last_axis", np.array([-1], np.int64))])
        return graph.node("Mul", [graph.node("Cast", [rows], to=FLOAT), scale])


class FloatFormat:
    """fp32: the reference format."""

    def multiply(self, graph: GraphBuilder, x: str, name: str, k: int, n: int, bias: str | None) -> str:
        y = graph.node("MatMul", [x, graph.stored(name)])
        return graph.node("Add", [y, bias]) if bias else y

    def lookup(self, graph: GraphBuilder, ids: str, name: str) -> str:
        columns = graph.node("Gather", [graph.stored(name), ids], axis=1)  # [k, 1, T]
        return graph.node("Transpose", [columns], perm=[1, 2, 0])


LINEAR: dict[Format, LinearFormat] = {
    **{form: BlockFormat(StockBlocks(blocks.bits)) for form, blocks in BLOCKS.items()},
    "w8a8": ChannelFormat(),
    "fp32": FloatFormat(),
}


def linear_format(matrix: Matrix) -> LinearFormat:
    """Return the format of a stored matrix."""
    return LINEAR[matrix.form] if matrix.blocks is None else BlockFormat(matrix.blocks)


def table_rows(graph: GraphBuilder, ids: str, name: str) -> str:
    """Emit the rows ``ids`` [1, T] of an embedding that is only looked up -> float32 [1, T, k]."""
    rows = graph.node("Gather", [graph.stored(f"{name}.table"), ids])
    if f"{name}.table_scales" not in graph.weights.entries:
        return rows
    scale = graph.node("Gather", [graph.stored(f"{name}.table_scales"), ids])
    return graph.node("Mul", [graph.node("Cast", [rows], to=FLOAT), scale])
