"""More of tests/support/zoo.py: architectures with states: convolutions, delta rules, state spaces."""

from __future__ import annotations

from tests.support.case import PLAIN, Case, config

STATES: dict[str, Case] = {
    # A convolution in two of three layers; an MLP size adjusted as the first release does.
    "lfm2_conv": Case(
        config("lfm2", num_hidden_layers=4, num_key_value_heads=2, conv_L_cache=3, norm_eps=1e-5, rope_theta=1e6,
               layer_types=["conv", "conv", "full_attention", "conv"], block_auto_adjust_ff_dim=True,
               block_ff_dim=130, block_multiple_of=16, tie_embedding=True),
        dtype="bfloat16",
        boost=2.0,
        long=True,
        seed=2,
    ),
    # Biases, attention first, convolutions of four tokens.
    "lfm2_biases": Case(
        config("lfm2", num_hidden_layers=4, num_key_value_heads=4, conv_L_cache=4, conv_bias=True, rope_theta=1e4,
               full_attn_idxs=[0, 2], block_auto_adjust_ff_dim=False, tie_embedding=False),
        seed=3,
    ),
    # Convolutions of seven tokens, a window, a gate on each head, half of each head turned in full layers.
    "lfm3_default": Case(
        config("lfm3", num_hidden_layers=5, num_key_value_heads=2, head_dim=32, conv_L_cache=7, sliding_window=12,
               norm_eps=1e-5, tie_word_embeddings=True),
        dtype="bfloat16",
        long=True,
        seed=12,
    ),
    # Attention first, biases, neither gates nor norms around sub-layers, all channels turned.
    "lfm3_plain": Case(
        config("lfm3", num_hidden_layers=4, num_key_value_heads=4, head_dim=16, conv_L_cache=4, sliding_window=16,
               layer_types=["full_attention", "conv", "sliding_attention", "conv"], attention_bias=True, conv_bias=True,
               use_sandwich_norm=False, use_attention_gate=False,
               rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 500.0},
                                "sliding_attention": PLAIN}, tie_word_embeddings=False),
        seed=11,
    ),
    # Three delta rules to one gated attention; two value heads a key head, a quarter of each head turned.
    "qwen3_5_delta": Case(
        config("qwen3_5_text", num_hidden_layers=4, num_key_value_heads=2, head_dim=32, linear_num_key_heads=2,
               linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=32, linear_conv_kernel_dim=4,
               rope_parameters={**PLAIN, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1],
                                "mrope_interleaved": True}, tie_word_embeddings=True),
        dtype="bfloat16",
        long=True,
        seed=11,
    ),
    # Attention first, biases, three heads each with a key of its own, convolutions of three tokens.
    "qwen3_5_biases": Case(
        config("qwen3_5_text", num_key_value_heads=1, head_dim=16, attention_bias=True, linear_num_key_heads=3,
               linear_num_value_heads=3, linear_key_head_dim=32, linear_value_head_dim=16, linear_conv_kernel_dim=3,
               layer_types=["full_attention", "linear_attention", "linear_attention"],
               rope_parameters={**PLAIN, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
               tie_word_embeddings=False),
        seed=4,
    ),
    # Dense layers first, experts chosen by sigmoids, with a bias or without.
    "lfm2_moe_bias": Case(
        config("lfm2_moe", num_hidden_layers=4, num_key_value_heads=2, conv_L_cache=3, norm_eps=1e-5, rope_theta=1e6,
               layer_types=["conv", "full_attention", "conv", "conv"], num_dense_layers=1, moe_intermediate_size=32,
               num_experts=6, num_experts_per_tok=2, use_expert_bias=True, norm_topk_prob=True,
               routed_scaling_factor=1.5, tie_embedding=True),
        dtype="bfloat16",
        boost=2.0,
    ),
    "lfm2_moe_plain": Case(
        config("lfm2_moe", num_key_value_heads=4, conv_L_cache=4, conv_bias=True, norm_eps=1e-5, rope_theta=1e4,
               layer_types=["full_attention", "conv", "conv"], num_dense_layers=2, moe_intermediate_size=64,
               num_experts=5, num_experts_per_tok=3, use_expert_bias=False, norm_topk_prob=False,
               tie_embedding=False),
        seed=2,
    ),
    # Experts behind delta rules and gated attention; a shared expert as wide as one, or as two.
    "qwen3_5_moe_shared": Case(
        config("qwen3_5_moe_text", num_hidden_layers=4, num_key_value_heads=2, head_dim=32, linear_num_key_heads=2,
               linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16, linear_conv_kernel_dim=4,
               moe_intermediate_size=32, shared_expert_intermediate_size=32, num_experts=6, num_experts_per_tok=2,
               rope_parameters={**PLAIN, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1],
                                "mrope_interleaved": True}, tie_word_embeddings=True),
        dtype="bfloat16",
        seed=16,
    ),
    # Attention first, biases, a key head for each value head, weights that are not normed, a shared expert of two.
    "qwen3_5_moe_biases": Case(
        config("qwen3_5_moe_text", num_key_value_heads=4, head_dim=16, attention_bias=True, linear_num_key_heads=3,
               linear_num_value_heads=3, linear_key_head_dim=32, linear_value_head_dim=16, linear_conv_kernel_dim=3,
               layer_types=["full_attention", "linear_attention", "linear_attention"], moe_intermediate_size=32,
               shared_expert_intermediate_size=64, num_experts=4, num_experts_per_tok=3,
               rope_parameters={**PLAIN, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
               tie_word_embeddings=False),
        seed=14,
    ),
    "qwen3_next_dense": Case(
        config("qwen3_next", num_hidden_layers=4, num_key_value_heads=2, head_dim=32, linear_num_key_heads=2,
               linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=32, linear_conv_kernel_dim=4,
               moe_intermediate_size=32, shared_expert_intermediate_size=64, num_experts=5, num_experts_per_tok=2,
               norm_topk_prob=True, mlp_only_layers=[1], decoder_sparse_step=1,
               rope_parameters={**PLAIN, "partial_rotary_factor": 0.25}, tie_word_embeddings=False),
        dtype="bfloat16",
        seed=22,
    ),
    # Every second MLP is a mixture, of one expert a row; one key head for three value heads, all channels turned.
    "qwen3_next_sparse": Case(
        config("qwen3_next", num_hidden_layers=3, num_key_value_heads=1, head_dim=16, attention_bias=True,
               linear_num_key_heads=1, linear_num_value_heads=3, linear_key_head_dim=16, linear_value_head_dim=16,
               linear_conv_kernel_dim=2, layer_types=["linear_attention", "full_attention", "linear_attention"],
               moe_intermediate_size=64, shared_expert_intermediate_size=64, num_experts=3, num_experts_per_tok=1,
               norm_topk_prob=False, mlp_only_layers=[], decoder_sparse_step=2,
               rope_parameters={**PLAIN, "partial_rotary_factor": 1.0}, tie_word_embeddings=True),
        seed=8,
    ),
    # Twice the rate of change, two value heads a key head; attention as OLMo 2's without positions, by a base of null.
    "olmo_hybrid_nope": Case(
        config("olmo_hybrid", num_hidden_layers=4, num_key_value_heads=2, linear_num_key_heads=2,
               linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=32, linear_conv_kernel_dim=4,
               rope_parameters={"rope_type": "default", "rope_theta": None}, tie_word_embeddings=True),
        dtype="bfloat16",
        long=True,
    ),
    # Attention first, with positions and biases; rates of change as elsewhere, the usual size of value heads.
    "olmo_hybrid_rope": Case(
        config("olmo_hybrid", num_key_value_heads=4, attention_bias=True, linear_allow_neg_eigval=False,
               linear_num_key_heads=3, linear_num_value_heads=3, linear_key_head_dim=16, linear_conv_kernel_dim=3,
               layer_types=["full_attention", "linear_attention", "linear_attention"], rope_parameters=PLAIN,
               tie_word_embeddings=False),
        seed=4,
    ),
    # State spaces (Mamba-2): dense, and with experts beside a shared MLP.
    "granite_hybrid_dense": Case(
        config("granitemoehybrid", num_hidden_layers=4, num_key_value_heads=2, shared_intermediate_size=96,
               num_local_experts=0, num_experts_per_tok=0, layer_types=["mamba", "mamba", "attention", "mamba"],
               mamba_n_heads=8, mamba_d_head=16, mamba_d_state=32, mamba_n_groups=1, mamba_d_conv=4, mamba_expand=2,
               position_embedding_type="nope", embedding_multiplier=2.0, logits_scaling=2.0, residual_multiplier=0.7,
               attention_multiplier=0.3, tie_word_embeddings=False),
        dtype="bfloat16",
        long=True,
        seed=10,
    ),
    "granite_hybrid_experts": Case(
        config("granitemoehybrid", num_key_value_heads=4, intermediate_size=32, shared_intermediate_size=64,
               num_local_experts=5, num_experts_per_tok=2, layer_types=["attention", "mamba", "mamba"],
               mamba_n_heads=4, mamba_d_head=32, mamba_d_state=16, mamba_n_groups=1, mamba_d_conv=3, mamba_expand=2,
               mamba_proj_bias=True, position_embedding_type="rope", embedding_multiplier=2.0, logits_scaling=0.5,
               residual_multiplier=1.3, attention_multiplier=0.3, tie_word_embeddings=False),
        scale=1.0,
        seed=4,
    ),
}  # fmt: skip
