"""Qwen2.5-VL (arXiv 2502.13923): a tower at native resolution, most of whose layers see windows of a picture."""

from __future__ import annotations

from edgespec.errors import UnsupportedModel
from edgespec.export.architectures.base import VisionEncoderSpec
from edgespec.export.architectures.ops import Ops, Value
from edgespec.export.architectures.qwen_vl import Qwen3VlTower, image_of, pixels_of
from edgespec.export.architectures.settings import Settings
from edgespec.export.architectures.towers import FIRST, MERGED_NORM, SECOND, Projector, VisionCheckpoint
from edgespec.export.source.derived import taken
from edgespec.runtimes.files.images import WindowsPart


class Qwen25VlTower(Qwen3VlTower):
    """The tower of Qwen2.5-VL; it ends in the residual stream, which the layers with other windows continue."""

    model_type = "qwen2_5_vl_vision"
    defaults = {"hidden_size": 3584, "intermediate_size": 3420, "depth": 32, "num_heads": 16, "patch_size": 14}
    outer_names = {}
    layer_names = {
        "input_layernorm": "norm1",
        "post_attention_layernorm": "norm2",
        "self_attn.o_proj": "attn.proj",
        **{f"mlp.{name}_proj": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    }
    activation_default = "silu"
    layer_norms = False
    gated_mlp = True
    patch_bias = False
    places_at = ""
    given = False

    def __init__(self, whole: VisionCheckpoint, rows: int) -> None:
        super().__init__(whole.below("patch_embed.proj.weight"), whole.vision, rows)
        self.input_width = max(self.columns, self.facts.hidden)

    def embed(self, ops: Ops) -> Value:
        return ops.select_input(lambda: self.patches(ops), lambda: ops.input_slice(0, self.facts.hidden))

    def end(self, ops: Ops, x: Value) -> Value:
        return ops.encoded(x, None)


def open_sight(whole: VisionCheckpoint) -> VisionEncoderSpec:
    vision = Settings(whole.source.path, whole.vision)
    factor, patch = vision.integer("spatial_merge_size", 2), vision.integer("patch_size", 14)
    how = pixels_of(whole, patch)
    tower = Qwen25VlTower(whole, how.max_pixels // patch**2)
    source, columns = whole.below("patch_embed.proj.weight"), tower.facts.hidden * factor**2
    tensors = taken(source, {FIRST: "merger.mlp.0", SECOND: "merger.mlp.2", MERGED_NORM: "merger.ln_q"})
    sizes = columns, columns, whole.text.facts.hidden
    side = vision.integer("window_size", 112) // factor // patch * factor
    if not side:
        raise UnsupportedModel(f"{vision.file}: expected window_size of at least {patch * factor} pixels")
    full = [int(layer) for layer in vision.get("fullatt_block_indexes", [7, 15, 23, 31])]
    image = image_of(whole, how, factor, windows=WindowsPart(side=side, full=full))
    projector = Projector(source, sizes, image.max_rows, tensors, norm=False, slices=factor**2)
    return VisionEncoderSpec(image, tower, [projector])
