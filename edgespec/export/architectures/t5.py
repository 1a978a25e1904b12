"""T5 and its kin (arXiv 1910.10683): biases by distance instead of positions, scores that are not scaled.

A bias depends on the head and on a bucket of the distance: near ones have a bucket each, further ones share one with
others, in steps of the logarithm.  Here a table has the bias of each distance, up to where all fall into the last one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import UnsupportedModel
from edgespec.export.architectures.base import known
from edgespec.export.architectures.formula import ATTENTION, EMBEDDING, FINAL_NORM, LAYERS, QKV
from edgespec.export.architectures.rules import AttentionRule, LogitsRule, RelativeRule
from edgespec.export.architectures.seq2seq import CROSS, EncoderDecoder
from edgespec.export.source.derived import Extra, Floats, made_of, original
from edgespec.export.source.source import Checkpoint

OWN, CROSSED = "layer.0.SelfAttention", "layer.1.EncDecAttention"
TABLE = "relative_attention_bias"
LONGEST = 1 << 15  # nothing in the model limits a text


@known(
    "t5", "t5-small, flan-t5-base, byt5-small, madlad400-3b-mt", "encoder-decoder; biases by distance, gated or relu"
)
class T5(EncoderDecoder):
    """T5 1.0, T5 1.1, Flan-T5, ByT5, MADLAD-400."""

    aliases = {"hidden_size": "d_model", "num_attention_heads": "num_heads", "intermediate_size": "d_ff",
               "head_dim": "d_kv", "max_position_embeddings": "n_positions"}  # fmt: skip
    context_default = 512  # what it was trained on
    layers_at = "decoder.block"
    outer_names = {EMBEDDING: "{}.embed_tokens", FINAL_NORM: "{}.final_layer_norm"}
    epsilon = ("layer_norm_epsilon", 1e-6)
    activation_key = ""  # feed_forward_proj says it
    layer_norms = False
    biases = {}
    placed = "relative"
    scaled = False
    logits_bias = False
    feed_forward: ClassVar[str] = "relu"  # the default of config.json
    scales: ClassVar[bool] = True  # logits are divided by the root of the width, but where config.json says untied
    each: ClassVar[bool] = False  # every layer has its own table

    def __init__(self, source: Checkpoint, encodes: bool = False) -> None:
        inner = f"layer.{1 if encodes else 2}"
        named = zip("qkvo", (*QKV, ATTENTION.format("o")), strict=True)
        self.layer_names = {
            "input_layernorm": "layer.0.layer_norm",
            "memory_layernorm": "layer.1.layer_norm",
            "post_attention_layernorm": f"{inner}.layer_norm",
            **{ours: f"{OWN}.{theirs}" for theirs, ours in named},
            **{CROSS.format(part): f"{CROSSED}.{part}" for part in "qkvo"},
            "mlp.down_proj": f"{inner}.DenseReluDense.wo",
        }
        kind = str(source.config.get("feed_forward_proj") or self.feed_forward)
        self.gated_mlp, self.activation_default = kind.startswith("gated-"), kind.removeprefix("gated-")
        names = {"gate": "wi_0", "up": "wi_1"} if self.gated_mlp else {"up": "wi"}
        self.layer_names |= {f"mlp.{ours}_proj": f"{inner}.DenseReluDense.{theirs}" for ours, theirs in names.items()}
        layers = "num_layers" if encodes or not source.config.get("num_decoder_layers") else "num_decoder_layers"
        self.aliases = {**self.aliases, "num_hidden_layers": layers}
        super().__init__(source, encodes)
        if kind == "gated-gelu":
            self.activation = "gelu_tanh"

    @property
    def most_context(self) -> int:
        return LONGEST

    @property
    def score_scale(self) -> float:
        return 1.0

    @property
    def logits(self) -> LogitsRule:
        tied = self.config.get("tie_word_embeddings") is not False  # new versions write what follows from it instead
        scales = self.scales and self.settings.flag("scale_decoder_outputs", tied)
        return LogitsRule(scale=self.facts.hidden**-0.5 if scales else 1.0)

    def configure(self) -> dict[str, Any]:
        buckets = self.settings.integer("relative_attention_num_buckets", 32)
        self.distance = self.settings.integer("relative_attention_max_distance", 128)
        self.buckets = buckets // (1 + self.both_ways)
        if self.buckets < 2 or self.distance <= self.buckets // 2:
            raise UnsupportedModel(
                f"{self.settings.file}: {buckets} buckets up to a distance of {self.distance}: expected "
                "more than 3, and a distance beyond half of them"
            )
        return super().configure()

    def rule(self, layer: int) -> AttentionRule:
        table = f"{LAYERS}.{layer if self.each else 0}.self_attn.{TABLE}"
        return replace(super().rule(layer), relative=RelativeRule(table, self.distance, self.both_ways))

    def embedding_at(self, source: Checkpoint) -> str:
        names = "shared", "decoder.embed_tokens", "encoder.embed_tokens"
        return next((f"{name}.weight" for name in names if source.has(f"{name}.weight")), "shared.weight")

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        found = dict(super().derived(source))
        size = self.facts.heads * RelativeRule("", self.distance, self.both_ways).size
        for layer in range(self.facts.layers if self.each else 1):
            name = f"{LAYERS}.{layer}.self_attn.{TABLE}"
            theirs = original(source, f"{self.layers_at}.{layer}.{OWN}.{TABLE}.weight")
            found[name] = made_of(theirs, (size,), self._spread)
        return found

    def _spread(self, table: Floats) -> Floats:  # [buckets, heads] -> [heads * distances]
        places = np.arange(-self.distance, self.distance * self.both_ways + 1)
        return table[bucket_of(places, self.buckets, self.distance)].T.ravel()


def bucket_of(places: NDArray[np.int64], buckets: int, distance: int) -> NDArray[np.int64]:
    """Find the bucket of each distance key - query; those of keys after the query follow ``buckets`` others.

    Half of them are for distances 0, 1, ..., the others go by the logarithm, as in the code of arXiv 1910.10683.
    """
    far = np.abs(places)
    exact = buckets // 2
    share = np.log(np.maximum(far, 1).astype(np.float32) / exact) / np.float32(math.log(distance / exact))
    large = np.minimum(exact + (share * np.float32(buckets - exact)).astype(np.int64), buckets - 1)
    found: NDArray[np.int64] = np.where(far < exact, far, large) + np.where(places > 0, buckets, 0)
    return found


@known("mt5", "mt5-small", "as t5, gated")
class MT5(T5):
    """mT5 (arXiv 2010.11934)."""

    feed_forward = "gated-gelu"
    scales = False


@known("umt5", "umt5-small", "as mt5, with a table of biases for each layer")
class UMT5(T5):
    """umT5 (arXiv 2304.09151)."""

    feed_forward = "gated-gelu"
    each = True
