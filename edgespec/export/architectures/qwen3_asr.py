"""Qwen3-ASR (arXiv 2601.21337): convolutions over chunks of a second, a tower that sees windows, a Qwen3 decoder.

Chunks of features [bands, frames] go through three convolutions of two dimensions, each a matrix over squares of
3 x 3 that runs over all places (``ChunkedFrontend``); all bands of a frame, [bands, channels], are then a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from edgespec.errors import UnsupportedModel
from edgespec.export.architectures.base import Architecture, AudioEncoderSpec
from edgespec.export.architectures.formula import ATTENTION, FINAL_NORM
from edgespec.export.architectures.ops import Ops, Value
from edgespec.export.architectures.settings import Settings
from edgespec.export.architectures.towers import FIRST, PLACES, SECOND, MultimodalCheckpoint, Projector, Tower
from edgespec.export.architectures.whisper import PADDED
from edgespec.export.source.derived import Extra, Floats, held, made_of, original, taken
from edgespec.export.source.source import Checkpoint
from edgespec.runtimes.files.images import ImageWords
from edgespec.runtimes.files.sound import ChunkedFrontend, SoundPart, TranscriptPrompt

BASE, SQUARE = 10000, 3 * 3  # of sinusoids' wavelengths; numbers under a convolution
LONGEST = 20 * 60 * 100  # frames: the authors' code cuts what is longer
LANGUAGES = {
    "ar": "Arabic", "cs": "Czech", "da": "Danish", "de": "German", "el": "Greek", "en": "English", "es": "Spanish",
    "fa": "Persian", "fi": "Finnish", "fil": "Filipino", "fr": "French", "hi": "Hindi", "hu": "Hungarian",
    "id": "Indonesian", "it": "Italian", "ja": "Japanese", "ko": "Korean", "mk": "Macedonian", "ms": "Malay",
    "nl": "Dutch", "pl": "Polish", "pt": "Portuguese", "ro": "Romanian", "ru": "Russian", "sv": "Swedish",
    "th": "Thai", "tr": "Turkish", "vi": "Vietnamese", "yue": "Cantonese", "zh": "Chinese",
}  # fmt: skip
ASK = TranscriptPrompt(
    text="<|im_start|>system\n{prompt}<|im_end|>\n<|im_start|>user\n{sound}<|im_end|>\n<|im_start|>assistant\n{language}",
    language="language {name}<asr_text>", languages=LANGUAGES, marker="<asr_text>",
)  # fmt: skip


class Convolution(Projector):
    """A convolution of two dimensions: a matrix over squares of rows, then GELU."""

    def build(self, ops: Ops) -> Value:
        (x,) = ops.linear(ops.input_slice(0, self.columns), self._matrix(FIRST))
        return ops.encoded(ops.activate(x, "gelu"), None)


class Qwen3AsrTower(Tower):
    """The tower of Qwen3-ASR, over one window of chunks.

    Args:
        front: of the model.
        channels: of what the convolutions give.
    """

    model_type = "qwen3_asr_encoder"
    aliases = {"hidden_size": "d_model", "num_hidden_layers": "encoder_layers", "intermediate_size": "encoder_ffn_dim",
               "num_attention_heads": "encoder_attention_heads"}  # fmt: skip
    layers_at = "layers"
    outer_names = {FINAL_NORM: "ln_post"}
    layer_names = {
        "input_layernorm": "self_attn_layer_norm",
        "post_attention_layernorm": "final_layer_norm",
        **{ATTENTION.format(part): f"self_attn.{part}_proj" for part in "qkv"},
        "self_attn.o_proj": "self_attn.out_proj",
        "mlp.up_proj": "fc1",
        "mlp.down_proj": "fc2",
    }
    epsilon = ("layer_norm_eps", 1e-5)
    activation_key = "activation_function"
    activation_default = "gelu"
    patch_at = "conv_out"
    places_at = ""
    patch_bias = False

    def __init__(self, source: Checkpoint, audio: Mapping[str, Any], front: ChunkedFrontend, channels: int) -> None:
        self._bands, self._channels = front.halved(front.bands), channels
        self._rows = front.halved(front.chunk)
        super().__init__(source, {"patch_size": 1, **audio}, front.window * self._rows)

    def of_a_row(self) -> int:
        return padded(self._bands * self._channels)

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        found, hidden = dict(super().derived(source)), self.facts.hidden
        steps = np.exp(-np.log(BASE) / (hidden // 2 - 1) * np.arange(hidden // 2, dtype=np.float32))
        angles = np.arange(self._rows, dtype=np.float32)[:, None] * steps.astype(np.float32)
        table = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
        found[PLACES] = held(np.tile(table, (self.facts.context // self._rows, 1)).astype(np.float32))
        return found

    def by_pixels(self, weight: Floats) -> Floats:  # [hidden, channels * bands] -> [hidden, bands * channels and zeros]
        mixed = weight.reshape(len(weight), self._channels, self._bands).transpose(0, 2, 1).reshape(len(weight), -1)
        return np.pad(mixed, ((0, 0), (0, self.columns - mixed.shape[1])))


def padded(columns: int) -> int:
    """Round up to what matrices in blocks need."""
    return -(-columns // PADDED) * PADDED


def open_hearing(whole: MultimodalCheckpoint) -> AudioEncoderSpec:
    audio, kinds = whole.settings.get("audio_config", {}), str(whole.settings.get("architectures", []))
    if "TokenClassification" in kinds or whole.settings.get("classify_num", 0):
        raise UnsupportedModel(f"{whole.settings.file}: a forced aligner tells when words are said, and writes none",
                               "take Qwen3-ASR 0.6B or 1.7B")  # fmt: skip
    sizes = Settings(whole.source.path, audio)
    chunk, channels = 2 * sizes.integer("n_window", 50), sizes.integer("downsample_hidden_size", 480)
    window = sizes.integer("n_window_infer", 800) // chunk
    front = ChunkedFrontend(kind="chunks", bands=sizes.integer("num_mel_bins", 128), chunk=chunk, window=window,
                        convolutions=3)  # fmt: skip
    tower = Qwen3AsrTower(whole.below("conv2d1.weight"), audio, front, channels)
    convolutions: list[Architecture] = []
    bands, frames = front.bands, front.chunk
    for number in range(front.convolutions):
        bands, frames = -(-bands // 2), -(-frames // 2)
        columns = padded(SQUARE * (channels if number else 1))
        source, name = whole.below("conv2d1.weight"), f"conv2d{number + 1}"
        tensors = {f"{FIRST}.weight": made_of(original(source, f"{name}.weight"), (channels, columns), by_squares),
                   f"{FIRST}.bias": original(source, f"{name}.bias")}  # fmt: skip
        convolutions.append(Convolution(source, (columns, channels, channels), bands * frames, tensors))
    source = whole.below("multi_modal_projector.linear_1.weight")
    names = "multi_modal_projector.linear_1", "multi_modal_projector.linear_2"
    if not source.has(f"{names[0]}.weight"):  # as the authors name them
        source, names = whole.below("conv2d1.weight"), ("proj1", "proj2")
    tensors = taken(source, dict(zip((FIRST, SECOND), names, strict=True)))
    hidden = tower.facts.hidden
    projector = Projector(source, (hidden, hidden, whole.text.facts.hidden), tower.facts.context, tensors,
                          activation=tower.activation)  # fmt: skip
    token = "<|audio_pad|>"
    words = ImageWords(placeholder=token, token=token, id=whole.settings.integer("audio_token_id", 151676),
                       written=f"<|audio_start|>{token}<|audio_end|>")  # fmt: skip
    sound = SoundPart(
        front=front, prompt_template=whole.words(words), max_rows=front.rows(LONGEST), transcript_prompt=ASK
    )
    return AudioEncoderSpec(sound, tower, [projector], convolutions)


def by_squares(weight: Floats) -> Floats:  # [out, in, 3, 3] -> [out, 9 * in and zeros]
    """Bring a convolution in the order of rows: bands, frames, channels."""
    mixed = weight.transpose(0, 2, 3, 1).reshape(len(weight), -1)
    return np.pad(mixed, ((0, 0), (0, padded(mixed.shape[1]) - mixed.shape[1])))
