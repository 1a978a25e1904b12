"""A decoder for a device whose memory is not the host's: only ids and a few probabilities need to leave it.

What differs from the stock graphs, and why (docs/devices.md):

* no ``If``: what is left out of a pass is left out of a graph, and there are several over one weight file;
* rotation outside attention: the WebGPU kernel's own ignores positions it is given;
* the mask of a tree and of windows is made on the device of what rows say about each other, [T, T]: a mask as wide as
  the cache would have to cross for every pass;
* the likeliest tokens are chosen in the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edgespec.decoding.target import SkipSet
from edgespec.export.architectures.ops import AttentionRule, Kind, Linear, Norm
from edgespec.export.drafters.heads import HeadPlan
from edgespec.export.emit.attention import AttentionEmitter
from edgespec.export.emit.graph import FLOAT, INT32, INT64
from edgespec.export.emit.heads import group_rows
from edgespec.export.emit.plan import StoragePlan
from edgespec.export.emit.stock import GraphOps
from edgespec.runtimes.devices.slot import BEST
from edgespec.runtimes.files.manifest import HeadGroup
from edgespec.runtimes.slots.stock import HIDE


class DeviceAttention(AttentionEmitter):
    """Attention with masks made of rows: see the module."""

    rotary_inside = False

    def bias(self) -> str:
        """[1, 1, T, C]: ``tree`` [T, T] under the places of the pass's rows, 0 elsewhere."""
        graph = self.graph
        relative = graph.node("Sub", ["places", "past"])  # [C]: place of each column among the rows
        hot = graph.node("Cast", [graph.node("Equal", [relative, "index"])], ["hot"], to=FLOAT)  # [T, C]
        graph.node("MatMul", ["tree", hot], ["mask"])
        axes = graph.constant("two_axes", np.array([0, 1], np.int64))
        return graph.node("Unsqueeze", ["mask", axes], ["bias"])

    def window(self, size: int) -> str:
        graph = self.graph

        def below() -> str:  # by how much each row's position lies below its place, [1, T]
            return graph.node("Transpose", [graph.node("Sub", ["position", graph.node("Add", ["index", "past"])])])

        shift = graph.once("shift", below)
        stands = graph.once("stands", lambda: graph.node("Add", ["places", graph.node("MatMul", [shift, "hot"])]))
        width = graph.constant(f"window_{size}", np.float32(size))
        hidden = graph.node("LessOrEqual", [stands, graph.node("Sub", ["position", width])])  # [T, C]
        mask = graph.node("Where", [hidden, graph.constant("hide", HIDE), "mask"])
        return graph.node("Unsqueeze", [mask, graph.constant("two_axes", np.array([0, 1], np.int64))])


class DeviceOps(GraphOps):
    """Emits a decoder, or a part of it, for a device.

    Args:
        storage: see ``GraphOps``.
        plan: only ``only`` is looked at: a draft whose only LM head is cut.
        first, last: the layers it has.  Later than 0: it begins with ``hidden_in`` instead of ids.
        skip: sub-layers left out.
        logits: it ends in the LM head; else in the residual stream.
    """

    def __init__(
        self,
        storage: StoragePlan,
        *,
        plan: HeadPlan | None = None,
        first: int = 0,
        last: int | None = None,
        skip: SkipSet | None = None,
        logits: bool = True,
    ) -> None:
        self._range = range(first, storage.arch.facts.layers if last is None else last)
        self.skip, self.logits = skip or SkipSet(), logits
        only = HeadPlan(only=True) if plan and plan.only else HeadPlan()
        super().__init__(storage, plan=only)

    @property
    def layers(self) -> Sequence[int]:
        return [layer for layer in self._range if layer not in self.skip.attention]

    def _declare(self) -> None:
        declare = self.graph.input
        if self._range.start == 0:
            declare("input_ids", INT64, [1, "T"])
        else:
            declare("hidden_in", FLOAT, self.x_dims)
        declare("position_ids", INT64, [1, "T"])
        for name in ("position", "index"):
            declare(name, FLOAT, ["T", 1])
        declare("past", FLOAT, [1])
        declare("places", FLOAT, ["C"])
        declare("tree", FLOAT, ["T", "T"])
        declare("seqlens_k", INT32, [1])
        declare("total", INT32, [])
        if self.logits:
            declare("rows", INT64, ["R"])
        self.graph.output("hidden", FLOAT, self.x_dims)

    def _emitter(self, rules: list[AttentionRule]) -> AttentionEmitter:
        return DeviceAttention(self, rules)

    def embed(self, weight: str, scale: float, positions: str | None) -> str:
        return super().embed(weight, scale, positions) if self._range.start == 0 else "hidden_in"

    def sublayer(self, kind: Kind, layer: int, x: str, body: Callable[[str], str]) -> str:
        skipped = self.skip.attention if kind == "attention" else self.skip.mlp
        if layer not in self._range or layer in skipped:
            return x
        return super().sublayer(kind, layer, x, body)

    def head(self, x: str, norm: Norm, head: Linear) -> str:
        self.graph.node("Identity", [x], ["hidden"])
        if not self.logits:
            return "hidden"
        super().head(x, norm, head)
        self._best("logits")
        return "logits"

    def _best(self, logits: str) -> None:
        """Add outputs: best_values and best_ids [.., BEST], the likeliest tokens; log_total, log of the sum of all."""
        graph = self.graph
        count = graph.constant("best", np.array([BEST], np.int64))
        graph.node("TopK", [logits, count], ["best_values", "best_ids"], axis=-1)
        axis = graph.constant("last_axis", np.array([-1], np.int64))
        graph.node("ReduceLogSumExp", [logits, axis], ["log_total"], keepdims=0)
        graph.output("log_total", FLOAT, [1, "R"])
        graph.output("best_values", FLOAT, [1, "R", BEST])
        graph.output("best_ids", INT64, [1, "R", BEST])


class DeviceHeads(DeviceOps):
    """Emits a group of heads by itself: rows of the residual stream in, logits and likeliest tokens out.

    Args:
        group: which.
        cut: the heads share a cut LM head.
    """

    def __init__(
        self,
        storage: StoragePlan,
        group: HeadGroup,
        *,
        cut: bool = False,
    ) -> None:
        self.group, self.cut = group, cut
        super().__init__(storage, first=storage.arch.facts.layers)

    @property
    def layers(self) -> Sequence[int]:
        return []

    def _declare(self) -> None:
        self.graph.input("hidden_in", FLOAT, [1, "R", self.arch.facts.hidden])

    def _emitter(self, rules: list[AttentionRule]) -> AttentionEmitter:
        return AttentionEmitter(self, [])

    def head(self, x: str, norm: Norm, head: Linear) -> str:
        logits = group_rows(self, self.norm(x, norm), self.group, head, self.cut)
        self.graph.node("Identity", [logits], ["logits"])
        self.graph.output("logits", FLOAT, [1, "Y", "V"])
        self._best("logits")
        return "logits"
