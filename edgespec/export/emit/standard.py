"""The decoder with the inputs and outputs of transformers' ONNX exports, which every program knows.

``input_ids``, ``attention_mask`` and ``position_ids`` go in with ``past_key_values``; ``logits`` of all rows come out
with ``present``.  Past and present are separate tensors, the second one longer, or one buffer bound as both, which the
operator updates in place.  The edgespec runtime uses other graphs, because these have no inputs for strict mode and
draft trees (docs/guides/open.md).
"""

from __future__ import annotations

import numpy as np

from edgespec.export.architectures.rules import Linear, Norm
from edgespec.export.emit.attention import AttentionEmitter
from edgespec.export.emit.graph import INT32, INT64
from edgespec.export.emit.stock import GraphOps


class StandardAttention(AttentionEmitter):
    """Attention over chains of rows: only windows need a bias."""

    def bias(self) -> str:
        return ""

    def window(self, size: int) -> str:
        self.graph.once("bias", self._zeros)
        return super().window(size)

    def _zeros(self) -> str:
        """``bias``, [1, 1, T, P]."""
        graph = self.graph
        sizes = [graph.node("Shape", [name], start=1, end=2) for name in ("position_ids", "attention_mask")]
        shape = graph.node("Concat", [graph.constant("ones_2", np.ones(2, np.int64)), *sizes], axis=0)
        return graph.node("Expand", [graph.constant("float_0", np.float32(0)), shape], ["bias"])


class StandardOps(GraphOps):
    """Emits a decoder for one chain of rows, after an ``attention_mask`` [1, P] of ones: P is past + T."""

    rows = "T"
    attention_of = StandardAttention

    def _declare(self) -> None:
        graph, facts = self.graph, self.arch.facts
        self.kv_dims, self.present_dims = ([1, facts.kv_heads, width, facts.head_dim] for width in ("C", "N"))
        for name, width in (("input_ids", "T"), ("attention_mask", "P"), ("position_ids", "T")):
            graph.input(name, INT64, [1, width])
        one = graph.constant("int_1", np.array([1], np.int64))
        last = graph.node("Sub", [graph.node("ReduceSum", ["attention_mask", one], keepdims=0), one])  # [1]
        graph.node("Cast", [last], ["seqlens_k"], to=INT32)
        width = graph.node("Squeeze", [graph.node("Shape", ["attention_mask"], start=1, end=2)])
        graph.node("Cast", [width], ["total"], to=INT32)

    def head(self, x: str, norm: Norm | None, head: Linear) -> str:
        logits, outputs = super().head(x, norm, head), self.graph.outputs
        outputs.insert(0, outputs.pop())  # some programs take the first one
        return logits

    def _chosen(self, x: str) -> str:
        return x
