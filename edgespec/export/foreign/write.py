"""A foreign graph as a part of a bundle: tensors in one weight file, matrices quantized on request, parity.

The exporter runs in a separate process, which frees torch's memory and hides its output.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from edgespec.errors import ExportError
from edgespec.export.bundle.model_part import INDEX, MAIN, STRICT
from edgespec.export.bundle.source_model import WrittenModel
from edgespec.export.emit.fill import Errors, WeightFile, add_error
from edgespec.export.emit.graph import MICROSOFT, alive, reads, stored_tensor
from edgespec.export.emit.plan import INLINE_BYTES, WEIGHTS, WeightLayout, converted_name
from edgespec.export.emit.plans import layouts_text
from edgespec.export.foreign.graph import ForeignGraph, Matrix, double_last_rows, lead_with_sinks
from edgespec.export.foreign.native import NativeGraph
from edgespec.export.measuring.parity import compared, compared_rows
from edgespec.export.quantization import levels as quantize
from edgespec.export.quantization.weights import WeightChoice
from edgespec.runtimes.files.manifest import Graph, ModelFacts, ModelPart
from edgespec.runtimes.files.operators import LINEAR, NATIVE
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.ort.native_library import native_library
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot

_NEEDED = {"transformers.exporters": "transformers 5.23 or newer", "torch": "torch", "onnxscript": "onnxscript"}
_CAPTURE = "edgespec.export.foreign.capture"


def exporter_missing() -> str | None:
    """Why transformers' exporter cannot be called in this environment; None = it can."""
    for name, what in _NEEDED.items():
        try:
            if find_spec(name) is None:
                return f"{what} is not installed here"
        except ImportError as error:
            return f"{what} is not installed here: {error}"
    return None


def capture_graph(model: Path, folder: Path) -> None:
    """Let transformers export a checkpoint in float32 into a new folder.

    Raises:
        ExportError: it fails; the message has its last line.
    """
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", _CAPTURE, str(model.resolve()), str(folder.resolve())]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if done.returncode:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        why = lines[-1] if lines else f"exit code {done.returncode}"
        raise ExportError(
            f"{model}: transformers cannot export this model: {why}",
            "take another model of its family, or export it elsewhere by `optimum-cli export onnx` and give its folder",
        )


FILES = {LINEAR: "model.linear.onnx", NATIVE: "model.native.onnx"}
AGAINST = "the float32 graph of"
_PASS = 64  # rows


def foreign_parity(file: Path, part: ModelPart, errors: Errors, slot: Slot, tokens: Sequence[int]) -> dict[str, Any]:
    """Compare a written graph with its original, on one text; nothing is compared with the checkpoint.

    Returns the JSON object of ``parity_report``, and ``against``, the reference of the figures.
    """
    rows = compared_rows(tokens)
    exact = _graph_logits(file, part, list(tokens), rows, slot.model.threads)
    return {"against": f"{AGAINST} {part.origin}", **compared(exact, rows, slot, tokens, errors, errors)}


def _graph_logits(
    file: Path, part: ModelPart, tokens: list[int], rows: NDArray[np.int64], threads: int
) -> NDArray[np.float32]:  # [R, vocab]
    """Compute the logits of the rows of a text by the original graph, many rows per pass."""
    original = part.model_copy(update={"format": "fp32", "graphs": {"plain": Graph(file=file.name)}})
    slot = open_slot(Model(file.parent, original, "plain", threads))
    found = []
    for start in range(0, len(tokens), _PASS):
        piece = np.asarray(tokens[start : start + _PASS], np.int64)
        logits = slot.forward(piece).logits  # [n, vocab]
        found.append(logits[rows[(rows >= start) & (rows < start + _PASS)] - start])
        slot.keep(range(len(piece)))
    return np.concatenate(found)


_TRIED = 40  # random tokens
_APART = 0.15  # most of the largest logit by which two roundings of activations differ, in half of the rows


