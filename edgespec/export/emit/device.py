"""Build a decoder for a device with separate memory: only ids and a few probabilities need to leave it.

Differences from the stock graphs, and why (docs/devices.md):

* no ``If``: instead of gates there are several graphs over one weight file, each without the parts that it skips;
* rotation outside attention: the WebGPU kernel's own ignores positions it is given;
* the device builds the mask of a tree and of windows from the relations of rows, [T, T]: a mask as wide as the cache
  would have to cross for every pass;
* the likeliest tokens are chosen in the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from edgespec.decoding.target import SkipSet
from edgespec.errors import ExportError
from edgespec.export.architectures import Architecture
from edgespec.export.architectures.ops import Kind
from edgespec.export.architectures.rules import Linear, Norm
from edgespec.export.drafters.heads import HeadPlan
from edgespec.export.emit.attention import AttentionEmitter
from edgespec.export.emit.graph import FLOAT, INT32, INT64, GraphBuilder
from edgespec.export.emit.heads import group_rows
from edgespec.export.emit.plan import StoragePlan, WeightLayout
from edgespec.export.emit.plans import storage_plans
from edgespec.export.emit.stock import GraphOps
from edgespec.runtimes.devices.slot import MOST_BEST
from edgespec.runtimes.devices.webgpu import DeviceName
from edgespec.runtimes.files.formats import DEVICE_FORMATS
from edgespec.runtimes.files.manifest import Graph, HeadGroup, ModelPart, Precision, SkipSetPart, graph_name
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

        def below() -> str:  # difference between each row's cache slot and its position, [1, T]
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
        plan: only ``only`` is used: a draft whose only LM head is cut.
        first, last: the layers it has.  Later than 0: it begins with ``hidden_in`` instead of ids.
        logits: it ends in the LM head; else in the residual stream.
    """

    attention_of: ClassVar[type[AttentionEmitter]] = DeviceAttention

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
        sizes: dict[str, list[int | str]] = {"position": ["T", 1], "index": ["T", 1], "past": [1], "places": ["C"],
                                             "tree": ["T", "T"]}  # fmt: skip
        for name, dims in sizes.items():
            declare(name, FLOAT, dims)
        declare("seqlens_k", INT32, [1])
        declare("total", INT32, [])
        if self.logits:
            declare("rows", INT64, ["R"])
        self.graph.output("hidden", FLOAT, self.x_dims)

    def embed(self, weight: str, scale: float, positions: str | None) -> str:
        return super().embed(weight, scale, positions) if self._range.start == 0 else "hidden_in"

    def sublayer(self, kind: Kind, layer: int, x: str, body: Callable[[str], str]) -> str:
        skipped = self.skip.attention if kind == "attention" else self.skip.mlp
        if layer not in self._range or layer in skipped:
            return x
        return super().sublayer(kind, layer, x, body)

    def head(self, x: str, norm: Norm | None, head: Linear) -> str:
        self.graph.node("Identity", [x], ["hidden"])
        if not self.logits:
            return "hidden"
        super().head(x, norm, head)
        self._best("logits")
        return "logits"

    def _best(self, logits: str) -> None:
        """Add outputs: best_values and best_ids [.., MOST_BEST], the likeliest tokens; log_total, of the sum of all."""
        graph = self.graph
        count = graph.constant("best", np.array([MOST_BEST], np.int64))
        graph.node("TopK", [logits, count], ["best_values", "best_ids"], axis=-1)
        axis = graph.constant("last_axis", np.array([-1], np.int64))
        graph.node("ReduceLogSumExp", [logits, axis], ["log_total"], keepdims=0)
        graph.output("log_total", FLOAT, [1, "R"])
        graph.output("best_values", FLOAT, [1, "R", MOST_BEST])
        graph.output("best_ids", INT64, [1, "R", MOST_BEST])


class DeviceHeads(DeviceOps):
    """Emits a separate graph of a group of heads: rows of the residual stream in, logits and likeliest tokens out.

    Args:
        cut: the heads share a cut LM head.
    """

    attention_of = AttentionEmitter

    def __init__(self, storage: StoragePlan, group: HeadGroup, *, cut: bool = False) -> None:
        self.group, self.cut = group, cut
        super().__init__(storage, first=storage.arch.facts.layers)

    @property
    def layers(self) -> Sequence[int]:
        return []

    def _declare(self) -> None:
        self.graph.input("hidden_in", FLOAT, [1, "R", self.arch.facts.hidden])

    def head(self, x: str, norm: Norm | None, head: Linear) -> str:
        logits = group_rows(self, self.normed(x, norm), self.group, head, self.cut)
        self.graph.node("Identity", [logits], ["logits"])
        self.graph.output("logits", FLOAT, [1, "Y", "V"])
        self._best("logits")
        return "logits"


