"""Gemma 4 with images: a tower at native resolution, whose heads turn by line and column, averages, a norm, a matrix.

Patches have a learnt position for their column and one for their line, which are added.  Inputs and outputs of its
matrices are clamped to bounds of the checkpoint (E2B, E4B), or its averages are standardized, channel by channel
(26B-A4B, 31B).  The text half is in ``gemma4.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from edgespec.errors import UnsupportedModel
from edgespec.export.architectures.base import VisionEncoderSpec
from edgespec.export.architectures.formula import ATTENTION, LAYERS, MLP, Switch
from edgespec.export.architectures.ops import Ops, Value
from edgespec.export.architectures.rope import Rotary
from edgespec.export.architectures.rows import turned_rows
from edgespec.export.architectures.rules import AROUND, AttentionRule, DepthwiseRule, Norm
from edgespec.export.architectures.settings import Settings
from edgespec.export.architectures.towers import (
    HALVES,
    MERGED_NORM,
    SECOND,
    Projector,
    Tower,
    VisionCheckpoint,
)
from edgespec.export.source.derived import Extra, Floats, held, made_of, original
from edgespec.export.source.source import Checkpoint
from edgespec.runtimes.files.images import Gemma4Pixels, ImagePart, ImageWords, MergePart, PositionEmbeddingPart

PLACES_FILE = "places.bin"
PROJECTION = "embed_vision.embedding_projection.weight"
MATRICES = (*(ATTENTION.format(part) for part in "qkvo"), *(MLP.format(part) for part in ("gate", "up", "down")))
VALUE_NORM = f"{LAYERS}.values_norm.weight"  # of ones
FACTORS, OFFSETS = "model.standard.weight", "model.standard.bias"
LARGEST = np.float32(np.finfo(np.float32).max)


class Gemma4Tower(Tower):
    """Norms around sub-layers, norms of heads, clamped matrices."""

    model_type = "gemma4_vision"
    defaults = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 12,
                "head_dim": 64, "patch_size": 16}  # fmt: skip
    outer_names: dict[str, str] = {}
    layer_names = {**{module: f"{module}.linear" for module in MATRICES}, **{norm: norm for norm in AROUND if norm}}
    epsilon = ("rms_norm_eps", 1e-6)
    activation_key = "hidden_activation"
    layer_norms = False
    gated_mlp = True
    biases: ClassVar[dict[str, Switch]] = {}
    norms = AROUND
    head_norms = ("q_norm", "k_norm")
    patch_at = "patch_embedder.input_proj"
    patch_bias = False
    given = True

    def __init__(self, source: Checkpoint, vision: Mapping[str, Any], rows: int) -> None:
        self.theta = float((vision.get("rope_parameters") or {}).get("rope_theta", 100.0))
        self.clamped = bool(vision.get("use_clipped_linears", False))
        self.standardized = bool(vision.get("standardize", False))
        super().__init__(source, vision, rows)

    @property
    def score_scale(self) -> float:
        return 1.0

    def rotary(self, layer: int) -> str | None:
        return "rope"

    def rotations(self) -> dict[str, Rotary]:
        quarter = self.facts.head_dim // 4
        parameters = {"rope_type": "axial", "rope_theta": self.theta}
        return {"rope": Rotary(parameters, 4 * quarter, (2,) * quarter + (1,) * quarter)}

    def rule(self, layer: int) -> AttentionRule:
        return replace(super().rule(layer), v_norm=Norm(VALUE_NORM))

    def attend(self, ops: Ops, h: Value, layer: int) -> Value:
        if not self.clamped:
            return super().attend(ops, h, layer)
        q, k, v = (self.product(ops, h, layer, ATTENTION.format(part)) for part in "qkv")
        return self.product(ops, ops.attention(q, k, v, self.rule(layer)), layer, ATTENTION.format("o"))

    def dense(self, ops: Ops, h: Value, layer: int) -> Value:
        if not self.clamped:
            return super().dense(ops, h, layer)
        gate, up = (self.product(ops, h, layer, MLP.format(part)) for part in ("gate", "up"))
        return self.product(ops, ops.gated(gate, up, self.activation), layer, MLP.format("down"))

    def product(self, ops: Ops, x: Value, layer: int, module: str) -> Value:
        """Multiply by a matrix, with inputs and outputs clamped."""
        at = f"{LAYERS}.{layer}.{module}"
        (y,) = ops.linear(ops.activate(x, "clamp", f"{at}.input_range"), self.linear(layer, module))
        return ops.activate(y, "clamp", f"{at}.output_range")

    def end(self, ops: Ops, x: Value) -> Value:
        # standardized before they are averaged, which is the same
        return ops.encoded(ops.depthwise(x, DepthwiseRule(FACTORS, 1, OFFSETS)) if self.standardized else x, None)

    def by_pixels(self, weight: Floats) -> Floats:  # its patches are in that order
        return weight

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        found, size, quarter = dict(super().derived(source)), self.facts.head_dim, self.facts.head_dim // 4
        found[VALUE_NORM] = held(np.ones(size, np.float32))
        if self.standardized:  # rows times the root of their width, see ``open_sight``
            factors = original(source, "std_scale")
            found[FACTORS] = factors
            found[OFFSETS] = made_of(
                original(source, "std_bias"), (self.facts.hidden,),
                lambda bias: -bias * factors.read(slice(None), None) / np.float32(self.facts.hidden) ** 0.5, factors,
            )  # fmt: skip
        # columns turn the first half of a head and lines the other one, a channel with the one a quarter further on
        order = np.arange(size)
        order[: 4 * quarter] = order[: 4 * quarter].reshape(2, 2, quarter).swapaxes(0, 1).ravel()
        for layer in range(self.facts.layers):
            at, there = f"{LAYERS}.{layer}", f"{self.layers_at}.{layer}"
            heads = {"q": self.facts.heads, "k": self.facts.kv_heads}
            found |= turned_rows(source, at, heads, order, bias=False, there=there, weight="proj.linear.weight")
            for module in MATRICES if self.clamped else ():
                for side in ("input", "output"):
                    least, most = (original(source, f"{there}.{module}.{side}_{end}") for end in ("min", "max"))
                    found[f"{at}.{module}.{side}_range"] = made_of(least, (3,), _range(most), most)
        return found


def _range(most: Extra) -> Any:
    def make(least: Floats) -> Floats:
        ends = np.array([least.ravel()[0], most.read(slice(None), None).ravel()[0], 0], np.float32)
        return np.clip(ends, -LARGEST, LARGEST)  # infinite where nothing is clamped

    return make


def open_sight(whole: VisionCheckpoint) -> VisionEncoderSpec:
    settings, pixels, vision = whole.settings, whole.pixels, Settings(whole.source.path, whole.vision)
    mutual = bool(whole.text.settings.get("use_bidirectional_attention"))
    if mutual and settings.get("audio_config"):
        raise UnsupportedModel(f"{settings.file}: expected rows of images that see each other (use_bidirectional_"
                               "attention) in a model without sound, or --text-only")  # fmt: skip
    for key, wanted in {"do_resize": True, "do_rescale": True, "do_normalize": False}.items():
        if pixels.flag(key, wanted) != wanted:
            raise UnsupportedModel(f"{pixels.file}: {key} {not wanted}: expected {wanted}, as this model has it")
    pad = whole.text.settings.get("pad_token_id", 0)
    if whole.text.facts.layer_embedding and pad:
        raise UnsupportedModel(f"{settings.file}: pad_token_id {pad}: expected 0, whose embeddings images have")
    patch, factor = vision.integer("patch_size", 16), vision.integer("pooling_kernel_size", 3)
    if pixels.integer("pooling_kernel_size", factor) != factor or pixels.integer("patch_size", patch) != patch:
        raise UnsupportedModel(f"{pixels.file}: patches or pooling other than the tower's")
    tokens = pixels.integer("max_soft_tokens", 280)
    tower = Gemma4Tower(whole.below("patch_embedder.input_proj.weight"), whole.vision, tokens * factor**2)
    table = original(tower.source, "patch_embedder.position_embedding_table")
    side = min(tokens * factor, vision.integer("position_embedding_size", 10240))
    places = made_of(table, (2 * side, tower.facts.hidden), lambda found: found[:, :side].reshape(2 * side, -1))
    source = whole.below(PROJECTION)
    tensors = {f"{SECOND}.weight": original(source, PROJECTION),
               f"{MERGED_NORM}.weight": held(np.ones(tower.facts.hidden, np.float32))}  # fmt: skip
    # rows are multiplied by the root of their width before the norm, which only its epsilon notices
    projector = Projector(source, (tower.facts.hidden, 0, whole.text.facts.hidden), tokens, tensors, norm=False,
                          eps=tower.eps / tower.facts.hidden)  # fmt: skip
    # the tower itself makes numbers between -1 and 1 of pixels
    pixels.values |= {"do_normalize": True, "image_mean": HALVES, "image_std": HALVES}
    how = Gemma4Pixels(kind="gemma4", max_tokens=tokens, **whole.common(patch, HALVES, HALVES, 3))
    token = "<|image|>"
    words = ImageWords(placeholder=token, token=token, id=settings.integer("image_token_id", 258880),
                       begin="<|image>", end="<image|>")  # fmt: skip
    image = ImagePart(
        processor=how, prompt_template=whole.words(words), merge=MergePart(how="average", factor=factor),
        max_rows=tokens, position_embedding=PositionEmbeddingPart(file=PLACES_FILE, side=side, width=tower.facts.hidden,
                                                                  how="axes"),
        bidirectional=mutual,
    )  # fmt: skip
    return VisionEncoderSpec(image, tower, [projector], places)
