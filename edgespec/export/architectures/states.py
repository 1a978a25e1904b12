"""Replacements of attention in some layers: short convolutions, gated delta rules, state spaces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from edgespec.errors import UnsupportedModel
from edgespec.export.architectures.base import Architecture
from edgespec.export.architectures.formula import LAYERS, Part
from edgespec.export.architectures.ops import Ops, Value
from edgespec.export.architectures.rules import ConvolutionRule, DeltaRule
from edgespec.export.architectures.settings import part_of
from edgespec.export.source.derived import Extra, exponential, joined, original, rows_of, taps
from edgespec.export.source.source import Checkpoint
from edgespec.runtimes.files.facts import DeltaHeads


class ShortConvolutions(Part):
    """Short convolutions between two gates (LFM2, arXiv 2511.23404); the architecture says in which layers."""

    def run(self, arch: Architecture, ops: Ops, h: Value, layer: int) -> Value:
        at, number = f"{LAYERS}.{layer}.conv", arch.facts.convolutions.index(layer)
        bias = f"{at}.conv.bias" if arch.bias("conv.conv") else None
        (x,) = ops.linear(h, arch.linear(layer, "conv.in_proj"))
        y = ops.convolution(x, ConvolutionRule(number, f"{at}.taps", bias, arch.facts.taps))
        return ops.linear(y, arch.linear(layer, "conv.out_proj"))[0]

    def derived(self, arch: Architecture, source: Checkpoint) -> dict[str, Extra]:
        names = (f"{LAYERS}.{layer}.conv" for layer in arch.facts.convolutions)
        return {f"{name}.taps": taps(original(source, f"{name}.conv.weight")) for name in names}


class DeltaRules(Part):
    """Gated delta rules (arXiv 2412.06464), in Qwen3.5's layout."""

    def sizes(self, arch: Architecture) -> dict[str, int]:
        keys = {"keys": ("num_key_heads", 16), "values": ("num_value_heads", 32), "key_dim": ("key_head_dim", 128),
                "value_dim": ("value_head_dim", 128)}  # fmt: skip
        return {ours: arch.settings.integer(f"linear_{key}", usual) for ours, (key, usual) in keys.items()}

    def configure(self, arch: Architecture) -> dict[str, Any]:
        settings, layers = arch.settings, arch.facts.layers
        every = settings.integer("full_attention_interval", 4)
        kinds = settings.each("layer_types", layers, ("linear_attention", "full_attention"))
        kinds = kinds or ["full_attention" if at % every == every - 1 else "linear_attention" for at in range(layers)]
        if not (recurrent := [layer for layer, kind in enumerate(kinds) if kind == "linear_attention"]):
            return {}  # a layer for predictions further on, alone
        heads = part_of(DeltaHeads, settings.file, **self.sizes(arch))
        taps = settings.integer("linear_conv_kernel_dim", 4)
        odd = any(size % 16 or size > 512 for size in (heads.key_dim, heads.value_dim))
        odd = odd or heads.values % heads.keys != 0 or not 2 <= taps <= 16
        if odd or arch.activation != "silu" or len(recurrent) == len(kinds):
            raise UnsupportedModel(
                f"{settings.file}: expected layers of both kinds, silu, key heads that divide the value heads, "
                "sizes of heads that are multiples of 16 up to 512, and linear_conv_kernel_dim in 2 to 16"
            )
        return {"convolutions": recurrent, "taps": taps, "delta": heads}

    def rule(self, arch: Architecture, layer: int) -> DeltaRule:
        at, number = f"{LAYERS}.{layer}.linear_attn", arch.facts.convolutions.index(layer)
        return DeltaRule(number, f"{at}.taps", f"{at}.dt_bias", f"{at}.rate", f"{at}.scale")

    def run(self, arch: Architecture, ops: Ops, h: Value, layer: int) -> Value:
        x, z, a, b = ops.linear(h, *(arch.linear(layer, f"linear_attn.in_proj_{part}") for part in ("qkv", *"zab")))
        y = ops.delta(x, z, a, b, self.rule(arch, layer))
        return ops.linear(y, arch.linear(layer, "linear_attn.out_proj"))[0]

    def derived(self, arch: Architecture, source: Checkpoint) -> dict[str, Extra]:
        found: dict[str, Extra] = {}
        for layer in arch.facts.convolutions:
            at = f"{LAYERS}.{layer}.linear_attn"
            found[f"{at}.taps"] = taps(original(source, f"{at}.conv1d.weight"))
            found[f"{at}.rate"] = exponential(original(source, f"{at}.A_log"))
            found[f"{at}.scale"] = original(source, f"{at}.norm.weight")  # no offset
        return found


