"""The decoder of VQ pictures of LlamaGen (arXiv 2406.06525) and Janus: residual blocks, attention, nearest upsampling.

How deep it is, its tensors say: blocks are read as long as there are some.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import count
from typing import Any

import numpy as np

from edgespec.export.codes.graph import CodeGraph
from edgespec.export.emit.graph import FLOAT, INT64

GROUPS, EPSILON = 32, 1e-6


def write(graph: CodeGraph, config: Mapping[str, Any]) -> dict[str, Any]:
    """Add the decoder; ``config`` has ``first`` and ``image`` as ``CodesPart`` does.

    Input ``codes``: int64 [rows, columns]; output ``picture``: float32 [height, width, 3], about -1 to 1.
    """
    book = codebook(graph, config)
    graph.input("codes", INT64, ["rows", "columns"])
    x = graph.node("Gather", [graph.constant("codebook", book), "codes"])  # [rows, columns, size]
    x = graph.node("Unsqueeze", [graph.node("Transpose", [x], perm=[2, 0, 1]), graph.shape(0)])
    x = graph.conv(x, "post_quant_conv")
    x = graph.conv(x, "decoder.conv_in", pads=[1] * 4)
    x = _residual(graph, x, "decoder.mid.0")
    x = _attention(graph, x, "decoder.mid.1")
    x = _residual(graph, x, "decoder.mid.2")
    for level in count():
        at = f"decoder.conv_blocks.{level}"
        if f"{at}.res.0.norm1.weight" not in graph.tensors:
            break
        x = _level(graph, x, at)
    x = graph.conv(_swish(graph, _normed(graph, x, "decoder.norm_out")), "decoder.conv_out", pads=[1] * 4)
    x = graph.node("Squeeze", [x, graph.shape(0)])
    graph.node("Transpose", [x], ["picture"], perm=[1, 2, 0])
    graph.output("picture", FLOAT, ["height", "width", 3])
    image = config.get("image")
    found = {"first": config.get("first", 0), "size": len(book), "image": image, "codebook": book}
    if isinstance(image, dict):
        twice = sum(name.endswith("upsample.conv.weight") for name in graph.tensors.names)
        pixels = int(image.get("rows", 0)) * int(image.get("columns", 0)) << 2 * twice
        found["working"] = 4 * pixels * len(graph.tensors("decoder.norm_out.weight"))
    if "nothing" in graph.tensors:
        found["nothing"] = graph.tensors("nothing")
    return found


def write_patches(graph: CodeGraph, config: Mapping[str, Any]) -> dict[str, Any]:
    """Add a decoder whose codes are patches of pixels, ``codebook`` [size, side * side * 3]; as ``write``."""
    book = graph.tensors("codebook").astype(np.float32)
    image = config.get("image") or {}
    rows, columns, side = int(image.get("rows", 0)), int(image.get("columns", 0)), math.isqrt(book.shape[1] // 3)
    graph.input("codes", INT64, [rows, columns])
    x = graph.node("Gather", [graph.constant("codebook", book), "codes"])
    x = graph.node("Reshape", [x, graph.shape(rows, columns, side, side, 3)])
    x = graph.node("Transpose", [x], perm=[0, 2, 1, 3, 4])
    graph.node("Reshape", [x, graph.shape(rows * side, columns * side, 3)], ["picture"])
    graph.output("picture", FLOAT, [rows * side, columns * side, 3])
    return {"first": config.get("first", 0), "size": len(book), "image": image, "codebook": book}


def codebook(graph: CodeGraph, config: Mapping[str, Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Read the vectors of all codes, [size, width], normalized if the decoder uses them so."""
    book = graph.tensors("quantize.embedding.weight")
    if config.get("codebook_l2_norm", True):
        book = book / np.maximum(np.linalg.norm(book, axis=1, keepdims=True), 1e-12)
    return book.astype(np.float32)


def _level(graph: CodeGraph, x: str, at: str) -> str:
    for number in count():
        if f"{at}.res.{number}.norm1.weight" not in graph.tensors:
            break
        x = _residual(graph, x, f"{at}.res.{number}")
        if f"{at}.attn.{number}.norm.weight" in graph.tensors:
            x = _attention(graph, x, f"{at}.attn.{number}")
    if f"{at}.upsample.conv.weight" not in graph.tensors:
        return x
    twice = graph.constant("twice", np.array([1, 1, 2, 2], np.float32))
    how = {"mode": "nearest", "nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"}
    return graph.conv(graph.node("Resize", [x, "", twice], **how), f"{at}.upsample.conv", pads=[1] * 4)


def _residual(graph: CodeGraph, x: str, at: str) -> str:
    y = graph.conv(_swish(graph, _normed(graph, x, f"{at}.norm1")), f"{at}.conv1", pads=[1] * 4)
    y = graph.conv(_swish(graph, _normed(graph, y, f"{at}.norm2")), f"{at}.conv2", pads=[1] * 4)
    if f"{at}.nin_shortcut.weight" in graph.tensors:
        x = graph.conv(x, f"{at}.nin_shortcut")
    return graph.node("Add", [x, y])


def _attention(graph: CodeGraph, x: str, at: str) -> str:
    """Add attention over all places of an image, with one head as wide as its channels."""
    h = _normed(graph, x, f"{at}.norm")
    channels = len(graph.tensors(f"{at}.norm.weight"))
    # [1, channels, rows, columns] -> [1, channels, places]
    flat = [graph.node("Reshape", [graph.conv(h, f"{at}.{name}"), graph.shape(1, channels, -1)]) for name in "qkv"]
    scores = graph.node("MatMul", [graph.node("Transpose", [flat[0]], perm=[0, 2, 1]), flat[1]])
    scale = graph.constant(f"scale_{channels}", np.array(channels**-0.5, np.float32))
    seen = graph.node("Softmax", [graph.node("Mul", [scores, scale])], axis=2)  # [1, places, places]
    y = graph.node("MatMul", [flat[2], graph.node("Transpose", [seen], perm=[0, 2, 1])])
    y = graph.node("Reshape", [y, graph.node("Shape", [x])])
    return graph.node("Add", [x, graph.conv(y, f"{at}.proj_out")])


def _normed(graph: CodeGraph, x: str, at: str) -> str:
    """Add a group norm: an instance norm, which ONNX Runtime has, then the weights."""
    weights = [graph.tensors(f"{at}.{name}").reshape(1, -1, 1, 1) for name in ("weight", "bias")]
    ones, zeros = (graph.constant(f"norm_{each:.0f}", np.full(GROUPS, each, np.float32)) for each in (1, 0))
    grouped = graph.node("Reshape", [x, graph.shape(1, GROUPS, -1)])
    y = graph.node("InstanceNormalization", [grouped, ones, zeros], epsilon=EPSILON)
    y = graph.node("Reshape", [y, graph.node("Shape", [x])])
    weight, bias = (graph.constant(f"{at}.{kind}", each) for kind, each in zip(("w", "b"), weights, strict=True))
    return graph.node("Add", [graph.node("Mul", [y, weight]), bias])


def _swish(graph: CodeGraph, x: str) -> str:
    return graph.node("Mul", [x, graph.node("Sigmoid", [x])])
