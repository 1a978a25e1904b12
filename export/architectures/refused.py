"""Well-known kinds of models that are refused, and why."""

from __future__ import annotations

ENCODERS = "encoders, and decoders that read one"
REFUSED: dict[str, tuple[str, ...]] = {
    "mixtures of experts": (
        "afmoe", "cohere2_moe", "dbrx", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "exaone_moe",
        "flex_olmo", "glm4_moe", "gpt_oss", "granitemoeshared", "hunyuan_v1_moe", "jetmoe",
        "llama4_text", "longcat_flash", "minimax_m2", "mixtral", "phimoe", "qwen2_moe",
    ),
    "recurrent states (state spaces, delta rules, linear attention)": (
        "bamba", "falcon_h1", "falcon_mamba", "jamba", "kimi_linear", "mamba", "mamba2", "minimax", "nemotron_h",
        "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2",
    ),
    "streams that predict each other (AltUp), sparse activations": ("gemma3n_text",),
    "latent attention": ("minicpm3",),
    "linear position biases (ALiBi)": ("bloom", "mpt"),
    ENCODERS: (
        "bart", "bert", "blenderbot", "camembert", "electra", "m2m_100", "marian", "mbart", "modernbert", "mt5",
        "pegasus", "roberta", "t5", "whisper", "xlm-roberta",
    ),
}  # fmt: skip
"""Values of ``model_type``, by what they have that nothing here computes."""


def reason(model_type: str) -> str | None:
    """What a model has that is not supported, if that is known."""
    return next((why for why, names in REFUSED.items() if model_type in names), None)
