"""Small configurations of Llama and Qwen2, with the seeds and dtypes behind their reference logits."""

from __future__ import annotations

from typing import Any, Literal

Config = dict[str, Any]
DType = Literal["float32", "float16", "bfloat16"]

BOS, EOS = 0, 1
MAX_POSITIONS = 512

_SPECIAL = {"bos_token_id": BOS, "eos_token_id": EOS, "hidden_act": "silu", "max_position_embeddings": MAX_POSITIONS}

CORE: dict[str, Config] = {
    # Tied, grouped-query attention; head_dim (16) is left to be derived.
    "llama_tied_gqa": {
        "model_type": "llama",
        "vocab_size": 160,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        **_SPECIAL,
    },
    # Untied, multi-head (num_key_value_heads is left out), heads * head_dim = 2 * hidden, llama3 rope the old way.
    "llama_untied_mha_llama3_legacy": {
        "model_type": "llama",
        "vocab_size": 200,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "tie_word_embeddings": False,
        **_SPECIAL,
    },
    # Tied, three queries per key, llama3 rope the new way.
    "llama_tied_llama3_parameters": {
        "model_type": "llama",
        "vocab_size": 128,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 96,
        },
        "tie_word_embeddings": True,
        **_SPECIAL,
    },
    # Untied, a bias on all seven projections, one key head for all, an intermediate size off the grid of 32.
    "llama_biases_mqa": {
        "model_type": "llama",
        "vocab_size": 144,
        "hidden_size": 96,
        "intermediate_size": 100,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "attention_bias": True,
        "mlp_bias": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        **_SPECIAL,
    },
    # Tied, 14 heads on 2 as in Qwen2-0.5B, a hidden size off the grid of 32, a sliding window that is switched off.
    "qwen2_tied_gqa7": {
        "model_type": "qwen2",
        "vocab_size": 200,
        "hidden_size": 112,
        "intermediate_size": 144,
        "num_hidden_layers": 2,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "use_sliding_window": False,
        "sliding_window": 16,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
        **_SPECIAL,
    },
    # Untied, an epsilon and a theta far from the defaults, plain rope the new way.
    "qwen2_untied": {
        "model_type": "qwen2",
        "vocab_size": 136,
        "hidden_size": 64,
        "intermediate_size": 120,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
        "tie_word_embeddings": False,
        **_SPECIAL,
    },
}

SEEDS: dict[str, int] = {
    "llama_tied_gqa": 3,
    "llama_untied_mha_llama3_legacy": 3,
    "llama_tied_llama3_parameters": 30,
    "llama_biases_mqa": 1,
    "qwen2_tied_gqa7": 34,
    "qwen2_untied": 37,
}
"""The seed behind the reference logits of each configuration."""

DTYPES: dict[str, DType] = {
    "llama_tied_gqa": "float32",
    "llama_untied_mha_llama3_legacy": "float32",
    "llama_tied_llama3_parameters": "bfloat16",
    "llama_biases_mqa": "float32",
    "qwen2_tied_gqa7": "bfloat16",
    "qwen2_untied": "float16",
}
"""The dtype of the stored weights behind the reference logits (computed in float32, after widening)."""
