"""Granite 3 and 4: Llama with four multipliers, mixtures of experts, state spaces."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.architectures.base import Architecture, known
from edgespec.export.architectures.experts import Experts
from edgespec.export.architectures.formula import LAYERS
from edgespec.export.architectures.ops import Ops, Value
from edgespec.export.architectures.rope import Rotary
from edgespec.export.architectures.rules import AttentionRule, LogitsRule
from edgespec.export.architectures.states import StateSpaces
from edgespec.export.source.derived import Extra, affine, original
from edgespec.export.source.source import Checkpoint

MIXTURES = Experts(
    routers=("block_sparse_moe.router.layer.weight", "block_sparse_moe.router.weight"),
    fused=(
        ("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
        ("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"),
    ),
    single="",
    count="num_local_experts",
    normed=True,
    scale="residual_multiplier",
)


@known("granite", "granite-3.3-2b-instruct", "multipliers of embedding, scores, sub-layers, logits")
class Granite(Architecture):
    """Granite 3: what a sub-layer adds to the stream is multiplied.

    Norms make the scale of the stream irrelevant, so the embedding is divided by the multiplier instead, and matrices
    stay as they are stored.  The epsilon of norms is divided by its square.  State spaces have norms inside, with the
    same epsilon: with those, what ends a sub-layer carries the multiplier.
    """

    def configure(self) -> dict[str, Any]:
        found, values = super().configure(), self.settings.values
        times = self.settings.positive("residual_multiplier", 1.0)
        if not found.get("convolutions"):
            values["embedding_multiplier"] = self.settings.number("embedding_multiplier", 1.0) / times
            values["residual_multiplier"] = 1.0
            self.eps /= times**2
        return found

    def embed(self, ops: Ops) -> Value:
        return ops.embed(self.embedding, scale=self.settings.number("embedding_multiplier", 1.0))

    @property
    def score_scale(self) -> float:
        return self.settings.number("attention_multiplier", 1.0)

    @property
    def logits(self) -> LogitsRule:
        return LogitsRule(scale=1 / self.settings.positive("logits_scaling", 1.0))

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        times, found = self.settings.number("residual_multiplier", 1.0), dict(super().derived(source))
        if times == 1:
            return found
        for layer in range(self.facts.layers):
            for module in ("self_attn.o_proj", "mlp.down_proj", "linear_attn.out_proj"):
                if module.startswith("linear_attn") and layer not in self.facts.convolutions:
                    continue
                for kind in ("weight", "bias") if self.bias(module) else ("weight",):
                    name = f"{LAYERS}.{layer}.{module}.{kind}"
                    stored = f"{LAYERS}.{layer}.{self.layer_names.get(module, module)}.{kind}"
                    found[name] = affine(found.get(name, original(source, stored)), scale=times)
        return found


@known("granite_swa", "granite-swash-2b", "as granite; sinks of attention, windows in three of four layers")
class GraniteSwa(Granite):
    """Granite with windows and sinks; a layer has positions or none."""

    epsilon = ("rms_norm_eps", 1e-5)
    tied_by_default = True

    def slides(self, layer: int) -> bool:
        return super().slides(layer) if self.layer_types else layer % 4 > 0

    def rotations(self) -> dict[str, Rotary]:
        bases = sorted({float(theta) for theta in self._bases if theta})
        if len(bases) > 1:
            raise UnsupportedModel(f"{self.settings.file}: layer_rope_theta {bases}: expected one base, or 0")
        found = super().rotations()
        if bases:
            found["rope"] = replace(found["rope"], parameters={**found["rope"].parameters, "rope_theta": bases[0]})
        return found

    @property
    def _bases(self) -> list[float]:
        """Return the base of each layer's angles, 0 = none, where config.json says it for each."""
        found = self.settings.get("layer_rope_theta", [])
        good = isinstance(found, list) and all(type(base) in (int, float) and 0 <= base < math.inf for base in found)
        if not good or len(found) not in (0, self.facts.layers):
            raise ExportError(f"{self.settings.file}: expected layer_rope_theta to be a number for each layer")
        return found

    def rotary(self, layer: int) -> str | None:
        return super().rotary(layer) if not self._bases or self._bases[layer] else None

    def rule(self, layer: int) -> AttentionRule:
        return replace(super().rule(layer), sinks=f"{LAYERS}.{layer}.self_attn.sinks")


@known("granitemoe", "granite-3.1-1b-a400m-instruct", "as granite, with mixtures of experts; native operators only")
class GraniteMoe(Granite):
    """Granite 3 with mixtures of experts: an expert's gate and up are one matrix."""

    experts = MIXTURES


@known(
    "granitemoehybrid",
    "granite-4.0-350m, granite-4.0-h-micro, granite-4.0-h-tiny",
    "as granite, with or without positions; state spaces (Mamba-2) and experts on native operators only",
)
class GraniteHybrid(Granite):
    """Granite 4: attention or state spaces, and experts with a shared MLP, if any."""

    layer_names = {"mlp.down_proj": "shared_mlp.output_linear"}
    stacked = {"shared_mlp.input_linear": ("mlp.gate_proj", "mlp.up_proj")}
    biases = {"self_attn": ("attention_bias", False), "linear_attn": ("mamba_proj_bias", False)}
    windows = "none"
    states = StateSpaces()
    experts = MIXTURES

    def inner_size(self, hidden: int) -> int:
        return self.settings.integer("shared_intermediate_size", 1024)

    def is_moe_layer(self, layer: int) -> bool:
        return bool(self.settings.get("num_local_experts", 0))

    def rotary(self, layer: int) -> str | None:
        return "rope" if self.settings.get("position_embedding_type") == "rope" else None

    def layer(self, ops: Ops, x: Value, layer: int) -> Value:
        if self.facts.experts is None:
            return super().layer(ops, x, layer)
        x = ops.sublayer("attention", layer, x, lambda x: self.attention(ops, x, layer))
        h = self.normed(ops, x, layer, self.norms.mlp)
        x = ops.sublayer("mlp", layer, x, lambda _: self.transform(ops, h, layer))
        return ops.sublayer("mlp", layer, x, lambda _: self.dense(ops, h, layer))
