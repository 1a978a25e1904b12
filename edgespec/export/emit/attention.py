"""Attention in a stock graph: norms of heads, rotation, windows, and the operator itself."""

from __future__ import annotations

import numpy as np

from edgespec.export.architectures.rules import AttentionRule, Norm
from edgespec.export.emit.graph import INT64, MICROSOFT
from edgespec.export.emit.pieces import GraphPieces, rope_vectors
from edgespec.runtimes.slots.stock import HIDE

ROTARY_INSIDE = 16  # GroupQueryAttention's own rotation needs head_dim and what is turned to be multiples of this


class AttentionEmitter:
    """Emits the attention of each layer of one graph.

    Rotary embedding happens inside GroupQueryAttention where q, k and v come as one matrix and sizes allow it, which
    saves three nodes a layer, and outside otherwise.  A window is a bias, made once a pass of the rows' positions: in a
    tree, places and positions differ, so the operator's own windows, which count places, would hide the wrong rows.

    In a stretched graph each head has a sink that weighs nothing: it changes no number, but ONNX Runtime then takes the
    kernel whose products have the whole text as columns.  The other one cuts the text into tiles of the processor's L2
    cache, and the sums of a wide head in the last tile would depend on its length (docs/dev/runtime.md).

    Attributes:
        rotary_inside: whether the operator's own rotation may be used; it must honour the positions it is given.
    """

    rotary_inside = True

    def __init__(self, ops: GraphPieces, rules: list[AttentionRule]) -> None:
        self.ops, self.graph, self.facts = ops, ops.graph, ops.arch.facts
        self._tables = {
            name: rope_vectors(self.graph, ops.storage, name)
            for name in dict.fromkeys(rule.rotary for rule in rules if rule.rotary)
        }
        self._biases = {0: self.bias()} | {size: self.window(size) for size in {rule.window for rule in rules} - {0}}

    def emit(self, q: str, k: str, v: str, packed: str | None, rule: AttentionRule, kv: tuple[str, str]) -> str:
        """One layer: q, k, v [1, T, heads * head_dim] -> [1, T, heads * head_dim].

        Args:
            packed: q, k and v as one value, if they come from one matrix.
            kv: names of the new keys and values.
        """
        facts, graph = self.facts, self.graph
        *tables, growth, turned = self._tables[rule.rotary] if rule.rotary else ("", "", "", 0)
        sizes_fit = facts.head_dim % ROTARY_INSIDE == 0 and turned % ROTARY_INSIDE == 0
        inside = packed is not None and self.rotary_inside and sizes_fit and not (rule.q_norm or rule.k_norm or growth)
        if packed is not None and inside:
            qkv = [self.ops.pad(packed, facts.heads + 2 * facts.kv_heads), "", ""]
        else:
            heads, norms = (facts.heads, facts.kv_heads), (rule.q_norm, rule.k_norm)
            both = [q, k]
            if not rule.late_norms:
                both = [self._normed(*each) for each in zip(both, heads, norms, strict=True)]
            both = [self.ops.pad(x, count) for x, count in zip(both, heads, strict=True)]
            if turned:
                both = [self._rotated(x, count, tables, turned) for x, count in zip(both, heads, strict=True)]
            if rule.late_norms:
                both = [self._normed(*each) for each in zip(both, heads, norms, strict=True)]
            if growth:
                last = graph.constant("int_2", np.array([2], np.int64))
                by = graph.node("Unsqueeze", [graph.node("Gather", [growth, "position_ids"]), last])  # [1, A, 1]
                both[0] = graph.node("Mul", [both[0], by])
            qkv = [*both, self.ops.pad(v, facts.kv_heads)]
        rotary = [*tables, "position_ids"] if inside and turned else ["", "", ""]
        sink = [graph.constant("no_sink", np.full(facts.heads, HIDE))] if self.ops.stretched else []
        past = [f"past_key_values.{rule.layer}.{name}" for name in ("key", "value")]
        y = graph.node(
            "GroupQueryAttention",
            [*qkv, *past, "seqlens_k", "total", *rotary, self._biases[rule.window], *sink],
            [graph.unique("attention"), *kv],
            domain=MICROSOFT, num_heads=facts.heads, kv_num_heads=facts.kv_heads, scale=rule.scale, softcap=rule.cap,
            do_rotary=int(inside and bool(turned)),
        )  # fmt: skip
        return self.ops.unpad(y)

    def _normed(self, x: str, heads: int, norm: Norm | None) -> str:
        if norm is None:
            return x
        graph, size = self.graph, self.facts.head_dim
        each = graph.constant(f"each_of_{heads}", np.array([0, 0, heads, size], np.int64))
        whole = graph.constant(f"whole_of_{heads}", np.array([0, 0, heads * size], np.int64))
        return graph.node("Reshape", [self.ops.norm(graph.node("Reshape", [x, each]), norm), whole])

    def _rotated(self, x: str, heads: int, tables: list[str], turned: int) -> str:
        part, inputs = turned if turned < self.facts.head_dim else 0, [x, *tables, "position_ids"]  # 0: all of it
        return self.graph.node("RotaryEmbedding", inputs, num_heads=heads, rotary_embedding_dim=part)

    def bias(self) -> str:
        """Name the attention bias that encodes the tree mask."""
        return "bias"

    def window(self, size: int) -> str:
        """Make the bias that also hides keys ``size`` or more positions before the row."""
        graph = self.graph

        def numbers(name: str, *values: int) -> str:
            return graph.constant(name, np.array(values, np.int64))

        # position of each cache slot: its index, except for this pass's rows, which have `position_ids`
        width = graph.node("Squeeze", [graph.node("Shape", ["bias"], start=3, end=4)])
        count = graph.node("Squeeze", [graph.node("Shape", ["position_ids"], start=1, end=2)])
        zero, one = graph.constant("scalar_0", np.array(0, np.int64)), graph.constant("scalar_1", np.array(1, np.int64))
        places = graph.node("Range", [zero, width, one])  # [P]
        last = graph.node("Squeeze", [graph.node("Cast", ["seqlens_k"], to=INT64)])
        first = graph.node("Sub", [graph.node("Add", [last, one]), count])
        own = graph.node("Range", [first, graph.node("Add", [first, count]), one])  # [A]
        rows = graph.node("Squeeze", ["position_ids", numbers("int_0", 0)])  # [A]
        stands = graph.node("ScatterElements", [places, own, rows])  # [P]
        oldest = graph.node("Sub", [rows, graph.constant(f"scalar_{size}", np.array(size, np.int64))])
        hidden = graph.node("LessOrEqual", [stands, graph.node("Unsqueeze", [oldest, numbers("int_1", 1)])])  # [A, P]
        return graph.node("Where", [hidden, graph.constant("hide", HIDE), "bias"])
