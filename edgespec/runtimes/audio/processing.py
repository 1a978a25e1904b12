"""Turn a recording into rows of a decoder that accepts audio: features, and inputs of tower and projector.

Features are Whisper's.  Voxtral's tower is Whisper's encoder over windows of 30 s (``features.encoder_rows``);
Qwen3-ASR has convolutions over chunks of a second in front of a tower that sees windows (``ChunkedFrontend``).  Gemma
4 has other features, and convolutions over the whole recording (``ConformerFrontend``).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from edgespec.runtimes.audio.features import HOP, encoder_rows, log_magnitudes, log_mel
from edgespec.runtimes.audio.reading import Samples
from edgespec.runtimes.files.sound import ChunkedFrontend, ConformerFrontend, Frontend, SoundPart, WhisperFrontend

Rows = NDArray[np.float32]
Encode = Callable[[int, Rows], Rows]  # (which of ``ModelPart.front``: tower, projector, convolutions; rows) -> its rows
TOWER, PROJECTOR, FIRST = 0, 1, 2


def frames_of(samples: int, front: Frontend) -> int:
    """Count the frames of ``samples`` samples that the model reads."""
    if isinstance(front, ConformerFrontend):  # a frame and the sample after it are part of the recording
        return (max(samples, front.min_samples) - 1) // HOP
    return -(-samples // HOP) if isinstance(front, WhisperFrontend) else max(samples, front.min_samples) // HOP


def sound_features(samples: Samples, front: Frontend) -> Rows:  # [n] -> [frames, bands]
    """Compute the features of a recording; add silence at the end if the model was trained with it."""
    if isinstance(front, WhisperFrontend):
        window = front.features.frames * HOP
        return log_mel([samples], front.bands, least=-(-len(samples) // window) * window)
    if isinstance(front, ConformerFrontend):
        padded = np.pad(samples, (0, max(0, front.min_samples - len(samples))))
        found = log_magnitudes(padded, front.bands)[: frames_of(len(samples), front)]
        mean, deviation = (np.array(one, np.float32) for one in (front.mean or 0, front.deviation or 1))
        made: Rows = (found - mean) / deviation
        return made
    return log_mel([samples], front.bands, least=front.min_samples)


def sound_rows(features: Rows, sound: SoundPart, encode: Encode) -> Rows:  # [frames, bands] -> [R, width]
    """Make rows of features, a window of the tower at a time."""
    front = sound.front
    if isinstance(front, WhisperFrontend):
        size, merge = front.features.frames, front.merge
        given = [encoder_rows(features[at : at + size], front.features) for at in range(0, len(features), size)]
    elif isinstance(front, ConformerFrontend):
        merge, given = 1, [_subsampled(features, front, encode)]
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


def _subsampled(
    features: Rows, front: ConformerFrontend, encode: Encode
) -> Rows:  # [frames, bands] -> [rows, bands * channels]
    """Run the convolutions over all frames, a piece of the tower's rows at a time."""
    first, count, found = features.T[:, :, None], front.rows(len(features)), []
    for at in range(0, count, front.piece):
        x = _strip(first, front.convolutions, at, min(at + front.piece, count), encode)
        found.append(x.transpose(1, 0, 2).reshape(x.shape[1], -1))
    return np.concatenate(found)


def _strip(first: Rows, number: int, begin: int, end: int, encode: Encode) -> Rows:  # [bands, end - begin, channels]
    """Run the first ``number`` convolutions for some of the frames that they give."""
    total = -(-first.shape[1] >> number)
    low, high = max(begin, 0), min(end, total)
    if not number:
        x = first[:, low:high]
    else:
        below = _strip(first, number - 1, 2 * low - 1, 2 * high, encode)
        bands = -(-below.shape[0] // 2)
        x = encode(FIRST + number - 1, squares(below, (0, 0))).reshape(bands, high - low, -1)
    return np.pad(x, ((0, 0), (low - begin, end - high), (0, 0)))  # there is nothing around the recording


def squares(x: Rows, around: tuple[int, int] = (1, 1)) -> Rows:  # [a, b, channels] -> [a / 2 * b / 2, 9 * channels]
    """Return the im2col matrix of a 3x3, stride-2, zero-padded convolution; both sizes are rounded up.

    ``around``: zeros before and after the second axis.
    """
    seen = sliding_window_view(np.pad(x, ((1, 1), around, (0, 0))), (3, 3), axis=(0, 1))[::2, ::2]
    return np.ascontiguousarray(seen.transpose(0, 1, 3, 4, 2)).reshape(-1, 9 * x.shape[2])
