"""Time the attention operator by KV format and depth, with ONNX Runtime's GroupQueryAttention in float32.

    python -m benchmarks.attention [--shape llama-3.2-1b] [--depths 2048,8192,32768] [--threads 1]

Both sides run a chain of layers with separate caches, larger than a processor's cache, one row per pass,
interleaved.  Edgespec's operator takes q, k and v from a small matrix per layer; the time of that matrix is measured
at depth 0 and subtracted.  The other side has none.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from benchmarks.common import alternate, conditions, show
from edgespec.export.emit.graph import EDGESPEC, MICROSOFT
from edgespec.runtimes.files.formats import CENTROIDS, LEARNT
from edgespec.runtimes.files.kv import ATTENTION, KvFormat, padded_dim
from edgespec.runtimes.files.manifest import ModelFacts
from edgespec.runtimes.files.packing import Packed
from edgespec.runtimes.ort.session import make_session
from edgespec.runtimes.slots.shared import Bound

SHAPES = {  # heads, kv heads, head size
    "qwen2.5-0.5b": (14, 2, 64),
    "llama-3.2-1b": (32, 8, 64),
    "llama-3.2-3b": (24, 8, 128),
}
FORMATS = {
    "f32": KvFormat("f32", "f32"),
    "f16": KvFormat("f16", "f16"),
    "int8": KvFormat("int8", "int8"),
    "int4": KvFormat("int4", "int8"),
    "nomad": KvFormat("nomad1", "int8"),
    "nomad2": KvFormat("nomad2", "int8"),
    "int4+window": ATTENTION["int4"],
    "nomad+window": ATTENTION["nomad"],
}
K = 64  # inputs of the small matrix
CACHE_BYTES = 96 << 20  # of float16 keys and values at least: beyond any laptop's last-level cache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3.2-1b")
    parser.add_argument("--depths", default="2048,8192,32768")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=15)
    arguments = parser.parse_args()
    heads, kv_heads, dim = SHAPES[arguments.shape]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for depth in (int(text) for text in arguments.depths.split(",")):
            layers = max(1, min(24, -(-CACHE_BYTES // (depth * kv_heads * dim * 4))))
            facts = _facts(layers, heads, kv_heads, dim, depth)
            runs = {"onnxruntime": _theirs(Path(folder), facts, depth, arguments)}
            bare: dict[str, Callable[[], None]] = {}
            for name in arguments.formats.split(","):
                runs[name] = _ours(Path(folder), facts, FORMATS[name], depth, arguments)
                bare[name] = _ours(Path(folder), facts, FORMATS[name], 0, arguments)
            times = {name: median(ms) for name, ms in alternate(runs, arguments.pairs, warm=2).items()}
            empty = {name: median(ms) for name, ms in alternate(bare, arguments.pairs, warm=2).items()}
            each = {name: 1000 * (ms - empty.get(name, 0.0)) / layers for name, ms in times.items()}
            found[str(depth)] = {
                "layers": layers,
                "us_per_layer": {name: round(us) for name, us in each.items()},
                "speed_over_onnxruntime": {
                    name: round(each["onnxruntime"] / us, 1) for name, us in each.items() if name in empty
                },
            }
    show(conditions(shape=arguments.shape, rows=arguments.rows, threads=arguments.threads) | {"depths": found})


def _facts(layers: int, heads: int, kv_heads: int, dim: int, depth: int) -> ModelFacts:
    return ModelFacts(
        architecture="attention",
        layers=layers,
        hidden=K,
        intermediate=K,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        vocab=16,
        context=depth + 256,
    )


def _ours(folder: Path, facts: ModelFacts, kv: KvFormat, depth: int, arguments: Any) -> Callable[[], None]:
    """One pass over layers of nothing but attention."""
    random, rows = np.random.default_rng(0), arguments.rows
    matrix = Packed("q8", (facts.heads + 2 * facts.kv_heads) * facts.head_dim, K, facts.head_dim)
    shape = f"dim={facts.head_dim} heads={facts.heads} kv={facts.kv_heads}"
    steps = [f"floats 0 {facts.heads * facts.head_dim}", f"acts 0 {K}", f"floats 1 {K}"]
    steps += [f"embed w=0 kind=r32 n=16 k={K} out=1", f"quantize x=1 k={K} kind=q8 out=0"]
    for layer in range(facts.layers):
        steps.append(f"heads act=0 w=1 kind=q8 k={K} {shape} layer={layer} scale={facts.head_dim**-0.5}")
        steps.append(f"attend {shape} layer={layer} out=0")
    levels = random.integers(100, 156, (matrix.n, 2, 32)).astype(np.uint8)  # keys and queries of about one
    packed = np.concatenate(list(matrix.pack_blocks([(levels, np.full((matrix.n, 2), 0.008))])))
    weights = {"rows": random.standard_normal((16, K)).astype(np.float32), "matrix": aligned(packed)}
    inputs: dict[str, Any] = {
        "plan": np.zeros((6, rows), np.int64),
        "wanted": np.zeros(0, np.int64),
        "gates": np.zeros(0, bool),
        "moves": np.zeros((0, 3), np.int64),
        "kv": np.zeros((1, kv.nbytes(facts, depth + 256)), np.uint8),
        "control": np.array([0, *kv.controls()], np.int64),
        "tables": _tables(kv, facts, random),
        "hidden_in": np.zeros((0, 0), np.float32),
        **weights,
    }
    inputs["plan"][:] = _chain(depth, rows)
    outputs = {"logits": np.float32, "ids": np.int64, "values": np.float32, "hidden": np.float32}
    node = helper.make_node(
        "Decoder", list(inputs), list(outputs), domain=EDGESPEC, program="\n".join(steps), constant_weights=0
    )
    session = session_of(folder, node, inputs, outputs, arguments.threads, EDGESPEC)
    # the first block is computed, the others repeat it: real numbers in every format
    session.run(None, {**inputs, "plan": _chain(0, 128)})
    header, block, cache = kv.header_bytes(facts), kv.block_bytes(facts), inputs["kv"][0]
    cache[header:] = np.resize(cache[header : header + block], len(cache) - header)
    io = session.io_binding()
    held = [Bound(array) for array in inputs.values()]
    for name, bound in zip(inputs, held, strict=True):
        io.bind_ortvalue_input(name, bound.value)
    for name in outputs:
        io.bind_output(name)
    return lambda: (session.run_with_iobinding(io), held)[0]


def _theirs(folder: Path, facts: ModelFacts, depth: int, arguments: Any) -> Callable[[], None]:
    """Give the same layers with GroupQueryAttention over a shared buffer."""
    rows, capacity = arguments.rows, depth + 64
    random = np.random.default_rng(0)
    inputs: dict[str, Any] = {
        "qkv": random.standard_normal((1, rows, (facts.heads + 2 * facts.kv_heads) * facts.head_dim)).astype(
            np.float32
        ),
        "seqlens": np.array([depth + rows - 1], np.int32),
        "total": np.array(depth + rows, np.int32),
    }
    nodes, outputs = [], dict[str, Any]()
    for layer in range(facts.layers):
        past, present = [f"past.{layer}.{kind}" for kind in "kv"], [f"present.{layer}.{kind}" for kind in "kv"]
        for name in past:
            block = random.standard_normal((1, facts.kv_heads, 64, facts.head_dim)).astype(np.float32)
            inputs[name] = np.tile(block, (1, 1, -(-capacity // 64), 1))[:, :, :capacity].copy()
        nodes.append(
            helper.make_node(
                "GroupQueryAttention",
                ["qkv", "", "", *past, "seqlens", "total"],
                [f"y.{layer}", *present],
                domain=MICROSOFT,
                num_heads=facts.heads,
                kv_num_heads=facts.kv_heads,
            )
        )
        outputs |= {f"y.{layer}": np.float32} | dict.fromkeys(present, np.float32)
    session = session_of(folder, nodes, inputs, outputs, arguments.threads, MICROSOFT)
    io = session.io_binding()
    held = {name: Bound(array) for name, array in inputs.items()}
    for name, bound in held.items():
        io.bind_ortvalue_input(name, bound.value)
        if name.startswith("past"):
            io.bind_ortvalue_output(name.replace("past", "present"), bound.value)
    for layer in range(facts.layers):
        io.bind_output(f"y.{layer}")
    return lambda: (session.run_with_iobinding(io), held)[0]


def session_of(folder: Path, nodes: Any, inputs: Any, outputs: Any, threads: int, domain: str) -> Any:
    """Make a session over nodes whose tensors are all inputs and outputs."""
    nodes = nodes if isinstance(nodes, list) else [nodes]
    values = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), [None] * array.ndim)
        for name, array in inputs.items()
    ]
    results = [
        helper.make_tensor_value_info(name, TensorProto.INT64 if kind is np.int64 else TensorProto.FLOAT, None)
        for name, kind in outputs.items()
    ]
    graph = helper.make_graph(nodes, "attention", values, results)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(domain, 1)]
    path = folder / f"{domain}-{len(list(folder.iterdir()))}.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return make_session(path, threads, native=domain == EDGESPEC)


def _chain(past: int, rows: int) -> Any:
    """Give the plan of a chain, [6, rows]."""
    at = np.arange(rows)
    return np.array([at % 16, past + at, 0 * at, 0 * at + past, at - 1, past + at])


def aligned(data: Any) -> Any:
    """Give the same bytes at an address that is a multiple of 64."""
    room = np.zeros(data.nbytes + 64, np.uint8)
    at = -room.ctypes.data % 64
    room[at : at + data.nbytes] = data
    return room[at : at + data.nbytes]


def _tables(kv: KvFormat, facts: ModelFacts, random: np.random.Generator) -> Any:
    dim = padded_dim(facts)
    each = 2 * dim if kv.keys == "int4" else CENTROIDS * dim if kv.keys in LEARNT else 0
    return np.abs(random.standard_normal(facts.layers * facts.kv_heads * each)).astype(np.float32) + 0.01


if __name__ == "__main__":
    main()
