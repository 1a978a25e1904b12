"""Gemma 4 with sound: two convolutions, a conformer whose rows see the last half second, two matrices around a norm.

A layer has half an MLP, attention, a depthwise convolution behind a gate, and the other half, each between norms
(Universal Speech Model, arXiv 2303.01037; Conformer, arXiv 2005.08100).  A score is q (k + r), where r is a key of the
distance (arXiv 1901.02860, 3.3).  Rows see fewer distances than ``period``, so that a finite Fourier series gives q r
exactly: a head has channels more, whose queries are the coefficients of its series and whose keys are one constant;
rotating both by the position makes their product the series of the distance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from edgespec.errors import UnsupportedModel
from edgespec.export.architectures.base import Architecture, AudioEncoderSpec
from edgespec.export.architectures.formula import ATTENTION, LAYERS
from edgespec.export.architectures.ops import Ops, Value
from edgespec.export.architectures.qwen3_asr import SQUARE, by_squares, padded
from edgespec.export.architectures.rope import Rotary
from edgespec.export.architectures.rules import AttentionRule, DepthwiseRule, Linear, Norm
from edgespec.export.architectures.settings import Settings
from edgespec.export.architectures.towers import (
    FIRST,
    MERGED_NORM,
    SECOND,
    MultimodalCheckpoint,
    Projector,
    Tower,
)
from edgespec.export.source.derived import Extra, Floats, affine, held, made_of, original
from edgespec.export.source.source import Checkpoint
from edgespec.export.source.stored import read_object
from edgespec.runtimes.files.images import ImageWords
from edgespec.runtimes.files.sound import ConformerFrontend, SoundPart, TranscriptPrompt

SUBSAMPLED = "subsample_conv_projection"
EPS = 1e-6  # of all norms
TIMES = 10_000.0  # ratio of the wavelengths of sinusoids
CLIPPED = 1e6  # bounds of a gradient that no activation reaches
LARGEST = float(np.finfo(np.float32).max)
LONGEST = 750  # rows: 30 s
ASK = TranscriptPrompt(
    text="<|turn>user\n{sound}Transcribe the following speech segment in its original language.{language} Only output "
    "the transcription, with no newlines. {prompt}<turn|>\n<|turn>model\n",
    language=" The code of the language is {code}.",
)  # fmt: skip
MODULES = {
    **{f"self_attn.{part}_proj": f"self_attn.{part}_proj" for part in "qkv"},
    "self_attn.o_proj": "self_attn.post",
    **{f"ffn{half}.{ours}_proj": f"feed_forward{half}.ffw_layer_{theirs}"
       for half in (1, 2) for ours, theirs in (("up", 1), ("down", 2))},
    "conv.start": "lconv1d.linear_start",
    "conv.end_proj": "lconv1d.linear_end",
}  # fmt: skip
"""Modules whose inputs and outputs are clamped, by their names here."""


class NormedConvolution(Projector):
    """A convolution of two dimensions, a layer norm over its channels, and what is positive of it."""

    def build(self, ops: Ops) -> Value:
        (x,) = ops.linear(ops.input_slice(0, self.columns), self._matrix(FIRST))
        x = ops.norm(x, Norm(f"{MERGED_NORM}.weight", None, True))
        return ops.encoded(ops.activate(x, "relu"), None)


class AudioProjector(Projector):
    """The tower's last matrix, a norm without weights, and the matrix to rows of the decoder."""

    def build(self, ops: Ops) -> Value:
        (x,) = ops.linear(ops.input_slice(0, self.columns), self._matrix(FIRST))
        return ops.encoded(ops.linear(ops.norm(x, Norm(f"{MERGED_NORM}.weight")), self._matrix(SECOND))[0], None)


