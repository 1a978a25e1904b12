"""The architectures that can be exported, by the ``model_type`` of config.json."""

from __future__ import annotations

from typing import Any

from edgespec.errors import UnsupportedModel
from edgespec.export.architectures import (  # noqa: F401 (register)
    gemma,
    gemma4,
    gpt,
    gpt_oss,
    granite,
    lfm,
    llama,
    olmo,
    qwen,
    seq2seq,
    t5,
    whisper,
)
from edgespec.export.architectures.base import ARCHITECTURES, Architecture
from edgespec.export.architectures.checked import check_tensors
from edgespec.export.architectures.encoders import ENCODERS
from edgespec.export.architectures.janus import generating_half
from edgespec.export.architectures.llamagen import LlamaGen as LlamaGen
from edgespec.export.architectures.refused import REFUSED, modalities, refuse_encoder, refuse_senses
from edgespec.export.architectures.sights import BOTH, HEARINGS, READ, open_hearing, open_sight
from edgespec.export.source.source import Checkpoint, ConfigOnly, renamed, with_usual_prefix, without_prefix
from edgespec.extensions import ARCHITECTURES as GROUP

__all__ = ["ARCHITECTURES", "ENCODERS", "Architecture", "VERIFIED", "architecture", "describe", "encoder_kind",
           "open_text_encoder"]  # fmt: skip

TEXT_HALVES = {
    "gemma4_unified_text": "gemma4_text",
    "granite_docling_text": "granite",
    "hunyuan_vl_text": "hunyuan_v1_dense",
    "paddleocr_vl_text": "llama",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_asr_text": "qwen3",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""Decoders that differ from another one only in the placement of images in their texts."""

ADDING = f"docs/dev/an-architecture.md says how to add one; packages add others in {GROUP}"
THINKER = "thinker."
ALWAYS = {"qwen3_vl_moe_text": {"norm_topk_prob": True}}
"""Their behavior, independent of the configuration."""

VERIFIED = "5.24.0"
"""The version of transformers whose logits every architecture's equal (tests/data/reference)."""


def architecture(source: Checkpoint, text_only: bool = False) -> Architecture:
    """Open a checkpoint as its architecture.

    Raises:
        NotCausalLM: the model has an encoder, or reads more than text and not its text half was asked for.
        UnsupportedModel: unknown ``model_type``; the message lists supported types.
    """
    source = generating_half(source) if describe(source.config) == "janus" and not text_only else _unwrapped(source)
    whole, opened = source.config, source
    config = whole
    what, text = modalities(config, source.index), config.get("text_config")
    kind_of = describe(config) if what and not text_only else ""
    read = READ.get(what, BOTH if what == " and ".join(READ) else ())
    if kind_of not in ("", *read):
        raise refuse_senses(source.path, what, text_kind(config), READ)
    if (reads := encoder_kind(config)) is not None or describe(config) not in ARCHITECTURES:
        refuse_encoder(source.path, reads or describe(config), config)
    inside = text_only or describe(config) not in ARCHITECTURES
    if isinstance(text, dict) and inside and describe(text) in ARCHITECTURES:
        shared = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        source.config = config = {**text, **shared, **ALWAYS.get(str(text.get("model_type")), {})}
    name = describe(config)
    if name not in ARCHITECTURES:
        raise UnsupportedModel(f"{source.path}: {refusal(name)}", ADDING)
    kind = ARCHITECTURES[name]
    source = with_usual_prefix(source, kind.layers_at)
    made = kind(source)
    for side in filter(None, (made, made.encoder)):
        check_tensors(side, source)
    if kind_of:
        opened.config = whole
        if kind_of in BOTH:  # token ids are named even where there is no tower
            what = " and ".join(sense for sense, key in CONFIGS.items() if whole.get(key))
        if "images" in what:
            made.sight = open_sight(kind_of, opened, made)
        if "sound" in what:
            made.hearing = open_hearing(kind_of, opened, made)
        return made
    made.text_half_of = what
    if what:
        made.source.notes.append(f"the text half alone: the model itself reads {what}, the bundle does not")
    return made


CONFIGS = {"images": "vision_config", "sound": "audio_config"}
"""Parts of a configuration that describe towers."""

ENCODER_NAMES = {"new": "gte"}
"""Types of encoders by what their authors call them."""


def encoder_kind(config: dict[str, Any]) -> str | None:
    """Return which encoder of texts a configuration describes, one of ``ENCODERS``; None = it is another model."""
    name = describe(config)
    if name in ARCHITECTURES and not config.get("use_bidirectional_attention"):
        return None
    name = ENCODER_NAMES.get(name, name)
    return name if name in ENCODERS else None


def open_text_encoder(source: Checkpoint) -> tuple[Architecture, Checkpoint]:
    """Open an encoder of texts -> the encoder, and the checkpoint with the names of a model without a head.

    Raises:
        ExportError: tensors or settings that do not fit.
    """
    kind = ENCODERS[str(encoder_kind(source.config))]
    if not isinstance(source, ConfigOnly):
        source = without_prefix(source, getattr(kind, "prefixes", ()))
    source = with_usual_prefix(source, kind.layers_at)
    made = kind(source)
    check_tensors(made, source)
    return made, source


def _unwrapped(source: Checkpoint) -> Checkpoint:
    """Name tensors of Qwen3-ASR's thinker, which its authors save as part of a larger model, as transformers does."""
    config = _thinker(source.config)
    if config is source.config:
        return source
    if isinstance(source, ConfigOnly):
        return ConfigOnly(source.path, config)
    found = renamed(source, {name.removeprefix(THINKER): name for name in source.index})
    found.config = config
    return found


def _thinker(config: dict[str, Any]) -> dict[str, Any]:
    thinker = config.get("thinker_config")
    if isinstance(thinker, dict) and describe(config) in HEARINGS:
        return {**thinker, "model_type": config["model_type"]}
    return config


def text_kind(config: dict[str, Any]) -> str | None:
    """Find the architecture of a model's text decoder, even inside another model; None = not supported."""
    config = _thinker(config)
    kinds = [describe(one) for one in (config, config.get("text_config")) if isinstance(one, dict)]
    return next((kind for kind in kinds if kind in ARCHITECTURES), None)


def refusal(name: str) -> str:
    """Write the error text for an unsupported model type."""
    why = "".join(f" ({feature})" for feature, names in REFUSED.items() if name in names)
    return f"architecture {name!r} is not supported{why}; supported: {', '.join(sorted(ARCHITECTURES))}"


def describe(config: dict[str, Any]) -> str:
    """Return how a configuration names itself, for messages."""
    if kind := config.get("model_type"):
        return TEXT_HALVES.get(str(kind), str(kind))
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else "unknown"
