"""Gemma 3 (arXiv 2503.19786) with images: SigLIP's tower over one square, averages of its rows, a norm and a matrix."""

from __future__ import annotations

from math import isqrt

from edgespec.errors import UnsupportedModel
from edgespec.export.architectures.base import VisionEncoderSpec
from edgespec.export.architectures.towers import HALVES, MERGED_NORM, SECOND, Projector, Tower, VisionCheckpoint
from edgespec.export.source.derived import affine, original, transposed
from edgespec.runtimes.files.images import Gemma3Pixels, ImagePart, ImageWords, MergePart

PROJECTION = "multi_modal_projector.mm_input_projection_weight"


def open_sight(whole: VisionCheckpoint) -> VisionEncoderSpec:
    """Open the tower and the projector of Gemma 3; its crops (pan and scan) are not supported."""
    settings, pixels = whole.settings, whole.pixels
    pixels.refuse("do_pan_and_scan", "pan and scan", "whole pictures, as the model's own processor has it")
    rows, patch = settings.integer("mm_tokens_per_image", 256), int(whole.vision.get("patch_size", 14))
    size = int(pixels.get("size", {}).get("height", 224))
    side, here = size // patch, isqrt(rows)
    if side % here or size != int(whole.vision.get("image_size", size)):
        raise UnsupportedModel(f"{pixels.file}: pictures of {size} pixels, {side} patches a side: expected the vision "
                               f"tower's own size, and a multiple of {here} patches")  # fmt: skip
    tower = Tower(whole.below("embeddings.patch_embedding.weight"), whole.vision, side * side)
    source = whole.below(PROJECTION)
    norm = original(source, "multi_modal_projector.mm_soft_emb_norm.weight")
    tensors = {
        f"{SECOND}.weight": transposed(original(source, PROJECTION)),
        f"{MERGED_NORM}.weight": affine(norm, shift=1.0),
    }
    sizes = tower.facts.hidden, 0, whole.text.facts.hidden
    projector = Projector(source, sizes, rows, tensors, norm=False, eps=tower.eps)
    begin, token = "<start_of_image>", "<image_soft_token>"
    words = ImageWords(placeholder=begin, token=token, id=settings.integer("image_token_index", 262144),
                       begin=f"\n\n{begin}", end="<end_of_image>\n\n")  # fmt: skip
    image = ImagePart(
        processor=Gemma3Pixels(kind="gemma3", size=size, **whole.common(patch, HALVES, HALVES, 2)),
        prompt_template=whole.words(words), merge=MergePart(how="average", factor=side // here), max_rows=rows,
        bidirectional=True,
    )  # fmt: skip
    return VisionEncoderSpec(image, tower, [projector])
