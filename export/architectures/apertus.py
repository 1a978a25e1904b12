"""Apertus: norms of each head, no gate, an activation with two learnt numbers a layer (arXiv 2509.14233)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from edgespec.export.architectures.base import LAYERS, Architecture
from edgespec.export.architectures.qwen3 import Qwen3
from edgespec.export.source.derived import Floats, Own
from edgespec.export.source.extended import Extra
from edgespec.export.source.source import Checkpoint


@dataclass(frozen=True)
class Xielu:
    """The numbers of one layer's ``xielu`` as ops.py has them, [3], of what training stores (arXiv 2411.13010)."""

    above: Own
    below: Own
    slope: Own | None

    @property
    def shape(self) -> tuple[int, ...]:
        """[3]."""
        return (3,)

    def read(self, rows: slice, columns: slice | None) -> Floats:
        """See Extra."""
        stored = (self.above, self.below, self.slope)
        given = [0.5 if each is None else float(each.read(slice(None), None).reshape(())) for each in stored]
        above, below, slope = np.logaddexp(0, given[0]), np.logaddexp(0, given[1]), given[2]
        return np.array([above, slope + below, slope], np.float32)[rows]


class Apertus(Qwen3):
    model_type = "apertus"
    example = "Apertus-8B-Instruct-2509"
    features = "xIELU without a gate, norms of each head"
    epsilon = ("rms_norm_eps", 1e-5)
    layer_names: ClassVar[dict[str, str]] = {
        "input_layernorm": "attention_layernorm",
        "post_attention_layernorm": "feedforward_layernorm",
    }
    activation_default = "xielu"
    gated_mlp = False
    rope_theta = 12_000_000.0

    def bias(self, module: str) -> bool:
        return module.startswith("self_attn") and Architecture.bias(self, module)

    def numbers(self, layer: int) -> str | None:
        return f"{LAYERS}.{layer}.mlp.act_fn.numbers" if self.activation == "xielu" else None

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        found: dict[str, Extra] = {}
        for layer in range(self.facts.layers):
            if name := self.numbers(layer):
                at = name.removesuffix("numbers")
                above, below, slope = (Own(source, f"{at}{part}") for part in ("alpha_p", "alpha_n", "beta"))
                found[name] = Xielu(above, below, slope if source.has(slope.name) else None)
        return found
