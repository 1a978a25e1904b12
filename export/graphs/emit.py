"""From an architecture to ONNX graphs over one weight file."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, ValueInfoProto, helper

from edgespec.export.architectures.base import Architecture
from edgespec.export.architectures.ops import Activation, AttentionRule, Kind, Linear, Norm
from edgespec.export.graphs.emit_attention import AttentionEmitter
from edgespec.export.graphs.emit_heads import head_logits
from edgespec.export.graphs.formats import EmbeddingTable, Errors, LinearFormat, stacked_shape
from edgespec.export.graphs.graph import MICROSOFT, GraphBuilder, WeightFile
from edgespec.export.graphs.vectors import position_rows, stacked_bias, vector
from edgespec.export.heads.description import HeadPlan, cut_head, is_head

FLOAT, INT64, INT32, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL


class GraphOps:
    """Emits one decoder graph with stock operators.

    ::

        ids -> embed -> [ If gate_attn[i]: + attention | Identity ] -> [ If gate_mlp[i]: + mlp | Identity ] -> ...
                     -> Gather(rows) -> norm -> LM head -> logits

    A padded graph gives attention one dummy row more than it has tokens: the operator's one-row kernel (and the one for
    a row left over after blocks of 16) rounds differently, every other operator computes a row the same whatever stands
    beside it (docs/runtime.md).  The dummy's KV lies after the pass's rows and is overwritten by the next.  Residuals
    are plain Adds, so that the gated and the ungated graph give the same bits.

    With ``hidden`` the residual stream is an output, and with gate_embed off it is an input, ``hidden_in``, in place of
    the embedded ids: layers can be run apart, and with all of them off only what comes after them runs: the LM head, or
    a group of heads (emit_heads.py).
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
        hidden: bool = False,
        plan: HeadPlan | None = None,
    ) -> None:
        self.arch, self.form, self.weights, self.errors = arch, form, weights, errors
        self.head_form = head or form  # of the LM head, and of the embedding tied to it
        self.gates, self.padded, self.hidden = gates, padded, hidden
        self.plan = plan or HeadPlan()
        self.graph = GraphBuilder(weights)
        facts = arch.facts
        self.kv_dims: list[int | str] = [1, facts.kv_heads, "C", facts.head_dim]
        self.x_dims: list[int | str] = [1, "T", facts.hidden]
        self._declare()
        for layer in self.layers:
            for name in ("key", "value"):
                self.graph.input(f"past_key_values.{layer}.{name}", FLOAT, self.kv_dims)
                self.graph.output(f"present.{layer}.{name}", FLOAT, self.kv_dims)
        self._attention = self._emitter([arch.rule(layer) for layer in self.layers])
        self._kv_names: tuple[str, str] = ("", "")
        self._packed: dict[tuple[str, ...], str] = {}  # parts of one matrix -> the product before it is split

    @property
    def layers(self) -> Sequence[int]:
        """Layers whose attention the graph has."""
        return range(self.arch.facts.layers)

    def _declare(self) -> None:
        """The inputs and outputs but for keys and values."""
        facts, declare = self.arch.facts, self.graph.input
        declare("ids", INT64, [1, "T"])
        declare("pos", INT64, [1, "A"])
        declare("seqlens_k", INT32, [1])
        declare("total", INT32, [])
        declare("bias", FLOAT, [1, 1, "A", "P"])
        declare("rows", INT64, ["R"])
        groups = len(self.plan.groups) if self.hidden else 0
        if self.hidden:
            declare("hidden_in", FLOAT, [1, "H", facts.hidden])
            declare("gate_embed", BOOL, [])
            self.graph.output("hidden", FLOAT, self.x_dims)
        if groups:
            declare("gate_lm", BOOL, [])
            declare("gate_heads", BOOL, [groups])
            names = [f"gate_heads.{i}" for i in range(groups)]
            self.graph.node("Split", ["gate_heads"], names, num_outputs=groups)
        if self.gates:
            for kind in ("attn", "mlp"):
                declare(f"gate_{kind}", BOOL, [facts.layers])
                self.graph.node(
                    "Split",
                    [f"gate_{kind}"],
                    [f"gate_{kind}.{i}" for i in range(facts.layers)],
                    num_outputs=facts.layers,
                )

    def _emitter(self, rules: list[AttentionRule]) -> AttentionEmitter:
        return AttentionEmitter(self, rules)

    # -- the operations --------------------------------------------------------------------------------------------

    def embed(self, weight: str, scale: float = 1.0, positions: str | None = None) -> str:
        graph, x = self.graph, self._lookup(weight)
        if scale != 1:
            x = graph.node("Mul", [x, graph.constant("embedding_scale", np.float32(scale))])
        if positions is not None:
            rows = graph.node("Gather", [position_rows(graph, self.arch, positions), "pos"])  # [1, A, hidden]
            x = graph.node("Add", [x, self.unpad(rows)])
        if not self.hidden:
            return x
        return self.choose(
            "gate_embed", "stream", self.arch.facts.hidden, lambda: self.same(x), lambda: self.same("hidden_in")
        )

    def norm(self, x: str, norm: Norm) -> str:
        graph, source = self.graph, self.arch.source
        inputs = [x, vector(graph, source, norm.weight)]
        if norm.bias is not None:
            inputs.append(vector(graph, source, norm.bias))
        kind = "LayerNormalization" if norm.centered else "RMSNormalization"
        return graph.node(kind, inputs, axis=-1, epsilon=self.arch.eps)

    def linear(self, x: str, *parts: Linear, joined: bool = False) -> tuple[str, ...]:
        # one node a part unless joined: a Split costs more than it saves for gate and up (docs/log.md)
        if not joined or not self.form.joins:
            return tuple(self.multiply(x, part) for part in parts)
        packed = self.multiply(x, *parts)
        sizes = np.array([self.arch.source.shape(part.weight)[0] for part in parts], np.int64)
        split = self.graph.constant("split_" + "_".join(map(str, sizes)), sizes)
        outputs = tuple(self.graph.unique("part") for _ in parts)
        self.graph.node("Split", [packed, split], outputs, axis=-1)  # dropped if nothing reads the parts
        self._packed[outputs] = packed
        return outputs

    def attention(self, q: str, k: str, v: str, rule: AttentionRule) -> str:
        return self._attention.emit(q, k, v, self._packed.get((q, k, v)), rule, self._kv_names)

    def gated(self, gate: str, up: str, activation: Activation) -> str:
        return self.graph.node("Mul", [self.activate(gate, activation), up])

    def activate(self, x: str, activation: Activation, numbers: str | None = None) -> str:
        if activation == "silu":
            return self.silu(x)
        if numbers is not None:
            return self._xielu(x, self.arch.source.read(numbers))
        if activation in ("relu", "relu2"):
            y = self.graph.node("Relu", [x])
            return y if activation == "relu" else self.graph.node("Mul", [y, y])
        return self.graph.node("Gelu", [x], approximate="tanh" if activation == "gelu_tanh" else "none")

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

    def head(self, x: str, norm: Norm, head: Linear) -> str:
        graph, plan = self.graph, self.plan
        if self.hidden:
            graph.node("Identity", [x], ["hidden"])
        h = self.norm(graph.node("Gather", [x, "rows"], axis=1), norm)  # [1, R, hidden]
        head = cut_head(self.arch) if plan.only else head
        logits = head_logits(self, h, head) if self.hidden and plan.groups else self.lm_head(h, head)
        graph.node("Identity", [logits], ["logits"])
        one = not plan.groups or not self.hidden
        graph.output("logits", FLOAT, [1, "R", self.arch.source.shape(head.weight)[0] if one else "V"])
        return "logits"

    # -- what the heads' nodes are made of too ----------------------------------------------------------------------

    def silu(self, x: str) -> str:
        """x * sigmoid(x), in one operator: QuickGelu with alpha 1."""
        return self.graph.node("QuickGelu", [x], domain=MICROSOFT, alpha=1.0)

    def same(self, x: str) -> str:
        """x under another name, as a branch needs it."""
        return self.graph.node("Identity", [x])

    def choose(
        self, gate: str, name: str, width: int | str, then: Callable[[], str], otherwise: Callable[[], str]
    ) -> str:
        """One of two values [1, rows, width]; what is left out costs nothing."""

        def branch(side: str, body: Callable[[], str]) -> onnx.GraphProto:
            # sizes of the same name share buffers: each branch has its own
            columns = width if isinstance(width, int) else self.graph.unique(width)
            dims: list[int | str] = [1, self.graph.unique("rows"), columns]
            return self.graph.branch(f"{name}.{side}", lambda: [helper.make_tensor_value_info(body(), FLOAT, dims)])

        branches = {"then_branch": branch("on", then), "else_branch": branch("off", otherwise)}
        return self.graph.node("If", [gate], [self.graph.unique(name)], **branches)

    def lm_head(self, h: str, head: Linear) -> str:
        """The model's own LM head, or rows of it: h [1, R, hidden] -> [1, R, n]."""
        graph, rule, y = self.graph, self.arch.logits, self.multiply(h, head)
        if rule.scale != 1:
            y = graph.node("Mul", [y, graph.constant("logit_scale", np.float32(rule.scale))])
        if rule.cap:
            cap = graph.constant("logit_cap", np.float32(rule.cap))
            y = graph.node("Mul", [graph.node("Tanh", [graph.node("Div", [y, cap])]), cap])
        return y

    def pad(self, x: str, heads: int) -> str:
        """x [1, T, heads * head_dim] with a dummy row behind it, if this is a padded graph."""
        if not self.padded:
            return x
        width = heads * self.arch.facts.head_dim
        dummy = self.graph.constant(f"dummy_{width}", np.zeros((1, 1, width), np.float32))
        return self.graph.node("Concat", [x, dummy], axis=1)

    def unpad(self, x: str) -> str:
        """x [1, A, width] without the dummy row."""
        if not self.padded:
            return x
        zero, one, minus = (self.graph.constant(f"int_{i}", np.array([i], np.int64)) for i in (0, 1, -1))
        return self.graph.node("Slice", [x, zero, minus, one])

    def multiply(self, x: str, *parts: Linear) -> str:
        """x [1, R, k] times matrices stacked along n -> [1, R, n]."""
        names = [part.weight for part in parts]
        name = "+".join(names)
        self._store(name, names)
        n, k = stacked_shape(self.arch.source, names)
        bias = stacked_bias(self.graph, self.arch.source, parts)
        return self._form(name).multiply(self.graph, x, name, k, n, bias)

    def _xielu(self, x: str, numbers: NDArray[np.float32]) -> str:  # numbers [3]
        """p relu(x)^2 + n (e^low - 1 - low) + b x, low = min(x, 0)."""
        graph = self.graph
        above, below, slope = (graph.constant(f"number_{value:.9g}", np.float32(value)) for value in numbers)
        zero, one = (graph.constant(f"number_{value}", np.float32(value)) for value in (0, 1))
        high, low = graph.node("Relu", [x]), graph.node("Min", [x, zero])
        bend = graph.node("Sub", [graph.node("Sub", [graph.node("Exp", [low]), one]), low])
        terms = ((graph.node("Mul", [high, high]), above), (bend, below), (x, slope))
        first, second, third = (graph.node("Mul", list(term)) for term in terms)
        return graph.node("Add", [graph.node("Add", [first, second]), third])

    # -- parts -----------------------------------------------------------------------------------------------------

    def _form(self, name: str) -> LinearFormat:
        return self.head_form if is_head(name, self.arch) else self.form

    def _lookup(self, weight: str) -> str:
        """Rows of the embedding -> [1, T, hidden]."""
        facts, form = self.arch.facts, self._form(weight)
        if form.can_lookup(facts.hidden, self.arch.head.weight == weight):
            self._store(weight, [weight])
            return form.lookup(self.graph, "ids", weight, facts.hidden, facts.vocab)
        table = EmbeddingTable(self.form.name == "fp32")
        if not self.weights.has(f"{weight}.table"):
            table.store(self.weights, self.arch.source, weight)
        return table.lookup(self.graph, "ids", weight)

    def _store(self, name: str, parts: list[str]) -> None:
        if name not in self.weights.matrices:
            self._form(name).store(self.weights, self.arch.source, name, parts, self.errors)
            self.weights.matrices.add(name)

    def _branch_outputs(self, names: list[str]) -> list[ValueInfoProto]:
        dims = [self.x_dims] + [self.kv_dims] * (len(names) - 1)
        return [helper.make_tensor_value_info(name, FLOAT, dim) for name, dim in zip(names, dims, strict=True)]
