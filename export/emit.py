"""From an architecture to ONNX graphs over one weight file."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import TensorProto, ValueInfoProto, helper

from edgespec.export.architectures.base import Architecture
from edgespec.export.formats import EmbeddingTable, Errors, LinearFormat, stacked_shape
from edgespec.export.graph import MICROSOFT, GraphBuilder, WeightFile
from edgespec.export.ops import Kind, Linear
from edgespec.export.vectors import rope_vectors, stacked_bias, vector

FLOAT, INT64, INT32, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL
ROTARY_INSIDE = 16  # GroupQueryAttention's own rotation needs head_dim to be a multiple of this


class GraphOps:
    """Emits one decoder graph with stock operators.

    ::

        ids -> embed -> [ If gate_attn[i]: + attention | Identity ] -> [ If gate_mlp[i]: + mlp | Identity ] -> ...
                     -> Gather(rows) -> norm -> LM head -> logits

    Rotary embedding happens inside GroupQueryAttention where q, k and v come as one matrix and head_dim % 16 == 0,
    which saves three nodes a layer, and outside otherwise.  A padded graph gives attention one dummy row more than it
    has tokens: the operator's one-row kernel (and the one for a row left over after blocks of 16) rounds differently,
    every other operator computes a row the same whatever stands beside it (docs/runtime.md).  The dummy's KV lies
    after the pass's rows and is overwritten by the next.  Residuals are plain Adds, so that the gated and the ungated
    graph give the same bits.
    """

    def __init__(
        self,
        arch: Architecture,
        form: LinearFormat,
        weights: WeightFile,
        errors: Errors,
        *,
        head: LinearFormat | None = None,
        gates: bool = False,
        padded: bool = False,
    ) -> None:
        self.arch, self.form, self.weights, self.errors = arch, form, weights, errors
        self.head_form = head or form  # of the LM head, and of the embedding tied to it
        self.gates, self.padded = gates, padded
        self.graph = GraphBuilder(weights)
        facts = arch.facts
        self.kv_dims: list[int | str] = [1, facts.kv_heads, "C", facts.head_dim]
        self.x_dims: list[int | str] = [1, "T", facts.hidden]
        declare = self.graph.input
        declare("ids", INT64, [1, "T"])
        declare("pos", INT64, [1, "A"])
        declare("seqlens_k", INT32, [1])
        declare("total", INT32, [])
        declare("bias", FLOAT, [1, 1, "A", "P"])
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
        *self._rope, _ = rope_vectors(self.graph, arch)
        self._kv_names: tuple[str, str] = ("", "")
        self._packed: dict[tuple[str, ...], str] = {}  # parts of one matrix -> the product before it is split

    # -- the operations --------------------------------------------------------------------------------------------

    def embed(self, weight: str) -> str:
        facts = self.arch.facts
        tied = self.arch.head.weight == weight
        form = self._form(weight)
        if form.can_lookup(facts.hidden, tied):
            self._store(weight, [weight])
            return form.lookup(self.graph, "ids", weight, facts.hidden, facts.vocab)
        table = EmbeddingTable(self.form.name == "fp32")
        if not self.weights.has(f"{weight}.table"):
            table.store(self.weights, self.arch.source, weight)
        return table.lookup(self.graph, "ids", weight)

    def norm(self, x: str, weight: str) -> str:
        return self.graph.node(
            "RMSNormalization", [x, vector(self.graph, self.arch.source, weight)], axis=-1, epsilon=self.arch.eps
        )

    def linear(self, x: str, *parts: Linear, joined: bool = False) -> tuple[str, ...]:
        # one node a part unless joined: a Split costs more than it saves for gate and up (docs/log.md)
        if not joined or not self.form.joins:
            return tuple(self._multiply(x, part) for part in parts)
        packed = self._multiply(x, *parts)
        sizes = np.array([self.arch.source.shape(part.weight)[0] for part in parts], np.int64)
        split = self.graph.constant("split_" + "_".join(map(str, sizes)), sizes)
        outputs = tuple(self.graph.unique("part") for _ in parts)
        self.graph.node("Split", [packed, split], outputs, axis=-1)  # dropped if nothing reads the parts
        self._packed[outputs] = packed
        return outputs

    def attention(self, q: str, k: str, v: str, layer: int) -> str:
        facts, graph = self.arch.facts, self.graph
        packed = self._packed.get((q, k, v))
        inside = packed is not None and facts.head_dim % ROTARY_INSIDE == 0
        if packed is not None and inside:
            qkv, rotary = [self._pad(packed, facts.heads + 2 * facts.kv_heads), "", ""], [*self._rope, "pos"]
        else:
            q, k, v = self._pad(q, facts.heads), self._pad(k, facts.kv_heads), self._pad(v, facts.kv_heads)
            q = graph.node("RotaryEmbedding", [q, *self._rope, "pos"], num_heads=facts.heads)
            k = graph.node("RotaryEmbedding", [k, *self._rope, "pos"], num_heads=facts.kv_heads)
            qkv, rotary = [q, k, v], ["", "", ""]
        past = [f"past_key_values.{layer}.{name}" for name in ("key", "value")]
        y = graph.node(
            "GroupQueryAttention",
            [*qkv, *past, "seqlens_k", "total", *rotary, "bias"],
            [graph.unique("attention"), *self._kv_names],
            domain=MICROSOFT,
            num_heads=facts.heads,
            kv_num_heads=facts.kv_heads,
            scale=facts.head_dim**-0.5,
            do_rotary=int(inside),
        )
        if not self.padded:
            return y
        zero, one, minus = (graph.constant(f"int_{i}", np.array([i], np.int64)) for i in (0, 1, -1))
        return graph.node("Slice", [y, zero, minus, one])

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
        logits = self._multiply(self.norm(chosen, norm), head)
        self.graph.node("Identity", [logits], ["logits"])
        self.graph.output("logits", FLOAT, [1, "R", self.arch.facts.vocab])
        return "logits"

    # -- parts -----------------------------------------------------------------------------------------------------

    def _multiply(self, x: str, *parts: Linear) -> str:
        names = [part.weight for part in parts]
        name = "+".join(names)
        self._store(name, names)
        n, k = stacked_shape(self.arch.source, names)
        bias = stacked_bias(self.graph, self.arch.source, parts)
        return self._form(name).multiply(self.graph, x, name, k, n, bias)

    def _form(self, name: str) -> LinearFormat:
        return self.head_form if name == self.arch.head.weight else self.form

    def _pad(self, x: str, heads: int) -> str:
        """x [1, T, heads * head_dim] with a dummy row behind it, if this is a padded graph."""
        if not self.padded:
            return x
        width = heads * self.arch.facts.head_dim
        dummy = self.graph.constant(f"dummy_{width}", np.zeros((1, 1, width), np.float32))
        return self.graph.node("Concat", [x, dummy], axis=1)

    def _store(self, name: str, parts: list[str]) -> None:
        if name not in self.weights.matrices:
            self._form(name).store(self.weights, self.arch.source, name, parts, self.errors)
            self.weights.matrices.add(name)

    def _branch_outputs(self, names: list[str]) -> list[ValueInfoProto]:
        dims = [self.x_dims] + [self.kv_dims] * (len(names) - 1)
        return [helper.make_tensor_value_info(name, FLOAT, dim) for name, dim in zip(names, dims, strict=True)]