def check_native(folder: Path, part: ModelPart, threads: int | None) -> ModelPart:
    """Return a part without its native graph where that computes something else than the stock one.

    Every part of it was compared when it was recognized; this is the whole, on random tokens in two passes.
    """
    if NATIVE not in part.graphs or native_library().path is None:
        return part
    tokens = np.random.default_rng(3).integers(0, part.facts.vocab, min(_TRIED, part.facts.context))
    found = []
    for name in ("plain", NATIVE):
        slot, logits = open_slot(Model(folder, part, name, threads)), []
        for piece in np.array_split(tokens, 2):
            logits.append(slot.forward(piece).logits.copy())
            slot.keep(range(len(piece)))
        found.append(np.concatenate(logits))
    apart = np.abs(found[0] - found[1]).max(1)  # of a row whose experts change, more
    if np.median(apart) < _APART * np.abs(found[0]).max():
        return part
    for file in (part.graphs[NATIVE].file, str(part.index)):
        (folder / file).unlink()
    graphs = {name: graph for name, graph in part.graphs.items() if name != NATIVE}
    return part.model_copy(update={"graphs": graphs, "index": None, "converted": None})


WORK = ".foreign"  # of a bundle in the making: what another exporter writes
HEADROOM = 16  # rows beyond the context: those that are timed and probed at its end


