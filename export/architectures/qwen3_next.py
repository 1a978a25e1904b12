"""Qwen3-Next: as Qwen3.5 with experts; what a delta rule reads comes out of two matrices, key head by key head."""

from collections.abc import Mapping

import numpy as np

from edgespec.export.architectures.base import LAYERS
from edgespec.export.architectures.qwen3_5_moe import Qwen35Moe
from edgespec.export.source.derived import Own, Rows
from edgespec.export.source.extended import Extra
from edgespec.export.source.source import Checkpoint


class Qwen3Next(Qwen35Moe):
    model_type = "qwen3_next"
    example = "Qwen3-Next-80B-A3B-Instruct"
    features = "as qwen3_5_moe_text; native operators only"

    def is_mixed(self, layer: int) -> bool:
        dense = self.settings.layers("mlp_only_layers")
        return layer not in dense and (layer + 1) % self.settings.integer("decoder_sparse_step", 1) == 0

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        found, heads = dict(super().derived(source)), self.facts.delta
        assert heads is not None
        each = heads.values // heads.keys
        ends = np.cumsum([heads.key_dim, heads.key_dim, each * heads.value_dim, each * heads.value_dim])
        mixed = np.split(np.arange(heads.keys * ends[-1]).reshape(heads.keys, -1), ends[:-1], 1)  # q, k, v, z
        b, a = np.split(np.arange(2 * heads.values).reshape(heads.keys, -1), 2, 1)
        rows = {"qkv": np.concatenate([part.ravel() for part in mixed[:3]]), "z": mixed[3], "a": a, "b": b}
        for layer in self.facts.convolutions:
            at = f"{LAYERS}.{layer}.linear_attn.in_proj_"
            for part, ids in rows.items():
                whole = Own(source, f"{at}{'ba' if part in 'ab' else 'qkvz'}.weight")
                found[f"{at}{part}.weight"] = Rows(whole, ids.ravel())
        return found
