"""Handle speech as codes: the prompt, allowed codes, the windows of frames to decode, and WAV files."""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.codes import CodesPart, SoundCodes
from edgespec.runtimes.text.codec import TextCodec

Samples = NDArray[np.float32]
Decode = Callable[[NDArray[np.int64], int], Samples]  # codes [frames, places], and the number of the first frame
WINDOW = 4  # frames that are decoded at once
MOST_VOICE = 64  # characters


def speech_prompt(part: SoundCodes, codec: TextCodec, text: str, voice: str | None = None) -> list[int]:
    """Write the prompt for a spoken text -> token ids; ``voice``: None = the model's default voice.

    Raises:
        InvalidRequest: an empty text, or an unknown voice.
    """
    voice = part.voices[0] if voice is None else voice
    if not text.strip():
        raise InvalidRequest("the text to speak is empty", "give at least one word")
    if not (0 < len(voice) <= MOST_VOICE and voice.isprintable()) or ":" in voice:
        raise InvalidRequest(f"voice {voice[:80]!r}: expected a name, such as {', '.join(part.voices)}")
    return [*part.begin, *codec.encode(f"{voice}: {text}"), *part.end]


def frame_noise(seed: int, first: int, frames: int, count: int) -> Samples:
    """Make the decoder's noise for some frames -> [frames, count]; a frame has the same noise in every window."""
    rows = [np.random.default_rng((seed, first + at)).standard_normal(count, np.float32) for at in range(frames)]
    return np.stack(rows)


class Windows:
    """Sound of frames as they come: as Orpheus decodes a stream, four frames at once, of which the second is heard.

    The reference (https://github.com/canopyai/Orpheus-TTS, decoder.py) never lets the first frame and the last two be
    heard, and leaves out code 0; here they are heard.
    """

    def __init__(self, part: CodesPart, decode: Decode) -> None:
        assert part.sound is not None
        self._decode, self._first, self._places = decode, part.first, part.sound.places
        self._levels = part.size // self._places
        self._codes: list[int] = []
        self._rest: Samples | None = None

    def push(self, tokens: Sequence[int]) -> Iterator[Samples]:
        """Add tokens -> sound of the frames that are complete now; skips tokens that are not codes of their place."""
        for token in tokens:
            place = len(self._codes) % self._places
            code = token - self._first - place * self._levels
            if 0 <= code < self._levels:
                self._codes.append(code)
                if place == self._places - 1 and len(self._codes) >= WINDOW * self._places:
                    yield self._next()

    def finish(self) -> Iterator[Samples]:
        """Return the rest; codes after the last complete frame are dropped."""
        if self._rest is None and (frames := len(self._codes) // self._places):
            self._rest = self._decode(self._window(0, frames), 0)
        if self._rest is not None:
            yield self._rest

    def _next(self) -> Samples:
        start = len(self._codes) // self._places - WINDOW
        frames = self._decode(self._window(start, WINDOW), start).reshape(WINDOW, -1)
        self._rest = frames[2:].reshape(-1)
        return frames[1 if start else 0 : 2].reshape(-1)

    def _window(self, start: int, frames: int) -> NDArray[np.int64]:  # [frames, places]
        codes = self._codes[start * self._places : (start + frames) * self._places]
        return np.array(codes, np.int64).reshape(frames, self._places)


class FrameRule:
    """A constraint of a speech-output model: after a code comes one of the next place, or the end."""

    scored = False  # log-probabilities are the model's

    def __init__(self, part: CodesPart, vocab: int, ends: Collection[int], prompt: int) -> None:
        assert part.sound is not None
        places, self._prompt = part.sound.places, prompt
        self._masks = np.zeros((places, vocab), np.bool_)
        self._masks[:, [token for token in ends if token < vocab]] = True
        codes = self._masks[:, part.first : part.first + part.size].reshape(places, places, -1)  # a view
        codes[range(places), range(places)] = True

    def allowed(self, prefix: Sequence[int], row: Samples | None = None) -> NDArray[np.bool_]:
        """See Constraint."""
        found: NDArray[np.bool_] = self._masks[(len(prefix) - self._prompt) % len(self._masks)]
        return found

    def forced(self, prefix: Sequence[int], most: int) -> list[int]:
        """See Constraint."""
        return []


def pcm(sound: Samples) -> bytes:
    """Write samples as 16-bit integers, as Orpheus does."""
    return (np.clip(sound, -1, 1) * 32767).astype("<i2").tobytes()


def wav_header(rate: int, samples: int | None = None) -> bytes:
    """Return the header of a WAV file of one channel of 16 bits; ``samples``: None = unknown, as in a stream."""
    size = 0xFFFFFFFF - 36 if samples is None else 2 * samples
    return struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", 36 + size, b"WAVE", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16,
                       b"data", size)  # fmt: skip
