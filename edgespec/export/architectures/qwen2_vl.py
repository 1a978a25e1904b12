"""Qwen2-VL (arXiv 2409.12191): a tower at native resolution, whose heads turn by line and column."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgespec.export.architectures.base import VisionEncoderSpec
from edgespec.export.architectures.formula import FINAL_NORM, LAYERS
from edgespec.export.architectures.ops import Ops, Value
from edgespec.export.architectures.qwen_vl import Qwen3VlTower, image_of, pixels_of
from edgespec.export.architectures.settings import Settings
from edgespec.export.architectures.towers import FIRST, SECOND, Projector, VisionCheckpoint
from edgespec.export.source.derived import Extra, affine, original, taken
from edgespec.export.source.source import Checkpoint

SIGMOID = 1.702  # x sigmoid(1.702 x), which is called quick GELU, is silu(1.702 x) / 1.702


class Qwen2VlTower(Qwen3VlTower):
    """The tower of Qwen2-VL; factors of its activation are in the matrices around it."""

    model_type = "qwen2_vl_vision"
    defaults = {"hidden_size": 1280, "intermediate_size": 5120, "depth": 32, "num_heads": 16, "patch_size": 14}
    outer_names = {FINAL_NORM: "merger.ln_q"}
    layer_names = Qwen3VlTower.layer_names | {"mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"}
    patch_bias = False
    places_at = ""
    given = False

    def __init__(self, source: Checkpoint, vision: Mapping[str, Any], rows: int) -> None:
        width = vision.get("embed_dim", 1280)
        own = {"hidden_size": width, "intermediate_size": int(width * vision.get("mlp_ratio", 4))}
        self.quick = vision.get("hidden_act", "quick_gelu") == "quick_gelu"
        if self.quick:
            own["hidden_act"] = "silu"
        super().__init__(source, {**vision, **own}, rows)

    def embed(self, ops: Ops) -> Value:
        return self.patches(ops)

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        found = dict(super().derived(source))
        for layer in range(self.facts.layers) if self.quick else ():
            for ours, theirs, factor in (("up", "fc1", SIGMOID), ("down", "fc2", 1 / SIGMOID)):
                for kind in ("weight", "bias") if ours == "up" else ("weight",):
                    whole = original(source, f"{self.layers_at}.{layer}.mlp.{theirs}.{kind}")
                    found[f"{LAYERS}.{layer}.mlp.{ours}_proj.{kind}"] = affine(whole, scale=factor)
        return found


def open_sight(whole: VisionCheckpoint) -> VisionEncoderSpec:
    vision = Settings(whole.source.path, whole.vision)
    factor, patch = vision.integer("spatial_merge_size", 2), vision.integer("patch_size", 14)
    how = pixels_of(whole, patch)
    image, source = image_of(whole, how, factor), whole.below("patch_embed.proj.weight")
    tower = Qwen2VlTower(source, whole.vision, how.max_pixels // patch**2)
    columns = tower.facts.hidden * factor**2
    tensors = taken(source, {FIRST: "merger.mlp.0", SECOND: "merger.mlp.2"})
    sizes = columns, columns, whole.text.facts.hidden
    projector = Projector(whole.below("patch_embed.proj.weight"), sizes, image.max_rows, tensors)
    return VisionEncoderSpec(image, tower, [projector])
