"""InternVL3 (arXiv 2504.10479): InternViT over tiles and a thumbnail, squares of rows, a norm, two matrices, GELU.

InternViT has a class row before the patches, and all rows attend to it.  Its layer scales multiply the output of each
sub-layer; here they are folded into the sub-layer's last matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgespec.errors import UnsupportedModel
from edgespec.export.architectures.base import VisionEncoderSpec
from edgespec.export.architectures.formula import ATTENTION, FINAL_NORM, LAYERS
from edgespec.export.architectures.ops import Ops, Value
from edgespec.export.architectures.qwen_vl import DEVIATION, MEAN
from edgespec.export.architectures.towers import FIRST, MERGED_NORM, SECOND, Projector, Tower, VisionCheckpoint
from edgespec.export.source.derived import Extra, Floats, made_of, original, taken
from edgespec.export.source.source import Checkpoint
from edgespec.runtimes.files.images import ImagePart, ImageWords, InternVlPixels, MergePart

SCALED = {"self_attn.o_proj": ("attention.projection_layer", "lambda_1"), "mlp.down_proj": ("mlp.fc2", "lambda_2")}
PLACES_AT, CLASS_AT = "embeddings.position_embeddings", "embeddings.cls_token"
REFUSED = {"use_qk_norm": True, "norm_type": "rms_norm", "use_absolute_position_embeddings": False}


class InternVit(Tower):
    """InternViT of 300M, as transformers saves it."""

    model_type = "internvl_vision"
    defaults = {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
        "patch_size": 14,
    }  # fmt: skip
    layers_at = "encoder.layer"
    outer_names = {FINAL_NORM: "layernorm"}
    layer_names = {
        "input_layernorm": "layernorm_before",
        "post_attention_layernorm": "layernorm_after",
        **{ATTENTION.format(part): f"attention.{part}_proj" for part in "qkv"},
        "mlp.up_proj": "mlp.fc1",
    }
    activation_default = "gelu"
    biases = {"": True, **{ATTENTION.format(part): ("attention_bias", False) for part in "qkv"}}
    patch_at = "embeddings.patch_embeddings.projection"

    def end(self, ops: Ops, x: Value) -> Value:
        return ops.encoded(x, None if self.settings.flag("use_mean_pooling", True) else self.final_norm)

    def places(self, source: Checkpoint) -> Extra:
        bias, row = original(source, f"{self.patch_at}.bias"), original(source, CLASS_AT)

        def table(learnt: Floats) -> Floats:  # [1, rows, hidden]
            found: Floats = learnt[0].copy()
            found[0] += row.read(slice(None), None).reshape(-1) - bias.read(slice(None), None)
            return found

        shape = (self.facts.context, self.facts.hidden)
        return made_of(original(source, PLACES_AT), shape, table, bias, row)

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        found, facts = dict(super().derived(source)), self.facts
        for layer in range(facts.layers):
            for ours, (theirs, scale) in SCALED.items():
                at = f"{self.layers_at}.{layer}"
                by = original(source, f"{at}.{scale}")
                columns = facts.hidden if scale == "lambda_1" else facts.intermediate
                for kind, shape in (("weight", (facts.hidden, columns)), ("bias", (facts.hidden,))):
                    of = original(source, f"{at}.{theirs}.{kind}")
                    found[f"{LAYERS}.{layer}.{ours}.{kind}"] = made_of(of, shape, _times(by), by)
        return found


def _times(by: Extra) -> Any:
    return lambda values: (values.T * by.read(slice(None), None)).T


def open_sight(whole: VisionCheckpoint) -> VisionEncoderSpec:
    settings, pixels = whole.settings, whole.pixels
    wrong = [key for key, value in REFUSED.items() if whole.vision.get(key) == value]
    layer, rows = settings.get("vision_feature_layer", -1), settings.get("vision_feature_select_strategy", "default")
    if wrong or (layer, rows) != (-1, "default"):
        what = f"{wrong[0]} {whole.vision[wrong[0]]}" if wrong else f"rows of layer {layer}, {rows}"
        raise UnsupportedModel(f"{settings.file}: {what} is not supported: expected InternViT of 300M")
    size, given = pixels.get("size", {}), (whole.vision.get(key) for key in ("patch_size", "image_size"))
    patch, side = (one[0] if isinstance(one, (list, tuple)) else one for one in given)
    patch, tile = int(patch or 14), int(size.get("height") or side or 448)
    factor = round(1 / settings.number("downsample_ratio", 0.5))
    grid = tile // patch
    if tile % (patch * factor) or size.get("width", tile) != tile or (side or tile) != tile:
        raise UnsupportedModel(
            f"{pixels.file}: tiles of {size}: expected squares of {side} pixels, in {factor} patches"
        )
    tower = InternVit(whole.below(CLASS_AT), {**whole.vision, "patch_size": patch}, 1 + grid**2)
    count = (grid // factor) ** 2
    source = whole.below("multi_modal_projector.layer_norm.weight")
    names = {MERGED_NORM: "layer_norm", FIRST: "linear_1", SECOND: "linear_2"}
    tensors = taken(source, {ours: f"multi_modal_projector.{theirs}" for ours, theirs in names.items()})
    hidden = whole.text.facts.hidden
    projector = Projector(source, (tower.facts.hidden * factor**2, hidden, hidden), count, tensors, True,
                          str(settings.get("projector_hidden_act", "gelu")), eps=1e-5)  # fmt: skip
    tiles = pixels.integer("min_patches", 1), pixels.integer("max_patches", 12)
    split = pixels.flag("crop_to_patches", True) and tiles[1] > 1
    how = InternVlPixels(
        kind="internvl", tile=tile, tiles=tiles, split=split, **whole.common(patch, MEAN, DEVIATION, 3)
    )
    token = "<IMG_CONTEXT>"
    words = ImageWords(placeholder=token, token=token, id=settings.integer("image_token_id", 151667), begin="<img>",
                       end="</img>")  # fmt: skip
    image = ImagePart(processor=how, prompt_template=whole.words(words),
                      max_rows=count * (tiles[1] + 1 if split else 1),
                      merge=MergePart(how="blocks", factor=factor, lead=1))  # fmt: skip
    return VisionEncoderSpec(image, tower, [projector])
