"""One configuration of an architecture for tests; see tests/support/zoo.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


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

    config: dict[str, Any]
    seed: int = 1
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    scale: float = 2.0
    boost: float = 1.0
    context: int | None = None
    long: bool = False


def config(kind: str, **values: Any) -> dict[str, Any]:
    shared = {
        "model_type": kind,
        "vocab_size": 160,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
    }
    return shared | values


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
GEMMA_4 = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
