"""gpt-oss: sinks of attention, windows in every other layer, experts with biases and a clamped gate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from edgespec.errors import UnsupportedModel
from edgespec.export.architectures.base import Architecture, known
from edgespec.export.architectures.experts import Experts, alike
from edgespec.export.architectures.formula import LAYERS
from edgespec.export.architectures.rope import Rotary
from edgespec.export.architectures.rules import AttentionRule, ExpertsRule
from edgespec.export.source.activations import SWIGLU_ALPHA, SWIGLU_LIMIT
from edgespec.export.source.derived import Extra, Floats, made_of, original, rows_of
from edgespec.export.source.source import Checkpoint

PACKED = "_blocks"  # how the names of matrices in MXFP4 end
YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096}  # fmt: skip


def of_experts(whole: Extra, n: int, first: int = 0, step: int = 1) -> Extra:
    """Put matrices of all experts below each other: [experts, k, n * step] -> [experts * n, k].

    Args:
        whole: of all experts, inputs first.
        n: outputs that are taken of each expert: ``first``, and every ``step``-th after it.
    """

    def read(rows: slice, columns: slice | None) -> Floats:
        start, stop, _ = rows.indices(whole.shape[0] * n)
        at, end = start // n, -(-stop // n)
        found = whole.read(slice(at, end), None)[:, :, first::step].swapaxes(1, 2)
        flat = found.reshape(-1, found.shape[2])[start - at * n : stop - at * n]
        return flat if columns is None else flat[:, columns]

    return Extra(lambda: (whole.shape[0] * n, whole.shape[1]), read, whole.origins)


@dataclass(frozen=True)
class BiasedExperts(Experts):
    """Experts whose products have biases; the outputs of gate and up alternate in one matrix."""

    def rule(self, arch: Architecture, layer: int) -> ExpertsRule:
        at = f"{LAYERS}.{layer}.mlp"
        gate, up, down = (f"{at}.experts.{part}.bias" for part in ("gate", "up", "down"))
        return replace(super().rule(arch, layer), router_bias=f"{at}.router.bias", gate_bias=gate, up_bias=up,
                       down_bias=down)  # fmt: skip

    def derived(self, arch: Architecture, source: Checkpoint) -> dict[str, Extra]:
        facts, hidden, found = arch.facts.experts, arch.facts.hidden, dict[str, Extra]()
        assert facts is not None
        for layer in facts.layers:
            at = f"{LAYERS}.{layer}.mlp.experts"
            if source.has(f"{at}.gate.weight"):  # one by one, as in GGUF
                names = [f"{at}.{part}.weight" for part in ("gate", "up", "down")]
                found |= alike({name: original(source, name) for name in names})
                continue
            parts = {"gate": ("gate_up_proj", facts.inner, 0, 2), "up": ("gate_up_proj", facts.inner, 1, 2),
                     "down": ("down_proj", hidden, 0, 1)}  # fmt: skip
            matrices: dict[str, Extra] = {}
            for part, (name, n, first, step) in parts.items():
                if source.has(f"{at}.{name}{PACKED}"):
                    rows = np.arange(first, facts.count * n * step, step)
                    matrices[f"{at}.{part}.weight"] = rows_of(original(source, f"{at}.{name}{PACKED}"), rows)
                else:
                    matrices[f"{at}.{part}.weight"] = of_experts(original(source, f"{at}.{name}"), n, first, step)
                bias = original(source, f"{at}.{name}_bias")
                found[f"{at}.{part}.bias"] = made_of(bias, (facts.count * n,), _every(first, step))
            found |= alike(matrices)
        return found


def _every(first: int, step: int) -> Callable[[Floats], Floats]:
    """Take every ``step``-th number of each expert's bias, [experts, n * step] -> [experts * n]."""
    return lambda found: found[:, first::step].ravel()


@known(
    "gpt_oss",
    "gpt-oss-20b",
    "sinks of attention, windows in every other layer, experts with biases, in MXFP4 as they come; "
    "native operators only",
)
class GptOss(Architecture):
    """gpt-oss (arXiv 2508.10925)."""

    epsilon = ("rms_norm_eps", 1e-5)
    context_default = 131072
    rope_theta = 150000.0
    biases = {"": ("attention_bias", True)}
    window_pattern = ("", 2)
    experts = BiasedExperts(count="num_local_experts", normed=True)

    def configure(self) -> dict[str, Any]:
        settings = self.settings
        if self.activation != "silu":
            raise UnsupportedModel(f"{settings.file}: hidden_act {settings.get('hidden_act')!r}: expected silu")
        for key, own in (("swiglu_limit", SWIGLU_LIMIT), ("swiglu_alpha", SWIGLU_ALPHA)):
            if np.float32(settings.number(key, float(own))) != own:
                raise UnsupportedModel(f"{settings.file}: {key} {settings.get(key)!r} is not supported: expected {own}")
        self.activation = "swiglu_oai"
        return super().configure()

    def rotations(self) -> dict[str, Rotary]:
        if self.settings.get("rope_parameters") is None and self.settings.get("rope_scaling") is None:
            self.settings.values["rope_parameters"] = YARN
        return super().rotations()

    def rule(self, layer: int) -> AttentionRule:
        return replace(super().rule(layer), sinks=f"{LAYERS}.{layer}.self_attn.sinks")