class FusedDeltaRules(DeltaRules):
    """Qwen3-Next's layout: two matrices give the inputs of a rule, key head by key head."""

    def derived(self, arch: Architecture, source: Checkpoint) -> dict[str, Extra]:
        found, heads = super().derived(arch, source), arch.facts.delta
        assert heads is not None
        each = heads.values // heads.keys
        ends = np.cumsum([heads.key_dim, heads.key_dim, each * heads.value_dim, each * heads.value_dim])
        mixed = np.split(np.arange(heads.keys * ends[-1]).reshape(heads.keys, -1), ends[:-1], 1)  # q, k, v, z
        b, a = np.split(np.arange(2 * heads.values).reshape(heads.keys, -1), 2, 1)
        rows = {"qkv": np.concatenate([part.ravel() for part in mixed[:3]]), "z": mixed[3], "a": a, "b": b}
        for layer in arch.facts.convolutions:
            at = f"{LAYERS}.{layer}.linear_attn.in_proj_"
            for part, ids in rows.items():
                if source.has(f"{at}{part}.weight"):  # q, k, v and z as they are used, as in GGUF
                    continue
                whole = original(source, f"{at}{'ba' if part in 'ab' else 'qkvz'}.weight")
                found[f"{at}{part}.weight"] = rows_of(whole, ids.ravel())
        return found


class NegativeDeltaRules(DeltaRules):
    """OLMo Hybrid's: a state's eigenvalues may be negative (arXiv 2411.12537), and each matrix is stored separately."""

    EPS = 1e-5  # of the norm after a delta rule; config.json states that of the others

    def sizes(self, arch: Architecture) -> dict[str, int]:
        heads, settings = arch.facts.heads, arch.settings
        keys = settings.integer("linear_num_key_heads", heads)
        size = settings.integer("linear_key_head_dim", int(0.75 * arch.facts.hidden / keys))
        return {"keys": keys, "values": settings.integer("linear_num_value_heads", heads), "key_dim": size,
                "value_dim": settings.integer("linear_value_head_dim", 2 * size)}  # fmt: skip

    def rule(self, arch: Architecture, layer: int) -> DeltaRule:
        twice = 2.0 if arch.settings.flag("linear_allow_neg_eigval", True) else 1.0
        return replace(super().rule(arch, layer), times=twice, eps=self.EPS)

    def derived(self, arch: Architecture, source: Checkpoint) -> dict[str, Extra]:
        def three(at: str, kind: str) -> Extra:
            return joined(*(original(source, f"{at}.{part}_{kind}.weight") for part in "qkv"))

        found: dict[str, Extra] = {}
        for layer in arch.facts.convolutions:
            at = f"{LAYERS}.{layer}.linear_attn"
            for ours, theirs in {"in_proj_z": "g_proj", "in_proj_a": "a_proj", "in_proj_b": "b_proj",
                                 "out_proj": "o_proj"}.items():  # fmt: skip
                found[f"{at}.{ours}.weight"] = original(source, f"{at}.{theirs}.weight")
            found[f"{at}.in_proj_qkv.weight"] = three(at, "proj")
            whole = f"{at}.conv1d.weight"
            found[f"{at}.taps"] = taps(original(source, whole) if source.has(whole) else three(at, "conv1d"))
            found[f"{at}.rate"] = exponential(original(source, f"{at}.A_log"))
            found[f"{at}.scale"] = original(source, f"{at}.o_norm.weight")
        return found


