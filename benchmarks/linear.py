"""Time only the matrices: GB/s of packed weights and v(n), compared with the machine's read bandwidth.

    python -m benchmarks.linear [--shapes qwen2.5-0.5b,llama-3.2-1b] [--threads 2] [--kind q4]

One pass multiplies by as many distinct matrices of a model's shapes as exceed the processor's cache by far.  The
bandwidth is measured between the passes, so that both see the same machine; the best of 1, 4 and 8 read streams of a
thread counts.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from onnx import helper

from benchmarks.attention import aligned, session_of
from benchmarks.common import alternate, conditions, show
from edgespec.export.emit.graph import EDGESPEC
from edgespec.runtimes.files.formats import GGML, HALVES
from edgespec.runtimes.files.packing import Packed
from edgespec.runtimes.ort.native_library import read_bandwidth
from edgespec.runtimes.slots.shared import Bound

SHAPES = {  # [n, k] of a layer: q k v, o, gate, up, down
    "qwen2.5-1.5b": [(2048, 1536), (1536, 1536), (8960, 1536), (8960, 1536), (1536, 8960)],
    "qwen2.5-0.5b": [(1152, 896), (896, 896), (4864, 896), (4864, 896), (896, 4864)],
    "llama-3.2-1b": [(3072, 2048), (2048, 2048), (8192, 2048), (8192, 2048), (2048, 8192)],
}
TOTAL = 256 << 20  # bytes of weights in a pass
ROWS = (1, 2, 4, 8, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="qwen2.5-0.5b,llama-3.2-1b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--kind", choices=["q4", "q8", "c8", "f32", *GGML, *HALVES], default="q4")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=25)
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for shape in arguments.shapes.split(","):
            runs, size = _passes(Path(folder), SHAPES[shape], arguments.kind, arguments.threads)
            bandwidth: list[float] = []
            times: dict[str, list[float]] = {name: [] for name in runs}
            for _ in range(5):
                bandwidth.append(max(read_bandwidth(arguments.threads, streams, 256, 2) for streams in (1, 4, 8)))
                for name, ms in alternate(runs, max(1, arguments.pairs // 5), warm=1).items():
                    times[name] += ms
            one = median(times["1"])
            found[shape] = {
                "weight_mb": round(size / 1e6),
                "gb_s": round(size / one / 1e6, 1),
                "bandwidth_gb_s": round(median(bandwidth), 1),
                "share": round(size / one / 1e6 / median(bandwidth), 2),
                "ms": {name: round(median(ms), 2) for name, ms in times.items()},
                "v": {name: round(median(ms) / one, 2) for name, ms in times.items()},
            }
    show(conditions(kind=arguments.kind, threads=arguments.threads) | {"shapes": found})


def _passes(folder: Path, shapes: Any, kind: Any, threads: int) -> tuple[dict[str, Callable[[], None]], int]:
    """Make a pass for each number of rows over distinct matrices, and their bytes together."""
    random = np.random.default_rng(0)
    matrices = [Packed(kind, n, k) for n, k in shapes]
    layers = max(1, TOTAL // sum(matrix.nbytes for matrix in matrices))
    widest = max(matrix.k for matrix in matrices)
    steps = [f"floats 0 {widest}", f"acts 0 {widest}", f"floats 1 {max(matrix.n for matrix in matrices)}"]
    steps += [f"embed w=0 kind=r32 n=16 k={widest} out=0"]
    weights: dict[str, Any] = {"rows": random.standard_normal((16, widest)).astype(np.float32)}
    for layer in range(layers):
        for at, matrix in enumerate(matrices):
            form = "f32" if kind in ("f32", *HALVES) else "c8" if kind == "c8" else "q4"
            steps.append(f"quantize x=0 k={matrix.k} kind={form} out=0")
            steps.append(f"linear act=0 w={len(weights)} kind={kind} n={matrix.n} k={matrix.k} out=1")
            weights[f"w{layer}.{at}"] = _packed(matrix, random)
    # an empty head and an attention of one token: a decoder must have both
    steps += ["quantize x=0 k=64 kind=f32 out=0 rows=1", f"logits act=0 w={len(weights)} kind=f32 n=16 k=64"]
    weights["head"] = aligned(np.zeros(Packed("f32", 16, 64).nbytes, np.uint8))
    runs: dict[str, Callable[[], None]] = {}
    outputs = {"logits": np.float32, "ids": np.int64, "values": np.float32, "hidden": np.float32}
    session = None
    for rows in ROWS:
        row = np.arange(rows)
        inputs: dict[str, Any] = {
            "plan": np.array([row % 16, row, 0 * row, 0 * row, row - 1, row]),
            "wanted": np.zeros(0, np.int64),
            "gates": np.zeros(0, bool),
            "moves": np.zeros((0, 3), np.int64),
            "kv": np.zeros((1, 1 << 16), np.uint8),
            "control": np.array([0, 1, 1, 6, 0, 0, 0, 0], np.int64),
            "tables": np.zeros(0, np.float32),
            "hidden_in": np.zeros((0, 0), np.float32),
            **weights,
        }
        if session is None:
            node = helper.make_node("Decoder", list(inputs), list(outputs), domain=EDGESPEC, program="\n".join(steps))
            session = session_of(folder, node, inputs, outputs, threads, EDGESPEC)
        runs[str(rows)] = _bind(session, inputs, outputs)
    return runs, sum(array.nbytes for name, array in weights.items() if name.startswith("w"))


def _packed(matrix: Packed, random: np.random.Generator) -> Any:
    """Bytes of a random matrix."""
    if matrix.kind in ("q4", "q8"):
        blocks = -(-matrix.k // 32)
        levels = random.integers(0, 16 if matrix.kind == "q4" else 256, (matrix.n, blocks, 32)).astype(np.uint8)
        pieces = matrix.pack_blocks([(levels, np.full((matrix.n, blocks), 0.01))])
    elif matrix.kind == "c8":
        levels8 = random.integers(-63, 64, (matrix.n, matrix.k)).astype(np.int8)
        pieces = matrix.pack_channels([(levels8, np.full(matrix.n, 0.01, np.float32))])
    elif matrix.kind in (*GGML, *HALVES):  # no byte is of a float16 that is negative, infinite or not a number
        pieces = iter([random.integers(0, 64, matrix.nbytes).astype(np.uint8)])
    else:
        pieces = matrix.pack_floats([random.standard_normal((matrix.n, matrix.k)).astype(np.float32)])
    return aligned(np.concatenate(list(pieces)))


def _bind(session: Any, inputs: dict[str, Any], outputs: Any) -> Callable[[], None]:
    io = session.io_binding()
    held = {name: Bound(array) for name, array in inputs.items()}
    for name, bound in held.items():
        io.bind_ortvalue_input(name, bound.value)
    for name in outputs:
        io.bind_output(name)

    def run() -> None:
        session.run_with_iobinding(io)

    run.held = held  # type: ignore[attr-defined]
    return run


if __name__ == "__main__":
    main()
