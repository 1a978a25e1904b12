"""Models that are refused by name: unsupported kinds, and those that do more than continue a text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from edgespec.errors import UnsupportedModel
from edgespec.export.architectures.encoders import ENCODERS as TEXT_ENCODERS

ENCODERS = "encoders, and decoders that read one"
LACKING = {
    "bigbird_pegasus": "sparse attention of the encoder",
    "led": "windowed and global attention of the encoder",
    "longt5": "local and transient-global attention of the encoder",
    "nllb-moe": "mixtures of experts in encoder-decoders",
    "prophetnet": "predictions of several tokens at once (n-stream attention)",
    "switch_transformers": "mixtures of experts in encoder-decoders",
}
"""Missing features of unsupported encoder-decoders, by model type."""
SEQUENCES = ("bart", "m2m_100", "marian", "mbart", "mt5", "pegasus", "t5", "umt5", "whisper")
REFUSED: dict[str, tuple[str, ...]] = {
    "mixtures of experts": (
        "afmoe", "cohere2_moe", "dbrx", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "exaone_moe",
        "flex_olmo", "glm4_moe", "glm4_moe_lite", "granitemoeshared", "hunyuan_v1_moe", "jetmoe",
        "llama4_text", "longcat_flash", "mimo_v2_flash", "minimax_m2", "mixtral", "phimoe",
    ),
    "recurrent states (state spaces, delta rules, linear attention)": (
        "bamba", "falcon_h1", "falcon_mamba", "jamba", "kimi_linear", "mamba", "mamba2", "minimax", "nemotron_h",
        "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2",
    ),
    "streams that predict each other (AltUp), sparse activations": ("gemma3n_text",),
    "latent attention": ("minicpm3",),
    "code of its own beside the checkpoint, which transformers does not have": ("mimo",),
    "linear position biases (ALiBi)": ("bloom", "mpt"),
    ENCODERS: (
        "albert", "bigbird_pegasus", "blenderbot", "deberta", "deberta-v2", "electra", "jina_embeddings_v3", "led",
        "longt5", "nllb-moe", "prophetnet", "switch_transformers",
    ),
}  # fmt: skip
"""Unsupported model types, grouped by the missing feature."""
SENSES = {
    "images": re.compile(r"(mm_)?(vision|visual|image|img|video)(_|$)"),
    "sound": re.compile(r"(audio|speech|sound)(_|$)"),
}
"""Inputs other than text, by the prefixes of config.json keys and of parts of tensor names."""
OPTION = "--text-only"


class NotCausalLM(UnsupportedModel):
    """A model that is not a text decoder, or more than that."""


def modalities(config: dict[str, Any], tensors: Iterable[str] = ()) -> str:
    """Name the inputs of a model other than text, as in "images and sound"; "" = none."""
    keys = {key for key, value in config.items() if value not in (None, False, {}, [])}
    parts = {part for name in tensors for part in name.split(".")[:3]}
    return " and ".join(what for what, begins in SENSES.items() if any(map(begins.match, keys | parts)))


def refuse_senses(path: Path, what: str, text_kind: str | None, known: Mapping[str, Iterable[str]]) -> NotCausalLM:
    """Make the error for a model that reads more than text.

    Args:
        what: its inputs other than text.
        text_kind: the architecture of its text half; None = one that is not supported.
        known: types of models whose images, and whose sound, are read.
    """
    hint = f"{OPTION} takes its text half alone" if text_kind else "take another model"
    read = "".join(f"; {sense}: of {', '.join(sorted(kinds))}" for sense, kinds in known.items() if sense in what)
    return NotCausalLM(f"{path}: this model reads {what}, and edgespec does not yet{read}", hint)


def refuse_encoder(path: Path, kind: str, config: dict[str, Any]) -> None:
    """Refuse models with an unsupported encoder: neither this package nor a foreign graph runs it."""
    if config.get("is_encoder_decoder") is True or kind in (*LACKING, "blenderbot"):
        why = f"it needs {LACKING[kind]}" if kind in LACKING else "its layers are not described here"
        raise NotCausalLM(
            f"{path}: the encoder-decoder {kind!r} is not supported: {why}; of encoder-decoders these are: "
            f"{', '.join(SEQUENCES)}",
            "take a model of one of these, or a decoder",
        )
    if kind in TEXT_ENCODERS:
        raise NotCausalLM(
            f"{path}: {kind!r} is an encoder: it reads texts and writes none",
            "`edgespec export` makes a bundle for `edgespec embed` and /v1/embeddings of it",
        )
    if kind in REFUSED[ENCODERS]:
        raise NotCausalLM(
            f"{path}: {kind!r} is an encoder alone: it reads a text and writes none",
            f"of encoders these are supported: {', '.join(TEXT_ENCODERS)}",
        )
