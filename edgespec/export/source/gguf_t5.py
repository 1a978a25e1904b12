"""T5 and its kin in a GGUF file: what config.json would say, and its tensors' names as Hugging Face has them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

OUTER = {
    "token_embd": "shared",
    "output": "lm_head",
    "enc.output_norm": "encoder.final_layer_norm",
    "dec.output_norm": "decoder.final_layer_norm",
}
OWN, CROSSED = "layer.0.SelfAttention", "layer.1.EncDecAttention"
INNER = {
    "attn_norm": "layer.0.layer_norm",
    **{f"attn_{part}": f"{OWN}.{part}" for part in "qkvo"},
    "attn_rel_b": f"{OWN}.relative_attention_bias",
    "cross_attn_norm": "layer.1.layer_norm",
    **{f"cross_attn_{part}": f"{CROSSED}.{part}" for part in "qkvo"},
    "cross_attn_rel_b": f"{CROSSED}.relative_attention_bias",  # of old files; nothing reads it
}
LAST = {"ffn_norm": "layer_norm", "ffn_gate": "DenseReluDense.wi_0", "ffn_down": "DenseReluDense.wo"}


def t5_name(name: str, config: Mapping[str, Any]) -> str | None:
    """Return the Hugging Face name of a tensor; None = an unknown name."""
    if (match := re.fullmatch(r"(.+)\.weight", name)) and match[1] in OUTER:
        return f"{OUTER[match[1]]}.weight"
    if (match := re.fullmatch(r"(enc|dec)\.blk\.(\d+)\.(\w+)\.weight", name)) is None:
        return None
    side, layer, part = match.groups()
    gated = config["feed_forward_proj"] != "relu"
    last = LAST | {"ffn_up": "DenseReluDense.wi_1" if gated else "DenseReluDense.wi"}
    inner = INNER.get(part) or (f"layer.{1 if side == 'enc' else 2}.{last[part]}" if part in last else None)
    return inner and f"{side}oder.block.{layer}.{inner}.weight"


def t5_config(number: Callable[..., Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration.

    Args:
        number: returns a positive number of the metadata, or the default given after its name.
        tensors: by the file's own names.
    """
    layers = number("block_count")
    each = "enc.blk.1.attn_rel_b.weight" in tensors  # every layer has a table of distances: umT5
    return {
        "architectures": ["UMT5ForConditionalGeneration" if each else "T5ForConditionalGeneration"],
        "model_type": "umt5" if each else "t5",
        "is_encoder_decoder": True,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "d_model": number("embedding_length"),
        "d_ff": number("feed_forward_length"),
        "d_kv": number("attention.key_length"),
        "num_heads": number("attention.head_count"),
        "num_layers": layers,
        "num_decoder_layers": number("decoder_block_count", layers),
        "n_positions": number("context_length"),
        "relative_attention_num_buckets": number("attention.relative_buckets_count"),
        "layer_norm_epsilon": float(f"{number('attention.layer_norm_rms_epsilon'):.7g}"),
        "feed_forward_proj": "gated-gelu" if "enc.blk.0.ffn_gate.weight" in tensors else "relu",
        "tie_word_embeddings": "output.weight" not in tensors,
    }