class Gemma4AudioTower(Tower):
    """The conformer, over one recording.

    Args:
        source: its tensors.
        audio: its configuration.
        columns: of a row that the convolutions give.
        rows: of the longest recording.
    """

    model_type = "gemma4_audio"
    defaults = {"hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 8, "patch_size": 1}
    layers_at = "layers"
    outer_names: dict[str, str] = {}
    layer_names: dict[str, str] = {}
    epsilon = ("", EPS)
    activation_default = "silu"
    layer_norms = False
    biases = {}
    patch_at = f"{SUBSAMPLED}.input_proj_linear"
    places_at = ""
    patch_bias = False
    rope_share = 1

    def __init__(self, source: Checkpoint, audio: Mapping[str, Any], columns: int, rows: int) -> None:
        own = Settings(source.path, {**self.defaults, **audio})
        hidden, heads = own.integer("hidden_size"), own.integer("num_attention_heads")
        chunk, left = own.integer("attention_chunk_size", 12), own.integer("attention_context_left", 13)
        if own.get("attention_context_right", 0) or left < 2:
            raise UnsupportedModel(f"{own.file}: attention_context_right: rows of sound that see later ones are not "
                                   "supported; supported: 0, and attention_context_left of 2 or more")  # fmt: skip
        if own.number("rms_norm_eps", EPS) != EPS or own.number("gradient_clipping", 1e10) < CLIPPED:
            raise UnsupportedModel(f"{own.file}: expected rms_norm_eps {EPS} and gradient_clipping of at least "
                                   f"{CLIPPED:.0e} in audio_config")  # fmt: skip
        self._columns, self.size, self.seen = columns, hidden // heads, left - 1
        self.more = -(-(self.seen + 1) // 16) * 16  # channels of a head that give the distance
        self.middle = (chunk + left - 1) // 2  # the largest distance that has a key
        self.cap = own.positive("attention_logit_cap", 50.0)
        self.taps = own.integer("conv_kernel_size", 5)
        self.clamped = own.flag("use_clipped_linears", True)
        self.share = own.number("residual_weight", 0.5)
        sizes = {"intermediate_size": 4 * hidden, "head_dim": self.size + self.more}
        super().__init__(source, {**audio, **sizes}, rows)

    def of_a_row(self) -> int:
        return self._columns

    def by_pixels(self, weight: Floats) -> Floats:  # its rows are in that order
        return weight

    @property
    def score_scale(self) -> float:
        return 1.0

    def rotations(self) -> dict[str, Rotary]:
        return {"rope": Rotary({"rope_type": "cyclic", "rope_theta": 1.0, "period": self.more - 1}, self.more)}

    def rule(self, layer: int) -> AttentionRule:
        return AttentionRule(layer, self.score_scale, "rope", self.seen, self.cap, after=0)

    def width(self, weight: str) -> int | None:
        hidden = self.facts.hidden
        own = {"q_proj": hidden, "gate_proj": hidden, "through_proj": hidden, "end_proj": hidden,
               "place_proj": self.facts.heads * self.facts.head_dim}  # fmt: skip
        return own.get(weight.split(".")[-2]) or super().width(weight)

    # -- what is computed ----------------------------------------------------------------------------------------------

    def embed(self, ops: Ops) -> Value:
        return self.patches(ops)

    def layer(self, ops: Ops, x: Value, layer: int) -> Value:
        before = None if layer == 0 else self.norm(f"{LAYERS}.{layer - 1}.out_norm")
        x = ops.sublayer("mlp", layer, x, lambda x: self.half(ops, x, layer, 1), norm=before)
        x = ops.sublayer("attention", layer, x, lambda x: self.hear(ops, x, layer))
        x = ops.sublayer("mlp", layer, x, lambda x: self.convolve(ops, x, layer))
        return ops.sublayer("mlp", layer, x, lambda x: self.half(ops, x, layer, 2))

    def end(self, ops: Ops, x: Value) -> Value:
        return ops.encoded(x, self.norm(f"{LAYERS}.{self.facts.layers - 1}.out_norm"))

    def half(self, ops: Ops, x: Value, layer: int, number: int) -> Value:
        """Compute one of a layer's two MLPs; what it is multiplied by is in the weights of its last norm."""
        at = f"ffn{number}"
        h = self.product(ops, self.normed(ops, x, layer, f"{at}.norm"), layer, f"{at}.up_proj")
        y = self.product(ops, ops.activate(h, self.activation), layer, f"{at}.down_proj")
        return self.normed(ops, y, layer, f"{at}.after_norm")

    def hear(self, ops: Ops, x: Value, layer: int) -> Value:
        """Attend to the last rows, by distance as well."""
        h = self.normed(ops, x, layer, "before_norm")
        q, k, v = (self.product(ops, h, layer, ATTENTION.format(part)) for part in "qkv")
        (q,) = ops.linear(q, self.linear(layer, "self_attn.place_proj"))
        y = self.product(ops, ops.attention(q, k, v, self.rule(layer)), layer, ATTENTION.format("o"))
        return self.normed(ops, y, layer, "after_norm")

    def convolve(self, ops: Ops, x: Value, layer: int) -> Value:
        """Gate rows, and convolve each channel over the last ones."""
        at = f"{LAYERS}.{layer}.conv"
        h = self.bounded(ops, self.normed(ops, x, layer, "conv.norm"), layer, "conv.start", "input")
        through, gate = ops.linear(h, *(self.linear(layer, f"conv.{part}_proj") for part in ("through", "gate")))
        through, gate = (self.bounded(ops, one, layer, "conv.start", "output") for one in (through, gate))
        y = ops.depthwise(ops.sigmoid_gate(through, gate), DepthwiseRule(f"{at}.taps", self.taps))
        y = ops.activate(ops.norm(y, self.norm(f"{at}.after_norm")), self.activation)
        return self.product(ops, y, layer, "conv.end_proj")

    def product(self, ops: Ops, x: Value, layer: int, module: str) -> Value:
        """Multiply by a matrix, with inputs and outputs clamped."""
        (y,) = ops.linear(self.bounded(ops, x, layer, module, "input"), self.linear(layer, module))
        return self.bounded(ops, y, layer, module, "output")

    def bounded(self, ops: Ops, x: Value, layer: int, module: str, side: str) -> Value:
        """Clamp the inputs or the outputs of a matrix, where the model does."""
        return ops.activate(x, "clamp", f"{LAYERS}.{layer}.{module}.{side}_range") if self.clamped else x

    # -- tensors -------------------------------------------------------------------------------------------------------

    def linear(self, layer: int, module: str) -> Linear:
        at = f"{LAYERS}.{layer}.{module}"
        return Linear(f"{at}.weight", f"{at}.bias" if module == ATTENTION.format("k") else None)

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        found = dict(super().derived(source))
        for layer in range(self.facts.layers):
            found |= self._layer(source, f"{LAYERS}.{layer}", f"{self.layers_at}.{layer}")
        return found

    def _layer(self, source: Checkpoint, at: str, there: str) -> dict[str, Extra]:
        hidden, found = self.facts.hidden, dict[str, Extra]()
        norms = {"out_norm": "norm_out", "before_norm": "norm_pre_attn", "after_norm": "norm_post_attn",
                 "conv.norm": "lconv1d.pre_layer_norm", "conv.after_norm": "lconv1d.conv_norm"}  # fmt: skip
        for number in (1, 2):
            norms[f"ffn{number}.norm"] = f"feed_forward{number}.pre_layer_norm"
            after = original(source, f"{there}.feed_forward{number}.post_layer_norm.weight")
            found[f"{at}.ffn{number}.after_norm.weight"] = affine(after, scale=self.share)
        for ours, theirs in norms.items():
            found[f"{at}.{ours}.weight"] = original(source, f"{there}.{theirs}.weight")
        for ours, theirs in MODULES.items():
            if ours.startswith(("ffn", "conv.end")) or ours == ATTENTION.format("q"):
                found[f"{at}.{ours}.weight"] = original(source, f"{there}.{theirs}.linear.weight")
            for side in ("input", "output") if self.clamped else ():
                least, most = (original(source, f"{there}.{theirs}.{side}_{end}") for end in ("min", "max"))
                times = self.key_scale if (ours, side) == (ATTENTION.format("k"), "output") else 1.0
                found[f"{at}.{ours}.{side}_range"] = made_of(least, (3,), _range(most, times), most)
        start = original(source, f"{there}.lconv1d.linear_start.linear.weight")
        for part, rows in (("through", slice(0, hidden)), ("gate", slice(hidden, 2 * hidden))):
            found[f"{at}.conv.{part}_proj.weight"] = made_of(start, (hidden, hidden), _rows(rows))
        taps = original(source, f"{there}.lconv1d.depthwise_conv1d.weight")
        found[f"{at}.conv.taps"] = made_of(taps, (self.taps * hidden,), lambda found: found[:, 0].T.ravel())
        return found | self._heads(source, at, there)

    @property
    def key_scale(self) -> float:
        """The factor of keys."""
        return math.log1p(math.e) / math.log(2)

    def _heads(self, source: Checkpoint, at: str, there: str) -> dict[str, Extra]:
        """Make the matrices of attention, whose heads have channels more, the first ones."""
        heads, hidden, wide = self.facts.heads, self.facts.hidden, self.facts.heads * self.facts.head_dim
        k, v, o = (original(source, f"{there}.self_attn.{name}.linear.weight") for name in ("k_proj", "v_proj", "post"))
        keys = original(source, f"{there}.self_attn.relative_k_proj.weight")
        scale = original(source, f"{there}.self_attn.per_dim_scale")
        own, more = f"{at}.self_attn", self.more

        def widened(times: float) -> Any:
            return lambda rows: np.pad(rows.reshape(heads, self.size, hidden) * np.float32(times),
                                       ((0, 0), (more, 0), (0, 0))).reshape(wide, hidden)  # fmt: skip

        bounds = [original(source, f"{there}.self_attn.k_proj.output_{end}") for end in ("min", "max")]
        limits = tuple(bounds) if self.clamped else ()

        def constant(_: Floats) -> Floats:
            found = np.zeros((heads, self.facts.head_dim), np.float32)
            found[:, : more // 2] = self._constant(limits)
            return found.ravel()

        return {
            f"{own}.k_proj.weight": made_of(k, (wide, hidden), widened(self.key_scale)),
            f"{own}.k_proj.bias": made_of(scale, (wide,), constant, *limits),
            f"{own}.v_proj.weight": made_of(v, (wide, hidden), widened(1)),
            f"{own}.o_proj.weight": made_of(
                o, (hidden, wide), lambda found: np.ascontiguousarray(widened(1)(np.ascontiguousarray(found.T)).T)
            ),
            f"{own}.place_proj.weight": made_of(
                keys,
                (wide, hidden),
                lambda found: self._series(found, scale.read(slice(None), None), self._constant(limits)),
                scale,
                *limits,
            ),
        }

    def _constant(self, limits: tuple[Extra, ...]) -> float:
        """Choose the constant of keys: 1, or what the bounds of keys leave of it."""
        if not limits:
            return 1.0
        least, most = (float(one.read(slice(None), None).ravel()[0]) * self.key_scale for one in limits)
        if least > 0 or most <= 0:
            raise UnsupportedModel(f"{self.settings.file}: keys of sound between {least:g} and {most:g}: expected "
                                   "bounds around 0")  # fmt: skip
        return min(1.0, most)

    def _series(
        self, keys: Floats, scale: Floats, constant: float
    ) -> Floats:  # [hidden, hidden], [size] -> [heads * head_dim, hidden]
        """Scale queries, and give the coefficients of their series of distances before them."""
        heads, size, period, half = self.facts.heads, self.size, self.more - 1, self.more // 2
        hidden = self.facts.hidden
        steps = np.exp(-np.log(TIMES) / max(hidden // 2 - 1, 1) * np.arange(hidden // 2))
        places = self.middle - self.seen + np.arange(period)  # of each distance
        known = (places >= 0) & (places <= self.middle)
        angles = places[:, None] * steps
        sinusoids = np.concatenate([np.sin(angles), np.cos(angles)], 1) * known[:, None]  # [period, hidden]
        by_distance = (sinusoids @ keys.astype(np.float64).T).reshape(period, heads, size)
        turns = 2 * np.pi / period * (np.arange(half)[:, None] * np.arange(period) % period)
        share = np.where(np.arange(half) == 0, 1, 2)[:, None] / period
        series = np.concatenate([np.cos(turns), -np.sin(turns)]) * np.concatenate([share, share])  # [more, period]
        factors = np.logaddexp(0, scale.astype(np.float64)) * size**-0.5 / math.log(2)  # softplus
        found = np.zeros((heads, self.facts.head_dim, heads, size))
        for head in range(heads):
            found[head, : self.more, head] = series @ by_distance[:, head] * factors / constant
            found[head, self.more :, head] = np.diag(factors)
        return found.reshape(heads * self.facts.head_dim, hidden).astype(np.float32)


def _by_bands(weight: Floats) -> Floats:  # [out, in, frames, bands] -> as ``by_squares``
    return by_squares(weight.swapaxes(2, 3))


def _rows(rows: slice) -> Any:
    return lambda found: found[rows]


def _range(most: Extra, times: float) -> Any:
    def make(least: Floats) -> Floats:
        ends = np.array([least.ravel()[0], most.read(slice(None), None).ravel()[0], 0], np.float64) * times
        return np.clip(ends, -LARGEST, LARGEST).astype(np.float32)  # infinite where nothing is clamped

    return make


FEATURES = {"sampling_rate": 16_000, "frame_length": 320, "frame_length_ms": 20.0, "hop_length": 160,
            "hop_length_ms": 10.0, "min_frequency": 0.0, "max_frequency": 8000.0, "preemphasis": 0.0, "dither": 0.0,
            "fft_overdrive": False, "fft_length": 512, "input_scale_factor": 1.0, "mel_floor": 1e-3}  # fmt: skip
"""Settings of features that ``audio.features.log_magnitudes`` has."""


def _front(whole: MultimodalCheckpoint) -> tuple[ConformerFrontend, int]:
    """Read how features are made, and the rows of the longest recording."""
    file = whole.source.path / "processor_config.json"
    processor = read_object(file, "download it again") if file.is_file() else {}
    given = processor.get("feature_extractor") or {}
    for key, wanted in FEATURES.items():
        if (got := given.get(key, wanted)) != wanted:
            raise UnsupportedModel(f"{file}: {key} {got!r}: expected {wanted}")
    bands = Settings(whole.source.path, given).integer("feature_size", 128)
    mean, deviation = given.get("per_bin_mean"), given.get("per_bin_stddev")
    if any(one is not None and (not isinstance(one, list) or len(one) != bands) for one in (mean, deviation)):
        raise UnsupportedModel(f"{file}: per_bin_mean and per_bin_stddev: expected {bands} numbers each")
    most = Settings(whole.source.path, processor).integer("audio_seq_length", LONGEST)
    return ConformerFrontend(kind="conformer", bands=bands, mean=mean, deviation=deviation), min(most, LONGEST)


def open_hearing(whole: MultimodalCheckpoint) -> AudioEncoderSpec:
    audio = whole.settings.get("audio_config", {})
    sizes = Settings(whole.source.path, audio)
    front, longest = _front(whole)
    channels = sizes.get("subsampling_conv_channels", [128, 32])
    if not isinstance(channels, list) or len(channels) != front.convolutions or min(channels) < 1:
        raise UnsupportedModel(f"{sizes.file}: subsampling_conv_channels {channels!r}: expected two numbers")
    source = whole.below(f"{SUBSAMPLED}.input_proj_linear.weight")
    columns = front.halved(front.bands) * channels[-1]
    tower = Gemma4AudioTower(source, audio, columns, longest)
    convolutions: list[Architecture] = []
    bands, rows, inside = front.bands, 2 * front.piece, 1
    for number, width in enumerate(channels):
        bands = -(-bands // 2)
        source, name = whole.below(f"{SUBSAMPLED}.input_proj_linear.weight"), f"{SUBSAMPLED}.layer{number}"
        most = bands * (rows + 1 if number == 0 else front.piece)
        matrix = original(source, f"{name}.conv.weight")
        tensors = {f"{FIRST}.weight": made_of(matrix, (width, padded(SQUARE * inside)), _by_bands),
                   f"{MERGED_NORM}.weight": original(source, f"{name}.norm.weight")}  # fmt: skip
        convolutions.append(
            NormedConvolution(source, (padded(SQUARE * inside), width, width), most, tensors, eps=EPS)
        )  # fmt: skip
        inside = width
    hidden, text = tower.facts.hidden, whole.text.facts.hidden
    source, inner = whole.below("audio_tower.output_proj.weight"), sizes.integer("output_proj_dims", 1536)
    tensors = {f"{FIRST}.weight": original(source, "audio_tower.output_proj.weight"),
               f"{FIRST}.bias": original(source, "audio_tower.output_proj.bias"),
               f"{MERGED_NORM}.weight": held(np.ones(inner, np.float32)),
               f"{SECOND}.weight": original(source, "embed_audio.embedding_projection.weight")}  # fmt: skip
    projector = AudioProjector(source, (hidden, inner, text), longest, tensors, eps=EPS)
    token = "<|audio|>"
    words = ImageWords(placeholder=token, token=token, id=whole.settings.integer("audio_token_id", 258881),
                       begin="<|audio>", end="<audio|>")  # fmt: skip
    sound = SoundPart(front=front, prompt_template=whole.words(words), max_rows=longest, transcript_prompt=ASK)
    return AudioEncoderSpec(sound, tower, [projector], convolutions)
