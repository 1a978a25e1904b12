"""Small configurations of every architecture, two or more each, with the quirks of each.

Their tensors' names and shapes are transformers' own (tests/data/reference, made by
tools/make_reference_logits.py); those of Llama and Qwen2 are computed (``hf.shapes``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Config = dict[str, Any]
DType = Literal["float32", "float16", "bfloat16"]
BF16: DType = "bfloat16"
F16: DType = "float16"
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
BOS, EOS = 0, 1
MAX_POSITIONS = 512
WITHOUT_REFERENCE = {"janus", "llamagen"}
"""Models that transformers lacks or computes otherwise; their own tests compare them."""
SCALE = 2.0
"""The default ``scale``: about the standard deviation of the logits."""


@dataclass(frozen=True)
class Case:
    """A configuration and how its reference is made.

    Attributes:
        config: config.json.
        seed: of weights and tokens.
        dtype: of the stored weights.
        scale: of embedding and LM head.
        boost: of what layers add to the stream: large embeddings would make a tied model repeat its input.
        context: what the export is limited to; None = the model's own limit.
        long: whether the reference reaches far positions.
    """

    config: Config
    seed: int = 1
    dtype: DType = "float32"
    scale: float = SCALE
    boost: float = 1.0
    context: int | None = None
    long: bool = False


SHORT = {"kv": "num_key_value_heads", "dim": "head_dim", "tied": "tie_word_embeddings", "layers": "num_hidden_layers",
         "heads": "num_attention_heads", "hidden": "hidden_size", "inner": "intermediate_size", "vocab": "vocab_size",
         "window": "sliding_window", "theta": "rope_theta", "eps": "rms_norm_eps"}  # fmt: skip
SIZES: Config = {"vocab": 160, "hidden": 64, "inner": 96, "layers": 3, "heads": 4, "pad_token_id": None}
COMMON: Config = {"max_position_embeddings": MAX_POSITIONS, "bos_token_id": BOS, "eos_token_id": EOS}


def case(
    kind: str, seed: int = 1, dtype: DType = "float32", *, scale: float = SCALE, boost: float = 1.0,
    context: int | None = None, long: bool = False, sizes: Config = SIZES, **values: Any,
) -> Case:  # fmt: skip
    """Make a case of a model type; ``values`` are of config.json, by their names there or in ``SHORT``."""
    config = {SHORT.get(name, name): value for name, value in (sizes | COMMON | values).items()}
    return Case({"model_type": kind} | config, seed, dtype, scale, boost, context, long)


def core(kind: str, seed: int, dtype: DType = "float32", **values: Any) -> Case:
    """Make a case that says all of its sizes."""
    return case(kind, seed, dtype, long="llama3" in str(values), sizes={"hidden_act": "silu"}, **values)


def delta(keys: int, values: int, key_dim: int, value_dim: int, kernel: int) -> Config:
    """Give the sizes of layers of the gated delta rule."""
    return {"linear_num_key_heads": keys, "linear_num_value_heads": values, "linear_key_head_dim": key_dim,
            "linear_value_head_dim": value_dim, "linear_conv_kernel_dim": kernel}  # fmt: skip


def scaled(embedding: float, logits: float, residual: float, attention: float) -> Config:
    """Give the multipliers of Granite."""
    return {"embedding_multiplier": embedding, "logits_scaling": logits, "residual_multiplier": residual,
            "attention_multiplier": attention}  # fmt: skip


def longrope(pairs: int, **more: float) -> Config:
    """Return factors for ``pairs`` rotary pairs."""
    return {"type": "longrope", "short_factor": [1.0 + 0.1 * i for i in range(pairs)],
            "long_factor": [2.0 + 0.5 * i for i in range(pairs)], **more}  # fmt: skip


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA_3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 64}  # fmt: skip
GEMMA_4 = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}

CORE: dict[str, Case] = {
    # Tied, grouped-query attention; head_dim (16) is left to be derived.
    "llama_tied_gqa": core("llama", 3, vocab=160, hidden=64, inner=96, layers=2, heads=4, kv=2, eps=1e-5, theta=10000.0,
         rope_scaling=None, tied=True),
    # Untied, multi-head (num_key_value_heads is left out), heads * head_dim = 2 * hidden, llama3 rope the old way.
    "llama_untied_mha_llama3_legacy": core("llama", 3, vocab=200, hidden=64, inner=128, layers=3, heads=4, dim=32,
         eps=1e-6, theta=500000.0, rope_scaling=LLAMA_3 | {"factor": 8.0}, tied=False),
    # Tied, three queries per key, llama3 rope the new way.
    "llama_tied_llama3_parameters": core("llama", 30, BF16, vocab=128, hidden=96, inner=160, layers=2, heads=6, kv=2,
         dim=16, eps=1e-5, rope_parameters=LLAMA_3 | {"rope_theta": 10000.0, "factor": 32.0,
         "original_max_position_embeddings": 96}, tied=True),
    # Untied, a bias on all seven projections, one key head for all, an intermediate size off the grid of 32.
    "llama_biases_mqa": core("llama", 1, vocab=144, hidden=96, inner=100, layers=2, heads=4, kv=1, attention_bias=True,
         mlp_bias=True, eps=1e-5, theta=10000.0, tied=False),
    # Tied, 14 heads on 2 as in Qwen2-0.5B, a hidden size off the grid of 32, a sliding window that is switched off.
    "qwen2_tied_gqa7": core("qwen2", 34, BF16, vocab=200, hidden=112, inner=144, layers=2, heads=14, kv=2, eps=1e-6,
         theta=1000000.0, use_sliding_window=False, window=16, max_window_layers=1, tied=True),
    # Untied, an epsilon and a theta far from the defaults, plain rope the new way.
    "qwen2_untied": core("qwen2", 37, F16, vocab=136, hidden=64, inner=120, layers=3, heads=4, kv=2, eps=1e-3,
         rope_parameters={"rope_type": "default", "rope_theta": 300.0}, tied=False),
}  # fmt: skip
"""Of Llama and Qwen2; they stand for all where a test is not about architectures."""

CASES: dict[str, Case] = CORE | {
    # A window shorter than the text, heads * head_dim = 2 * hidden.
    "mistral_window": case("mistral", 2, BF16, kv=2, dim=32, window=16, eps=1e-5, theta=1e4, tied=False,
         long=True),
    # No window, yarn scaling the new way.
    "mistral_yarn": case("mistral", 4, kv=4, window=None, rope_parameters=YARN, tied=True, long=True),
    # Norms of heads, tied.
    "qwen3_tied": case("qwen3", 5, BF16, kv=2, dim=32, theta=1e6, tied=True),
    # Biases, windows in the upper layers, linear scaling the old way.
    "qwen3_window_linear": case("qwen3", 13, kv=1, dim=16, attention_bias=True, use_sliding_window=True, window=12,
         max_window_layers=1, theta=1e4, rope_scaling={"type": "linear", "factor": 4.0}, tied=False, long=True),
    # One key head for all, heads * head_dim != hidden.
    "gemma_mqa": case("gemma", 2, kv=1, dim=32, hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh",
         eps=1e-6, tied=True, boost=4.0),
    # Fields that the first release omitted from config.json; a hidden size off the grid of 32.
    "gemma_short_config": case("gemma", 13, F16, hidden=80, heads=5, kv=5, dim=16, boost=4.0),
    # Caps that bite, windows in every other layer.
    "gemma2_caps": case("gemma2", 74, kv=2, dim=32, window=16, query_pre_attn_scalar=24, attn_logit_softcapping=2.0,
         final_logit_softcapping=6.0, tied=True, scale=2.5, long=True, boost=8.0),
    # No caps, windows where layer_types says.
    "gemma2_layer_types": case("gemma2", 5, BF16, kv=4, dim=16, window=10, query_pre_attn_scalar=16,
         attn_logit_softcapping=None, final_logit_softcapping=None, layer_types=[FULL, SLIDING, SLIDING], boost=4.0),
    # A local layer to a global one, scaled global rotation, the old way.
    "gemma3_old": case("gemma3_text", 8, layers=4, kv=1, dim=32, window=16, sliding_window_pattern=2,
         query_pre_attn_scalar=32, theta=1e6, rope_local_base_freq=1e4, rope_scaling={"rope_type": "linear",
         "factor": 8.0}, tied=True, long=True, boost=4.0),
    # The new way: rotations and windows by layer type.
    "gemma3_new": case("gemma3_text", 8, BF16, kv=2, dim=16, window=10, query_pre_attn_scalar=20,
         layer_types=[SLIDING, FULL, SLIDING], rope_parameters={FULL: {"rope_type": "default", "rope_theta": 5000.0},
         SLIDING: {"rope_type": "default", "rope_theta": 100.0}}, boost=8.0),
    # The long factors: a context beyond what was trained.
    "phi3_long": case("phi3", 4, BF16, kv=2, original_max_position_embeddings=4, theta=1e4, rope_scaling=longrope(8,
         attention_factor=1.25), window=32, tied=False, long=True),
    # The short factors, chosen by a context within what was trained; three quarters of each head are turned.
    "phi3_short_partial": case("phi3", 1, heads=2, kv=2, original_max_position_embeddings=96,
         partial_rotary_factor=0.75, theta=1e4, window=None, rope_scaling=longrope(12), tied=True, context=96),
    # Every fourth layer is not told positions.
    "smollm3_interval": case("smollm3", 1, BF16, layers=4, kv=2, theta=5e4, tied=True),
    # A list of layers; windows in those without positions; biases.
    "smollm3_explicit": case("smollm3", 11, kv=1, no_rope_layers=[1, 0, 1], use_sliding_window=True, window=12,
         attention_bias=True, mlp_bias=True, theta=1e4, tied=False, long=True),
    "olmo2_mha": case("olmo2", 6, BF16, theta=5e5, tied=False, scale=3.0),
    "olmo2_gqa_tied": case("olmo2", 14, hidden=96, heads=6, kv=2, tied=True, boost=2.0),
    # Three layers with windows to one without, and only that one has scaled rotation.
    "olmo3_yarn": case("olmo3", 12, layers=4, kv=2, window=16, rope_parameters={FULL: YARN, SLIDING: PLAIN},
         tied=False, scale=3.0, long=True),
    "olmo3_layer_types": case("olmo3", 9, kv=4, window=10, layer_types=[FULL, SLIDING, FULL], tied=False, scale=3.0),
    "granite_tied": case("granite", 1, BF16, kv=2, **scaled(3.0, 3.0, 0.6, 0.2), eps=1e-5, tied=True,
         scale=6.0, boost=8.0),
    "granite_biases": case("granite", 13, kv=4, **scaled(2.0, 0.5, 1.3, 0.3), attention_bias=True, mlp_bias=True,
         tied=False, scale=1.0),
    # A quarter of each head is turned; biases on q, k, v.
    "stablelm_quarter": case("stablelm", 6, F16, hidden=128, kv=4, use_qkv_bias=True, partial_rotary_factor=0.25,
         layer_norm_eps=1e-5, tied=False),
    # Sub-layers side by side.
    "stablelm_parallel": case("stablelm", 7, kv=2, use_parallel_residual=True, partial_rotary_factor=0.5, theta=500.0,
         tied=True),
    "gpt2_default": Case({"model_type": "gpt2", "vocab_size": 160, "n_embd": 64, "n_layer": 3, "n_head": 4,
         "n_positions": 128, "bos_token_id": 0, "eos_token_id": 1}, seed=32, boost=1.5),
    # An MLP of another width, another activation, heads of 8.
    "gpt2_inner": Case({"model_type": "gpt2", "vocab_size": 160, "n_embd": 48, "n_layer": 2, "n_head": 6,
         "n_positions": 512, "n_inner": 100, "activation_function": "relu", "layer_norm_epsilon": 1e-4,
         "bos_token_id": 0, "eos_token_id": 1}, seed=95, dtype="float16", boost=1.5, long=True),
    "gpt_neox_parallel": case("gpt_neox", 27, F16, hidden=128, rotary_pct=0.25, rotary_emb_base=10000,
         use_parallel_residual=True, hidden_act="gelu", layer_norm_eps=1e-5, tied=False),
    # One sub-layer after the other, no biases in attention, whole heads turned, a type that changes nothing yet.
    "gpt_neox_serial": case("gpt_neox", 3, rotary_pct=1.0, rotary_emb_base=1000, use_parallel_residual=False,
         attention_bias=False, hidden_act="gelu_new", rope_scaling={"type": "dynamic", "factor": 2.0}, tied=False),
    "starcoder2_window": case("starcoder2", 42, BF16, kv=2, window=16, norm_epsilon=1e-5,
         hidden_act="gelu_pytorch_tanh", theta=1e5, use_bias=True, tied=True, long=True),
    "starcoder2_no_bias": case("starcoder2", 11, kv=1, window=None, use_bias=False, tied=False),
    # One key head, one norm for both sub-layers.
    "falcon_7b": case("falcon", 2, BF16, multi_query=True, parallel_attn=True, new_decoder_architecture=False,
         bias=False, alibi=False, tied=True),
    # Groups of heads, a norm for each sub-layer.
    "falcon_40b": case("falcon", 4, num_kv_heads=2, new_decoder_architecture=True, parallel_attn=True, bias=False,
         alibi=False, tied=False),
    # One sub-layer after the other, a key head for each, biases.
    "falcon_serial": case("falcon", 26, multi_query=False, parallel_attn=False, new_decoder_architecture=False,
         bias=True, alibi=False, ffn_hidden_size=100, tied=True, boost=1.5),
    # Sub-layers side by side, whole heads turned, neighbours together, logits scaled.
    "cohere_tied": case("cohere", 9, F16, kv=2, logit_scale=0.5, theta=1e4, layer_norm_eps=1e-5, tied=True,
         scale=4.0),
    "cohere_biases": case("cohere", 6, kv=4, logit_scale=2.0, attention_bias=True, layer_norm_eps=1e-4,
         rope_scaling={"type": "linear", "factor": 2.0}, tied=False, scale=1.0),
    # Every fourth layer has neither window nor positions.
    "cohere2_pattern": case("cohere2", 3, BF16, layers=4, kv=2, window=12, logit_scale=0.5, theta=5e4, tied=True,
         scale=4.0, long=True),
    "cohere2_layer_types": case("cohere2", 2, kv=1, window=16, logit_scale=1.0, attention_bias=True,
         layer_types=[FULL, SLIDING, SLIDING], tied=False),
    "ernie4_5_tied": case("ernie4_5", 6, BF16, kv=2, dim=32, eps=1e-5, theta=5e5, tied=True),
    "ernie4_5_biases": case("ernie4_5", 8, kv=1, dim=16, use_bias=True, tied=False),
    # Norms after sub-layers and of heads; the layer without a window is not told positions.
    "exaone4_pattern": case("exaone4", 4, layers=4, kv=2, window=12, sliding_window_pattern=4, theta=1e6, tied=True,
         boost=4.0, long=True),
    "exaone4_global": case("exaone4", 7, BF16, kv=4, dim=32, window=None, layer_types=[FULL] * 3,
         rope_scaling={"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64}, tied=False, boost=2.0, long=True),
    # Half of each head is turned, neighbours together.
    "glm_half": case("glm", 3, BF16, kv=2, dim=32, theta=1e4, tied=False),
    "glm_no_bias": case("glm", 2, kv=4, dim=16, attention_bias=False, partial_rotary_factor=1.0, theta=500.0,
         tied=True),
    "glm4_half": case("glm4", 2, BF16, kv=2, dim=32, theta=1e4, tied=False, boost=2.0),
    "glm4_no_bias": case("glm4", 2, kv=1, dim=16, attention_bias=False, partial_rotary_factor=0.25, theta=500.0,
         tied=True, boost=4.0),
    "seed_oss_default": case("seed_oss", 4, BF16, kv=2, dim=32, theta=1e7, tied=False),
    "seed_oss_biases": case("seed_oss", 17, kv=1, dim=16, attention_bias=False, attention_out_bias=True,
         mlp_bias=True, tied=True),
    # An activation with learnt numbers, llama3 scaling.
    "apertus_llama3": case("apertus", 3, kv=2, hidden_act="xielu", eps=1e-5,
         rope_parameters={"rope_type": "llama3", "rope_theta": 12e6, "factor": 8.0, "low_freq_factor": 1.0,
         "high_freq_factor": 4.0, "original_max_position_embeddings": 64}, tied=False, long=True),
    "apertus_biases": case("apertus", 4, BF16, kv=4, inner=100, hidden_act="xielu", attention_bias=True,
         rope_parameters=PLAIN, tied=True),
    # Norms after rotation; a base stretched by alpha, which only looks dynamic.
    "hunyuan_alpha": case("hunyuan_v1_dense", 14, BF16, kv=2, dim=32, rope_parameters={"rope_type": "dynamic",
         "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0}, tied=True, long=True),
    "hunyuan_biases": case("hunyuan_v1_dense", 8, kv=1, dim=16, attention_bias=True, rope_parameters=PLAIN,
         tied=False),
    # Queries grow every 64 positions.
    "ministral3_growth": case("ministral3", 1, BF16, kv=2, dim=32, eps=1e-5, rope_parameters={**YARN,
         "llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0,
         "max_position_embeddings": 512}, tied=True, long=True),
    # A context within the original training length: nothing grows; a window.
    "ministral3_window": case("ministral3", 2, kv=1, dim=16, window=16, rope_parameters={**YARN,
         "original_max_position_embeddings": 256, "llama_4_scaling_beta": 0.1}, tied=False, context=128),
    "nanochat_capped": case("nanochat", 23, BF16, kv=4, hidden_act="relu2", final_logit_softcapping=6.0, theta=1e4,
         tied=False, long=True),
    "nanochat_biases": case("nanochat", 4, kv=2, hidden_act="relu2", final_logit_softcapping=15.0,
         attention_bias=True, theta=300.0, tied=False),
    # Both sub-layers after one norm; the LM head has a bias.
    "phi_half": case("phi", 23, F16, hidden_act="gelu_new", partial_rotary_factor=0.5, layer_norm_eps=1e-5, theta=1e4,
         tied=False),
    "phi_gqa": case("phi", 31, kv=2, hidden_act="gelu", partial_rotary_factor=1.0, layer_norm_eps=1e-4, theta=300.0,
         vocab_size=150, tied=False),
    # Granite 4 without experts or state-space layers.
    "granitemoehybrid_rope": case("granitemoehybrid", 9, BF16, kv=2, shared_intermediate_size=112,
         num_local_experts=0, num_experts_per_tok=0, layer_types=["attention"] * 3, position_embedding_type="rope",
         **scaled(3.0, 3.0, 0.6, 0.2), tied=True, scale=6.0, boost=8.0),
    "granitemoehybrid_nope": case("granitemoehybrid", 2, kv=4, shared_intermediate_size=96, num_local_experts=0,
         num_experts_per_tok=0, layer_types=["attention"] * 3, position_embedding_type="nope", **scaled(2.0, 0.5, 1.3,
         0.3), attention_bias=True, tied=False, scale=1.0),
    # Layers that read the keys of others, two head sizes, an embedding in each layer; MLPs twice as wide where shared.
    "gemma4_shared": case("gemma4_text", 2, BF16, layers=6, kv=2, dim=16, global_head_dim=32,
         hidden_size_per_layer_input=16, vocab_size_per_layer_input=160, num_kv_shared_layers=2,
         use_double_wide_mlp=True, window=12, layer_types=[SLIDING] * 3 + [FULL, SLIDING, FULL],
         final_logit_softcapping=12.0, rope_parameters=GEMMA_4, tied=True, long=True),
    # Nothing shared; sizes that do not fill whole vectors, all channels rotate.
    "gemma4_alone": case("gemma4_text", 5, kv=1, dim=24, global_head_dim=40, hidden_size_per_layer_input=20,
         vocab_size_per_layer_input=160, window=16, layer_types=[FULL, SLIDING, FULL],
         rope_parameters=GEMMA_4 | {FULL: {"rope_type": "default", "rope_theta": 500.0}}, tied=False),
    # A mixture next to the MLP, no embeddings of layers, values that are keys, fewer key heads in full layers.
    "gemma4_experts": case("gemma4_text", 8, kv=4, dim=16, layers=4, global_head_dim=32, num_global_key_value_heads=2,
         attention_k_eq_v=True, hidden_size_per_layer_input=0, window=12, layer_types=[SLIDING, FULL, SLIDING, FULL],
         enable_moe_block=True, num_experts=6, top_k_experts=3, moe_intermediate_size=32, rope_parameters=GEMMA_4,
         final_logit_softcapping=12.0, tied=False),
    # Mixtures of experts: weights that add up to one or not, a dense layer between, multipliers.
    "qwen3_moe_dense": case("qwen3_moe", 15, BF16, kv=2, dim=16, moe_intermediate_size=32, num_experts=7,
         num_experts_per_tok=3, norm_topk_prob=True, mlp_only_layers=[1], decoder_sparse_step=1, theta=1e4, tied=True,
         boost=2.0),
    "qwen3_moe_plain": case("qwen3_moe", 1, kv=4, dim=24, moe_intermediate_size=96, num_experts=5,
         num_experts_per_tok=1, norm_topk_prob=False, theta=500.0, tied=False),
    "olmoe_eight": case("olmoe", 15, BF16, kv=4, inner=64, num_experts=8, num_experts_per_tok=2,
         norm_topk_prob=False, tied=False),
    "olmoe_normed": case("olmoe", 2, kv=2, inner=32, num_experts=4, num_experts_per_tok=4,
         norm_topk_prob=True, tied=True, boost=2.0),
    "granitemoe_untied": case("granitemoe", 6, kv=4, inner=64, num_local_experts=4, num_experts_per_tok=3,
         **scaled(2.0, 0.5, 1.3, 0.3), tied=False, scale=1.0),
    "granitemoe_small": case("granitemoe", 8, BF16, kv=2, inner=32, num_local_experts=6,
         num_experts_per_tok=2, **scaled(3.0, 3.0, 0.6, 0.2), tied=True, scale=6.0, boost=8.0),
    # Sinks of attention, windows in every other layer, biases of experts and of the router, a clamped gate.
    "gpt_oss_default": case("gpt_oss", 8, BF16, layers=4, kv=2, dim=16, inner=64, window=12, num_local_experts=5,
         num_experts_per_tok=3, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
         "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 128},
         tied=False, long=True),
    "gpt_oss_plain": case("gpt_oss", 20, kv=4, dim=24, inner=32, window=16, layer_types=[FULL, SLIDING, FULL],
         num_local_experts=4, num_experts_per_tok=1, attention_bias=False, rope_parameters=PLAIN, tied=False),
    "qwen2_moe_shared": case("qwen2_moe", 5, BF16, kv=2, moe_intermediate_size=32, shared_expert_intermediate_size=64,
         num_experts=6, num_experts_per_tok=2, norm_topk_prob=False, decoder_sparse_step=1, mlp_only_layers=[1],
         rope_parameters=PLAIN, tied=False),
    "qwen2_moe_normed": case("qwen2_moe", 6, kv=4, moe_intermediate_size=64, shared_expert_intermediate_size=64,
         num_experts=4, num_experts_per_tok=3, norm_topk_prob=True, decoder_sparse_step=1, qkv_bias=False,
         rope_parameters=PLAIN, tied=True, boost=2.0),
    "mellum_windows": case("mellum", 15, BF16, layers=4, kv=2, dim=16, window=12, moe_intermediate_size=32,
         num_experts=6, num_experts_per_tok=2,
         layer_types=[SLIDING, FULL, SLIDING, FULL], mlp_layer_types=["dense", *["sparse"] * 3],
         rope_parameters={FULL: {"rope_type": "default", "rope_theta": 5e5}, SLIDING: PLAIN}, tied=False),
    "mellum_full": case("mellum", 9, kv=4, dim=24, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=1,
         rope_parameters={FULL: {"rope_type": "default", "rope_theta": 500.0}, SLIDING: PLAIN}, tied=True, boost=2.0),
    # Sinks with Granite's multipliers; layers without positions.
    "granite_swa_default": case("granite_swa", 7, BF16, layers=5, kv=2, window=12, rope_parameters=PLAIN,
         **scaled(3.0, 3.0, 0.6, 0.2), tied=True, scale=6.0, boost=8.0),
    "granite_swa_nope": case("granite_swa", 7, kv=4, window=16, layer_types=[SLIDING, FULL, SLIDING],
         layer_rope_theta=[500.0, 0, 500.0], rope_parameters=PLAIN, **scaled(2.0, 0.5, 1.3, 0.3), tied=False,
         scale=1.0),
    # A convolution in two of three layers; an MLP size adjusted as the first release does.
    "lfm2_conv": case("lfm2", 2, BF16, layers=4, kv=2, conv_L_cache=3, norm_eps=1e-5, theta=1e6, layer_types=["conv",
         "conv", FULL, "conv"], block_auto_adjust_ff_dim=True, block_ff_dim=130, block_multiple_of=16,
         tie_embedding=True, boost=2.0, long=True),
    # Biases, attention first, convolutions of four tokens.
    "lfm2_biases": case("lfm2", 3, layers=4, kv=4, conv_L_cache=4, conv_bias=True, theta=1e4, full_attn_idxs=[0, 2],
         block_auto_adjust_ff_dim=False, tie_embedding=False),
    # Convolutions of seven tokens, a window, a gate on each head, half of each head turned in full layers.
    "lfm3_default": case("lfm3", 12, BF16, layers=5, kv=2, dim=32, conv_L_cache=7, window=12, norm_eps=1e-5,
         tied=True, long=True),
    # Attention first, biases, neither gates nor norms around sub-layers, all channels turned.
    "lfm3_plain": case("lfm3", 11, layers=4, kv=4, dim=16, conv_L_cache=4, window=16, layer_types=[FULL, "conv",
         SLIDING, "conv"], attention_bias=True, conv_bias=True, use_sandwich_norm=False, use_attention_gate=False,
         rope_parameters={FULL: {"rope_type": "default", "rope_theta": 500.0}, SLIDING: PLAIN}, tied=False),
    # Three delta rules to one gated attention; two value heads a key head, a quarter of each head turned.
    "qwen3_5_delta": case("qwen3_5_text", 11, BF16, layers=4, kv=2, dim=32, **delta(2, 4, 16, 32, 4),
         rope_parameters={**PLAIN, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1],
         "mrope_interleaved": True}, tied=True, long=True),
    # Attention first, biases, three heads each with a separate key, convolutions of three tokens.
    "qwen3_5_biases": case("qwen3_5_text", 4, kv=1, dim=16, attention_bias=True, **delta(3, 3, 32, 16, 3),
         layer_types=[FULL, LINEAR, LINEAR], rope_parameters={**PLAIN, "partial_rotary_factor": 0.5,
         "mrope_section": [2, 1, 1]}, tied=False),
    # Dense layers first, experts chosen by sigmoids, with a bias or without.
    "lfm2_moe_bias": case("lfm2_moe", 1, BF16, layers=4, kv=2, conv_L_cache=3, norm_eps=1e-5, theta=1e6,
         layer_types=["conv", FULL, "conv", "conv"], num_dense_layers=1, moe_intermediate_size=32, num_experts=6,
         num_experts_per_tok=2, use_expert_bias=True, norm_topk_prob=True, routed_scaling_factor=1.5,
         tie_embedding=True, boost=2.0),
    "lfm2_moe_plain": case("lfm2_moe", 2, kv=4, conv_L_cache=4, conv_bias=True, norm_eps=1e-5, theta=1e4,
         layer_types=[FULL, "conv", "conv"], num_dense_layers=2, moe_intermediate_size=64, num_experts=5,
         num_experts_per_tok=3, use_expert_bias=False, norm_topk_prob=False, tie_embedding=False),
    # Experts after delta rules and gated attention; a shared expert as wide as one, or as two.
    "qwen3_5_moe_shared": case("qwen3_5_moe_text", 16, BF16, layers=4, kv=2, dim=32, **delta(2, 4, 16, 16, 4),
         moe_intermediate_size=32, shared_expert_intermediate_size=32, num_experts=6, num_experts_per_tok=2,
         rope_parameters={**PLAIN, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1],
         "mrope_interleaved": True}, tied=True),
    # Attention first, biases, a key head for each value head, weights that are not normed, a shared expert of two.
    "qwen3_5_moe_biases": case("qwen3_5_moe_text", 14, kv=4, dim=16, attention_bias=True, **delta(3, 3, 32, 16, 3),
         layer_types=[FULL, LINEAR, LINEAR], moe_intermediate_size=32, shared_expert_intermediate_size=64,
         num_experts=4, num_experts_per_tok=3, rope_parameters={**PLAIN, "partial_rotary_factor": 0.5,
         "mrope_section": [2, 1, 1]}, tied=False),
    "qwen3_next_dense": case("qwen3_next", 22, BF16, layers=4, kv=2, dim=32, **delta(2, 4, 16, 32, 4),
         moe_intermediate_size=32, shared_expert_intermediate_size=64, num_experts=5, num_experts_per_tok=2,
         norm_topk_prob=True, mlp_only_layers=[1], decoder_sparse_step=1, rope_parameters={**PLAIN,
         "partial_rotary_factor": 0.25}, tied=False),
    # Every second MLP is a mixture, of one expert a row; one key head for three value heads, all channels turned.
    "qwen3_next_sparse": case("qwen3_next", 8, layers=3, kv=1, dim=16, attention_bias=True, **delta(1, 3, 16, 16, 2),
         layer_types=[LINEAR, FULL, LINEAR], moe_intermediate_size=64, shared_expert_intermediate_size=64,
         num_experts=3, num_experts_per_tok=1, norm_topk_prob=False, mlp_only_layers=[], decoder_sparse_step=2,
         rope_parameters={**PLAIN, "partial_rotary_factor": 1.0}, tied=True),
    # Twice the rate of change, two value heads a key head; attention as OLMo 2's without positions, by a base of null.
    "olmo_hybrid_nope": case("olmo_hybrid", 1, BF16, layers=4, kv=2, **delta(2, 4, 16, 32, 4),
         rope_parameters={"rope_type": "default", "rope_theta": None}, tied=True, long=True),
    # Attention first, with positions and biases; rates of change as elsewhere, the usual size of value heads.
    "olmo_hybrid_rope": case("olmo_hybrid", 4, kv=4, attention_bias=True, linear_allow_neg_eigval=False,
         linear_num_key_heads=3, linear_num_value_heads=3, linear_key_head_dim=16, linear_conv_kernel_dim=3,
         layer_types=[FULL, LINEAR, LINEAR], rope_parameters=PLAIN, tied=False),
    # State spaces (Mamba-2): dense, and with experts and a shared MLP.
    "granite_hybrid_dense": case("granitemoehybrid", 10, BF16, layers=4, kv=2, shared_intermediate_size=96,
         num_local_experts=0, num_experts_per_tok=0, layer_types=["mamba", "mamba", "attention", "mamba"],
         mamba_n_heads=8, mamba_d_head=16, mamba_d_state=32, mamba_n_groups=1, mamba_d_conv=4, mamba_expand=2,
         position_embedding_type="nope", **scaled(2.0, 2.0, 0.7, 0.3), tied=False, long=True),
    "granite_hybrid_experts": case("granitemoehybrid", 4, kv=4, inner=32, shared_intermediate_size=64,
         num_local_experts=5, num_experts_per_tok=2, layer_types=["attention", "mamba", "mamba"], mamba_n_heads=4,
         mamba_d_head=32, mamba_d_state=16, mamba_n_groups=1, mamba_d_conv=3, mamba_expand=2, mamba_proj_bias=True,
         position_embedding_type="rope", **scaled(2.0, 0.5, 1.3, 0.3), tied=False, scale=1.0),
}  # fmt: skip
