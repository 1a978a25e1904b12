"""Small encoder-decoders of every kind, two or more each, and what transformers computes with them.

tests/data/reference/seq2seq.npz has of each (tools/make_seq2seq_reference.py makes it): ``saved``, JSON of the
config.json and of the names and shapes of tensors that transformers saves; ``source``, int64 [S] ids or float32
[frames, bands] features; ``tokens`` int64 [T]; ``encoded`` float32 [S, width], the encoder's output; ``rows``
int64 [R] and ``logits`` float32 [R, vocab] of the decoder there; ``greedy`` int64 [200], the continuation after the
first token.  Weights are a function of names, shapes and a seed, so that no test needs torch.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from tests.support.saved import arrays_of, form_of

ARCHIVE = Path(__file__).parents[1] / "data" / "reference" / "seq2seq.npz"
Config = dict[str, Any]
reference, saved = partial(arrays_of, ARCHIVE), partial(form_of, ARCHIVE)

BART: Config = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 8, "encoder_ffn_dim": 96, "decoder_ffn_dim": 160, "vocab_size": 160,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
    "forced_eos_token_id": None, "forced_bos_token_id": None, "max_position_embeddings": 400,
}  # fmt: skip
T5: Config = {
    "d_model": 64, "d_kv": 24, "num_heads": 3, "num_layers": 2, "num_decoder_layers": 3, "d_ff": 96, "vocab_size": 160,
    "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0, "relative_attention_num_buckets": 16,
    "relative_attention_max_distance": 50,
}  # fmt: skip
WHISPER: Config = {
    key: value for key, value in BART.items() if key not in ("max_position_embeddings", "forced_bos_token_id")
} | {"num_mel_bins": 80, "max_source_positions": 50, "max_target_positions": 320}
UNTIED: Config = {"tie_word_embeddings": False}
CASES: dict[str, Config] = {
    "marian": {"model_type": "marian", **BART, "scale_embedding": True, "activation_function": "swish",
               "pad_token_id": 159, "decoder_start_token_id": 159},
    "marian_two_vocabularies": {"model_type": "marian", **BART, "share_encoder_decoder_embeddings": False,
                                "vocab_size": 170, "decoder_vocab_size": 120},
    "bart": {"model_type": "bart", **BART},
    "bart_scaled_relu": {"model_type": "bart", **BART, "scale_embedding": True, "activation_function": "relu",
                         "d_model": 128},
    "mbart": {"model_type": "mbart", **BART, "scale_embedding": True},
    "mbart_relu_untied": {"model_type": "mbart", **BART, "activation_function": "relu", **UNTIED},
    "pegasus": {"model_type": "pegasus", **BART, "scale_embedding": True, "decoder_start_token_id": 0,
                "pad_token_id": 0},
    "pegasus_silu": {"model_type": "pegasus", **BART, "activation_function": "silu"},
    "m2m_100": {"model_type": "m2m_100", **BART},
    "m2m_100_gelu_untied": {"model_type": "m2m_100", **BART, "activation_function": "gelu", "scale_embedding": False,
                            **UNTIED},
    "t5": {"model_type": "t5", **T5},
    "t5_gated_untied": {"model_type": "t5", **T5, "feed_forward_proj": "gated-gelu", **UNTIED},
    "mt5": {"model_type": "mt5", **T5, **UNTIED},
    "mt5_silu": {"model_type": "mt5", **T5, "feed_forward_proj": "gated-silu", "relative_attention_num_buckets": 33},
    "umt5": {"model_type": "umt5", **T5},
    "umt5_relu_untied": {"model_type": "umt5", **T5, "feed_forward_proj": "relu", **UNTIED},
    "whisper": {"model_type": "whisper", **WHISPER},
    "whisper_128_relu": {"model_type": "whisper", **WHISPER, "num_mel_bins": 128, "activation_function": "relu",
                         "scale_embedding": True},
}  # fmt: skip


def weights(shapes: dict[str, list[int]], kind: str) -> dict[str, NDArray[np.float32]]:
    """Make weights whose logits depend on the source, on what was written, and on positions."""
    generator, made = np.random.default_rng(3), {}
    for name, shape in shapes.items():
        noise, module = generator.standard_normal(shape), name.split(".")[-2] if "." in name else ""
        if "norm" in module and name.endswith("weight"):
            values = 1 + 0.3 * noise
        elif len(shape) == 1 or name == "final_logits_bias":
            values = 0.3 * noise
        elif module == "shared" or "embed" in module or module in ("lm_head", "relative_attention_bias"):
            values = (0.5 if "bias" in module or "positions" in module else 0.15) * noise
        else:
            scores = "t5" in kind and module in ("q", "k")  # which nothing scales
            values = (0.5 if scores else 2.0) * noise / np.sqrt(np.prod(shape[1:]))
        made[name] = values.astype(np.float32)
    return made


def write_checkpoint(folder: Path, config: Config, shapes: dict[str, list[int]]) -> Path:
    """Write config.json and weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    save_file(weights(shapes, config["model_type"]), folder / "model.safetensors", {"format": "pt"})
    return folder


def write_case(folder: Path, name: str) -> Path:
    """Write the checkpoint of a case."""
    found = saved(name)
    return write_checkpoint(folder, found["config"], found["tensors"])
