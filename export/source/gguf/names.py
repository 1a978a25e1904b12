"""Names of tensors in GGUF files and in Hugging Face checkpoints."""

from __future__ import annotations

import re
from pathlib import Path

from edgespec.errors import UnsupportedModel

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SANDWICH = {  # gemma 2 and 3: norms before and after each sub-layer
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
SANDWICHED = ("gemma2", "gemma3_text")
ROPE_FACTORS = "rope_freqs.weight"  # becomes part of the configuration


def hf_name(file: Path, name: str, model_type: str) -> str | None:
    """The Hugging Face name of a tensor; None = it is none of the checkpoint's.

    Raises:
        UnsupportedModel: a tensor that models of this type do not have.
    """
    if name == ROPE_FACTORS:
        return None
    layer = LAYER | (SANDWICH if model_type in SANDWICHED else {})
    if (match := re.fullmatch(r"(\w+)\.(weight|bias)", name)) and match[1] in TOP:
        return f"{TOP[match[1]]}.{match[2]}"
    if (match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)) and match[2] in layer:
        return f"model.layers.{match[1]}.{layer[match[2]]}.{match[3]}"
    raise UnsupportedModel(
        f"{file}: tensor {name} is unknown for model type {model_type}: the file needs more than this model type has",
        "export from the Hugging Face checkpoint",
    )
