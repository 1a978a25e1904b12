"""A recording in a prompt."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Any

import numpy as np

from edgespec.errors import InvalidRequest
from edgespec.runtimes.audio.processing import frames_of
from edgespec.runtimes.audio.reading import RATE, Samples, Sound, pieces
from edgespec.runtimes.files.sound import SoundPart


class Audio:
    """A recording as a part of a prompt; ``edgespec.Audio``.

    Attributes:
        samples: float32 [n], one channel, 16,000 a second; not to be changed.
        kind: of parts of messages that hold one.
    """

    kind = "audio"

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    @classmethod
    def open(cls, source: Sound, rate: int = RATE) -> Audio:
        """Read a file (wav, flac, ogg, mp3, m4a, webm), its bytes, or samples; see ``reading.pieces`` for errors.

        Args:
            source: a file, bytes, or an array of samples, [n] or [n, channels].
            rate: of an array, in samples per second; a file has its own.
        """
        return cls(np.concatenate(list(pieces(source, rate))))

    @classmethod
    def of(cls, source: Any) -> Audio:
        """Make a recording from any accepted input.

        Args:
            source: an ``Audio``, or what ``open`` reads.
        """
        return source if isinstance(source, Audio) else cls.open(source)

    @cached_property
    def digest(self) -> bytes:
        """Return the SHA-256 of the samples."""
        return hashlib.sha256(b"sound" + np.ascontiguousarray(self.samples).tobytes()).digest()

    def text(self, part: SoundPart) -> str:
        """Return the text that represents it in a prompt.

        Args:
            part: the sound part of a bundle's model.

        Raises:
            InvalidRequest: it is longer than the model accepts at once.
        """
        rows = part.front.rows(frames_of(len(self.samples), part.front))
        if rows > part.max_rows:
            raise InvalidRequest(
                f"a recording of {len(self.samples) / RATE:.0f} s is {rows} rows, and this model hears {part.max_rows}",
                "cut it, or transcribe it: that is done window by window",
            )
        return part.prompt_template.begin + part.prompt_template.token * rows + part.prompt_template.end

    def forget(self) -> None:
        """Free derived data: there is none."""
