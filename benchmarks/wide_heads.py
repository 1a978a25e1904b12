"""What strict mode costs on stock operators where heads are wider than 128 (docs/dev/runtime.md).

    edgespec export MODEL --operators stock -o OUT
    python -m benchmarks.wide_heads OUT [--threads 2] [--depths 0,16,32,48,64,200,2048,8192] [--rows 1,4,8]

Three graphs over the same weights take turns: the strict one; the same with one dummy row and without sinks, whose rows
differ from pass to pass; and the plain one.  The keys and values of a depth are made up.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx

from benchmarks.common import alternate, conditions, ratio, show
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.manifest import ModelPart
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot

SINK = 11  # which input of GroupQueryAttention


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--depths", default="0,16,32,48,64,200,2048,8192")
    parser.add_argument("--rows", default="1,4,8")
    parser.add_argument("--pairs", type=int, default=25)
    arguments = parser.parse_args()
    part = Bundle.open(arguments.bundle, check=False).manifest.target
    main_graph = part.graphs[part.main]
    if part.layout != "stock" or main_graph.least_length is None:
        parser.error("expected a bundle of a model with heads wider than 128, exported with --operators stock")
    sizes = [int(text) for text in arguments.rows.split(",")]
    depths = [int(text) for text in arguments.depths.split(",")]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "bundle"
        shutil.copytree(arguments.bundle, folder)
        models = {
            "strict": Model(folder, part, part.main, arguments.threads),
            "one dummy": Model(folder, without_mend(folder, part), part.main, arguments.threads),
            "plain": Model(folder, part, "plain", arguments.threads),
        }
        slots = {name: open_slot(model, reserve=max(depths) + 64) for name, model in models.items()}
        for depth in (depth for depth in depths if depth + max(sizes) <= part.facts.context):
            for slot in slots.values():
                slot.stand_in(depth)
            found[str(depth)] = {str(rows): _compare(slots, rows, arguments.pairs) for rows in sizes}
    show(conditions(threads=arguments.threads, head_dim=part.facts.head_dim, format=part.format) | {"depths": found})


def without_mend(folder: Path, part: ModelPart) -> ModelPart:
    """Write the strict graph again without sinks; returns a part over it that asks for one dummy row."""
    graph = part.graphs[part.main]
    model = onnx.load(folder / graph.file, load_external_data=False)
    _forget_sinks(model.graph)
    file = "one-dummy.onnx"
    (folder / file).write_bytes(model.SerializeToString())
    other = graph.model_copy(update={"file": file, "least_length": None})
    return part.model_copy(update={"graphs": {**part.graphs, part.main: other}})


def _forget_sinks(graph: onnx.GraphProto) -> None:
    for node in graph.node:
        if node.op_type == "GroupQueryAttention":
            del node.input[SINK:]
        for attribute in node.attribute:
            _forget_sinks(attribute.g)


def _compare(slots: dict[str, Slot], rows: int, pairs: int) -> dict[str, Any]:
    tokens = np.arange(2, 2 + rows)
    runs: dict[str, Callable[[], None]] = {name: _pass(slot, tokens) for name, slot in slots.items()}
    times = alternate(runs, pairs)
    return {
        "ms": {name: round(median(ms), 3) for name, ms in times.items()},
        "strict_over_one_dummy": ratio(times["strict"], times["one dummy"]),
        "strict_over_plain": ratio(times["strict"], times["plain"]),
    }


def _pass(slot: Slot, tokens: np.ndarray) -> Callable[[], None]:
    def run() -> None:
        slot.forward(tokens)

    return run


if __name__ == "__main__":
    main()
