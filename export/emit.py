"""From an architecture to ONNX graphs over one weight file."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import TensorProto, ValueInfoProto, helper

from edgespec.export.architectures.base import Architecture
from edgespec.export.formats import EmbeddingTable, Errors, LinearFormat
from edgespec.export.graph import INLINE_BYTES, MICROSOFT, GraphBuilder, WeightFile
from edgespec.export.ops import Kind, Linear
from edgespec.export.rope import rope_tables

FLOAT, INT64, INT32, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL
HEADROOM = 66  # rows beyond the context: the largest tree (64 nodes) and two for padding


class GraphOps:
    """Emits one decoder graph with stock operators.

    ::

        ids -> embed -> [ If gate_attn[i]: + attention | Identity ] -> [ If gate_mlp[i]: + mlp | Identity ] -> ...
                     -> Gather(rows) -> norm -> LM head -> logits

    Rotary embedding stands outside GroupQueryAttention: the operator's own needs head_dim % 16 == 0.  Residuals are
    plain Adds, so that the gated and the ungated graph give the same bits.
    """

    def __init__(
        self, arch: Architecture, form: LinearFormat, weights: WeightFile, errors: Errors, *, gates: bool
    ) -> None:
        self.arch, self.form, self.weights, self.errors, self.gates = arch, form, weights, errors, gates
        self.graph = GraphBuilder(weights)
        facts = arch.facts
        self.kv_dims: list[int | str] = [1, facts.kv_heads, "C", facts.head_dim]
        self.x_dims: list[int | str] = [1, "T", facts.hidden]
        declare = self.graph.input
        declare("ids", INT64, [1, "T"])
        declare("pos", INT64, [1, "T"])
        declare("seqlens_k", INT32, [1])
        declare("total", INT32, [])
        declare("bias", FLOAT, [1, 1, "T", "P"])
        declare("rows", INT64, ["R"])
        if gates:
            for kind in ("attn", "mlp"):
                declare(f"gate_{kind}", BOOL, [facts.layers])
                self.graph.node(
                    "Split",
                    [f"gate_{kind}"],
                    [f"gate_{kind}.{i}" for i in range(facts.layers)],
                    num_outputs=facts.layers,
                )
        for layer in range(facts.layers):
            for name in ("key", "value"):
                declare(f"past_key_values.{layer}.{name}", FLOAT, self.kv_dims)
                self.graph.output(f"present.{layer}.{name}", FLOAT, self.kv_dims)
        self._tables()
        self._kv_names: tuple[str, str] = ("", "")

    # -- the operations --------------------------------------------------------------------------------------------

    def embed(self, weight: str) -> str:
        facts = self.arch.facts
        tied = self.arch.head.weight == weight
        if self.form.can_lookup(facts.hidden, tied):
            self._store(weight)
            return self.form.lookup(self.graph, "ids", weight, facts.hidden, facts.vocab)
        table = EmbeddingTable(self.form.name == "fp32")
        if not self.weights.has(f"{weight}.table"):
            table.store(self.weights, self.arch.source, weight)
        return table.lookup(self.graph, "ids", weight)

    def norm(self, x: str, weight: str) -> str:
        return self.graph.node("RMSNormalization", [x, self._vector(weight)], axis=-1, epsilon=self.arch.eps)

    def linear(self, x: str, *parts: Linear) -> tuple[str, ...]:
        # one node a part: joining gate and up was 12 % slower on stock operators (docs/log.md)
        return tuple(self._linear(x, part) for part in parts)

    def attention(self, q: str, k: str, v: str, layer: int) -> str:
        facts, graph = self.arch.facts, self.graph
        q = graph.node("RotaryEmbedding", [q, *self._rope, "pos"], num_heads=facts.heads)
        k = graph.node("RotaryEmbedding", [k, *self._rope, "pos"], num_heads=facts.kv_heads)
        past = [f"past_key_values.{layer}.{name}" for name in ("key", "value")]
        inputs = [q, k, v, *past, "seqlens_k", "total", "", "", "", "bias"]
        sizes = {"num_heads": facts.heads, "kv_num_heads": facts.kv_heads, "scale": facts.head_dim**-0.5}
        outputs = [graph.unique("attention"), *self._kv_names]
        return graph.node("GroupQueryAttention", inputs, outputs, domain=MICROSOFT, **sizes)

    def gated(self, gate: str, up: str) -> str:
        # QuickGelu with alpha 1 is x * sigmoid(x) in one operator
        return self.graph.node("Mul", [self.graph.node("QuickGelu", [gate], domain=MICROSOFT, alpha=1.0), up])

    def sublayer(self, kind: Kind, layer: int, x: str, body: Callable[[str], str]) -> str:
        graph = self.graph
        kv = [f"present.{layer}.{name}" for name in ("key", "value")] if kind == "attention" else []
        if not self.gates:
            self._kv_names = (kv[0], kv[1]) if kv else ("", "")
            return graph.node("Add", [x, body(x)])
        past = [f"past_key_values.{layer}.{name}" for name in ("key", "value")] if kv else []

        def then() -> list[ValueInfoProto]:
            inner = [f"then.{name}" for name in kv]
            self._kv_names = (inner[0], inner[1]) if kv else ("", "")
            y = graph.node("Add", [x, body(x)])
            return self._branch_outputs([y, *inner])

        def otherwise() -> list[ValueInfoProto]:
            return self._branch_outputs([graph.node("Identity", [name]) for name in (x, *past)])

        gate = f"gate_{'attn' if kind == 'attention' else 'mlp'}.{layer}"
        branches = {
            "then_branch": graph.branch(f"{kind}.{layer}.run", then),
            "else_branch": graph.branch(f"{kind}.{layer}.skip", otherwise),
        }
        return graph.node("If", [gate], [graph.unique(kind), *kv], **branches)

    def head(self, x: str, norm: str, head: Linear) -> str:
        chosen = self.graph.node("Gather", [x, "rows"], axis=1)
        logits = self._linear(self.norm(chosen, norm), head)
        self.graph.node("Identity", [logits], ["logits"])
        self.graph.output("logits", FLOAT, [1, "R", self.arch.facts.vocab])
        return "logits"

    # -- parts -----------------------------------------------------------------------------------------------------

    def _linear(self, x: str, part: Linear) -> str:
        self._store(part.weight)
        n, k = self.arch.source.shape(part.weight)
        bias = None if part.bias is None else self._vector(part.bias)
        return self.form.multiply(self.graph, x, part.weight, k, n, bias)

    def _store(self, name: str) -> None:
        if name not in self.weights.matrices:
            self.form.store(self.weights, self.arch.source, name, self.errors)
            self.weights.matrices.add(name)

    def _vector(self, name: str) -> str:
        value = self.arch.source.read(name)
        if value.nbytes <= INLINE_BYTES:
            return self.graph.constant(name, value)
        if not self.weights.has(name):
            self.weights.put(name, value.shape, np.float32, [value])
        return self.graph.stored(name)

    def _tables(self) -> None:
        facts = self.arch.facts
        for name, table in zip(
            ("rope_cos", "rope_sin"), rope_tables(self.arch.rope, facts.head_dim, facts.context + HEADROOM), strict=True
        ):
            if not self.weights.has(name):
                self.weights.put(name, table.shape, np.float32, [table])
        self._rope = [self.graph.stored("rope_cos"), self.graph.stored("rope_sin")]

    def _branch_outputs(self, names: list[str]) -> list[ValueInfoProto]:
        dims = [self.x_dims] + [self.kv_dims] * (len(names) - 1)
        return [helper.make_tensor_value_info(name, FLOAT, dim) for name, dim in zip(names, dims, strict=True)]