class StateSpaces(Part):
    """State spaces (Mamba-2, arXiv 2405.21060): delta rules without correction, on C, B and x."""

    KINDS = ("attention", "full_attention", "mamba", "linear_attention")

    def configure(self, arch: Architecture) -> dict[str, Any]:
        settings, hidden, layers = arch.settings, arch.facts.hidden, arch.facts.layers
        kinds = settings.each("layer_types", layers, self.KINDS)
        kinds = kinds or settings.each("layers_block_type", layers, self.KINDS) or ["mamba"]
        spaces = [layer for layer, kind in enumerate(kinds) if kind in self.KINDS[2:]]
        if len(spaces) == len(kinds):
            raise UnsupportedModel(f"{settings.file}: expected a layer with attention (layer_types)")
        if not spaces:
            return {}
        inner, values = settings.integer("mamba_expand", 2) * hidden, settings.integer("mamba_n_heads", 128)
        groups, size = settings.integer("mamba_n_groups", 1), settings.integer("mamba_d_state", 256)
        heads = part_of(DeltaHeads, settings.file, keys=groups, values=values, space=True, key_dim=size,
                        value_dim=inner // values)  # fmt: skip
        taps, limit = settings.integer("mamba_d_conv", 4), settings.get("time_step_limit", [0.0, np.inf])
        odd = heads.key_dim % 16 or heads.value_dim % 16 or values * heads.value_dim != inner or not 2 <= taps <= 16
        other = heads.keys != 1 or not settings.flag("mamba_conv_bias", True) or arch.activation != "silu"
        wide = max(heads.key_dim, heads.value_dim) > 512
        if odd or wide or other or limit != [0.0, np.inf]:
            raise UnsupportedModel(
                f"{settings.file}: expected state spaces of one group (mamba_n_groups), with mamba_conv_bias and silu, "
                "no time_step_limit, sizes of heads and states in multiples of 16 up to 512, mamba_d_conv in 2 to 16"
            )
        return {"convolutions": spaces, "taps": taps, "delta": heads}

    def run(self, arch: Architecture, ops: Ops, h: Value, layer: int) -> Value:
        at = f"{LAYERS}.{layer}.linear_attn"
        x, z, a = ops.linear(h, *(arch.linear(layer, f"linear_attn.in_proj_{part}") for part in ("qkv", "z", "a")))
        rule = DeltaRule(arch.facts.convolutions.index(layer), f"{at}.taps", f"{at}.dt_bias", f"{at}.rate",
                         skip=f"{at}.skip", taps_bias=f"{at}.taps_bias")  # fmt: skip
        y = ops.norm(ops.delta(x, z, a, a, rule), arch.norm(f"{at}.norm"))
        return ops.linear(y, arch.linear(layer, "linear_attn.out_proj"))[0]

    def derived(self, arch: Architecture, source: Checkpoint) -> dict[str, Extra]:
        found, heads = dict[str, Extra](), arch.facts.delta
        if heads is None:
            return found
        size, inner = heads.key_dim, heads.values * heads.value_dim
        x, b, c = np.split(np.arange(inner + 2 * size), [inner, inner + size])
        order = np.concatenate([c, b, x])
        rows = {"z": np.arange(inner), "qkv": inner + order, "a": 2 * (inner + size) + np.arange(heads.values)}
        for layer in arch.facts.convolutions:
            at, theirs = f"{LAYERS}.{layer}.linear_attn", f"{LAYERS}.{layer}.mamba"
            for kind in ("weight", "bias") if arch.bias("linear_attn") else ("weight",):
                for part, ids in rows.items():
                    found[f"{at}.in_proj_{part}.{kind}"] = rows_of(original(source, f"{theirs}.in_proj.{kind}"), ids)
                found[f"{at}.out_proj.{kind}"] = original(source, f"{theirs}.out_proj.{kind}")
            found[f"{at}.taps"] = taps(original(source, f"{theirs}.conv1d.weight"), order)
            found[f"{at}.taps_bias"] = rows_of(original(source, f"{theirs}.conv1d.bias"), order)
            found[f"{at}.rate"] = exponential(original(source, f"{theirs}.A_log"))
            for ours, name in (("dt_bias", "dt_bias"), ("skip", "D"), ("norm.weight", "norm.weight")):
                found[f"{at}.{ours}"] = original(source, f"{theirs}.{name}")
        return found
