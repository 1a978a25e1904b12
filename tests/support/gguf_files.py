"""Small GGUF files, written as llama.cpp's converter writes them from a Hugging Face checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType
from gguf.quants import quantize
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tests.support import hf

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
SANDWICH = NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
"""Of models with norms before and after each sub-layer."""

Change = Callable[[GGUFWriter], object]


def gguf_name(name: str, model_type: str) -> str:
    """Give the name of a Hugging Face tensor in a GGUF file."""
    names = SANDWICH if model_type in ("gemma2", "gemma3_text") else NAMES
    module, kind = name.rsplit(".", 1)
    if module in names:
        return f"{names[module]}.{kind}"
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{names[rest]}.{kind}"


def interleaved(value: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of queries or keys as llama.cpp wants them: the two of a rotary pair beside each other."""
    halves = value.reshape(heads, 2, len(value) // heads // 2, -1)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(value.shape))


def rope_factors(config: Mapping[str, Any]) -> NDArray[np.float32] | None:
    """Give what the converter stores of a llama3 scaling: by how much each rotary pair is slowed down."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type") != "llama3":
        return None
    theta = rope.get("rope_theta", config.get("rope_theta"))
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    found = []
    for at in range(0, config["head_dim"], 2):
        wavelength = 2 * math.pi * theta ** (at / config["head_dim"])
        if wavelength < original / high:
            found.append(1.0)
        elif wavelength > original / low:
            found.append(float(factor))
        else:
            smooth = (original / wavelength - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


def add_model(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    """Add the metadata of a decoder."""
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-6))
    writer.add_rope_freq_base(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])
    if config["model_type"] in ("gemma2", "gemma3_text"):
        writer.add_sliding_window(config["sliding_window"])
    if config.get("sliding_window_pattern"):
        writer.add_sliding_window_pattern(config["sliding_window_pattern"])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_rope_dimension_count(config["head_dim"])


def add_byte_level(writer: GGUFWriter, tokenizer: Tokenizer, size: int, add_bos: bool, pre: str = "gpt-2") -> None:
    """Add a byte-level BPE tokenizer, filled with unused tokens up to the size of the embedding."""
    described = json.loads(tokenizer.to_str())
    numbers = tokenizer.get_vocab()
    tokens = sorted(numbers, key=lambda token: numbers[token])
    special = {entry["content"] for entry in described["added_tokens"]}
    types = [3 if token in special else 1 for token in tokens]
    padding = [f"[PAD{at}]" for at in range(len(tokens), size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*tokens, *padding])
    writer.add_token_types([*types, *(5 for _ in padding)])
    writer.add_token_merges([" ".join(pair) for pair in described["model"]["merges"]])
    writer.add_bos_token_id(hf.BOS)
    writer.add_eos_token_id(hf.EOS)
    writer.add_add_bos_token(add_bos)


def write_gguf(
    file: Path,
    name: str,
    seed: int = 3,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    change: Change | None = None,
    tokenizer: Change | None = None,
    architecture: str | None = None,
) -> dict[str, NDArray[np.float32]]:
    """Write a GGUF file of the model `name` of `hf.CONFIGS`; give its tensors under their Hugging Face names.

    Args:
        file: to write.
        name: of the configuration.
        seed: of the weights.
        kind: ggml type of every matrix; those that have no whole blocks become float16, as in the converter.
        change: called with the writer before it writes.
        tokenizer: adds another tokenizer.
        architecture: instead of the configuration's.
    """
    config = dict(hf.CONFIGS[name])
    llama = config["model_type"] == "llama"
    writer = GGUFWriter(file, architecture or config["model_type"].removesuffix("_text"))
    add_model(writer, config)
    if tokenizer is None:
        add_byte_level(writer, hf.make_tokenizer(config["vocab_size"], llama), config["vocab_size"], llama)
    else:
        tokenizer(writer)
    if (factors := rope_factors(config)) is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    truth = {}
    key_heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    for tensor, value in hf.weights(hf.CONFIGS[name], seed).items():
        truth[tensor] = stored = value
        if llama and ".q_proj." in tensor:
            stored = interleaved(value, config["num_attention_heads"])
        elif llama and ".k_proj." in tensor:
            stored = interleaved(value, key_heads)
        elif config["model_type"].startswith("gemma") and tensor.endswith("norm.weight"):
            stored = value + np.float32(1)
            truth[tensor] = stored - np.float32(1)  # not always the same bits
        if value.ndim == 1 or kind == GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name(tensor, config["model_type"]), stored)
            continue
        whole = kind not in BLOCKS or value.shape[1] % 32 == 0
        its = kind if whole else GGMLQuantizationType.F16
        writer.add_tensor(gguf_name(tensor, config["model_type"]), quantize(stored, its), raw_dtype=its)
        truth[tensor] = rounded(value, its)
    if change is not None:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return truth


BLOCKS = (
    GGMLQuantizationType.Q4_0,
    GGMLQuantizationType.Q4_1,
    GGMLQuantizationType.Q5_0,
    GGMLQuantizationType.Q5_1,
    GGMLQuantizationType.Q8_0,
)
"""Types of blocks of 32 values that the package can also write."""


def rounded(value: NDArray[np.float32], kind: GGMLQuantizationType) -> NDArray[np.float32]:
    """Give what a matrix means once it is stored; rows do not depend on each other."""
    from gguf.quants import dequantize

    return np.asarray(dequantize(quantize(value, kind), kind), np.float32)
