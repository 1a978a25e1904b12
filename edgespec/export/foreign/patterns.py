"""Operations over rows that native operators have, as other exporters write them."""

from __future__ import annotations

from collections.abc import Callable
from math import erf

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from edgespec.export.foreign.attention import Norm
from edgespec.export.foreign.values import Values, attributes

_ELEMENTWISE = {"Add", "Cast", "Clip", "Div", "Erf", "Exp", "Gelu", "Identity", "Max", "Min", "Mul", "Neg", "Pow",
                "Relu", "Sigmoid", "Sub", "Swish", "Tanh"}  # fmt: skip
_GRID = np.linspace(-9, 9, 577)  # where functions are compared
ACTIVATIONS: dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * (1 + np.vectorize(erf)(x / np.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}
"""Functions of a number, by the names of the steps' field ``fn``."""
_CLOSE = 2e-6


def find_norms(values: Values) -> dict[str, Norm]:
    """Return the norms of a graph along the last axis, by the values that they make."""
    found = {}
    for node in values.graph.node:
        norm = _layer_norm(values, node) if node.op_type == "LayerNormalization" else _norm(values, node)
        if norm is not None:
            found[node.output[0]] = norm
    return found


def _layer_norm(values: Values, node: onnx.NodeProto) -> Norm | None:
    facts = attributes(node)
    x, weight, bias = [*node.input, ""][:3]
    size = _last(values, x)
    if node.domain or size is None or facts.get("axis", -1) not in (-1, len(values.dims[x]) - 1):
        return None
    if not values.vector(weight, size) or (bias and not values.vector(bias, size)):
        return None
    return Norm(x, weight, float(facts.get("epsilon", 1e-5)), bias or None, centered=True)


def _norm(values: Values, node: onnx.NodeProto) -> Norm | None:
    """Recognize the last product of a root-mean-square norm."""
    for weight, scaled in values.either(node.output[0], "Mul"):
        tensor = values.tensors.get(weight)
        if tensor is None or tensor.data_type != TensorProto.FLOAT or len(tensor.dims) != 1:
            continue
        for value, root in _divided(values, scaled):
            for eps, mean in values.either(root.input[0], "Add"):
                number = values.number(eps)
                if number is None or not _is_mean(values, mean, value) or _last(values, value) != tensor.dims[0]:
                    continue
                return Norm(value, weight, number)
    return None


def _last(values: Values, name: str) -> int | None:
    """Return the size of a value's last axis."""
    dims = values.dims.get(name, ())
    return int(dims[-1].dim_value) or None if len(dims) else None


def _divided(values: Values, name: str) -> list[tuple[str, onnx.NodeProto]]:
    """List what a value may be: another one divided by a square root, and that root."""
    node, found = values.made.get(name), []
    if node is not None and node.op_type == "Div":
        found = [(node.input[0], values.made.get(node.input[1]))]
    for value, inverse in values.either(name, "Mul"):
        above = values.made.get(inverse)
        if above is not None and above.op_type == "Reciprocal":
            found.append((value, values.made.get(above.input[0])))
    return [(value, root) for value, root in found if root is not None and root.op_type == "Sqrt"]


def _is_mean(values: Values, mean: str, value: str) -> bool:
    """Whether a value is the mean of another's squares along the last axis."""
    node = values.made.get(mean)
    if node is None or node.op_type != "ReduceMean" or len(node.input) != 2 or not attributes(node).get("keepdims", 1):
        return False
    axes, power = values.tensors.get(node.input[1]), values.made.get(node.input[0])
    if axes is None or numpy_helper.to_array(axes).ravel().tolist() != [-1] or power is None:
        return False
    if power.op_type == "Mul":
        return list(power.input) == [value, value]
    return power.op_type == "Pow" and power.input[0] == value and values.number(power.input[1]) == 2


def activation(values: Values, name: str) -> tuple[str, str] | None:
    """Recognize a function of every number of a value -> the function, and the value."""
    width = values.width(name)
    leaves, seen, stack = set(), {name}, [name]
    while stack:
        at = stack.pop()
        node = values.made.get(at)
        if (
            node is None
            or node.domain
            or node.op_type not in _ELEMENTWISE
            or (at != name and values.width(at) != width)
        ):
            leaves.add(at)
            if len(leaves) > 1:
                return None
            continue
        for one in node.input:
            if not one or values.number(one) is not None or one in seen:
                continue
            seen.add(one)
            stack.append(one)
    if width is None or len(leaves) != 1 or name in leaves or values.width(leaf := next(iter(leaves))) != width:
        return None
    x = np.resize(_GRID, (-(-len(_GRID) // width), width)).astype(np.float32)
    got = values.compute(name, 0, len(x), {leaf: x if values.rank(leaf) == 2 else x[None]})
    if got is None or got.size != x.size:
        return None
    wide = x.astype(np.float64)
    for fn, function in ACTIVATIONS.items():
        if np.allclose(got.reshape(x.shape), function(wide), rtol=_CLOSE, atol=_CLOSE):
            return fn, leaf
    return None
