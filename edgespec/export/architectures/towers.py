"""Vision towers: encoders of what pictures are cut into, and projectors to the rows of a decoder.

A tower's rows are patches, which see each other, and its first matrix is the convolution over patches.  Between tower
and projector, rows are merged (``runtimes.images.processing.merged``)::

    x = patches W + b + positions;  x = x + attention(norm x);  x = x + mlp(norm x);  ...;  norm x
    projector: W' activation(W norm(merged rows) + b) + b'

Sources: An Image is Worth 16x16 Words (arXiv 2010.11929); SigLIP (arXiv 2303.15343).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isqrt
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.architectures.base import Architecture
from edgespec.export.architectures.formula import ATTENTION, FINAL_NORM
from edgespec.export.architectures.ops import Ops, Value
from edgespec.export.architectures.rules import Linear, Norm
from edgespec.export.architectures.settings import Settings
from edgespec.export.source.derived import Extra, Floats, made_of, original
from edgespec.export.source.source import Checkpoint, ConfigOnly, renamed
from edgespec.export.source.stored import read_object
from edgespec.runtimes.files.images import ImageWords

PATCHES, PLACES, FIRST, SECOND, MERGED_NORM = (
    f"model.{name}" for name in ("patches", "places.weight", "projector.fc1", "projector.fc2", "projector.norm")
)
CHANNELS = 3
HALVES = [0.5, 0.5, 0.5]  # mean and deviation of most


@dataclass
class MultimodalCheckpoint:
    """A checkpoint of a model that reads more than text."""

    source: Checkpoint
    text: Architecture  # the decoder
    settings: Settings = field(init=False)  # config.json

    def __post_init__(self) -> None:
        self.settings = Settings(self.source.path, self.source.config, {})

    def below(self, suffix: str) -> Checkpoint:
        """Take the tensors with the prefix of the one whose name ends in ``suffix``, without the prefix."""
        found = next((name for name in self.source.index if name.endswith(suffix)), suffix)
        before = found.removesuffix(suffix)
        inside = {name.removeprefix(before): name for name in self.source.index if name.startswith(before)}
        if isinstance(self.source, ConfigOnly):
            return ConfigOnly(self.source.path, self.source.config)
        return renamed(self.source, inside)

    def words(self, default: ImageWords) -> ImageWords:
        """Name the token of inserted rows as the tokenizer does."""
        file = self.source.path / "tokenizer.json"
        added = read_object(file, "download it again").get("added_tokens", []) if file.is_file() else []
        names = {one.get("id"): one.get("content") for one in added if isinstance(one, dict)}
        token = names.get(default.id, default.token)
        placeholder = token if default.placeholder == default.token else default.placeholder
        return default.model_copy(update={"token": token, "placeholder": placeholder})


@dataclass
class VisionCheckpoint(MultimodalCheckpoint):
    """A checkpoint of a model that reads images, its configuration and that of its processor."""

    vision: dict[str, Any] = field(init=False)  # config.json's part about the vision encoder
    pixels: Settings = field(init=False)  # preprocessor_config.json, or processor_config.json's part about images
    processor: dict[str, Any] = field(init=False)  # processor_config.json

    def __post_init__(self) -> None:
        super().__post_init__()
        self.vision = self.settings.get("vision_config", {})
        self.processor, own = _processors(self.source.path)
        self.pixels = Settings(self.source.path, own, {})
        self.pixels.file = self.source.path / "preprocessor_config.json"

    def common(self, patch: int, mean: list[float], std: list[float], resample: int) -> dict[str, Any]:
        """Read the settings that all processors have, as fields of ``Pixels``; the arguments are defaults."""
        pixels = self.pixels
        for key in ("do_resize", "do_rescale", "do_normalize"):
            if not pixels.flag(key, True):
                raise UnsupportedModel(f"{pixels.file}: expected {key}, as this kind of model was trained with")
        found = pixels.integer("resample", resample)
        if found not in RESAMPLE:
            raise UnsupportedModel(f"{pixels.file}: resample {found} is not supported; supported: {list(RESAMPLE)}")
        return {
            "patch": patch, "rescale": pixels.number("rescale_factor", 1 / 255), "resample": RESAMPLE[found],
            "mean": tuple(pixels.get("image_mean", mean)), "std": tuple(pixels.get("image_std", std)),
        }  # fmt: skip


RESAMPLE = {1: "lanczos", 2: "bilinear", 3: "bicubic"}
"""Filters by Pillow's numbers."""


