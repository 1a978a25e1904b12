"""The graphs of a bundle for a device: small files over the weights that are there already."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

from edgespec.decoding.target import SkipSet
from edgespec.errors import ExportError
from edgespec.export.architectures import Architecture
from edgespec.export.drafters.heads import HeadPlan
from edgespec.export.emit.device import DeviceHeads, DeviceOps
from edgespec.export.emit.graph import FLOAT, INT64, GraphBuilder
from edgespec.export.emit.half import to_half
from edgespec.export.emit.plan import WeightLayout
from edgespec.export.emit.plans import storage_plans
from edgespec.runtimes.devices.webgpu import DeviceName
from edgespec.runtimes.files.formats import DEVICE_FORMATS
from edgespec.runtimes.files.manifest import Graph, ModelPart, Precision, SkipSetPart, graph_name


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
    """Write the graphs of a model for a device into ``folder``.

    Args:
        folder: the model's folder.
        arch: the model, with the tensors of its heads.
        part: its entry in the manifest.
        device: which.
        skip: sub-layers that a self-draft leaves out; None = there is no self-draft.
        prefix: path of ``folder`` inside the bundle, with a trailing slash.
        precision: of activations, keys and values.
        fine: names of matrices that are int8, whatever the part's format says.

    Raises:
        ExportError: a weight format that devices do not have.
    """
    if part.format not in DEVICE_FORMATS:
        raise ExportError(
            f"--device {device} and --format {part.format}: expected one of {', '.join(DEVICE_FORMATS)}",
            "its operators run on the CPU only",
        )
    plan = HeadPlan(tuple(part.heads), part.head_vocab is not None, part.cut)
    storage = storage_plans(arch, part.format, part.head_format, plan, fine, part.layout)["stock"]
    trace, found = arch.trace(), dict(part.graphs)

    def add(which: str, graph: GraphBuilder, **facts: Any) -> None:
        name = graph_name(device, precision, which)
        if precision == "fp16":
            to_half(graph)
        file = f"model.{name.replace('/', '.')}.onnx"
        graph.save(folder / file)
        found[name] = Graph(file=prefix + file, device=device, precision=precision, **facts)

    def decoder(which: str, facts: dict[str, Any] | None = None, **kind: Any) -> None:
        ops = DeviceOps(storage, plan=plan, **kind)
        ops.run(trace)
        add(which, ops.graph, **(facts or {}))

    decoder("", {"hidden": True})
    add("move", move_graph(arch, storage))
    add("rows", rows_graph(arch, storage))
    if skip is not None:
        decoder("skip", {"skip": skip}, skip=SkipSet(tuple(skip.attention), tuple(skip.mlp)))
    for group in part.heads:
        heads = DeviceHeads(storage, group, cut=plan.cut)
        heads.run(trace)
        add(f"heads/{group.name}", heads.graph)
    edges = [0, *sorted(group.layer for group in part.heads if group.kind == "exit")]
    for first, last in combinations(edges, 2):  # a request may use some of the exits
        decoder(f"layers/{first}-{last}", first=first, last=last, logits=False)
    for layer in edges[1:]:
        decoder(f"from/{layer}", {"hidden": True}, first=layer)
    return part.model_copy(update={"graphs": found})


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