def device_graphs(part: ModelPart, skip: SkipSetPart | None) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """List the graphs of a model for a device: the suffix, the manifest's fields, and the options that emit it.

    Args:
        skip: sub-layers that a self-draft leaves out; None = no self-draft.
    """
    yield "", {"hidden": True}, {}
    yield "move", {}, {}
    yield "rows", {}, {}
    if skip is not None:
        yield "skip", {"skip": skip}, {"skip": SkipSet(tuple(skip.attention), tuple(skip.mlp))}
    for group in part.heads:
        yield f"heads/{group.name}", {}, {"group": group}
    edges = [0, *sorted(group.layer for group in part.heads if group.kind == "exit")]
    for first, last in combinations(edges, 2):  # a request may use some of the exits
        yield f"layers/{first}-{last}", {}, {"first": first, "last": last, "logits": False}
    for layer in edges[1:]:
        yield f"from/{layer}", {"hidden": True}, {"first": layer}


def with_device_graphs(
    part: ModelPart, device: DeviceName, skip: SkipSetPart | None, prefix: str, precision: Precision = "fp32"
) -> ModelPart:
    """Return the entry of a model with the graphs of a device."""
    found = dict(part.graphs)
    for which, facts, _ in device_graphs(part, skip):
        name = graph_name(device, precision, which)
        file = f"{prefix}model.{name.replace('/', '.')}.onnx"
        found[name] = Graph(file=file, device=device, precision=precision, **facts)
    return part.model_copy(update={"graphs": found})


def add_device_graphs(
    folder: Path,
    arch: Architecture,
    part: ModelPart,
    device: DeviceName,
    skip: SkipSetPart | None,
    prefix: str = "",
    precision: Precision = "fp32",
    fine: frozenset[str] = frozenset(),
) -> ModelPart:
    """Write the graphs of a model for a device into ``folder``."""
    if part.format not in DEVICE_FORMATS:
        raise ExportError(
            f"--device {device} and --format {part.format}: expected one of {', '.join(DEVICE_FORMATS)}",
            "its operators run on the CPU only",
        )
    plan = HeadPlan(tuple(part.heads), part.head_vocab is not None, part.cut)
    storage = storage_plans(arch, part.format, part.head_format, plan, fine, part.layout)["stock"]
    trace, made = arch.trace(), with_device_graphs(part, device, skip, prefix, precision)
    for which, _, how in device_graphs(part, skip):
        if which in ("move", "rows"):
            graph = (move_graph if which == "move" else rows_graph)(arch, storage)
        else:
            ops = DeviceHeads(storage, cut=plan.cut, **how) if "group" in how else DeviceOps(storage, plan=plan, **how)
            ops.run(trace)
            graph = ops.graph
        if precision == "fp16":
            from edgespec.export.emit.half import to_half  # needs onnx, which plans do without

            to_half(graph)
        graph.save(folder / made.graphs[graph_name(device, precision, which)].file.removeprefix(prefix))
    return made


def move_graph(arch: Architecture, weights: WeightLayout) -> GraphBuilder:
    """Rows of all keys and values to other places: ``from`` and ``to`` are int64 [m, 3], (0, head, place) each."""
    graph, facts = GraphBuilder(weights), arch.facts
    dims: list[int | str] = [1, facts.kv_heads, "C", facts.head_dim]
    for name in ("from", "to"):
        graph.input(name, INT64, ["M", 3])
    for layer in range(facts.layers):
        for kind in ("key", "value"):
            past = graph.input(f"past_key_values.{layer}.{kind}", FLOAT, dims)
            rows = graph.node("GatherND", [past, "from"])  # all are read before any is written
            graph.node("ScatterND", [past, "to", rows], [f"present.{layer}.{kind}"])
            graph.output(f"present.{layer}.{kind}", FLOAT, dims)
    return graph


def rows_graph(arch: Architecture, weights: WeightLayout) -> GraphBuilder:
    """Rows int64 [R] of hidden states [1, T, hidden]."""
    graph = GraphBuilder(weights)
    graph.input("hidden_in", FLOAT, [1, "T", arch.facts.hidden])
    graph.input("rows", INT64, ["R"])
    graph.node("Gather", ["hidden_in", "rows"], ["hidden"], axis=1)
    graph.output("hidden", FLOAT, [1, "R", arch.facts.hidden])
    return graph
