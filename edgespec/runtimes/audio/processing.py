"""Turn a recording into rows of a decoder that accepts audio: features, and inputs of tower and projector.

Features are Whisper's.  Voxtral's tower is Whisper's encoder over windows of 30 s (``features.encoder_rows``);
Qwen3-ASR has convolutions over chunks of a second in front of a tower that sees windows (``ChunkedFrontend``).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from edgespec.runtimes.audio.features import HOP, encoder_rows, log_mel
from edgespec.runtimes.audio.reading import Samples
from edgespec.runtimes.files.sound import ChunkedFrontend, SoundPart, WhisperFrontend

Rows = NDArray[np.float32]
Encode = Callable[[int, Rows], Rows]  # (which of ``ModelPart.front``: tower, projector, convolutions; rows) -> its rows
TOWER, PROJECTOR, FIRST = 0, 1, 2


def frames_of(samples: int, front: WhisperFrontend | ChunkedFrontend) -> int:
    """Count the frames of ``samples`` samples that the model reads."""
    return -(-samples // HOP) if isinstance(front, WhisperFrontend) else max(samples, front.min_samples) // HOP


def sound_features(samples: Samples, front: WhisperFrontend | ChunkedFrontend) -> Rows:  # [n] -> [frames, bands]
    """Compute the features of a recording; add silence at the end if the model was trained with it."""
    if isinstance(front, WhisperFrontend):
        window = front.features.frames * HOP
        return log_mel([samples], front.bands, least=-(-len(samples) // window) * window)
    return log_mel([samples], front.bands, least=front.min_samples)


def sound_rows(features: Rows, sound: SoundPart, encode: Encode) -> Rows:  # [frames, bands] -> [R, width]
    """Make rows of features, a window of the tower at a time."""
    front = sound.front
    if isinstance(front, WhisperFrontend):
        size, merge = front.features.frames, front.merge
        given = [encoder_rows(features[at : at + size], front.features) for at in range(0, len(features), size)]
    else:
        size, merge = front.window * front.chunk, 1
        given = [_window(features[at : at + size], front, encode) for at in range(0, len(features), size)]
    towers = (encode(TOWER, rows) for rows in given)
    return np.concatenate([encode(PROJECTOR, rows.reshape(len(rows) // merge, -1)) for rows in towers])


def _window(
    features: Rows, front: ChunkedFrontend, encode: Encode
) -> Rows:  # [frames, bands] -> [rows, bands * channels]
    """Run the convolutions over the chunks of a window."""
    found = []
    for at in range(0, len(features), front.chunk):
        chunk = features[at : at + front.chunk]
        x = np.pad(chunk, ((0, front.chunk - len(chunk)), (0, 0))).T[:, :, None]  # [bands, frames, channels]
        for number in range(front.convolutions):
            bands, frames = (-(-size // 2) for size in x.shape[:2])
            x = encode(FIRST + number, squares(x)).reshape(bands, frames, -1)
        found.append(x.transpose(1, 0, 2)[: front.halved(len(chunk))].reshape(-1, x.shape[0] * x.shape[2]))
    return np.concatenate(found)


def squares(x: Rows) -> Rows:  # [a, b, channels] -> [a / 2 * b / 2, 9 * channels], both sizes rounded up
    """Return the im2col matrix of a 3x3, stride-2, zero-padded convolution."""
    seen = sliding_window_view(np.pad(x, ((1, 1), (1, 1), (0, 0))), (3, 3), axis=(0, 1))[::2, ::2]
    return np.ascontiguousarray(seen.transpose(0, 1, 3, 4, 2)).reshape(-1, 9 * x.shape[2])