def write_foreign(
    folder: Path,
    graph: ForeignGraph,
    facts: ModelFacts,
    choice: WeightChoice,
    *,
    draft: bool = False,
    prefix: str = "",
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> WrittenModel:
    """Write ``model.data`` and the graphs over it: a target's strict and plain one, a draft's plain one.

    Args:
        choice: fp32, int4 or int8, and how levels are chosen.
    """
    errors: Errors = {}
    model = onnx.ModelProto()
    model.CopyFrom(graph.proto)
    with WeightFile(folder / WEIGHTS) as file:
        weights = WeightLayout()
        made = _quantized(graph, choice, weights, file, errors, progress) if choice.format in quantize.BLOCKS else {}
        nodes = [made.get(at, node) for at, node in enumerate(graph.proto.graph.node)]
        nodes = alive(nodes, {output.name for output in graph.proto.graph.output})
        read = {name for node in nodes for name in reads(node)}
        del model.graph.node[:], model.graph.initializer[:]
        model.graph.node.extend(nodes)
        kept = {name for node in nodes for name in node.output}
        shapes = [value for value in model.graph.value_info if value.name in kept]
        del model.graph.value_info[:]
        model.graph.value_info.extend(shapes)
        for name, tensor in graph.initializers.items():
            if name not in read:
                continue
            values = graph.tensor(name)
            if values.nbytes < INLINE_BYTES:
                model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(values), name))
                continue
            file.write(weights.add(name, tuple(tensor.dims), values.dtype), [values])
            model.graph.initializer.append(stored_tensor(weights, name))
        model.graph.initializer.extend(
            stored_tensor(weights, name) for name in weights.entries if name not in graph.initializers
        )
    if made and not any(opset.domain == MICROSOFT for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
    lead_with_sinks(model)
    (folder / MAIN).write_bytes(model.SerializeToString())
    graphs = {"plain": Graph(file=prefix + MAIN)}
    native = _write_native(folder, model, graph, weights, facts) if made else None
    if graph.ports.single:
        graphs["strict"] = graphs["plain"]
    elif not draft:
        double_last_rows(model)
        (folder / STRICT).write_bytes(model.SerializeToString())
        graphs = {"strict": Graph(file=prefix + STRICT)} | graphs
    if made and native is None:
        native = _write_native(folder, model, graph, weights)
    if native is not None:
        graphs[native] = Graph(file=prefix + FILES[native], operators="native")
    part = ModelPart(
        facts=facts.model_copy(update={"parameters": graph.parameters}),
        format=choice.stored,
        quantizer=choice.quantizer.name if choice.quantizer else "rtn",
        head_format=choice.head,
        graphs=graphs,
        weights=prefix + WEIGHTS,
        index=prefix + INDEX if native else None,
        converted=converted_name("native") if native else None,
        layout="stock",
        extra_rows=HEADROOM,
        min_rows=1,
        origin=graph.origin,
    )
    return WrittenModel(part, errors)


def _write_native(
    folder: Path, model: onnx.ModelProto, graph: ForeignGraph, weights: WeightLayout, facts: ModelFacts | None = None
) -> str | None:
    """Write the graph on native operators as far as they go, and how their weights are converted.

    Args:
        facts: of the model, for a graph over the cache of native operators; None = one with its own caches.

    Returns the graph's name; None = there is nothing for them.
    """
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    positions, hidden = (facts.context + HEADROOM, facts.hidden) if facts else (0, 0)
    made = NativeGraph(changed, graph, positions, hidden)
    name = NATIVE if facts else LINEAR
    if (made.cached() if facts else made.joined()) is None:
        return None
    read = {name for node in changed.graph.node for name in reads(node)}
    layout = WeightLayout()
    layout.file = converted_name("native")
    for key, packed in made.matrices.items():
        layout.add(f"{key}.packed", (packed.nbytes,), np.uint8)
    for key, entry in weights.entries.items():
        if key in read:
            layout.add(key, entry.dims, entry.dtype)
    inline = [one for one in changed.graph.initializer if one.name in read and one.name not in weights.entries]
    del changed.graph.initializer[:]
    changed.graph.initializer.extend(inline)
    changed.graph.initializer.extend(stored_tensor(layout, key) for key in layout.entries)
    (folder / FILES[name]).write_bytes(changed.SerializeToString())
    (folder / INDEX).write_text(layouts_text(made.matrices, weights, layout), "utf-8")
    return name


def _quantized(
    graph: ForeignGraph,
    choice: WeightChoice,
    weights: WeightLayout,
    file: WeightFile,
    errors: Errors,
    progress: Callable[[int, int], None],
) -> dict[int, onnx.NodeProto]:
    """Give the nodes that take the place of multiplications, by their place; their matrices are in the weight file."""
    matrices = graph.matrices()
    if not matrices:
        raise ExportError(f"{graph.path}: the graph multiplies by no constant matrix", "export it with --format fp32")
    assert choice.quantizer is not None
    found = {}
    for done, matrix in enumerate(matrices, 1):
        # the LM head is the multiplication by as many rows as there are logits
        form = quantize.BLOCKS[choice.head if choice.head and matrix.n == graph.ports.vocab else choice.stored]
        if f"{matrix.key}.levels" not in weights.entries:
            _store(graph, matrix, choice, form, weights, file, errors)
        node = graph.proto.graph.node[matrix.node]
        inputs = [node.input[0], f"{matrix.key}.levels", f"{matrix.key}.scales"]
        found[matrix.node] = helper.make_node(
            "MatMulNBits",
            [*inputs, "", "", matrix.bias] if matrix.bias else inputs,
            list(node.output),
            name=node.name,
            domain=MICROSOFT,
            K=matrix.k,
            N=matrix.n,
            bits=form.bits,
            block_size=quantize.BLOCK,
            accuracy_level=4,
        )
        progress(done, len(matrices))
    return found


def _store(
    graph: ForeignGraph,
    matrix: Matrix,
    choice: WeightChoice,
    form: quantize.Blocks,
    weights: WeightLayout,
    file: WeightFile,
    errors: Errors,
) -> None:
    """Write a matrix in the layout of MatMulNBits, and add up its errors."""
    assert choice.quantizer is not None
    quantizer, shape = choice.quantizer.prepare(None), form.stock_shape(matrix.n, matrix.k)
    levels = weights.add(f"{matrix.key}.levels", shape, np.uint8)
    scales = weights.add(f"{matrix.key}.scales", shape[:2], np.float32)
    kept: list[NDArray[np.float32]] = []  # small compared with the levels: kept until those are written

    def rows() -> Iterator[NDArray[np.uint8]]:
        for piece in graph.pieces(matrix):
            level, scale = quantizer(piece, form)
            packed, scales_there = form.to_stock(level, scale, matrix.k)
            kept.append(scales_there)
            add_error(errors, matrix.name, piece, quantize.dequantize_block(level, scale, matrix.k, form.bits))
            yield packed

    file.write(levels, rows())
    file.write(scales, kept)
