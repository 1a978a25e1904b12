"""Gemma 4, the text model of E2B and E4B: per-layer embeddings, layers that share keys and values, two head sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.architectures.base import Architecture, known
from edgespec.export.architectures.formula import ATTENTION, LAYERS
from edgespec.export.architectures.ops import Ops, Value
from edgespec.export.architectures.rope import Rotary, proportional, rotations_by_kind
from edgespec.export.architectures.rows import turned_first, turned_rows
from edgespec.export.architectures.rules import AROUND, AttentionRule, LayerEmbedding, Norm
from edgespec.export.source.derived import Extra, affine, held, original, rows_of
from edgespec.export.source.source import Checkpoint

TABLE, PROJECTION, NORM = (f"model.{name}.weight" for name in (
    "embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm"))  # fmt: skip
SUPPORTED = "gemma4 with per-layer embeddings and without experts (E2B, E4B)"
ROTATIONS = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}


@known(
    "gemma4_text",
    "gemma-4-E2B-it, gemma-4-E4B-it",
    "embeddings of each layer, shared keys and values, two head sizes; native operators only",
)
class Gemma4(Architecture):
    """See the module."""

    activation_key = "hidden_activation"
    activation_default = "gelu_pytorch_tanh"
    tied_by_default = True
    norms = AROUND
    logits_cap = ("final_logit_softcapping", 0.0)
    kinds: list[str]  # sliding or full attention, by layer
    owners: int  # layers with their own keys and values; later layers read the last ones of their kind
    wide: int  # size of a head of full layers

    def configure(self) -> dict[str, Any]:
        settings, facts = self.settings, self.facts
        if settings.get("use_bidirectional_attention") == "all":
            settings.refuse("use_bidirectional_attention", "attention to later tokens", "causal attention")
        settings.refuse("enable_moe_block", "a mixture of experts", SUPPORTED)
        settings.refuse("attention_k_eq_v", "one projection for keys and values", SUPPORTED)
        width = settings.get("hidden_size_per_layer_input", 256)
        if not width or settings.get("vocab_size_per_layer_input", facts.vocab) != facts.vocab:
            raise UnsupportedModel(
                f"{settings.file}: expected embeddings of each layer (hidden_size_per_layer_input) of all tokens "
                f"(vocab_size_per_layer_input); supported: {SUPPORTED}"
            )
        settings.values["rope_parameters"] = rotations_by_kind(settings, ROTATIONS)
        self.kinds = self._kinds()
        shared = settings.get("num_kv_shared_layers", 0)
        self.owners = facts.layers - (shared if isinstance(shared, int) and 0 <= shared < facts.layers else 0)
        if set(self.kinds[: self.owners]) != set(self.kinds):
            raise ExportError(
                f"{settings.file}: num_kv_shared_layers: no layer gives keys and values to those that share them"
            )
        self.wide = self._wide()
        dims = [self.dim(layer) for layer in range(self.owners)]
        sizes = {"head_dims": dims, "shared": facts.layers - self.owners,
                 "layer_embedding": settings.integer("hidden_size_per_layer_input", 256)}  # fmt: skip
        return sizes

    def _kinds(self) -> list[str]:
        """Sliding or full attention of each layer; the last one's is full."""
        kinds = self.layer_types or ["full_attention" if at % 6 == 5 else "sliding_attention"
                                     for at in range(self.facts.layers)]  # fmt: skip
        return [*kinds[:-1], "full_attention"]

    def _wide(self) -> int:
        """Size of a head of full layers: said at once, or layer by layer."""
        every = self.settings.get("per_layer_config")
        if not isinstance(every, dict):
            return self.settings.integer("global_head_dim", 512)
        found = [every.get(str(at), {}) for at, kind in enumerate(self.kinds) if kind == "full_attention"]
        sizes = [own.get("head_dim", self.facts.head_dim) if isinstance(own, dict) else None for own in found]
        size = sizes[0]
        others = {key for own in every.values() if isinstance(own, dict) for key in own} - {"head_dim"}
        if any(other != size for other in sizes) or others or not isinstance(size, int) or size <= 0 or size % 8:
            raise UnsupportedModel(
                f"{self.settings.file}: expected per_layer_config to give all full layers one head_dim, a multiple of 8"
            )
        return size

    def dim(self, layer: int) -> int:
        """Size of a layer's heads."""
        return self.facts.head_dim if self.slides(layer) else self.wide

    def slides(self, layer: int) -> bool:
        return self.kinds[layer] == "sliding_attention"

    def source_of(self, layer: int) -> int:
        if layer < self.owners:
            return layer
        return max(at for at in range(self.owners) if self.kinds[at] == self.kinds[layer])

    def width(self, weight: str) -> int | None:
        at, module = int(weight.split(".")[2]), weight.split(".")[-2]
        sizes = {"q_proj": self.facts.heads, "k_proj": self.facts.kv_heads, "v_proj": self.facts.kv_heads}
        if module in sizes:
            return sizes[module] * self.dim(at)
        if module in ("per_layer_input_gate", "per_layer_model_projection"):
            return self.facts.layer_embedding
        if module == "per_layer_projection":
            return self.facts.hidden
        doubled = at >= self.owners and self.settings.flag("use_double_wide_mlp")
        return 2 * self.facts.intermediate if doubled and module in ("gate_proj", "up_proj") else None

    def ignores(self, name: str) -> bool:
        shared = ("k_proj", "v_proj", "k_norm", "v_norm")
        return int(name.split(".layers.")[1].split(".")[0]) >= self.owners and name.split(".")[-2] in shared

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

    def build(self, ops: Ops) -> Value:
        """Build the whole decoder; after each layer its own embedding of the tokens is added."""
        scale = self.facts.hidden**0.5
        x = ops.embed(self.embedding, scale=scale)
        tokens = ops.token_embeddings(self.embedding, scale)  # the stream changes under the layers that read this

        def own(layer: int) -> Callable[[Value], Value]:
            return lambda x: self.own(ops, x, tokens, layer)

        for layer in range(self.facts.layers):
            x = self.layer(ops, x, layer)
            x = ops.sublayer("embedding", layer, x, own(layer), scale=f"{LAYERS}.{layer}.layer_scalar")
        return ops.head(x, self.final_norm, self.head)

    def own(self, ops: Ops, x: Value, tokens: Value, layer: int) -> Value:
        """Return the contribution of a layer's own embedding, from the tokens' usual embeddings."""
        size, layers = self.facts.layer_embedding, self.facts.layers
        (gate,) = ops.linear(x, self.linear(layer, "per_layer_input_gate"))
        (given,) = ops.linear(tokens, self.linear(layer, "per_layer_model_projection"))
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
        found: dict[str, Extra] = {NORM: affine(original(source, NORM), scale=0.5**0.5)}
        found |= {f"{LAYERS}.heads_of_{dim}_norm.weight": held(np.ones(dim, np.float32)) for dim in self.facts.dims}
        for layer in range(self.facts.layers):
            at, rows = f"{LAYERS}.{layer}", np.arange(layer * size, (layer + 1) * size)
            projection = affine(rows_of(original(source, PROJECTION), rows), scale=self.facts.hidden**-0.5)
            found[f"{at}.per_layer_model_projection.weight"] = projection
        return found | self._reordered(source)

    def _reordered(self, source: Checkpoint) -> dict[str, Extra]:
        """Rows of q and k of full layers with the rotated channels first."""
        order, found = turned_first(self.wide, self.rotaries["rope_full"].dims), dict[str, Extra]()
        for layer in range(self.facts.layers):
            if not self.slides(layer):
                heads = {"q": self.facts.heads} | ({"k": self.facts.kv_heads} if layer < self.owners else {})
                found |= turned_rows(source, f"{LAYERS}.{layer}", heads, order, bias=False)
        return found
