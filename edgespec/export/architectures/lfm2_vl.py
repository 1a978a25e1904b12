"""LFM2-VL (arXiv 2511.23404): a SigLIP 2 tower (arXiv 2502.14786) at native resolution, unshuffle, two matrices."""

from __future__ import annotations

from math import isqrt

from edgespec.errors import UnsupportedModel
from edgespec.export.architectures.base import VisionEncoderSpec
from edgespec.export.architectures.towers import FIRST, HALVES, MERGED_NORM, SECOND, Projector, Tower, VisionCheckpoint
from edgespec.export.source.derived import Floats, original, taken
from edgespec.runtimes.files.images import ImagePart, ImageWords, Lfm2VlPixels, MergePart, PositionEmbeddingPart

PROJECTION = "multi_modal_projector"
PLACES_FILE = "places.bin"


class Siglip2Tower(Tower):
    """SigLIP 2's tower, whose positions are resampled to the grid of a picture."""

    model_type = "siglip2_vision_model"
    given = True

    def by_pixels(self, weight: Floats) -> Floats:  # its patches are in that order
        return weight


def open_sight(whole: VisionCheckpoint) -> VisionEncoderSpec:
    settings, pixels = whole.settings, whole.pixels
    factor = settings.integer("downsample_factor", 2)
    patch = pixels.integer("encoder_patch_size", 16)
    tile, split = pixels.integer("tile_size", 512), pixels.flag("do_image_splitting", True)
    tokens = pixels.integer("min_image_tokens", 64), pixels.integer("max_image_tokens", 256)
    tiles = pixels.integer("min_tiles", 2), pixels.integer("max_tiles", 10)
    if split and tile % (patch * factor):
        raise UnsupportedModel(
            f"{pixels.file}: tiles of {tile} pixels: expected a multiple of {factor} patches of {patch}"
        )
    rows = max(tokens[1], (tile // patch // factor) ** 2 if split else 0)
    tower = Siglip2Tower(whole.below("embeddings.patch_embedding.weight"), whole.vision, rows * factor**2)
    source = whole.below(f"{PROJECTION}.linear_1.weight")
    norm = settings.flag("projector_use_layernorm", True)
    names = {FIRST: "linear_1", SECOND: "linear_2"} | ({MERGED_NORM: "layer_norm"} if norm else {})
    tensors = taken(source, {ours: f"{PROJECTION}.{theirs}" for ours, theirs in names.items()})
    sizes = tower.facts.hidden * factor**2, settings.integer("projector_hidden_size", 2560), whole.text.facts.hidden
    projector = Projector(
        source, sizes, rows, tensors, norm or None, settings.get("projector_hidden_act", "gelu"), 1e-5
    )
    marked = whole.processor.get("use_image_special_tokens", True)
    around = {"begin": "<|image_start|>", "end": "<|image_end|>", "tile": "<|img_row_{row}_col_{column}|>",
              "whole": "<|img_thumbnail|>"}  # fmt: skip
    words = ImageWords(placeholder="<image>", token="<image>", id=settings.integer("image_token_id", 396),
                       **(around if marked else {}))  # fmt: skip
    how = Lfm2VlPixels(
        kind="lfm2-vl", tile=tile, tiles=tiles, tokens=tokens, split=split,
        tolerance=pixels.number("max_pixels_tolerance", 2.0), thumbnail=pixels.flag("use_thumbnail", True),
        **whole.common(patch, HALVES, HALVES, 2),
    )  # fmt: skip
    side = isqrt(int(whole.vision.get("num_patches", 256)))
    learnt = original(tower.source, Tower.places_at)
    places = PositionEmbeddingPart(file=PLACES_FILE, side=side, width=tower.facts.hidden, how="inside")
    most = max(tokens[1], rows * tiles[1] + tokens[1]) if split else tokens[1]
    image = ImagePart(processor=how, prompt_template=whole.words(words), merge=MergePart(how="blocks", factor=factor),
                      max_rows=most, position_embedding=places)  # fmt: skip
    return VisionEncoderSpec(image, tower, [projector], learnt)
