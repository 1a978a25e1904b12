"""Small GGUF files, written as llama.cpp's converter writes them from a Hugging Face checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, RopeScalingType
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
"""Names for models with norms before and after each sub-layer."""

Change = Callable[[GGUFWriter], object]
INNER = 512  # numbers inside an MLP whose matrices have types of their own


def gguf_name(name: str, model_type: str) -> str:
    """Give the name of a Hugging Face tensor in a GGUF file."""
    names = SANDWICH if model_type in ("gemma2", "gemma3_text") else NAMES
    module, kind = name.rsplit(".", 1)
    if module in names:
        return f"{names[module]}.{kind}"
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{names[rest]}.{kind}"


def interleaved(value: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorder rows of queries or keys as in llama.cpp: the two of a rotary pair are adjacent."""
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


T5_NAMES = {
    "shared": "token_embd", "lm_head": "output", "encoder.final_layer_norm": "enc.output_norm",
    "decoder.final_layer_norm": "dec.output_norm", "SelfAttention.relative_attention_bias": "attn_rel_b",
    **{f"SelfAttention.{part}": f"attn_{part}" for part in "qkvo"}, "layer.0.layer_norm": "attn_norm",
    **{f"EncDecAttention.{part}": f"cross_attn_{part}" for part in "qkvo"}, "layer.1.layer_norm": "cross_attn_norm",
    "DenseReluDense.wi": "ffn_up", "DenseReluDense.wi_0": "ffn_gate", "DenseReluDense.wi_1": "ffn_up",
    "DenseReluDense.wo": "ffn_down",
}  # fmt: skip


def t5_gguf_name(name: str) -> str:
    """Give the name of a tensor of Hugging Face's T5 in a GGUF file."""
    module = name.removesuffix(".weight")
    if module in T5_NAMES:
        return f"{T5_NAMES[module]}.weight"
    side, _, layer, inner = module.split(".", 3)
    last = f"layer.{1 if side == 'encoder' else 2}."
    part = "ffn_norm" if inner == f"{last}layer_norm" else T5_NAMES.get(inner) or T5_NAMES[inner.split(".", 2)[2]]
    return f"{side[:3]}.blk.{layer}.{part}.weight"


def write_t5(file: Path, config: Mapping[str, Any], weights: Mapping[str, NDArray[np.float32]], model: Any) -> None:
    """Write a T5 with a unigram tokenizer.

    Args:
        file: to write.
        config: config.json.
        weights: by Hugging Face's names.
        model: a sentencepiece ModelProto, filled with unused tokens up to the size of the embedding.
    """
    writer, unused = GGUFWriter(file, "t5"), config["vocab_size"] - len(model.pieces)
    writer.add_context_length(config.get("n_positions", 512))
    writer.add_embedding_length(config["d_model"])
    writer.add_feed_forward_length(config["d_ff"])
    writer.add_block_count(config["num_layers"])
    writer.add_decoder_block_count(config["num_decoder_layers"])
    writer.add_head_count(config["num_heads"])
    writer.add_key_length(config["d_kv"])
    writer.add_value_length(config["d_kv"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    writer.add_relative_attn_buckets_count(config["relative_attention_num_buckets"])
    writer.add_decoder_start_token_id(config["decoder_start_token_id"])
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*(piece.piece for piece in model.pieces), *(f"[PAD{at}]" for at in range(unused))])
    writer.add_token_scores([*(piece.score for piece in model.pieces), *[-1000.0] * unused])
    writer.add_token_types([*(piece.type for piece in model.pieces), *[5] * unused])
    writer.add_add_space_prefix(model.normalizer_spec.add_dummy_prefix)
    writer.add_remove_extra_whitespaces(model.normalizer_spec.remove_extra_whitespaces)
    writer.add_precompiled_charsmap(model.normalizer_spec.precompiled_charsmap)
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_unk_token_id(model.trainer_spec.unk_id)
    for name, value in weights.items():
        writer.add_tensor(t5_gguf_name(name), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_blocks(name: str, n: int, k: int) -> NDArray[np.uint8]:  # [n, bytes]
    """Make rows of a type that the package cannot write: random codes with sane scales."""
    size, length = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    random = np.random.default_rng(len(name) + n)
    if name == "F16":
        return random.normal(0, 0.05, (n, k)).astype("<f2").view(np.uint8)
    blocks = random.integers(0, 256, (n, k // size, length), np.uint8)
    if name == "MXFP4":
        blocks[..., 0] = random.integers(118, 122, blocks.shape[:2])
        return blocks.reshape(n, -1)
    least = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(name, (0,))
    for at in least:
        scales = random.uniform(1e-4, 4e-4, (*blocks.shape[:2], 1))
        blocks[..., at : at + 2] = scales.astype("<f2").view(np.uint8)
    return blocks.reshape(n, -1)


def with_types(**types: str) -> Change:
    """Replace matrices of a file by random ones of other types, names having __ for a point.

    An MLP has INNER numbers inside, so that one matrix of a layer has whole blocks of 256.
    """

    def change(writer: GGUFWriter) -> None:
        tensors = writer.tensors[0]
        writer.kv_data[0]["llama.feed_forward_length"].value = INNER
        wanted = {name.replace("__", "."): kind for name, kind in types.items()}
        for name in [name for name in tensors if "ffn_" in name and "norm" not in name]:
            wanted.setdefault(name, "Q8_0")
        for name, kind in wanted.items():
            n, k = tensors.pop(name).shape
            n, k = (n, INNER) if "ffn_down" in name else (INNER, k) if "ffn_" in name else (n, k)
            writer.add_tensor(name, random_blocks(kind, n, k), raw_dtype=GGMLQuantizationType[kind])

    return change
