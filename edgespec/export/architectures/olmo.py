"""OLMo 2, 3, OLMoE and OLMo Hybrid: norms after the sub-layers, and of whole rows of q and k."""

from __future__ import annotations

from collections.abc import Mapping

from edgespec.export.architectures.base import Architecture, known
from edgespec.export.architectures.experts import Experts
from edgespec.export.architectures.formula import LAYERS
from edgespec.export.architectures.rope import Rotary
from edgespec.export.architectures.rules import AFTER, BEFORE, Norms
from edgespec.export.architectures.states import NegativeDeltaRules
from edgespec.export.source.derived import Extra, original
from edgespec.export.source.source import Checkpoint


@known("olmo2", "OLMo-2-0425-1B-Instruct", "norms only after sub-layers, of whole rows of q and k")
class Olmo2(Architecture):
    """OLMo 2 (arXiv 2501.00656)."""

    epsilon = ("rms_norm_eps", 1e-5)
    norms = AFTER
    row_norms = True


@known("olmo3", "Olmo-3-7B-Instruct", "as olmo2; local and global layers with a rotation each")
class Olmo3(Olmo2):
    """OLMo 3: windows in three of four layers; scaled rotation only in the others."""

    window_pattern = ("", 4)

    def rotations(self) -> dict[str, Rotary]:
        theta = self.settings.number("rope_theta", 500_000.0)
        full = self.rotation("full_attention", theta, scaled=True)
        return {"rope": full, "rope_local": self.rotation("sliding_attention", theta, scaled=False)}


@known(
    "olmoe",
    "OLMoE-1B-7B-0125-Instruct",
    "norms of whole rows of q and k, mixtures of experts; native operators only",
)
class Olmoe(Olmo2):
    """OLMoE: norms in front, a mixture of experts in every layer (arXiv 2409.02060)."""

    norms = BEFORE
    experts = Experts()
    refused = (("clip_qkv", "clipped queries, keys and values", "OLMoE without clip_qkv"),)


@known(
    "olmo_hybrid",
    "Olmo-Hybrid-7B",
    "gated delta rules with negative eigenvalues in three of four layers, as olmo2 in the others; "
    "native operators only",
)
class OlmoHybrid(Architecture):
    """OLMo Hybrid: gated delta rules, normed before; OLMo 3's attention without windows."""

    context_default = 65536
    biases = {"self_attn": ("attention_bias", False)}
    windows = "none"
    row_norms = True
    states = NegativeDeltaRules()
    # names in files; for layers with attention, transformers 5 also saves the second norm by this name
    SAVED = {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}

    def norms_of(self, layer: int) -> Norms:
        return BEFORE if layer in self.facts.convolutions else AFTER

    def rotations(self) -> dict[str, Rotary]:
        given = self.settings.get("rope_parameters", {})  # a base of null: no layer has positions
        positions = isinstance(given, dict) and given.get("rope_theta", self.rope_theta) is not None
        return super().rotations() if positions else {}

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        found = dict(super().derived(source))
        for layer in range(self.facts.layers):
            for ours, theirs in self.SAVED.items():
                if source.has(name := f"{LAYERS}.{layer}.{theirs}.weight"):
                    found[f"{LAYERS}.{layer}.{ours}.weight"] = original(source, name)
        return found
