"""Gemma 4, the text models: of E2B and E4B with per-layer embeddings and layers that share keys and values, of 12B and
31B without, of 26B-A4B with a mixture of experts and the MLP; full layers have heads of another size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.architectures.base import Architecture, known
from edgespec.export.architectures.experts import Experts
from edgespec.export.architectures.formula import ATTENTION, LAYERS
from edgespec.export.architectures.ops import Ops, Value
from edgespec.export.architectures.rope import Rotary, proportional, rotations_by_kind
from edgespec.export.architectures.rows import turned_first, turned_rows
from edgespec.export.architectures.rules import AROUND, AttentionRule, ExpertsRule, LayerEmbedding, Norm
from edgespec.export.source.derived import Extra, affine, by_column, held, original, rows_of
from edgespec.export.source.source import Checkpoint

TABLE, PROJECTION, NORM = (f"model.{name}.weight" for name in (
    "embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm"))  # fmt: skip
UNIFIED = "gemma4_unified_text"  # of 12B, which has no embeddings of each layer
UNIT = "model.unit_norm.weight"  # of a norm without weights
ROTATIONS = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}


@dataclass(frozen=True)
class ScaledExperts(Experts):
    """Experts that a scaled norm of the stream itself chooses, each with a factor of its weight."""

    def rule(self, arch: Architecture, layer: int) -> ExpertsRule:
        return replace(super().rule(arch, layer), factors=f"{LAYERS}.{layer}.router.per_expert_scale")

    def derived(self, arch: Architecture, source: Checkpoint) -> dict[str, Extra]:
        found, facts = super().derived(arch, source), arch.facts
        for layer in facts.experts.layers if facts.experts else ():
            at, matrix = f"{LAYERS}.{layer}", f"{LAYERS}.{layer}.mlp.router.weight"
            scale = original(source, f"{at}.router.scale")
            found[matrix] = by_column(found[matrix], scale, facts.hidden**-0.5)
        return found


EXPERTS = ScaledExperts(
    size="moe_intermediate_size",
    count="num_experts",
    chosen="top_k_experts",
    routers=("router.proj.weight",),
    fused=(("experts.gate_up_proj", "experts.down_proj"),),
    single="experts.{}.{}.weight",
    normed=True,
)


@known(
    "gemma4_text",
    "gemma-4-E2B-it, gemma-4-E4B-it, gemma-4-26B-A4B-it",
    "embeddings of each layer, shared keys and values, two head sizes, mixtures next to the MLP; native operators only",
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
    full_heads: int  # heads of keys in full layers of the checkpoint, each of which stands for several here

    def configure(self) -> dict[str, Any]:
        settings, facts = self.settings, self.facts
        if settings.get("use_bidirectional_attention") == "all":
            settings.refuse("use_bidirectional_attention", "attention to later tokens", "causal attention")
        width = settings.get("hidden_size_per_layer_input", 0 if settings.get("model_type") == UNIFIED else 256)
        if width and settings.get("vocab_size_per_layer_input", facts.vocab) != facts.vocab:
            raise UnsupportedModel(
                f"{settings.file}: expected embeddings of each layer of all tokens (vocab_size_per_layer_input)"
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
        heads = settings.get("num_global_key_value_heads") if settings.flag("attention_k_eq_v") else None
        self.full_heads = self._of_full_layers("num_key_value_heads", heads or facts.kv_heads)
        if self.wide % 8 or facts.kv_heads % self.full_heads:
            raise UnsupportedModel(
                f"{settings.file}: {self.full_heads} key heads of {self.wide} in full layers: expected a size that is "
                f"a multiple of 8, and heads that divide the {facts.kv_heads} of the others"
            )
        dims = [self.dim(layer) for layer in range(self.owners)]
        sizes: dict[str, Any] = {"head_dims": dims, "shared": facts.layers - self.owners}
        sizes["layer_embedding"] = width and settings.integer("hidden_size_per_layer_input", 256)
        if settings.flag("enable_moe_block"):
            self.experts = EXPERTS
            sizes |= EXPERTS.configure(self)
        return sizes

    def _kinds(self) -> list[str]:
        """Sliding or full attention of each layer; the last one's is full."""
        kinds = self.layer_types or ["full_attention" if at % 6 == 5 else "sliding_attention"
                                     for at in range(self.facts.layers)]  # fmt: skip
        return [*kinds[:-1], "full_attention"]

    def _wide(self) -> int:
        """Size of a head of full layers."""
        return self._of_full_layers("head_dim", self.settings.get("global_head_dim", 512))

    def _of_full_layers(self, key: str, otherwise: Any) -> int:
        """Read a number of full layers that ``per_layer_config`` may give, the same for all of them."""
        every = self.settings.get("per_layer_config")
        usual = {"head_dim": self.facts.head_dim, "num_key_value_heads": self.facts.kv_heads}
        found, others = [otherwise], set[str]()
        if isinstance(every, dict):
            every = {
                str(at).lstrip("0") or "0": own for at, own in every.items()
            }  # "05" in models of ten layers or more
            full = [every.get(str(at), {}) for at, kind in enumerate(self.kinds) if kind == "full_attention"]
            found = [own.get(key, usual[key]) if isinstance(own, dict) else None for own in full]
            others = {each for own in every.values() if isinstance(own, dict) for each in own} - usual.keys()
        size = found[0]
        if any(other != size for other in found) or others or type(size) is not int or size <= 0:
            raise UnsupportedModel(
                f"{self.settings.file}: expected per_layer_config to give all full layers one head_dim and one "
                "num_key_value_heads, and nothing else"
            )
        return size

    def dim(self, layer: int) -> int:
        """Size of a layer's heads."""
        return self.facts.head_dim if self.slides(layer) else self.wide

    @property
    def mutual(self) -> bool:
        """Whether rows of an image see each other, which they do in layers with a window alone."""
        return bool(self.inserts) and self.settings.get("use_bidirectional_attention") == "vision"

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
        after = 0 if self.mutual and not self.slides(layer) else None
        gives = owns and layer in map(self.source_of, range(self.owners, self.facts.layers))
        rule = AttentionRule(self.source_of(layer), 1.0, rotary, self.window(layer), q_norm=q, dim=dim, gives=gives,
                             after=after)  # fmt: skip
        return replace(rule, k_norm=k, v_norm=v) if owns else rule

    def rotations(self) -> dict[str, Rotary]:
        full = proportional(self.rotation("full_attention", 1e6, scaled=False), self.wide)
        return {"rope": self.rotation("sliding_attention", 1e4, scaled=False), "rope_full": full}

    def build(self, ops: Ops) -> Value:
        """Build the whole decoder; after each layer its own embedding of the tokens is added."""
        scale = self.facts.hidden**0.5
        x = ops.embed(self.embedding, scale=scale)
        if not self.facts.layer_embedding:
            for layer in range(self.facts.layers):
                x = self.layer(ops, x, layer)
            return ops.head(x, self.final_norm, self.head)
        tokens = ops.token_embeddings(self.embedding, scale)  # the stream changes under the layers that read this

        def own(layer: int) -> Callable[[Value], Value]:
            return lambda x: self.own(ops, x, tokens, layer)

        for layer in range(self.facts.layers):
            x = self.layer(ops, x, layer)
            x = ops.sublayer("embedding", layer, x, own(layer), scale=f"{LAYERS}.{layer}.layer_scalar")
        return ops.head(x, self.final_norm, self.head)

    def layer(self, ops: Ops, x: Value, layer: int) -> Value:
        x = ops.sublayer("attention", layer, x, lambda x: self.attention(ops, x, layer))
        scale = None if self.facts.layer_embedding else f"{LAYERS}.{layer}.layer_scalar"
        return ops.sublayer("mlp", layer, x, lambda x: self.mlp(ops, x, layer), scale=scale)

    def mlp(self, ops: Ops, x: Value, layer: int) -> Value:
        if self.experts is None or self.facts.experts is None:
            return super().mlp(ops, x, layer)
        y = self.dense(ops, self.normed(ops, x, layer, self.norms.mlp), layer)
        y = self.normed(ops, y, layer, f"{self.norms.after_mlp}_1")
        h = self.normed(ops, x, layer, f"{self.norms.mlp}_2")
        mixed = ops.experts(h, EXPERTS.rule(self, layer), self.activation, by=ops.norm(x, Norm(UNIT)))
        both = ops.sum(y, self.normed(ops, mixed, layer, f"{self.norms.after_mlp}_2"))
        return self.normed(ops, both, layer, self.norms.after_mlp)

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
        found: dict[str, Extra] = {UNIT: held(np.ones(self.facts.hidden, np.float32))}
        found |= {f"{LAYERS}.heads_of_{dim}_norm.weight": held(np.ones(dim, np.float32)) for dim in self.facts.dims}
        if self.experts is not None:
            found |= self.experts.derived(self, source)
        if size:
            found[NORM] = affine(original(source, NORM), scale=0.5**0.5)
        for layer in range(self.facts.layers) if size else ():
            at, rows = f"{LAYERS}.{layer}", np.arange(layer * size, (layer + 1) * size)
            projection = affine(rows_of(original(source, PROJECTION), rows), scale=self.facts.hidden**-0.5)
            found[f"{at}.per_layer_model_projection.weight"] = projection
        return found | self._reordered(source)

    def _reordered(self, source: Checkpoint) -> dict[str, Extra]:
        """Rows of q and k of full layers with the rotated channels first; heads of k and v as often as in others."""
        order, found = turned_first(self.wide, self.rotaries["rope_full"].dims), dict[str, Extra]()
        times = np.arange(self.facts.kv_heads) // (self.facts.kv_heads // self.full_heads)  # the stored head of each
        same = self.settings.flag("attention_k_eq_v")
        for layer in range(self.facts.layers):
            if self.slides(layer):
                continue
            at = f"{LAYERS}.{layer}"
            found |= turned_rows(source, at, {"q": self.facts.heads}, order, bias=False)
            if layer < self.owners:
                k, v = (f"{at}.self_attn.{part}_proj.weight" for part in "kv")
                rows = {k: order, v: np.arange(self.wide)}
                for name, of in {k: k, v: k if same else v}.items():
                    ids = (times[:, None] * self.wide + rows[name]).ravel()
                    found[name] = rows_of(original(source, of), ids)
                norm = f"{at}.self_attn.k_norm.weight"
                found[norm] = rows_of(original(source, norm), order)
        return found
