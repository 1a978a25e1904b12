"""Gemma 4, the text model of E2B and E4B: per-layer embeddings, layers that share keys and values, two head sizes."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from edgespec.export.architectures.base import ATTENTION, LAYERS
from edgespec.export.architectures.gemma2 import Gemma2
from edgespec.export.architectures.gemma4_config import Gemma4Config
from edgespec.export.architectures.ops import AttentionRule, LayerEmbedding, Norm, Ops, Value
from edgespec.export.architectures.proportional import proportional, turned_first, turned_rows
from edgespec.export.architectures.rope import Rotary
from edgespec.export.source.derived import Affine, Own, Rows
from edgespec.export.source.extended import Extra, Held
from edgespec.export.source.source import Checkpoint

TABLE, PROJECTION, NORM = (f"model.{name}.weight" for name in (
    "embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm"))  # fmt: skip


class Gemma4(Gemma4Config, Gemma2):
    model_type = "gemma4_text"
    example = "gemma-4-E2B-it, gemma-4-E4B-it"
    features = "embeddings of each layer, shared keys and values, two head sizes; native operators only"
    norm_weight_is_offset = False

    def rule(self, layer: int) -> AttentionRule:
        at, dim, owns = f"{LAYERS}.{layer}.self_attn", self.dim(layer), layer < self.owners
        q, k, v = (self.norm(name) for name in (f"{at}.q_norm", f"{at}.k_norm", f"{LAYERS}.heads_of_{dim}_norm"))
        rotary = "rope" if self.slides(layer) else "rope_full"
        gives = owns and layer in map(self.source_of, range(self.owners, self.facts.layers))
        rule = AttentionRule(self.source_of(layer), 1.0, rotary, self.window(layer), q_norm=q, dim=dim, gives=gives)
        return replace(rule, k_norm=k, v_norm=v) if owns else rule

    def rotations(self) -> dict[str, Rotary]:
        full = proportional(self.rotation("full_attention", 1e6, scaled=False), self.wide)
        return {"rope": self.rotation("sliding_attention", 1e4, scaled=False), "rope_full": full}

    def embed(self, ops: Ops) -> Value:
        # a second time, because the stream changes under the layers that read this
        scale = self.facts.hidden**0.5
        x = ops.embed(self.embedding, scale=scale)
        self._embedded: Any = ops.token_embeddings(self.embedding, scale)
        return x

    def layer(self, ops: Ops, x: Value, layer: int) -> Value:
        x = super().layer(ops, x, layer)
        name = f"{LAYERS}.{layer}.layer_scalar"
        return ops.sublayer("embedding", layer, x, lambda x: self.own(ops, x, layer), scale=name)

    def own(self, ops: Ops, x: Value, layer: int) -> Value:
        """What a layer's own embedding of the tokens adds."""
        size, layers = self.facts.layer_embedding, self.facts.layers
        (gate,) = ops.linear(x, self.linear(layer, "per_layer_input_gate"))
        (given,) = ops.linear(self._embedded, self.linear(layer, "per_layer_model_projection"))
        rule = LayerEmbedding(TABLE, layer, layers, size, (size / 2) ** 0.5)
        inner = ops.layer_embedding(gate, ops.norm(given, Norm(NORM)), rule, self.activation)
        (y,) = ops.linear(inner, self.linear(layer, "per_layer_projection"))
        return self.normed(ops, y, layer, "post_per_layer_input_norm")

    def attend(self, ops: Ops, h: Value, layer: int) -> Value:
        if layer < self.owners:
            return super().attend(ops, h, layer)
        (q,) = ops.linear(h, self.linear(layer, ATTENTION.format("q")), joined=True)
        return ops.linear(ops.attention(q, None, None, self.rule(layer)), self.linear(layer, ATTENTION.format("o")))[0]

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        size = self.facts.layer_embedding
        found: dict[str, Extra] = {NORM: Affine(Own(source, NORM), scale=0.5**0.5)}
        found |= {f"{LAYERS}.heads_of_{dim}_norm.weight": Held(np.ones(dim, np.float32)) for dim in self.facts.dims}
        for layer in range(self.facts.layers):
            at, rows = f"{LAYERS}.{layer}", np.arange(layer * size, (layer + 1) * size)
            projection = Affine(Rows(Own(source, PROJECTION), rows), scale=self.facts.hidden**-0.5)
            found[f"{at}.per_layer_model_projection.weight"] = projection
        return found | self._reordered(source)

    def _reordered(self, source: Checkpoint) -> dict[str, Extra]:
        """Rows of q and k of full layers so that the channels that turn lie in front."""
        order, found = turned_first(self.wide, self.rotaries["rope_full"].dims), dict[str, Extra]()
        for layer in range(self.facts.layers):
            if not self.slides(layer):
                heads = {"q": self.facts.heads} | ({"k": self.facts.kv_heads} if layer < self.owners else {})
                found |= turned_rows(source, f"{LAYERS}.{layer}", heads, order, bias=False)
        return found
