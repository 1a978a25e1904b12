"""ONNX exports in optimum's form, of small llama checkpoints, written without optimum or torch.

Ports, names and the shape of the computation are those of ``optimum-cli export onnx --task text-generation-with-past``:
keys and values are concatenated, the causal mask is computed from sizes, a tied LM head is the transposed embedding.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from tests.support import hf

MODEL_TYPE = "harbour"  # of the exports' config.json: an architecture that edgespec does not emit


class _Graph:
    """Collects nodes and initializers."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self._count = 0

    def const(self, value: Any, dtype: Any = np.int64) -> str:
        self._count += 1
        return self.weight(f"const_{self._count}", np.asarray(value, dtype))

    def weight(self, name: str, value: NDArray[Any]) -> str:
        self.initializers.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def add(self, kind: str, *inputs: str, name: str = "", out: str = "", count: int = 1, **attributes: Any) -> Any:
        self._count += 1
        outputs = [out or f"{name or kind}_{self._count}_output_{at}" for at in range(count)]
        self.nodes.append(helper.make_node(kind, inputs, outputs, name=name or f"{kind}_{self._count}", **attributes))
        return outputs[0] if count == 1 else outputs


def llama_graph(config: hf.Config, seed: int, positions: bool = True, einsum: bool = False) -> onnx.ModelProto:
    """Give the decoder of ``hf.write_checkpoint(folder, config, seed)``.

    ``positions``: with an input position_ids; ``einsum``: attention's products as Einsum.
    """
    weights, graph = hf.weights(config, seed), _Graph()
    add, const = graph.add, graph.const
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    dim = config.get("head_dim") or config["hidden_size"] // heads

    def linear(x: str, layer: int, name: str) -> str:
        where = f"model.layers.{layer}.{name}"
        weight = graph.weight(f"onnx::MatMul_{layer}_{name}", weights[f"{where}.weight"].T)
        made: str = add(
            "MatMul", x, weight, name="/" + where.replace(".", "/").replace("layers/", "layers.") + "/MatMul"
        )
        return made

    def norm(x: str, name: str) -> str:
        mean = add("ReduceMean", add("Mul", x, x), const([-1]), keepdims=1)
        root = add("Sqrt", add("Add", mean, const(config["rms_norm_eps"], np.float32)))
        scaled: str = add("Mul", add("Div", x, root), graph.weight(name, weights[name]))
        return scaled

    def split(x: str, count: int) -> str:  # [1, s, count * dim] -> [1, count, s, dim]
        made: str = add("Transpose", add("Reshape", x, const([0, 0, count, dim])), perm=[0, 2, 1, 3])
        return made

    def rotate(x: str) -> str:
        first, second = add("Split", x, axis=-1, num_outputs=2, count=2)
        low = add("Sub", add("Mul", first, cos), add("Mul", second, sin))
        made: str = add("Concat", low, add("Add", add("Mul", second, cos), add("Mul", first, sin)), axis=-1)
        return made

    def repeated(x: str) -> str:  # [1, kv_heads, T, dim] -> [1, heads, T, dim]
        if heads == kv_heads:
            return x
        wide = add("Concat", const([1, kv_heads, heads // kv_heads]), total, const([dim]), axis=0)
        made: str = add("Reshape", add("Expand", add("Unsqueeze", x, const([2])), wide), const([1, heads, -1, dim]))
        return made

    total = add("Shape", "attention_mask", start=1, end=2)  # [1]
    past = add("Shape", "past_key_values.0.key", start=2, end=3)  # [1]
    one = const(1)
    keys = add("Range", const(0), add("Squeeze", total), one)  # [T]
    rows = add("Range", add("Squeeze", past), add("Squeeze", total), one)  # [s]: their positions
    hidden = add("Greater", add("Unsqueeze", keys, const([0])), add("Unsqueeze", rows, const([1])))  # [s, T]
    lowest = const(np.finfo(np.float32).min, np.float32)
    mask = add("Where", hidden, lowest, const(0, np.float32))
    at = "position_ids" if positions else add("Unsqueeze", rows, const([0]))  # [1, s]
    inverse = config["rope_theta"] ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    angles = add(
        "Mul", add("Unsqueeze", add("Cast", at, to=TensorProto.FLOAT), const([1, 3])), const(inverse, np.float32)
    )
    cos, sin = add("Cos", angles), add("Sin", angles)  # [1, 1, s, dim / 2]

    x = add("Gather", graph.weight("model.embed_tokens.weight", weights["model.embed_tokens.weight"]), "input_ids")
    for layer in range(config["num_hidden_layers"]):
        where = f"model.layers.{layer}"
        h = norm(x, f"{where}.input_layernorm.weight")
        q = rotate(split(linear(h, layer, "self_attn.q_proj"), heads))
        k = rotate(split(linear(h, layer, "self_attn.k_proj"), kv_heads))
        v = split(linear(h, layer, "self_attn.v_proj"), kv_heads)
        k, v = (
            add("Concat", f"past_key_values.{layer}.{kind}", new, axis=2, out=f"present.{layer}.{kind}")
            for kind, new in (("key", k), ("value", v))
        )
        if einsum:
            scores = add("Einsum", q, repeated(k), equation="bhsd,bhtd->bhst")
        else:
            scores = add("MatMul", q, add("Transpose", repeated(k), perm=[0, 1, 3, 2]))
        scores = add("Add", add("Mul", scores, const(1 / math.sqrt(dim), np.float32)), mask)
        seen = add("Softmax", scores, axis=-1)
        if einsum:
            mixed = add("Einsum", seen, repeated(v), equation="bhst,bhtd->bshd")
        else:
            mixed = add("Transpose", add("MatMul", seen, repeated(v)), perm=[0, 2, 1, 3])
        x = add("Add", x, linear(add("Reshape", mixed, const([0, 0, heads * dim])), layer, "self_attn.o_proj"))
        h = norm(x, f"{where}.post_attention_layernorm.weight")
        gate = linear(h, layer, "mlp.gate_proj")
        inner = add("Mul", add("Mul", gate, add("Sigmoid", gate)), linear(h, layer, "mlp.up_proj"))
        x = add("Add", x, linear(inner, layer, "mlp.down_proj"))
    head = add("Transpose", "model.embed_tokens.weight", perm=[1, 0])
    add("MatMul", norm(x, "model.norm.weight"), head, name="/lm_head/MatMul", out="logits")

    inputs, outputs = _ports(config["num_hidden_layers"], kv_heads, dim, config["vocab_size"], positions)
    made = helper.make_graph(graph.nodes, "main_graph", inputs, outputs, graph.initializers)
    return helper.make_model(
        made, opset_imports=[helper.make_opsetid("", 18)], ir_version=8, producer_name="pytorch", producer_version="2.0"
    )


def _ports(layers: int, kv_heads: int, dim: int, vocab: int, positions: bool) -> tuple[list[Any], list[Any]]:
    """Describe the inputs and outputs of a decoder."""

    def value(name: str, kind: int, *shape: int | str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, ["batch_size", *shape])

    width = "past_sequence_length + sequence_length"
    inputs = [
        value("input_ids", TensorProto.INT64, "sequence_length"),
        value("attention_mask", TensorProto.INT64, width),
    ]
    outputs = [value("logits", TensorProto.FLOAT, "sequence_length", vocab)]
    for layer in range(layers):
        for kind in ("key", "value"):
            inputs.append(
                value(f"past_key_values.{layer}.{kind}", TensorProto.FLOAT, kv_heads, "past_sequence_length", dim)
            )
            outputs.append(value(f"present.{layer}.{kind}", TensorProto.FLOAT, kv_heads, width, dim))
    if positions:
        inputs.append(value("position_ids", TensorProto.INT64, "sequence_length"))
    return inputs, outputs


def write_export(
    folder: Path,
    config: hf.Config,
    seed: int,
    *,
    positions: bool = True,
    einsum: bool = False,
    external: bool = False,
    inside: str = "",
    changes: dict[str, Any] | None = None,
) -> Path:
    """Write the folder of an export and return it.

    Args:
        folder: where; it is made.
        config: of a llama, tied, without biases.
        seed: of the weights.
        positions: whether the graph has an input position_ids.
        einsum: whether attention's products are Einsum nodes.
        external: the weights in a separate file, ``model.onnx_data``.
        inside: the sub-folder of the graph.
        changes: what config.json says otherwise.
    """
    (folder / inside).mkdir(parents=True, exist_ok=True)
    model = llama_graph(config, seed, positions, einsum)
    data = {"save_as_external_data": True, "location": "model.onnx_data", "size_threshold": 1024} if external else {}
    onnx.save_model(model, str(folder / inside / "model.onnx"), **data)
    described = {"architectures": ["HarbourForCausalLM"], **config, "model_type": MODEL_TYPE} | (changes or {})
    (folder / "config.json").write_text(json.dumps(described), "utf-8")
    hf.write_tokenizer(folder, config)
    return folder
