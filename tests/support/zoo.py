"""Small configurations of every architecture but llama and qwen2, with the quirks that set each apart.

Two or more an architecture.  Their tensors' names and shapes are transformers' own
(tests/data/reference/shapes.json, made by tools/make_reference_logits.py).
"""

from __future__ import annotations

from tests.support.case import PLAIN, YARN, Case, config
from tests.support.zoo_later import LATER

CASES: dict[str, Case] = {
    # A window shorter than the text, heads * head_dim = 2 * hidden.
    "mistral_window": Case(
        config("mistral", num_key_value_heads=2, head_dim=32, sliding_window=16, rms_norm_eps=1e-5, rope_theta=1e4,
                tie_word_embeddings=False),
        seed=2,
        dtype="bfloat16",
        long=True,
    ),
    # No window, yarn scaling the new way.
    "mistral_yarn": Case(
        config("mistral", num_key_value_heads=4, sliding_window=None, rope_parameters=YARN, tie_word_embeddings=True),
        seed=4,
        long=True,
    ),
    # Norms of heads, tied.
    "qwen3_tied": Case(
        config("qwen3", num_key_value_heads=2, head_dim=32, rope_theta=1e6, tie_word_embeddings=True),
        seed=5,
        dtype="bfloat16",
    ),
    # Biases, windows in the upper layers, linear scaling the old way.
    "qwen3_window_linear": Case(
        config("qwen3", num_key_value_heads=1, head_dim=16, attention_bias=True, use_sliding_window=True,
                sliding_window=12, max_window_layers=1, rope_theta=1e4, rope_scaling={"type": "linear", "factor": 4.0},
                tie_word_embeddings=False),
        seed=13,
        long=True,
    ),
    # One key head for all, heads * head_dim != hidden.
    "gemma_mqa": Case(
        config("gemma", num_key_value_heads=1, head_dim=32, hidden_act="gelu_pytorch_tanh",
                hidden_activation="gelu_pytorch_tanh", rms_norm_eps=1e-6, tie_word_embeddings=True),
        seed=2,
        scale=2.0,
        boost=4.0,
    ),
    # What the first release left out of config.json; a hidden size off the grid of 32.
    "gemma_short_config": Case(
        config("gemma", hidden_size=80, num_attention_heads=5, num_key_value_heads=5, head_dim=16),
        seed=13,
        dtype="float16",
        boost=4.0,
    ),
    # Caps that bite, windows in every other layer.
    "gemma2_caps": Case(
        config("gemma2", num_key_value_heads=2, head_dim=32, sliding_window=16, query_pre_attn_scalar=24,
                attn_logit_softcapping=2.0, final_logit_softcapping=6.0, tie_word_embeddings=True),
        seed=74,
        scale=2.5,
        long=True,
        boost=8.0,
    ),
    # No caps, windows where layer_types says.
    "gemma2_layer_types": Case(
        config("gemma2", num_key_value_heads=4, head_dim=16, sliding_window=10, query_pre_attn_scalar=16,
                attn_logit_softcapping=None, final_logit_softcapping=None,
                layer_types=["full_attention", "sliding_attention", "sliding_attention"]),
        seed=5,
        dtype="bfloat16",
        boost=4.0,
    ),
    # A local layer to a global one, scaled global rotation, the old way.
    "gemma3_old": Case(
        config("gemma3_text", num_hidden_layers=4, num_key_value_heads=1, head_dim=32, sliding_window=16,
                sliding_window_pattern=2, query_pre_attn_scalar=32, rope_theta=1e6, rope_local_base_freq=1e4,
                rope_scaling={"rope_type": "linear", "factor": 8.0}, tie_word_embeddings=True),
        seed=8,
        long=True,
        boost=4.0,
    ),
    # The new way: rotations and windows by layer type.
    "gemma3_new": Case(
        config("gemma3_text", num_key_value_heads=2, head_dim=16, sliding_window=10, query_pre_attn_scalar=20,
                layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 5000.0},
                                 "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}),
        seed=8,
        dtype="bfloat16",
        boost=8.0,
    ),
    # The long factors: a context beyond what was trained.
    "phi3_long": Case(
        config("phi3", num_key_value_heads=2, original_max_position_embeddings=4, rope_theta=1e4,
                rope_scaling={"type": "longrope", "short_factor": [1.0 + 0.1 * i for i in range(8)],
                              "long_factor": [2.0 + 0.5 * i for i in range(8)], "attention_factor": 1.25},
                sliding_window=32, tie_word_embeddings=False),
        seed=4,
        dtype="bfloat16",
        long=True,
    ),
    # The short factors, chosen by a context within what was trained; three quarters of each head are turned.
    "phi3_short_partial": Case(
        config("phi3", num_attention_heads=2, num_key_value_heads=2, original_max_position_embeddings=96,
                partial_rotary_factor=0.75, rope_theta=1e4, sliding_window=None,
                rope_scaling={"type": "longrope", "short_factor": [1.0 + 0.1 * i for i in range(12)],
                              "long_factor": [2.0 + 0.5 * i for i in range(12)]},
                tie_word_embeddings=True),
        seed=1,
        context=96,
    ),
    # Every fourth layer is not told positions.
    "smollm3_interval": Case(
        config("smollm3", num_hidden_layers=4, num_key_value_heads=2, rope_theta=5e4, tie_word_embeddings=True),
        seed=1,
        dtype="bfloat16",
    ),
    # Which layers is said; windows in those without positions; biases.
    "smollm3_explicit": Case(
        config("smollm3", num_key_value_heads=1, no_rope_layers=[1, 0, 1], use_sliding_window=True, sliding_window=12,
                attention_bias=True, mlp_bias=True, rope_theta=1e4, tie_word_embeddings=False),
        seed=11,
        long=True,
    ),
    "olmo2_mha": Case(config("olmo2", rope_theta=5e5, tie_word_embeddings=False), seed=6, dtype="bfloat16", scale=3.0),
    "olmo2_gqa_tied": Case(
        config("olmo2", hidden_size=96, num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=True),
        seed=14,
        scale=2.0,
        boost=2.0,
    ),
    # Three layers with windows to one without, whose rotation alone is scaled.
    "olmo3_yarn": Case(
        config("olmo3", num_hidden_layers=4, num_key_value_heads=2, sliding_window=16,
                rope_parameters={"full_attention": YARN, "sliding_attention": PLAIN}, tie_word_embeddings=False),
        seed=12,
        scale=3.0,
        long=True,
    ),
    "olmo3_layer_types": Case(
        config("olmo3", num_key_value_heads=4, sliding_window=10,
                layer_types=["full_attention", "sliding_attention", "full_attention"], tie_word_embeddings=False),
        seed=9,
        scale=3.0,
    ),
    "granite_tied": Case(
        config("granite", num_key_value_heads=2, embedding_multiplier=3.0, logits_scaling=3.0,
                residual_multiplier=0.6, attention_multiplier=0.2, rms_norm_eps=1e-5, tie_word_embeddings=True),
        seed=1,
        dtype="bfloat16",
        scale=6.0,
        boost=8.0,
    ),
    "granite_biases": Case(
        config("granite", num_key_value_heads=4, embedding_multiplier=2.0, logits_scaling=0.5, residual_multiplier=1.3,
                attention_multiplier=0.3, attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
        seed=13,
        scale=1.0,
    ),
    # A quarter of each head is turned; biases on q, k, v.
    "stablelm_quarter": Case(
        config("stablelm", hidden_size=128, num_key_value_heads=4, use_qkv_bias=True, partial_rotary_factor=0.25,
                layer_norm_eps=1e-5, tie_word_embeddings=False),
        seed=6,
        dtype="float16",
    ),
    # Sub-layers side by side.
    "stablelm_parallel": Case(
        config("stablelm", num_key_value_heads=2, use_parallel_residual=True, partial_rotary_factor=0.5,
                rope_theta=500.0, tie_word_embeddings=True),
        seed=7,
    ),
    "gpt2_default": Case(
        {"model_type": "gpt2", "vocab_size": 160, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128,
         "bos_token_id": 0, "eos_token_id": 1},
        seed=32,
        boost=1.5,
    ),
    # An MLP of another width, another activation, heads of 8.
    "gpt2_inner": Case(
        {"model_type": "gpt2", "vocab_size": 160, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 512,
         "n_inner": 100, "activation_function": "relu", "layer_norm_epsilon": 1e-4, "bos_token_id": 0,
         "eos_token_id": 1},
        seed=95,
        boost=1.5,
        dtype="float16",
        long=True,
    ),
    "gpt_neox_parallel": Case(
        config("gpt_neox", hidden_size=128, rotary_pct=0.25, rotary_emb_base=10000, use_parallel_residual=True,
                hidden_act="gelu", layer_norm_eps=1e-5, tie_word_embeddings=False),
        seed=27,
        dtype="float16",
    ),
    # One sub-layer after the other, no biases in attention, whole heads turned, a type that changes nothing yet.
    "gpt_neox_serial": Case(
        config("gpt_neox", rotary_pct=1.0, rotary_emb_base=1000, use_parallel_residual=False, attention_bias=False,
                hidden_act="gelu_new", rope_scaling={"type": "dynamic", "factor": 2.0}, tie_word_embeddings=False),
        seed=3,
    ),
    "starcoder2_window": Case(
        config("starcoder2", num_key_value_heads=2, sliding_window=16, norm_epsilon=1e-5,
                hidden_act="gelu_pytorch_tanh", rope_theta=1e5, use_bias=True, tie_word_embeddings=True),
        seed=42,
        dtype="bfloat16",
        long=True,
    ),
    "starcoder2_no_bias": Case(
        config("starcoder2", num_key_value_heads=1, sliding_window=None, use_bias=False, tie_word_embeddings=False),
        seed=11,
    ),
    # One key head, one norm for both sub-layers.
    "falcon_7b": Case(
        config("falcon", multi_query=True, parallel_attn=True, new_decoder_architecture=False, bias=False,
                alibi=False, tie_word_embeddings=True),
        seed=2,
        dtype="bfloat16",
    ),
    # Groups of heads, a norm for each sub-layer.
    "falcon_40b": Case(
        config("falcon", num_kv_heads=2, new_decoder_architecture=True, parallel_attn=True, bias=False, alibi=False,
                tie_word_embeddings=False),
        seed=4,
    ),
    # One sub-layer after the other, a key head for each, biases.
    "falcon_serial": Case(
        config("falcon", multi_query=False, parallel_attn=False, new_decoder_architecture=False, bias=True,
                alibi=False, ffn_hidden_size=100, tie_word_embeddings=True),
        seed=26,
        boost=1.5,
    ),
}  # fmt: skip
CASES |= LATER
