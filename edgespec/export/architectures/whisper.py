"""Whisper (arXiv 2212.04356): an encoder over sound, after two convolutions, and a decoder of its transcript.

The convolutions are matrices over neighboring rows.  A row of the encoder needs three rows of the first one, those of
the frames 2 i - 1, 2 i and 2 i + 1.  All three are computed for each row, so that one pass over rows of numbers is
enough.  Half of them are computed twice, which costs little compared with the layers (``FeaturePart`` describes the
rows)::

    y = gelu(second [gelu(first p_0), gelu(first p_1), gelu(first p_2)]) + positions
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from edgespec.export.architectures.base import known
from edgespec.export.architectures.formula import ATTENTION, EMBEDDING, FINAL_NORM
from edgespec.export.architectures.ops import Ops, Value
from edgespec.export.architectures.rules import Linear
from edgespec.export.architectures.seq2seq import CROSS, EncoderDecoder
from edgespec.export.source.derived import Extra, Floats, made_of, original
from edgespec.export.source.source import Checkpoint
from edgespec.runtimes.files.manifest import FeaturePart

FIRST, SECOND = "model.conv1", "model.conv2"
TAPS, PADDED = 3, 32  # columns of a part are a multiple of what matrices in blocks need


@known(
    "whisper", "whisper-small, whisper-large-v3-turbo, distil-large-v3", "encoder-decoder over sound; two convolutions"
)
class Whisper(EncoderDecoder):
    """Whisper of every size."""

    aliases = {**EncoderDecoder.aliases, "max_position_embeddings": "max_{}_positions"}
    outer_names = {EMBEDDING: "model.{}.embed_tokens", FINAL_NORM: "model.{}.layer_norm", "lm_head": "proj_out"}
    biases = {"": True, ATTENTION.format("k"): False, CROSS.format("k"): False}
    logits_bias = False
    scaled = False  # whatever config.json says: transformers does not heed it

    def __init__(self, source: Checkpoint, encodes: bool = False) -> None:
        side = "source" if encodes else "target"
        self.aliases = {**self.aliases, "max_position_embeddings": f"max_{side}_positions"}
        super().__init__(source, encodes)
        if encodes:
            assert self.sound is not None
            self.input_width = TAPS * self.sound.columns

    def configure(self) -> dict[str, Any]:
        return super().configure() | ({"vocab": 1} if self.both_ways else {})

    @property
    def sound(self) -> FeaturePart | None:
        bands = self.settings.integer("num_mel_bins", 80)
        frames = 2 * self.settings.integer("max_source_positions", 1500)
        columns = -(-(TAPS * bands + 1) // PADDED) * PADDED
        return FeaturePart(bands=bands, frames=frames, columns=columns)

    def embed(self, ops: Ops) -> Value:
        if not self.both_ways:
            return super().embed(ops)
        assert self.sound is not None
        assert self.positions is not None
        parts = [ops.input_slice(at * self.sound.columns, self.sound.columns) for at in range(TAPS)]
        rows = [ops.activate(ops.linear(x, Linear(f"{FIRST}.weight"))[0], "gelu") for x in parts]
        (y,) = ops.linear(ops.join(*rows), Linear(f"{SECOND}.weight", f"{SECOND}.bias"))
        return ops.place(ops.activate(y, "gelu"), self.positions)

    def width(self, weight: str) -> int | None:
        return self.facts.hidden if weight.startswith((FIRST, SECOND)) else super().width(weight)

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        found = dict(super().derived(source))
        if not self.both_ways:
            return found
        assert self.sound is not None
        hidden, columns = self.facts.hidden, self.sound.columns
        first, second = (f"model.encoder.conv{number}" for number in (1, 2))
        bias = original(source, f"{first}.bias")

        def with_bias(weight: Floats) -> Floats:  # [hidden, bands, 3] -> [hidden, columns]
            rows = np.zeros((hidden, columns), np.float32)
            rows[:, : weight[0].size] = weight.transpose(0, 2, 1).reshape(hidden, -1)
            rows[:, weight[0].size] = bias.read(slice(None), None)
            return rows

        def flattened(weight: Floats) -> Floats:  # [hidden, hidden, 3] -> [hidden, 3 hidden]
            return weight.transpose(0, 2, 1).reshape(hidden, -1)

        found[f"{FIRST}.weight"] = made_of(original(source, f"{first}.weight"), (hidden, columns), with_bias, bias)
        found[f"{SECOND}.weight"] = made_of(original(source, f"{second}.weight"), (hidden, TAPS * hidden), flattened)
        found[f"{SECOND}.bias"] = original(source, f"{second}.bias")
        return found
