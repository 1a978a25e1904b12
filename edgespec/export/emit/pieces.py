"""Building blocks of every graph of stock operators: products, norms, and values chosen by a gate."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.export.architectures.rules import Linear, Norm
from edgespec.export.drafters.heads import HeadPlan
from edgespec.export.emit.formats import linear_format
from edgespec.export.emit.graph import FLOAT, MICROSOFT, Branch, GraphBuilder
from edgespec.export.emit.plan import StoragePlan, stacked_name

# ONNX Runtime's matrix product (MLAS, sgemm.cpp) sums up to 128 terms in one piece.  Longer sums, as of a query and a
# key of a wide head, are cut at places that follow from the number of columns up to 64, and at every 128 beyond.
WHOLE_SUM, FIXED_FROM = 128, 65


def min_length(head_dim: int) -> int:
    """Fewest tokens, dummies included, that attention over such heads needs for rows of the same bits in every pass."""
    return FIXED_FROM if head_dim > WHOLE_SUM else 0


def vector(graph: GraphBuilder, plan: StoragePlan, name: str) -> str:
    """Name a vector of the checkpoint: inside the graph file if it is small."""
    return graph.stored(name) if name in plan.entries else graph.constant(name, plan.arch.source.read(name))


def stacked_bias(graph: GraphBuilder, plan: StoragePlan, parts: Sequence[Linear]) -> str | None:
    """Name the biases of matrices stacked along n, concatenated; None if there are none."""
    if all(part.bias is None for part in parts):
        return None
    if len(parts) == 1:
        return vector(graph, plan, str(parts[0].bias))
    read = plan.arch.source.read
    pieces = [read(part.bias) if part.bias else np.zeros(plan.width(part), np.float32) for part in parts]
    return graph.constant(stacked_name(part.bias for part in parts), np.concatenate(pieces))


def rope_vectors(graph: GraphBuilder, plan: StoragePlan, rotary: str) -> tuple[str, str, str, int]:
    """Cosines and sines of all positions, how queries grow there ("" = they do not), and how many channels turn."""
    growth = graph.stored(f"{rotary}_growth") if f"{rotary}_growth" in plan.entries else ""
    return graph.stored(f"{rotary}_cos"), graph.stored(f"{rotary}_sin"), growth, plan.arch.rotaries[rotary].dims


class GraphPieces:
    """One graph, and the nodes that decoders, their attention and their heads share; see ``GraphOps``."""

    def __init__(self, storage: StoragePlan, plan: HeadPlan | None, padded: bool) -> None:
        self.arch, self.storage = storage.arch, storage
        self.plan, self.padded = plan or HeadPlan(), padded
        self.stretched = padded and min_length(self.arch.facts.head_dim) > 0  # more dummies where texts are short
        self.graph = GraphBuilder(storage)
        self.packed: dict[tuple[str, ...], str] = {}  # parts of one matrix -> the product before it is split

    def norm(self, x: str, norm: Norm) -> str:
        graph, storage = self.graph, self.storage
        inputs = [x, vector(graph, storage, norm.weight)]
        if norm.bias is not None:
            inputs.append(vector(graph, storage, norm.bias))
        kind = "LayerNormalization" if norm.centered else "RMSNormalization"
        return graph.node(kind, inputs, axis=-1, epsilon=self.arch.eps)

    def linear(self, x: str, parts: tuple[Linear, ...], joined: bool) -> tuple[str, ...]:
        # one node a part unless joined: a Split costs more than it saves for gate and up (docs/dev/log.md)
        name = stacked_name(part.weight for part in parts)
        if not joined or len(parts) == 1 or name not in self.storage.matrices:
            return tuple(self.multiply(x, part) for part in parts)
        packed = self.multiply(x, *parts)
        sizes = np.array([self.storage.width(part) for part in parts], np.int64)
        split = self.graph.constant("split_" + "_".join(map(str, sizes)), sizes)
        outputs = tuple(self.graph.unique("part") for _ in parts)
        self.graph.node("Split", [packed, split], outputs, axis=-1)  # dropped if nothing reads the parts
        self.packed[outputs] = packed
        return outputs

    def silu(self, x: str) -> str:
        """x * sigmoid(x), in one operator: QuickGelu with alpha 1."""
        return self.graph.node("QuickGelu", [x], domain=MICROSOFT, alpha=1.0)

    def xielu(self, x: str, numbers: NDArray[np.float32]) -> str:  # numbers [3]
        """p relu(x)^2 + n (e^low - 1 - low) + b x, low = min(x, 0)."""
        graph = self.graph
        above, below, slope = (graph.constant(f"number_{value:.9g}", np.float32(value)) for value in numbers)
        zero, one = (graph.constant(f"number_{value}", np.float32(value)) for value in (0, 1))
        high, low = graph.node("Relu", [x]), graph.node("Min", [x, zero])
        bend = graph.node("Sub", [graph.node("Sub", [graph.node("Exp", [low]), one]), low])
        terms = ((graph.node("Mul", [high, high]), above), (bend, below), (x, slope))
        first, second, third = (graph.node("Mul", list(term)) for term in terms)
        return graph.node("Add", [graph.node("Add", [first, second]), third])

    def same(self, x: str) -> str:
        """x under another name, as a branch needs it."""
        return self.graph.node("Identity", [x])

    def choose(
        self, gate: str, name: str, width: int | str, then: Callable[[], str], otherwise: Callable[[], str]
    ) -> str:
        """Choose one of two values [1, rows, width]; the other one costs nothing."""

        def branch(side: str, body: Callable[[], str]) -> Branch:
            # dimensions with the same name share buffers, so each branch has a separate name
            columns = width if isinstance(width, int) else self.graph.unique(width)
            dims: list[int | str] = [1, self.graph.unique("rows"), columns]
            return self.graph.branch(f"{name}.{side}", lambda: [(body(), FLOAT, dims)])

        branches = {"then_branch": branch("on", then), "else_branch": branch("off", otherwise)}
        return self.graph.node("If", [gate], [self.graph.unique(name)], **branches)

    def lm_head(self, h: str, head: Linear) -> str:
        """Multiply by the model's own LM head, or rows of it: h [1, R, hidden] -> [1, R, n]."""
        graph, rule, y = self.graph, self.arch.logits, self.multiply(h, head)
        if rule.scale != 1:
            y = graph.node("Mul", [y, graph.constant("logit_scale", np.float32(rule.scale))])
        if rule.cap:
            cap = graph.constant("logit_cap", np.float32(rule.cap))
            y = graph.node("Mul", [graph.node("Tanh", [graph.node("Div", [y, cap])]), cap])
        return y

    def declare_dummies(self) -> None:
        """Count the dummy rows of a stretched graph, outside of branches: rows of `position_ids` beyond `input_ids`."""
        if not self.stretched:
            return
        graph = self.graph
        graph.node("Shape", ["input_ids"], ["pass_rows"], start=1, end=2)
        more = graph.node("Sub", [graph.node("Shape", ["position_ids"], start=1, end=2), "pass_rows"])
        before, after = (graph.constant(f"zeros_{n}", np.zeros(n, np.int64)) for n in (4, 1))
        graph.node("Concat", [before, more, after], ["dummies"], axis=0)  # begins, then ends, of three axes

    def pad(self, x: str, heads: int) -> str:
        """Append dummy rows to x [1, T, heads * head_dim], if this is a padded graph."""
        if not self.padded:
            return x
        if self.stretched:
            return self.graph.node("Pad", [x, "dummies"])
        width = heads * self.arch.facts.head_dim
        dummy = self.graph.constant(f"dummy_{width}", np.zeros((1, 1, width), np.float32))
        return self.graph.node("Concat", [x, dummy], axis=1)

    def unpad(self, x: str) -> str:
        """x [1, A, width] without the dummy rows."""
        if not self.padded:
            return x
        zero, one, minus = (self.graph.constant(f"int_{i}", np.array([i], np.int64)) for i in (0, 1, -1))
        return self.graph.node("Slice", [x, zero, "pass_rows" if self.stretched else minus, one])

    def multiply(self, x: str, *parts: Linear) -> str:
        """x [1, R, k] times matrices stacked along n -> [1, R, n]."""
        name = stacked_name(part.weight for part in parts)
        matrix = self.storage.matrices[name]
        bias, order = stacked_bias(self.graph, self.storage, parts), self.storage.order_of(parts[0].weight)
        if order:  # groups of inputs that are stored together
            given = [x, self.graph.stored(order)]
            x = self.graph.once(("ordered", *given), lambda: self.graph.node("Gather", given, axis=-1))
        return linear_format(matrix).multiply(self.graph, x, name, matrix.k, matrix.n, bias)
