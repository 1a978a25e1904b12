"""Input for an encoder-decoder's encoder, so that an export can compare and time its decoder."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.export.architectures import Architecture
from edgespec.export.bundle.model_part import source_of
from edgespec.export.quantization.reference import reference_rows
from edgespec.export.tokenizers.text_form import surroundings
from edgespec.runtimes.files.manifest import ModelPart, TextForm
from edgespec.runtimes.files.operators import NATIVE
from edgespec.runtimes.slots.encoder import EncodedSources, Encoder
from edgespec.runtimes.slots.native import NativeSlot
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot
from edgespec.runtimes.text.codec import TextCodec

MOST = 256  # rows of the source
LEAST = 64  # tokens that are compared; a model was not trained to continue after an end of text
Array = NDArray[np.float32]


@dataclass
class Reading:
    """A source, and what the decoder's text begins with."""

    form: TextForm  # of the model's texts
    content: list[int] | Array  # token ids, or rows of features float32 [S, columns]
    begin: list[int]  # token ids
    around: tuple[list[int], list[int]] = ([], [])  # tokens before and after the words of a source of tokens
    _rows: Array | None = field(default=None, repr=False)  # what the target's encoder gave

    def attend(self, folder: Path, part: ModelPart, slot: Slot, threads: int | None) -> None:
        """Let a slot of a written model attend over the source; a draft may share what the target's encoder gave."""
        assert isinstance(slot, NativeSlot)
        if part.encoder is not None:
            encoder = Encoder(Model(folder, part.encoder, NATIVE, threads))
            own = encoder.encode(np.asarray(self.content))
            encoder.close()
            self._rows = own if self._rows is None else self._rows
        else:
            assert self._rows is not None
            own = self._rows
        slot.attend(EncodedSources(slot.model, 1).fill(own, b"measured"))

    def written(self, slot: Slot, count: int, eos: Collection[int]) -> list[int]:
        """Generate at most ``count`` tokens about the source greedily; the text may end after ``LEAST`` tokens."""
        tokens, banned = list(self.begin), [token for token in eos if token < slot.vocab_size]
        slot.follow([])
        slot.prefill(tokens[:-1])
        while len(tokens) < min(count, slot.context - 1):
            row = slot.forward(np.array(tokens[-1:], np.int64)).logits[0].copy()
            slot.keep([0])
            if len(tokens) >= LEAST and int(row.argmax()) in banned:
                break
            row[banned] = -np.inf
            tokens.append(int(row.argmax()))
        return tokens

    def reference(self, encoder: Architecture) -> Array:
        """Compute in float32 what the source model's encoder gives -> [1, S, width]."""
        return reference_rows(encoder, self.content)


def reading(
    arch: Architecture, form: TextForm, codec: TextCodec, text: str, seed: int, sound: Array | None = None
) -> Reading:
    """Choose a source from a text, or for a speech model a recording or noise.

    Args:
        arch: the decoder.
        form: of the model's texts.
        codec: of sources.
        text: for sources of tokens.
        seed: of noise.
        sound: float32 [S, columns].
    """
    source = source_of(arch)
    assert source is not None
    begin, (before, behind) = surroundings(form, codec)
    if source.kind == "features":
        shape = min(MOST, source.max_rows), arch.encoder.input_width if arch.encoder else 0
        noise = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
        return Reading(form, noise if sound is None else sound, begin)
    most = max(1, min(MOST, source.max_rows) - len(before) - len(behind))
    return Reading(form, [*before, *_longest_line(codec, text, most), *behind], begin, (before, behind))


def _longest_line(codec: TextCodec, text: str, most: int) -> list[int]:
    """Choose the line of a text with the maximum number of tokens, of those that fit; otherwise the text's beginning.

    A page of text would be unlike the training data of a model for sentences.
    """
    lines = [codec.encode(line, special=False) for line in text.splitlines()]
    fitting = [line for line in lines if 0 < len(line) <= most]
    return max(fitting, key=len, default=codec.encode(text, special=False)[:most])


class Sources:
    """Sources that the slots of one written model attend over, one after the other.

    Args:
        ids: int64 [S, R], token ids, or float32 [S, R, columns].
        folder: of the model, and part: its entry in the manifest.
        model: it, opened.
        together: slots that attend at a time.
    """

    def __init__(
        self, ids: NDArray[np.int64] | Array, folder: Path, part: ModelPart, model: Model, together: int
    ) -> None:
        assert part.encoder is not None
        self.ids = ids
        self._encoder = Encoder(Model(folder, part.encoder, NATIVE, model.threads))
        self._memories = EncodedSources(model, together)

    def attend(self, slots: Sequence[Slot], first: int) -> None:
        """Let slots attend over the sources from a number on."""
        for number, slot in enumerate(slots, first):
            assert isinstance(slot, NativeSlot)
            slot.attend(self._memories.fill(self._encoder.encode(self.ids[number]), b"%d" % number))

    def close(self) -> None:
        """Free what it holds; no slot that attends is of use afterwards."""
        self._encoder.close()
        self._memories.close()


def source_rows(read: Reading, codec: TextCodec, text: str, length: int) -> NDArray[np.int64]:  # [S, R]
    """Cut a text into sources of ``length`` tokens, each with the prefix and suffix of ``reading``."""
    before, behind = read.around
    words, each = codec.encode(text, special=False), length - len(before) - len(behind)
    found = [[*before, *words[at : at + each], *behind] for at in range(0, len(words) - each + 1, each)]
    return np.asarray(found, np.int64).reshape(len(found), length)


def shares_encoder(target: Architecture, draft: Architecture) -> bool:
    """Whether a draft's encoder is its target's, number for number, as those of distil-whisper are."""
    one, other = target.encoder, draft.encoder
    if one is None or other is None or one.tensors != other.tensors:
        return False
    return all(np.array_equal(one.source.read(name), other.source.read(name)) for name in one.tensors)
