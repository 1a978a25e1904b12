"""Idefics 3 (arXiv 2408.12637) and SmolVLM (arXiv 2504.05299): a SigLIP tower over tiles, pixel shuffle, a matrix."""

from __future__ import annotations

from edgespec.errors import UnsupportedModel
from edgespec.export.architectures.base import VisionEncoderSpec
from edgespec.export.architectures.towers import HALVES, SECOND, Projector, Tower, VisionCheckpoint
from edgespec.export.source.derived import taken
from edgespec.runtimes.files.images import Idefics3Pixels, ImagePart, ImageWords, MergePart

AROUND = "<fake_token_around_image>"
PROJECTION = "modality_projection.proj"


class Idefics3Tower(Tower):
    """SigLIP's tower, over tiles."""

    model_type = "idefics3_vision"
    defaults = {
        "hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 16,
        "patch_size": 32,
    }  # fmt: skip


def open_sight(whole: VisionCheckpoint) -> VisionEncoderSpec:
    factor, token = whole.settings.integer("scale_factor", 2), whole.settings.integer("image_token_id", 128257)
    patch = int(whole.vision.get("patch_size", 32))
    size, tiles = (whole.pixels.get(key, {}) for key in ("size", "max_image_size"))
    longest, tile = int(size.get("longest_edge", 4 * 364)), int(tiles.get("longest_edge", 364))
    side, split = tile // patch, whole.pixels.flag("do_image_splitting", True)
    if tile % (patch * factor):
        raise UnsupportedModel(
            f"{whole.pixels.file}: tiles of {tile} pixels: expected a multiple of {factor} patches of {patch}"
        )
    tower = Idefics3Tower(whole.below("embeddings.patch_embedding.weight"), whole.vision, side * side)
    rows, pieces = (side // factor) ** 2, 1 + (-(-longest // tile)) ** 2 * split
    source = whole.below(f"{PROJECTION}.weight")
    sizes = tower.facts.hidden * factor**2, 0, whole.text.facts.hidden
    projector = Projector(source, sizes, rows, taken(source, {SECOND: PROJECTION}))
    words = ImageWords(
        placeholder="<image>", token="<image>", id=token, end=AROUND, line="\n",
        tile=f"{AROUND}<row_{{row}}_col_{{column}}>", whole=f"{AROUND}<global-img>",
    )  # fmt: skip
    pixels = Idefics3Pixels(kind="idefics3", longest=longest, tile=tile, split=split,
                            **whole.common(patch, HALVES, HALVES, 1))  # fmt: skip
    image = ImagePart(processor=pixels, prompt_template=whole.words(words), max_rows=rows * pieces,
                      merge=MergePart(how="blocks", factor=factor))  # fmt: skip
    return VisionEncoderSpec(image, tower, [projector])
