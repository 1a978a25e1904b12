"""LlamaGen of classes: a Llama over codes of pictures, whose channels turn by lines and columns (arXiv 2406.06525).

Classes are tokens behind the codes; the LM head has rows of zeros for them, and pictures are made of codes alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from edgespec.errors import UnsupportedModel
from edgespec.export.architectures.base import EMBEDDING, HEAD, QKV, Architecture, known
from edgespec.export.architectures.rope import Rotary
from edgespec.export.source.derived import Extra, held, joined, original
from edgespec.export.source.source import Checkpoint

CLASSES = "cls_embedding.embedding_table.weight"


@known("llamagen", "LlamaGen c2i_B_256", "codes of pictures, of classes; channels turn by lines and columns")
class LlamaGen(Architecture):
    """The authors' checkpoint of https://github.com/FoundationVision/LlamaGen, with its arguments as config.json."""

    aliases = {
        "hidden_size": "dim",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "num_key_value_heads": "n_kv_head",
    }
    layers_at = "layers"
    outer_names = {"model.norm": "norm"}
    layer_names = {
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    }
    stacked = {"attention.wqkv": QKV}
    epsilon = ("norm_eps", 1e-5)
    biases = {}
    windows = "none"
    pairs = "neighbours"
    context_default = 257

    @property
    def side(self) -> int:
        """Codes of a line of a picture."""
        return math.isqrt(self.settings.integer("block_size", 256))

    @property
    def most_context(self) -> int:
        return 1 + self.side**2

    def inner_size(self, hidden: int) -> int:
        size, multiple = int(2 * 4 * hidden / 3), self.settings.integer("multiple_of", 256)
        if factor := self.settings.get("ffn_dim_multiplier", None):
            size = int(factor * size)
        return -(-size // multiple) * multiple

    def configure(self) -> dict[str, Any]:
        if self.config.get("cond", "c2i") != "c2i" or self.settings.integer("cls_token_num", 1) != 1:
            raise UnsupportedModel(f"{self.settings.file}: LlamaGen of texts is not supported: expected one of classes")
        classes = self.settings.integer("num_classes", 1000) + 1  # the last one is none in particular
        return super().configure() | {"vocab": self.facts.vocab + classes, "context": self.most_context, "tied": False}

    def rotations(self) -> dict[str, Rotary]:
        theta = self.settings.number("rope_base", 10000.0)
        return {"rope": Rotary({"rope_type": "grid", "rope_theta": theta, "side": self.side, "before": 1},
                               self.facts.head_dim)}  # fmt: skip

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        classes = original(source, CLASSES)
        found = {f"{EMBEDDING}.weight": joined(original(source, "tok_embeddings.weight"), classes)}
        found[f"{HEAD}.weight"] = joined(original(source, "output.weight"), held(np.zeros(classes.shape, np.float32)))
        return {**super().derived(source), **found}
