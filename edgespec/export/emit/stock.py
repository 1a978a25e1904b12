"""From an architecture to ONNX graphs over one weight file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from edgespec.export.architectures.base import Architecture
from edgespec.export.architectures.ops import Activation, Kind
from edgespec.export.architectures.rules import AttentionRule, Linear, Norm
from edgespec.export.architectures.trace import Pass
from edgespec.export.drafters.heads import HeadPlan, cut_head
from edgespec.export.emit.attention import AttentionEmitter
from edgespec.export.emit.formats import linear_format, table_rows
from edgespec.export.emit.graph import BOOL, FLOAT, INT32, INT64, Declared
from edgespec.export.emit.heads import head_logits
from edgespec.export.emit.pieces import GraphPieces
from edgespec.export.emit.plan import FLOATS, StoragePlan, is_quantized, kept_types
from edgespec.runtimes.files.manifest import Layout


def native_only(arch: Architecture) -> str:
    """Name what of a model only native operators compute; "" = stock ones compute it all."""
    return GraphOps.lacks(arch.trace()) or (
        "tables of tokens beside its layers" if arch.drafter and arch.drafter.heads else ""
    )


def keeps_weights(arch: Architecture, layout: Layout) -> bool:
    """Whether a model's weights are quantized, and a bundle in this layout has them as their file does.

    Native operators have nearly every type.  Stock ones must have all types but floats, which become int8.
    """
    if layout == "stock" and (native_only(arch) or set(kept_types(arch, layout)[1]) - FLOATS):
        return False
    return is_quantized(arch)


class GraphOps(GraphPieces, Pass[str]):
    """Emits one decoder graph with stock operators.

    ::

        input_ids -> embed -> [ If gate_attn[i]: + attention | Identity ] -> [ If gate_mlp[i]: + mlp | Identity ] -> ...
                     -> Gather(rows) -> norm -> LM head -> logits

    A padded graph gives attention one dummy row more than it has tokens: the operator's one-row kernel (and the one for
    a row left over after blocks of 16) rounds differently, every other operator computes a row independently of other
    rows (docs/dev/runtime.md).  The dummy's KV is after the pass's rows; the next pass overwrites it.  Wide heads need
    more dummies where the text is short: as many as `position_ids` has rows beyond `input_ids`.  Residuals are plain
    Adds, so that the gated and the ungated graph give the same bits.

    With ``hidden`` the residual stream is an output.  With gate_embed off it is also an input, ``hidden_in``, in place
    of the embedded ids, so that layers can run separately.  With all layers off only the rest runs: the LM head, or a
    group of heads (emit_heads.py).
    """

    handled_fields: ClassVar[dict[type, str]] = {
        Linear: "weight bias",
        Norm: "weight bias centered",
        AttentionRule: "layer scale rotary window cap q_norm k_norm late_norms",
    }
    rows = "R"  # that reach the LM head
    attention_of: ClassVar[type[AttentionEmitter]] = AttentionEmitter

    def __init__(
        self,
        storage: StoragePlan,
        *,
        gates: bool = False,
        padded: bool = False,
        hidden: bool = False,
        plan: HeadPlan | None = None,
    ) -> None:
        super().__init__(storage, plan, padded)
        arch = self.arch
        self.gates, self.hidden = gates, hidden
        facts = arch.facts
        self.kv_dims: list[int | str] = [1, facts.kv_heads, "C", facts.head_dim]
        self.present_dims = self.kv_dims
        self.x_dims: list[int | str] = [1, "T", facts.hidden]
        self._declare()
        self.declare_dummies()
        for layer in self.layers:
            for name in ("key", "value"):
                self.graph.input(f"past_key_values.{layer}.{name}", FLOAT, self.kv_dims)
                self.graph.output(f"present.{layer}.{name}", FLOAT, self.present_dims)
        self._attention = self.attention_of(self, [arch.rule(layer) for layer in self.layers])
        self._kv_names: tuple[str, str] = ("", "")
        self._taps: dict[int, str] = {}  # the residual stream by the number of layers before it

    @property
    def layers(self) -> Sequence[int]:
        """Layers whose attention the graph has."""
        return range(self.arch.facts.layers)

    def _declare(self) -> None:
        facts, declare = self.arch.facts, self.graph.input
        declare("input_ids", INT64, [1, "T"])
        declare("position_ids", INT64, [1, "A"])
        declare("seqlens_k", INT32, [1])
        declare("total", INT32, [])
        declare("bias", FLOAT, [1, 1, "A", "P"])
        declare("rows", INT64, ["R"])
        groups = len(self.plan.groups) if self.hidden else 0
        if self.hidden:
            declare("hidden_in", FLOAT, [1, "H", self.arch.input_width or facts.hidden])
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
                names = [f"gate_{kind}.{i}" for i in range(facts.layers)]
                self.graph.node("Split", [f"gate_{kind}"], names, num_outputs=facts.layers)

    # -- the operations --------------------------------------------------------------------------------------------

    def embed(self, weight: str, scale: float, positions: str | None) -> str:
        graph, x = self.graph, self._lookup(weight)
        if scale != 1:
            x = graph.node("Mul", [x, graph.constant("embedding_scale", np.float32(scale))])
        if positions is not None:
            rows = graph.node("Gather", [graph.stored(positions), "position_ids"])  # [1, A, hidden]
            x = graph.node("Add", [x, self.unpad(rows)])
        if not self.hidden:
            return x
        return self.choose(
            "gate_embed", "stream", self.arch.facts.hidden, lambda: self.same(x), lambda: self.same("hidden_in")
        )

    def input_slice(self, first: int, width: int) -> str:
        start, end, axis = (self.graph.constant(f"int_{i}", np.array([i], np.int64)) for i in (first, first + width, 2))
        return self.graph.node("Slice", ["hidden_in", start, end, axis])

    def select_input(self, fused: Callable[[], str], recycled: Callable[[], str]) -> str:
        return self.choose("gate_embed", "stream", self.arch.facts.hidden, fused, recycled)

    def join(self, parts: tuple[str, ...]) -> str:
        return self.graph.node("Concat", list(parts), axis=-1)

    def attention(self, q: str, k: str, v: str, rule: AttentionRule) -> str:
        return self._attention.emit(q, k, v, self.packed.get((q, k, v)), rule, self._kv_names)

    def sigmoid_gate(self, x: str, gate: str) -> str:
        return self.graph.node("Mul", [x, self.graph.node("Sigmoid", [gate])])

    def gated(self, gate: str, up: str, activation: Activation) -> str:
        return self.graph.node("Mul", [self.activate(gate, activation, None), up])

    def activate(self, x: str, activation: Activation, numbers: str | None) -> str:
        if activation == "silu":
            return self.silu(x)
        if numbers is not None:
            return self.xielu(x, self.arch.source.read(numbers))
        if activation in ("relu", "relu2"):
            y = self.graph.node("Relu", [x])
            return y if activation == "relu" else self.graph.node("Mul", [y, y])
        return self.graph.node("Gelu", [x], approximate="tanh" if activation == "gelu_tanh" else "none")

    def sublayer(self, kind: Kind, layer: int, x: str, body: Callable[[str], str]) -> str:
        graph = self.graph
        if kind == "attention":
            self._tap(x, layer)
        kv = [f"present.{layer}.{name}" for name in ("key", "value")] if kind == "attention" else []
        if not self.gates:
            self._kv_names = (kv[0], kv[1]) if kv else ("", "")
            return graph.node("Add", [x, body(x)])
        past = [f"past_key_values.{layer}.{name}" for name in ("key", "value")] if kv else []

        def then() -> list[Declared]:
            inner = [f"then.{name}" for name in kv]
            self._kv_names = (inner[0], inner[1]) if kv else ("", "")
            y = graph.node("Add", [x, body(x)])
            return self._branch_outputs([y, *inner])

        def otherwise() -> list[Declared]:
            return self._branch_outputs([graph.node("Identity", [name]) for name in (x, *past)])

        gate = f"gate_{'attn' if kind == 'attention' else 'mlp'}.{layer}"
        run, skip = graph.branch(f"{kind}.{layer}.run", then), graph.branch(f"{kind}.{layer}.skip", otherwise)
        return graph.node("If", [gate], [graph.unique(kind), *kv], then_branch=run, else_branch=skip)

    def head(self, x: str, norm: Norm | None, head: Linear) -> str:
        graph, plan = self.graph, self.plan
        if self.hidden:
            graph.node("Identity", [x], ["hidden"])
            self._tap(x, self.arch.facts.layers)
        if self._taps:
            graph.node("Concat", [self._taps[layer] for layer in plan.tapped], ["taps"], axis=-1)
            graph.output("taps", FLOAT, [1, "T", len(plan.tapped) * self.arch.facts.hidden])
        h = self.normed(self._chosen(x), norm)  # [1, R, hidden]
        head = cut_head(head) if plan.only else head
        logits = head_logits(self, h, head) if self.hidden and plan.groups else self.lm_head(h, head)
        graph.node("Identity", [logits], ["logits"])
        one = not plan.groups or not self.hidden
        graph.output("logits", FLOAT, [1, self.rows, self.storage.width(head) if one else "V"])
        return "logits"

    def normed(self, x: str, norm: Norm | None) -> str:
        """Norm what an LM head reads, if it is not normed yet."""
        return x if norm is None else self.norm(x, norm)

    # -- parts -----------------------------------------------------------------------------------------------------

    def _chosen(self, x: str) -> str:
        """Choose the rows [1, R, hidden] that reach the LM head."""
        return self.graph.node("Gather", [x, "rows"], axis=1)

    def _tap(self, x: str, layers: int) -> None:
        if self.hidden and layers in self.plan.tapped:
            self._taps[layers] = x

    def _lookup(self, weight: str) -> str:
        """Rows of the embedding -> [1, T, hidden]."""
        if f"{weight}.table" in self.storage.entries:
            return table_rows(self.graph, "input_ids", weight)
        return linear_format(self.storage.matrices[weight]).lookup(self.graph, "input_ids", weight)

    def _branch_outputs(self, names: list[str]) -> list[Declared]:
        dims = [self.x_dims] + [self.kv_dims] * (len(names) - 1)
        return [(name, FLOAT, dim) for name, dim in zip(names, dims, strict=True)]
