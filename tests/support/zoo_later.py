"""More of tests/support/zoo.py: architectures of 2024 and later, and Phi-2."""

from __future__ import annotations

from tests.support.case import GEMMA_4, PLAIN, YARN, Case, config
from tests.support.zoo_states import STATES

LATER: dict[str, Case] = {
    # Sub-layers side by side, whole heads turned, neighbours together, logits scaled.
    "cohere_tied": Case(
        config("cohere", num_key_value_heads=2, logit_scale=0.5, rope_theta=1e4, layer_norm_eps=1e-5,
                tie_word_embeddings=True),
        dtype="float16",
        scale=4.0,
        seed=9,
    ),
    "cohere_biases": Case(
        config("cohere", num_key_value_heads=4, logit_scale=2.0, attention_bias=True, layer_norm_eps=1e-4,
                rope_scaling={"type": "linear", "factor": 2.0}, tie_word_embeddings=False),
        scale=1.0,
        seed=6,
    ),
    # Every fourth layer has neither window nor positions.
    "cohere2_pattern": Case(
        config("cohere2", num_hidden_layers=4, num_key_value_heads=2, sliding_window=12, logit_scale=0.5,
                rope_theta=5e4, tie_word_embeddings=True),
        dtype="bfloat16",
        scale=4.0,
        long=True,
        seed=3,
    ),
    "cohere2_layer_types": Case(
        config("cohere2", num_key_value_heads=1, sliding_window=16, logit_scale=1.0, attention_bias=True,
                layer_types=["full_attention", "sliding_attention", "sliding_attention"], tie_word_embeddings=False),
        seed=2,
    ),
    "ernie4_5_tied": Case(
        config("ernie4_5", num_key_value_heads=2, head_dim=32, rms_norm_eps=1e-5, rope_theta=5e5,
                tie_word_embeddings=True),
        dtype="bfloat16",
        seed=6,
    ),
    "ernie4_5_biases": Case(
        config("ernie4_5", num_key_value_heads=1, head_dim=16, use_bias=True, tie_word_embeddings=False),
        seed=8,
    ),
    # Norms after sub-layers and of heads; the layer without a window is not told positions.
    "exaone4_pattern": Case(
        config("exaone4", num_hidden_layers=4, num_key_value_heads=2, sliding_window=12, sliding_window_pattern=4,
                rope_theta=1e6, tie_word_embeddings=True),
        boost=4.0,
        long=True,
        seed=4,
    ),
    "exaone4_global": Case(
        config("exaone4", num_key_value_heads=4, head_dim=32, sliding_window=None, layer_types=["full_attention"] * 3,
                rope_scaling={"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                              "original_max_position_embeddings": 64}, tie_word_embeddings=False),
        dtype="bfloat16",
        boost=2.0,
        long=True,
        seed=7,
    ),
    # Half of each head is turned, neighbours together.
    "glm_half": Case(
        config("glm", num_key_value_heads=2, head_dim=32, rope_theta=1e4, tie_word_embeddings=False),
        dtype="bfloat16",
        seed=3,
    ),
    "glm_no_bias": Case(
        config("glm", num_key_value_heads=4, head_dim=16, attention_bias=False, partial_rotary_factor=1.0,
                rope_theta=500.0, tie_word_embeddings=True),
        seed=2,
    ),
    "glm4_half": Case(
        config("glm4", num_key_value_heads=2, head_dim=32, rope_theta=1e4, tie_word_embeddings=False),
        dtype="bfloat16",
        boost=2.0,
        seed=2,
    ),
    "glm4_no_bias": Case(
        config("glm4", num_key_value_heads=1, head_dim=16, attention_bias=False, partial_rotary_factor=0.25,
                rope_theta=500.0, tie_word_embeddings=True),
        boost=4.0,
        seed=2,
    ),
    "seed_oss_default": Case(
        config("seed_oss", num_key_value_heads=2, head_dim=32, rope_theta=1e7, tie_word_embeddings=False),
        dtype="bfloat16",
        seed=4,
    ),
    "seed_oss_biases": Case(
        config("seed_oss", num_key_value_heads=1, head_dim=16, attention_bias=False, attention_out_bias=True,
                mlp_bias=True, tie_word_embeddings=True),
        seed=17,
    ),
    # An activation with learnt numbers, llama3 scaling.
    "apertus_llama3": Case(
        config("apertus", num_key_value_heads=2, hidden_act="xielu", rms_norm_eps=1e-5,
                rope_parameters={"rope_type": "llama3", "rope_theta": 12e6, "factor": 8.0, "low_freq_factor": 1.0,
                                 "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
                tie_word_embeddings=False),
        long=True,
        seed=3,
    ),
    "apertus_biases": Case(
        config("apertus", num_key_value_heads=4, intermediate_size=100, hidden_act="xielu", attention_bias=True,
                rope_parameters=PLAIN, tie_word_embeddings=True),
        dtype="bfloat16",
        seed=4,
    ),
    # Norms after rotation; a base stretched by alpha, which only looks dynamic.
    "hunyuan_alpha": Case(
        config("hunyuan_v1_dense", num_key_value_heads=2, head_dim=32,
                rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0},
                tie_word_embeddings=True),
        dtype="bfloat16",
        long=True,
        seed=14,
    ),
    "hunyuan_biases": Case(
        config("hunyuan_v1_dense", num_key_value_heads=1, head_dim=16, attention_bias=True, rope_parameters=PLAIN,
                tie_word_embeddings=False),
        seed=8,
    ),
    # Queries grow every 64 positions.
    "ministral3_growth": Case(
        config("ministral3", num_key_value_heads=2, head_dim=32, rms_norm_eps=1e-5,
                rope_parameters={**YARN, "llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0,
                                 "beta_fast": 32.0, "beta_slow": 1.0, "max_position_embeddings": 512},
                tie_word_embeddings=True),
        dtype="bfloat16",
        long=True,
        seed=1,
    ),
    # A context within what was trained at first: nothing grows; a window.
    "ministral3_window": Case(
        config("ministral3", num_key_value_heads=1, head_dim=16, sliding_window=16,
                rope_parameters={**YARN, "original_max_position_embeddings": 256, "llama_4_scaling_beta": 0.1},
                tie_word_embeddings=False),
        context=128,
        seed=2,
    ),
    "nanochat_capped": Case(
        config("nanochat", num_key_value_heads=4, hidden_act="relu2", final_logit_softcapping=6.0, rope_theta=1e4,
                tie_word_embeddings=False),
        dtype="bfloat16",
        long=True,
        seed=23,
    ),
    "nanochat_biases": Case(
        config("nanochat", num_key_value_heads=2, hidden_act="relu2", final_logit_softcapping=15.0,
                attention_bias=True, rope_theta=300.0, tie_word_embeddings=False),
        seed=4,
    ),
    # Both sub-layers behind one norm; the LM head has a bias.
    "phi_half": Case(
        config("phi", hidden_act="gelu_new", partial_rotary_factor=0.5, layer_norm_eps=1e-5, rope_theta=1e4,
                tie_word_embeddings=False),
        dtype="float16",
        seed=23,
    ),
    "phi_gqa": Case(
        config("phi", num_key_value_heads=2, hidden_act="gelu", partial_rotary_factor=1.0, layer_norm_eps=1e-4,
                rope_theta=300.0, vocab_size=150, tie_word_embeddings=False),
        seed=31,
    ),
    # Granite 4 without experts or state-space layers.
    "granitemoehybrid_rope": Case(
        config("granitemoehybrid", num_key_value_heads=2, shared_intermediate_size=112, num_local_experts=0,
                num_experts_per_tok=0, layer_types=["attention"] * 3, position_embedding_type="rope",
                embedding_multiplier=3.0, logits_scaling=3.0, residual_multiplier=0.6, attention_multiplier=0.2,
                tie_word_embeddings=True),
        dtype="bfloat16",
        scale=6.0,
        boost=8.0,
        seed=9,
    ),
    "granitemoehybrid_nope": Case(
        config("granitemoehybrid", num_key_value_heads=4, shared_intermediate_size=96, num_local_experts=0,
                num_experts_per_tok=0, layer_types=["attention"] * 3, position_embedding_type="nope",
                embedding_multiplier=2.0, logits_scaling=0.5, residual_multiplier=1.3, attention_multiplier=0.3,
                attention_bias=True, tie_word_embeddings=False),
        scale=1.0,
        seed=2,
    ),
    # Layers that read the keys of others, two head sizes, an embedding in each layer; MLPs twice as wide where shared.
    "gemma4_shared": Case(
        config("gemma4_text", num_hidden_layers=6, num_key_value_heads=2, head_dim=16, global_head_dim=32,
               hidden_size_per_layer_input=16, vocab_size_per_layer_input=160,
               num_kv_shared_layers=2, use_double_wide_mlp=True, sliding_window=12,
               layer_types=["sliding_attention"] * 3 + ["full_attention", "sliding_attention", "full_attention"],
               final_logit_softcapping=12.0, rope_parameters=GEMMA_4, tie_word_embeddings=True),
        dtype="bfloat16",
        long=True,
        seed=2,
    ),
    # Nothing shared; sizes that are no whole vectors, all channels turn.
    "gemma4_alone": Case(
        config("gemma4_text", num_key_value_heads=1, head_dim=24, global_head_dim=40, hidden_size_per_layer_input=20,
               vocab_size_per_layer_input=160,
               sliding_window=16, layer_types=["full_attention", "sliding_attention", "full_attention"],
               rope_parameters=GEMMA_4 | {"full_attention": {"rope_type": "default", "rope_theta": 500.0}},
               tie_word_embeddings=False),
        seed=5,
    ),
    # Mixtures of experts: weights that add up to one or not, a dense layer between, multipliers.
    "qwen3_moe_dense": Case(
        config("qwen3_moe", num_key_value_heads=2, head_dim=16, moe_intermediate_size=32, num_experts=7,
               num_experts_per_tok=3, norm_topk_prob=True, mlp_only_layers=[1], decoder_sparse_step=1,
               rope_theta=1e4, tie_word_embeddings=True),
        dtype="bfloat16",
        boost=2.0,
        seed=15,
    ),
    "qwen3_moe_plain": Case(
        config("qwen3_moe", num_key_value_heads=4, head_dim=24, moe_intermediate_size=96, num_experts=5,
               num_experts_per_tok=1, norm_topk_prob=False, rope_theta=500.0, tie_word_embeddings=False),
        seed=1,
    ),
    "olmoe_eight": Case(
        config("olmoe", num_key_value_heads=4, intermediate_size=64, num_experts=8, num_experts_per_tok=2,
               norm_topk_prob=False, tie_word_embeddings=False),
        dtype="bfloat16",
        seed=15,
    ),
    "olmoe_normed": Case(
        config("olmoe", num_key_value_heads=2, intermediate_size=32, num_experts=4, num_experts_per_tok=4,
               norm_topk_prob=True, tie_word_embeddings=True),
        boost=2.0,
        seed=2,
    ),
    "granitemoe_untied": Case(
        config("granitemoe", num_key_value_heads=4, intermediate_size=64, num_local_experts=4, num_experts_per_tok=3,
               embedding_multiplier=2.0, logits_scaling=0.5, residual_multiplier=1.3, attention_multiplier=0.3,
               tie_word_embeddings=False),
        scale=1.0,
        seed=6,
    ),
    "granitemoe_small": Case(
        config("granitemoe", num_key_value_heads=2, intermediate_size=32, num_local_experts=6, num_experts_per_tok=2,
               embedding_multiplier=3.0, logits_scaling=3.0, residual_multiplier=0.6, attention_multiplier=0.2,
               tie_word_embeddings=True),
        dtype="bfloat16",
        scale=6.0,
        boost=8.0,
        seed=8,
    ),
}  # fmt: skip
LATER |= STATES
