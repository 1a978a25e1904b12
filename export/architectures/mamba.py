"""State spaces (Mamba-2, arXiv 2405.21060) in some layers: delta rules without correction, on C, B and x."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from edgespec.errors import UnsupportedModel
from edgespec.export.architectures.base import LAYERS, Architecture
from edgespec.export.architectures.ops import AttentionRule, DeltaRule, Ops, Value
from edgespec.export.architectures.settings import part_of
from edgespec.export.source.derived import Exponential, Own, Rows, Taps
from edgespec.export.source.extended import Extra
from edgespec.export.source.source import Checkpoint
from edgespec.runtimes.files.facts import DeltaHeads

KINDS = ("attention", "full_attention", "mamba", "linear_attention")


class Mamba(Architecture):
    """A decoder some of whose layers have a state space instead of attention."""

    def check(self) -> None:
        super().check()
        settings, hidden = self.settings, self.facts.hidden
        kinds = settings.each("layer_types", self.facts.layers, KINDS)
        kinds = kinds or settings.each("layers_block_type", self.facts.layers, KINDS) or ["mamba"]
        spaces = [layer for layer, kind in enumerate(kinds) if kind in KINDS[2:]]
        if len(spaces) == len(kinds):
            raise UnsupportedModel(f"{settings.file}: expected a layer with attention (layer_types)")
        if not spaces:
            return
        inner, values = settings.integer("mamba_expand", 2) * hidden, settings.integer("mamba_n_heads", 128)
        sizes = {"keys": settings.integer("mamba_n_groups", 1), "values": values, "space": True,
                 "key_dim": settings.integer("mamba_d_state", 256), "value_dim": inner // values}  # fmt: skip
        heads = part_of(DeltaHeads, settings.file, sizes)
        taps, limit = settings.integer("mamba_d_conv", 4), settings.get("time_step_limit", [0.0, np.inf])
        odd = heads.key_dim % 16 or heads.value_dim % 16 or values * heads.value_dim != inner or not 2 <= taps <= 16
        other = heads.keys != 1 or not settings.flag("mamba_conv_bias", True) or self.activation != "silu"
        wide = max(heads.key_dim, heads.value_dim) > 512
        if odd or wide or other or limit != [0.0, np.inf]:
            raise UnsupportedModel(
                f"{settings.file}: expected state spaces of one group (mamba_n_groups), with mamba_conv_bias and silu, "
                "no time_step_limit, sizes of heads and states in multiples of 16 up to 512, mamba_d_conv in 2 to 16"
            )
        self.facts = self.facts.model_copy(update={"convolutions": spaces, "taps": taps, "delta": heads})

    def bias(self, module: str) -> bool:
        return self.settings.flag("mamba_proj_bias") if module.startswith("linear_attn") else super().bias(module)

    def rule(self, layer: int) -> AttentionRule:
        before = sum(other < layer for other in self.facts.convolutions)
        return replace(super().rule(layer), layer=layer - before)

    def attend(self, ops: Ops, h: Value, layer: int) -> Value:
        if layer not in self.facts.convolutions:
            return super().attend(ops, h, layer)
        at = f"{LAYERS}.{layer}.linear_attn"
        x, z, a = ops.linear(h, *(self.linear(layer, f"linear_attn.in_proj_{part}") for part in ("qkv", "z", "a")))
        rule = DeltaRule(self.facts.convolutions.index(layer), f"{at}.taps", f"{at}.dt_bias", f"{at}.rate",
                         skip=f"{at}.skip", taps_bias=f"{at}.taps_bias")  # fmt: skip
        y = ops.norm(ops.delta(x, z, a, a, rule), self.norm(f"{at}.norm"))
        return ops.linear(y, self.linear(layer, "linear_attn.out_proj"))[0]

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        found, heads = dict(super().derived(source)), self.facts.delta
        if heads is None:
            return found
        size, inner = heads.key_dim, heads.values * heads.value_dim
        x, b, c = np.split(np.arange(inner + 2 * size), [inner, inner + size])
        order = np.concatenate([c, b, x])
        rows = {"z": np.arange(inner), "qkv": inner + order, "a": 2 * (inner + size) + np.arange(heads.values)}
        for layer in self.facts.convolutions:
            at, theirs = f"{LAYERS}.{layer}.linear_attn", f"{LAYERS}.{layer}.mamba"
            for kind in ("weight", "bias") if self.bias("linear_attn") else ("weight",):
                for part, ids in rows.items():
                    found[f"{at}.in_proj_{part}.{kind}"] = Rows(Own(source, f"{theirs}.in_proj.{kind}"), ids)
                found[f"{at}.out_proj.{kind}"] = Own(source, f"{theirs}.out_proj.{kind}")
            found[f"{at}.taps"] = Taps(Own(source, f"{theirs}.conv1d.weight"), order)
            found[f"{at}.taps_bias"] = Rows(Own(source, f"{theirs}.conv1d.bias"), order)
            found[f"{at}.rate"] = Exponential(Own(source, f"{theirs}.A_log"))
            for ours, name in (("dt_bias", "dt_bias"), ("skip", "D"), ("norm.weight", "norm.weight")):
                found[f"{at}.{ours}"] = Own(source, f"{theirs}.{name}")
        return found
