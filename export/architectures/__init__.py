"""The architectures that can be exported, by the ``model_type`` of config.json."""

from __future__ import annotations

from typing import Any

from edgespec.errors import UnsupportedModel
from edgespec.export.architectures.apertus import Apertus
from edgespec.export.architectures.base import Architecture
from edgespec.export.architectures.beyond_text import refuse_encoder, refuse_senses, senses
from edgespec.export.architectures.checked import check_tensors
from edgespec.export.architectures.cohere import Cohere
from edgespec.export.architectures.cohere2 import Cohere2
from edgespec.export.architectures.ernie4_5 import Ernie45
from edgespec.export.architectures.exaone4 import Exaone4
from edgespec.export.architectures.falcon import Falcon
from edgespec.export.architectures.gemma import Gemma
from edgespec.export.architectures.gemma2 import Gemma2
from edgespec.export.architectures.gemma3 import Gemma3
from edgespec.export.architectures.gemma4 import Gemma4
from edgespec.export.architectures.glm import Glm
from edgespec.export.architectures.glm4 import Glm4
from edgespec.export.architectures.gpt2 import Gpt2
from edgespec.export.architectures.gpt_neox import GptNeoX
from edgespec.export.architectures.granite import Granite
from edgespec.export.architectures.granitemoe import GraniteMoe
from edgespec.export.architectures.granitemoehybrid import GraniteHybrid
from edgespec.export.architectures.hunyuan_v1_dense import HunyuanDense
from edgespec.export.architectures.lfm2 import Lfm2
from edgespec.export.architectures.lfm2_moe import Lfm2Moe
from edgespec.export.architectures.lfm3 import Lfm3
from edgespec.export.architectures.llama import Llama
from edgespec.export.architectures.ministral3 import Ministral3
from edgespec.export.architectures.mistral import Mistral
from edgespec.export.architectures.nanochat import NanoChat
from edgespec.export.architectures.olmo2 import Olmo2
from edgespec.export.architectures.olmo3 import Olmo3
from edgespec.export.architectures.olmo_hybrid import OlmoHybrid
from edgespec.export.architectures.olmoe import Olmoe
from edgespec.export.architectures.phi import Phi
from edgespec.export.architectures.phi3 import Phi3
from edgespec.export.architectures.qwen2 import Qwen2
from edgespec.export.architectures.qwen3 import Qwen3
from edgespec.export.architectures.qwen3_5 import Qwen35
from edgespec.export.architectures.qwen3_5_moe import Qwen35Moe
from edgespec.export.architectures.qwen3_moe import Qwen3Moe
from edgespec.export.architectures.qwen3_next import Qwen3Next
from edgespec.export.architectures.refused import reason
from edgespec.export.architectures.seed_oss import SeedOss
from edgespec.export.architectures.smollm3 import SmolLm3
from edgespec.export.architectures.stablelm import StableLm
from edgespec.export.architectures.starcoder2 import StarCoder2
from edgespec.export.source.prefix import with_usual_prefix
from edgespec.export.source.source import Checkpoint

__all__ = ["ARCHITECTURES", "Architecture", "VERIFIED", "architecture", "describe"]

KINDS: tuple[type[Architecture], ...] = (
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
    Gemma,
    Gemma2,
    Gemma3,
    Gemma4,
    GraniteMoe,
    Olmoe,
    Qwen3Moe,
    Phi3,
    SmolLm3,
    Olmo2,
    Olmo3,
    Granite,
    StableLm,
    Gpt2,
    GptNeoX,
    StarCoder2,
    Falcon,
    Apertus,
    Cohere,
    Cohere2,
    Ernie45,
    Exaone4,
    Glm,
    Glm4,
    GraniteHybrid,
    HunyuanDense,
    Ministral3,
    NanoChat,
    Phi,
    SeedOss,
    Lfm2,
    Lfm2Moe,
    Lfm3,
    Qwen35,
    Qwen35Moe,
    Qwen3Next,
    OlmoHybrid,
)
VERIFIED = "5.23.0"
"""The version of transformers whose logits every architecture's equal (tests/data/reference)."""
ARCHITECTURES: dict[str, type[Architecture]] = {kind.model_type: kind for kind in KINDS}


def architecture(source: Checkpoint, text_only: bool = False) -> Architecture:
    """The architecture of a checkpoint.

    Args:
        source: the checkpoint.
        text_only: of a model that reads more than text, take its text half.

    Raises:
        NotText: the model has an encoder, or reads more than text and not its text half was asked for.
        UnsupportedModel: unknown ``model_type``; the message lists what is supported.
    """
    config = source.config
    what, text = senses(config, source.index), config.get("text_config")
    if what and not text_only:
        raise refuse_senses(source.path, what, text_kind(config))
    refuse_encoder(source.path, describe(config), config)
    if isinstance(text, dict) and describe(config) not in ARCHITECTURES and describe(text) in ARCHITECTURES:
        shared = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        source.config = config = {**shared, **text}
    name = describe(config)
    if name not in ARCHITECTURES:
        raise UnsupportedModel(f"{source.path}: {refusal(name)}", "docs/architectures.md says how to add one")
    kind = ARCHITECTURES[name]
    source = with_usual_prefix(source, kind.layers_at)
    made = kind(source)
    check_tensors(made, source)
    made.text_half_of = what
    if what:
        made.source.notes.append(f"the text half alone: the model itself reads {what}, the bundle does not")
    return made


def text_kind(config: dict[str, Any]) -> str | None:
    """The architecture of a model's text, in whatever it is wrapped; None = one that is not supported."""
    kinds = [describe(one) for one in (config, config.get("text_config")) if isinstance(one, dict)]
    return next((kind for kind in kinds if kind in ARCHITECTURES), None)


def refusal(name: str) -> str:
    """That a ``model_type`` is not supported, why if that is known, and what is."""
    why = f" ({found})" if (found := reason(name)) else ""
    return f"architecture {name!r} is not supported{why}; supported: {', '.join(sorted(ARCHITECTURES))}"


def describe(config: dict[str, Any]) -> str:
    """How a configuration names itself, for messages."""
    if kind := config.get("model_type"):
        return str(kind)
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else "unknown"