def _processors(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    whole, own = (
        read_object(file, "download it again") if (file := folder / f"{name}_config.json").is_file() else {}
        for name in ("processor", "preprocessor")
    )
    inner = whole.get("image_processor")
    if not (found := own or (inner if isinstance(inner, dict) else {})):
        raise ExportError(
            f"{folder}: no preprocessor_config.json: how pictures are cut is not known",
            "download it, or take the text half alone by --text-only",
        )
    return whole, found


class Tower(Architecture):
    """SigLIP's tower; others differ only slightly.

    Args:
        source: its tensors, and its configuration.
        rows: the maximum number of patches per pass.

    Attributes:
        columns: of a patch.
        given: each row's position follows its patch; else the tower has those of its grid.
    """

    model_type, example, features = "siglip", "", ""
    defaults: ClassVar[Mapping[str, Any]] = {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "patch_size": 16,
    }  # fmt: skip
    layers_at = "encoder.layers"
    outer_names = {FINAL_NORM: "post_layernorm"}
    layer_names = {
        "input_layernorm": "layer_norm1",
        "post_attention_layernorm": "layer_norm2",
        **{ATTENTION.format(part): f"self_attn.{part}_proj" for part in "qkv"},
        "self_attn.o_proj": "self_attn.out_proj",
        "mlp.up_proj": "mlp.fc1",
        "mlp.down_proj": "mlp.fc2",
    }
    epsilon = ("layer_norm_eps", 1e-6)
    activation_default = "gelu_pytorch_tanh"
    layer_norms = True
    gated_mlp = False
    biases = {"": True}
    windows = "none"
    rope_share = 0
    both_ways = True
    patch_at: ClassVar[str] = "embeddings.patch_embedding"
    places_at: ClassVar[str] = "embeddings.position_embedding.weight"
    given: ClassVar[bool] = False
    patch_bias: ClassVar[bool] = True

    def __init__(self, source: Checkpoint, vision: Mapping[str, Any], rows: int) -> None:
        sizes = {"vocab_size": 1, "max_position_embeddings": rows, "rope_parameters": None}
        source.config = {**self.defaults, **vision, **sizes}
        self.patch = Settings(source.path, source.config, {}).integer("patch_size")
        self.columns = self.of_a_row()
        super().__init__(source)
        self.input_width = self.columns + (self.facts.hidden if self.given else 0)

    def of_a_row(self) -> int:
        """Count the numbers of a row."""
        return self.patch**2 * CHANNELS

    def embed(self, ops: Ops) -> Value:
        y = self.patches(ops)
        if self.given:
            return ops.plus(ops.input_slice(self.columns, self.facts.hidden), y)
        return ops.place(y, PLACES)

    def patches(self, ops: Ops) -> Value:
        """Multiply patches by the first matrix."""
        bias = f"{PATCHES}.bias" if self.patch_bias else None
        return ops.linear(ops.input_slice(0, self.columns), Linear(f"{PATCHES}.weight", bias))[0]

    def width(self, weight: str) -> int | None:
        return self.facts.hidden if weight.startswith(PATCHES) else super().width(weight)

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        found = dict(super().derived(source))
        found[f"{PATCHES}.weight"] = made_of(
            original(source, f"{self.patch_at}.weight"), (self.facts.hidden, self.columns), self.by_pixels
        )
        if self.patch_bias:
            found[f"{PATCHES}.bias"] = original(source, f"{self.patch_at}.bias")
        if not self.given and self.places_at:
            found[PLACES] = self.places(source)
        return found

    def by_pixels(self, weight: Floats) -> Floats:  # [hidden, 3, patch, patch] -> [hidden, patch * patch * 3]
        """Bring the first matrix in the order of a patch's pixels."""
        return weight.transpose(0, 2, 3, 1).reshape(len(weight), -1)

    def places(self, source: Checkpoint) -> Extra:
        """Positions of the rows of a piece, [rows, hidden], each that of its place in the learnt grid."""
        learnt = original(source, self.places_at)
        rows = self.facts.context

        def nearest(table: Floats) -> Floats:
            here, there = isqrt(rows), isqrt(len(table))
            at = np.arange(here) * there // here
            return table[(at[:, None] * there + at).ravel()]

        return made_of(learnt, (rows, self.facts.hidden), nearest)


class Projector(Architecture):
    """One or two matrices, and a norm in front of them where there is one.

    Args:
        source: has the tensors by the names above.
        sizes: columns that it reads, what is between the matrices (0 = there is one), the decoder's width.
        rows: the maximum number of rows per pass.
        eps: of the norm.
        norm: a layer norm (True), a root-mean-square norm, or none.
        slices: each of this many parts of a row is normed separately.
        activation: between the matrices.
        tensors: ours by name.
    """

    model_type, example, features = "projector", "", ""
    both_ways = True
    windows = "none"
    rope_share = 0
    epsilon = ("norm_eps", 1e-6)

    def __init__(
        self,
        source: Checkpoint,
        sizes: tuple[int, int, int],
        rows: int,
        tensors: Mapping[str, Extra],
        norm: bool | None = None,
        activation: str = "gelu",
        eps: float = 1e-6,
        slices: int = 1,
    ) -> None:
        self.columns, self.inner, width = sizes
        self._slices = slices
        self.input_width, self._tensors, self._centered = self.columns, tensors, norm
        source.config = {
            "hidden_size": width, "intermediate_size": self.inner or width, "num_hidden_layers": 1,
            "num_attention_heads": 1, "head_dim": 8, "vocab_size": 1, "max_position_embeddings": rows,
            "hidden_act": activation, "norm_eps": eps,
        }  # fmt: skip
        super().__init__(source)

    def build(self, ops: Ops) -> Value:
        x = ops.input_slice(0, self.columns)
        if self._centered is not None:
            norm = Norm(f"{MERGED_NORM}.weight", self._bias(MERGED_NORM), self._centered)
            size = self.columns // self._slices
            parts = [ops.norm(ops.input_slice(at, size), norm) for at in range(0, self.columns, size)]
            x = ops.join(*parts) if self._slices > 1 else parts[0]
        if self.inner:
            (x,) = ops.linear(x, self._matrix(FIRST))
            x = ops.activate(x, self.activation)
        return ops.encoded(ops.linear(x, self._matrix(SECOND))[0], None)

    def _matrix(self, name: str) -> Linear:
        return Linear(f"{name}.weight", self._bias(name))

    def _bias(self, name: str) -> str | None:
        return f"{name}.bias" if f"{name}.bias" in self._tensors else None

    def width(self, weight: str) -> int | None:
        return self.inner if weight.startswith(FIRST) else self.facts.hidden

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        return self._tensors
