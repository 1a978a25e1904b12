"""Parrot: a Llama whose checkpoint has other names, and whose config.json calls two sizes otherwise."""

from __future__ import annotations

from edgespec.export.architectures.base import Architecture, known


@known("parrot", "my-parrot", "Llama by other names")
class Parrot(Architecture):
    """Parrot; everything else is as in Llama."""

    aliases = {"hidden_size": "width", "num_hidden_layers": "depth"}
    layers_at = "body.blocks"
    outer_names = {"model.embed_tokens": "body.tokens", "model.norm": "body.last_norm"}
    layer_names = {
        "input_layernorm": "norm_1",
        "post_attention_layernorm": "norm_2",
        **{f"self_attn.{part}_proj": f"mix.{part}" for part in "qkvo"},
        **{f"mlp.{part}_proj": f"think.{part}" for part in ("gate", "up", "down")},
    }
    tied_by_default = True
