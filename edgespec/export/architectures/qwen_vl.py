"""Qwen3-VL (arXiv 2511.21631) and Qwen3.5: a tower at native resolution, whose heads turn by line and column.

Learnt positions are resampled as well.  Squares of rows go through a norm, two matrices and GELU; so do those of some
layers inside the tower, for the first layers of the decoder (deepstack, arXiv 2406.04334).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import Any

import numpy as np

from edgespec.errors import ExportError
from edgespec.export.architectures.base import VisionEncoderSpec
from edgespec.export.architectures.formula import FINAL_NORM, LAYERS, QKV
from edgespec.export.architectures.rope import Rotary
from edgespec.export.architectures.settings import Settings
from edgespec.export.architectures.towers import FIRST, MERGED_NORM, SECOND, Projector, Tower, VisionCheckpoint
from edgespec.export.source.derived import Extra, Floats, original, rows_of, taken
from edgespec.export.source.source import Checkpoint
from edgespec.runtimes.files.images import ImagePart, ImageWords, MergePart, PositionEmbeddingPart, Qwen2VlPixels

MEAN, DEVIATION = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]  # of CLIP
PLACES_FILE = "places.bin"


class Qwen3VlTower(Tower):
    """The tower of Qwen3-VL; its last norm is that of the projector."""

    model_type = "qwen3_vl_vision"
    aliases = {"num_hidden_layers": "depth", "num_attention_heads": "num_heads"}
    defaults = {"hidden_size": 1152, "intermediate_size": 4304, "depth": 27, "num_heads": 16, "patch_size": 16}
    layers_at = "blocks"
    outer_names = {FINAL_NORM: "merger.norm"}
    layer_names = {
        "input_layernorm": "norm1",
        "post_attention_layernorm": "norm2",
        "self_attn.o_proj": "attn.proj",
        "mlp.up_proj": "mlp.linear_fc1",
        "mlp.down_proj": "mlp.linear_fc2",
    }
    patch_at = "patch_embed.proj"
    places_at = "pos_embed.weight"
    given = True

    def rotations(self) -> dict[str, Rotary]:
        quarter = self.facts.head_dim // 4
        given = self.settings.get("rope_parameters") or {}
        parameters = {"rope_type": "axial", "rope_theta": float(given.get("rope_theta", 10000.0))}
        return {"rope": Rotary(parameters, 4 * quarter, (1,) * quarter + (2,) * quarter)}

    def by_pixels(self, weight: Floats) -> Floats:  # [hidden, 3, 2, patch, patch]: both frames are the same picture
        return super().by_pixels(weight.sum(2))

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        found, hidden = dict(super().derived(source)), self.facts.hidden
        for layer in range(self.facts.layers):
            for kind in ("weight", "bias"):
                whole = original(source, f"{self.layers_at}.{layer}.attn.qkv.{kind}")
                for at, module in enumerate(QKV):
                    rows = np.arange(at * hidden, (at + 1) * hidden)
                    found[f"{LAYERS}.{layer}.{module}.{kind}"] = rows_of(whole, rows)
        return found


def pixels_of(whole: VisionCheckpoint, patch: int) -> Qwen2VlPixels:
    """Read how pictures are resized."""
    size = whole.pixels.get("size", {})
    least = int(size.get("shortest_edge") or whole.pixels.integer("min_pixels", 56 * 56))
    most = int(size.get("longest_edge") or whole.pixels.integer("max_pixels", 28 * 28 * 1280))
    return Qwen2VlPixels(kind="qwen2-vl", min_pixels=least, max_pixels=most, **whole.common(patch, MEAN, DEVIATION, 3))


def image_of(whole: VisionCheckpoint, how: Qwen2VlPixels, factor: int, **more: Any) -> ImagePart:
    """Make the manifest's part about images; ``factor``: patches per side of the square that becomes a row."""
    token = "<|image_pad|>"
    words = ImageWords(placeholder=token, token=token, id=whole.settings.integer("image_token_id", 151655),
                       written=f"<|vision_start|>{token}<|vision_end|>")  # fmt: skip
    return ImagePart(processor=how, prompt_template=whole.words(words), merge=MergePart(how="blocks", factor=factor),
                     max_rows=how.max_pixels // (how.patch * factor) ** 2, positions="grid", **more)  # fmt: skip


def open_sight(whole: VisionCheckpoint) -> VisionEncoderSpec:
    vision = Settings(whole.source.path, whole.vision)
    factor, patch = vision.integer("spatial_merge_size", 2), vision.integer("patch_size", 16)
    listed = vision.layers("deepstack_visual_indexes")
    order = sorted(range(len(listed)), key=listed.__getitem__)  # rows reach the decoder in the tower's order
    layers = [listed[at] for at in order]
    depth = whole.text.facts.layers
    if len({*layers}) != len(layers) or len(layers) > depth or any(layer < 0 for layer in layers):
        raise ExportError(
            f"{vision.file}: expected deepstack_visual_indexes to be different layers of the tower, no more than the "
            f"decoder's {depth}, got {listed}",
            "download config.json again",
        )
    side = isqrt(vision.integer("num_position_embeddings", 2304))
    how = pixels_of(whole, patch)
    source = whole.below("patch_embed.proj.weight")
    tower = Qwen3VlTower(source, whole.vision, how.max_pixels // patch**2)
    places = PositionEmbeddingPart(file=PLACES_FILE, side=side, width=tower.facts.hidden, how="corners")
    image = image_of(whole, how, factor, position_embedding=places, deepstack_layers=[layer + 1 for layer in layers])
    columns = tower.facts.hidden * factor**2

    def projector(at: str, norm: bool) -> Projector:
        names = {FIRST: "linear_fc1", SECOND: "linear_fc2"} | ({MERGED_NORM: "norm"} if norm else {})
        tensors = taken(source, {ours: f"{at}.{theirs}" for ours, theirs in names.items()})
        sizes = columns, columns, whole.text.facts.hidden
        return Projector(whole.below("patch_embed.proj.weight"), sizes, image.max_rows, tensors, norm or None)

    projectors = [projector("merger", norm=False)]
    projectors += [projector(f"deepstack_merger_list.{at}", norm=True) for at in order]
    return VisionEncoderSpec(image, tower, [*projectors], original(source, tower.places_at))
