"""The metadata of a GGUF file as a config.json."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.source.gguf.names import ROPE_FACTORS
from edgespec.export.source.tensors.stored import Stored

Metadata = Mapping[str, Any]
MODEL_TYPES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma": ("gemma", "GemmaForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
"""general.architecture -> model_type and class; mistral is "llama" there, and the same decoder."""
LOW, HIGH = 1.0, 4.0  # low_freq_factor and high_freq_factor of every llama3 scaling so far
REBUILD = "export from the Hugging Face checkpoint"


class Facts:
    """The metadata of one architecture, checked as it is asked for.

    Args:
        file: for messages.
        metadata: of the file.
    """

    def __init__(self, file: Path, metadata: Metadata) -> None:
        self.file, self.metadata = file, metadata
        self.architecture = str(metadata.get("general.architecture"))
        if self.architecture not in MODEL_TYPES:
            raise UnsupportedModel(
                f"{file}: GGUF architecture {self.architecture!r} is not supported; supported: "
                f"{', '.join(MODEL_TYPES)}",
                REBUILD,
            )

    def get(self, key: str, default: Any = None) -> Any:
        """``ARCHITECTURE.key``."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def number(self, key: str, default: float | None = None) -> Any:
        """A positive number; the same for all layers, where the file has one for each.

        Raises:
            ExportError: missing or no number. UnsupportedModel: different numbers for different layers.
        """
        value = self.get(key, default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                name = f"{self.architecture}.{key}"
                raise UnsupportedModel(f"{self.file}: {name} differs between layers: {value}", REBUILD)
            value = value[0]
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise ExportError(
                f"{self.file}: expected a positive number {self.architecture}.{key}, got {value!r}",
                "the file is damaged: download it again",
            )
        return value


def gguf_config(file: Path, metadata: Metadata, tensors: Mapping[str, Stored]) -> dict[str, Any]:
    """What config.json would say, from the metadata and the tensors under the file's own names.

    Raises:
        UnsupportedModel: an architecture or an option of it that is not supported.
        ExportError: facts that are missing.
    """
    facts = Facts(file, metadata)
    if facts.get("expert_count"):
        raise UnsupportedModel(f"{file}: a mixture of experts is not supported for {facts.architecture}", REBUILD)
    if "token_embd.weight" not in tensors:
        raise ExportError(f"{file}: has no tensor token_embd.weight", "give the file of a whole model")
    model_type, name = MODEL_TYPES[facts.architecture]
    heads, hidden = facts.number("attention.head_count"), facts.number("embedding_length")
    key_length = facts.number("attention.key_length", hidden // heads)
    if facts.number("attention.value_length", key_length) != key_length:
        raise UnsupportedModel(f"{file}: values of another length than keys are not supported", REBUILD)
    if facts.number("rope.dimension_count", key_length) != key_length:
        raise UnsupportedModel(f"{file}: rotary positions on a part of the head are not supported", REBUILD)
    config: dict[str, Any] = {
        "architectures": [name],
        "model_type": model_type,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": facts.number("feed_forward_length"),
        "num_hidden_layers": facts.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": facts.number("attention.head_count_kv", heads),
        "head_dim": key_length,
        "max_position_embeddings": facts.number("context_length"),
        "rms_norm_eps": _short(facts.number("attention.layer_norm_rms_epsilon")),
        "rope_theta": _short(facts.number("rope.freq_base", 10000.0)),
        "tie_word_embeddings": "output.weight" not in tensors,
        "hidden_act": "silu",
    }
    for key, source in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        if (number := metadata.get(f"tokenizer.ggml.{source}_token_id")) is not None:
            config[key] = int(number)
    if model_type in ("llama", "qwen3"):
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    if model_type == "llama":
        config["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    if scaling := _scaling(facts, tensors, config):
        config["rope_scaling"] = scaling
    return config | (EXTRA[model_type](facts) if model_type in EXTRA else {})


def _scaling(facts: Facts, tensors: Mapping[str, Stored], config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The rotary scaling; None = none."""
    if ROPE_FACTORS in tensors:
        factors = tensors[ROPE_FACTORS].read(slice(None), None).astype(np.float64)
        return llama3_scaling(facts.file, factors, config["rope_theta"], config["max_position_embeddings"])
    kind = str(facts.get("rope.scaling.type", "linear" if facts.get("rope.scale_linear") else "none"))
    factor = facts.get("rope.scaling.factor", facts.get("rope.scale_linear", 1.0))
    if kind == "none" or (kind == "linear" and factor in (0, 1)):
        return None
    scaling = {"rope_type": kind, "factor": _short(float(factor))}
    if (original := facts.get("rope.scaling.original_context_length")) is not None:
        scaling["original_max_position_embeddings"] = int(original)
    return scaling


def llama3_scaling(file: Path, factors: NDArray[np.float64], theta: float, context: int) -> dict[str, Any]:
    """The llama3 scaling whose factors, one a rotary pair, a file holds instead of its parameters.

    A pair of wavelength w has the factor 1 where w < L / HIGH, ``factor`` where w > L / LOW, and between them
    1 / ((1 - s) / factor + s), s = (L / w - LOW) / (HIGH - LOW); so a pair between them gives L, the original context.

    Raises:
        UnsupportedModel: factors of another kind, such as those of longrope.
    """
    size = 2 * len(factors)
    wavelengths = 2 * math.pi * theta ** (np.arange(0, size, 2) / size)
    factor = float(factors.max())
    short, long = wavelengths[factors <= 1 + 1e-4], wavelengths[factors >= factor * (1 - 1e-4)]
    guesses = [8192, context]
    if factor > 1 and len(short) + len(long) < len(factors):
        at = int(np.flatnonzero((factors > 1 + 1e-4) & (factors < factor * (1 - 1e-4)))[0])
        blend = (1 / factors[at] - 1 / factor) / (1 - 1 / factor)
        guesses.insert(0, round(float(wavelengths[at] * (LOW + blend * (HIGH - LOW)))))
    elif factor > 1:  # anything between those that are kept and those that are slowed down gives the same factors
        least = HIGH * float(short.max()) if len(short) else LOW * float(long.min()) / 2
        guesses.append(round(math.sqrt(least * LOW * float(long.min()))))
    for original in guesses:
        blend = np.clip((original / wavelengths - LOW) / (HIGH - LOW), 0, 1)
        if factor >= 1 and np.allclose(1 / ((1 - blend) / factor + blend), factors, rtol=1e-3):
            found = {"factor": _short(factor), "low_freq_factor": LOW, "high_freq_factor": HIGH}
            return {"rope_type": "llama3", **found, "original_max_position_embeddings": int(original)}
    raise UnsupportedModel(
        f"{file}: {ROPE_FACTORS} holds factors that are not those of the llama3 scaling ({LOW:g} to {HIGH:g})", REBUILD
    )


def _gemma(facts: Facts) -> dict[str, Any]:
    return {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def _gemma2(facts: Facts) -> dict[str, Any]:
    heads, large = facts.number("attention.head_count"), facts.number("block_count") == 46
    query = facts.number("embedding_length") // heads if large else facts.number("attention.key_length", 256)
    return _gemma(facts) | {  # the 27B model alone scales queries by another size than the head's
        "query_pre_attn_scalar": query,
        "attn_logit_softcapping": facts.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": facts.number("final_logit_softcapping", 30.0),
        "sliding_window": int(facts.number("attention.sliding_window", 4096)),
    }


def _gemma3(facts: Facts) -> dict[str, Any]:
    heads, large = facts.number("attention.head_count"), facts.number("block_count") == 62
    query = facts.number("embedding_length") // heads if large else facts.number("attention.key_length", 256)
    pattern = facts.get("attention.sliding_window_pattern", 6)
    if isinstance(pattern, list):  # whether each layer has a window
        local: dict[str, Any] = {"layer_types": [f"{'sliding' if slides else 'full'}_attention" for slides in pattern]}
    else:
        local = {"sliding_window_pattern": int(pattern)}
    return _gemma(facts) | {
        "query_pre_attn_scalar": query,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "sliding_window": int(facts.number("attention.sliding_window", 1024)),
        "rope_local_base_freq": _short(facts.number("rope.freq_base_swa", 10000.0)),
        **local,
    }


EXTRA: dict[str, Callable[[Facts], dict[str, Any]]] = {"gemma": _gemma, "gemma2": _gemma2, "gemma3_text": _gemma3}


def _short(value: float) -> float:
    """The float32 of a file as the shortest decimal number that means it."""
    return float(str(np.float32(value)))
