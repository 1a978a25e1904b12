"""A graph of optimum as a part of a bundle: its tensors in one weight file, matrices quantized if asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from edgespec.errors import ExportError
from edgespec.export.bundle.model_part import MAIN, STRICT
from edgespec.export.bundle.source_model import WrittenModel
from edgespec.export.emit.fill import Errors, WeightFile, add_error
from edgespec.export.emit.graph import MICROSOFT, alive, reads, stored_tensor
from edgespec.export.emit.layout import INLINE_BYTES, WEIGHTS, WeightLayout
from edgespec.export.optimum.graph import ForeignGraph, Matrix
from edgespec.export.optimum.strict import double_last_rows
from edgespec.export.quantization import levels as quantize
from edgespec.export.quantization.weights import WeightChoice
from edgespec.runtimes.files.manifest import Graph, ModelFacts, ModelPart

WORK = ".optimum"  # of a bundle in the making: what optimum writes
HEADROOM = 16  # rows beyond the context: those that are timed and probed at its end


def write_foreign(
    folder: Path,
    graph: ForeignGraph,
    facts: ModelFacts,
    choice: WeightChoice,
    *,
    draft: bool = False,
    prefix: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> WrittenModel:
    """Write ``model.data`` and the graphs over it: a target's strict and plain one, a draft's plain one.

    Args:
        folder: an existing folder.
        graph: what optimum made.
        facts: of the model.
        choice: fp32, int4 or int8, and how levels are chosen.
        draft: only the plain graph.
        prefix: path of ``folder`` inside the bundle, with a trailing slash.
        progress: called with (matrices done, of).

    Raises:
        ExportError: a tensor cannot be read, or there is nothing to quantize.
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
        del model.graph.value_info[:]  # of values that may be gone
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
    (folder / MAIN).write_bytes(model.SerializeToString())
    graphs = {"plain": Graph(file=prefix + MAIN)}
    if not draft:
        double_last_rows(model)
        (folder / STRICT).write_bytes(model.SerializeToString())
        graphs = {"strict": Graph(file=prefix + STRICT)} | graphs
    part = ModelPart(
        facts=facts.model_copy(update={"parameters": graph.parameters}),
        format=choice.format,
        quantizer=choice.quantizer.name if choice.quantizer else "rtn",
        head_format=choice.head,
        graphs=graphs,
        weights=prefix + WEIGHTS,
        layout="stock",
        headroom=HEADROOM,
        min_rows=1,
        origin="optimum",
    )
    return WrittenModel(part, errors)


def _quantized(
    graph: ForeignGraph,
    choice: WeightChoice,
    weights: WeightLayout,
    file: WeightFile,
    errors: Errors,
    progress: Callable[[int, int], None] | None,
) -> dict[int, onnx.NodeProto]:
    """The nodes that take the place of multiplications, by their place; their matrices are in the weight file."""
    matrices = graph.matrices()
    if not matrices:
        raise ExportError(f"{graph.path}: the graph multiplies by no constant matrix", "export it with --format fp32")
    assert choice.quantizer is not None
    found = {}
    for done, matrix in enumerate(matrices, 1):
        # the LM head is the multiplication by as many rows as there are logits
        form = quantize.BLOCKS[choice.head if choice.head and matrix.n == graph.ports.vocab else choice.format]
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
        if progress:
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
    kept: list[NDArray[np.float32]] = []  # small beside the levels: kept until those are written

    def rows() -> Iterator[NDArray[np.uint8]]:
        for piece in graph.pieces(matrix):
            level, scale = quantizer(piece, form)
            packed, scales_there = form.to_stock(level, scale, matrix.k)
            kept.append(scales_there)
            add_error(errors, matrix.name, piece, quantize.dequantize_block(level, scale, matrix.k, form.bits))
            yield packed

    file.write(levels, rows())
    file.write(scales, kept)
