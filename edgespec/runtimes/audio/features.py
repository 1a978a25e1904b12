"""Log-mel features of Whisper (arXiv 2212.04356, section 2.2): how loud each band of frequencies is, every 10 ms.

A frame is 25 ms of sound under a Hann window; its power spectrum goes through triangular filters on Slaney's mel scale
(Auditory Toolbox, Technical Report 1998-010), each with the area 1.  The logarithm is bounded to 8 decades below the
loudest band of the recording.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from edgespec.errors import InvalidRequest
from edgespec.runtimes.audio.reading import RATE, Samples
from edgespec.runtimes.files.manifest import FeaturePart

WINDOW, HOP = 400, 160  # samples: 25 ms every 10 ms
SECONDS = 30  # length of a model's input
WINDOW_SAMPLES = SECONDS * RATE
_SIDE = WINDOW // 2  # what the first and the last frame see beyond the ends is mirrored
_AT_ONCE = 256  # frames: their spectra stay in a processor's cache
_ROWS = 8
_QUIETEST = np.float32(1e-10)
_LINEAR, _STEP = 1000.0, 200 / 3  # end of the mel scale's linear part in Hz, and Hz per mel there
_LOG_STEP = np.log(6.4) / 27  # step of the frequency's logarithm per mel, above

Floats = NDArray[np.float64]


def log_mel(pieces: Iterable[Samples], bins: int, least: int = WINDOW_SAMPLES) -> NDArray[np.float32]:
    """Compute the features of a recording.

    Args:
        pieces: float32 [m] each, one channel at 16,000 samples per second.
        bins: bands; 80, or 128 for models from large-v3 on.
        least: samples; a shorter recording is filled up with silence.

    Returns:
        float32 [samples // 160, bins].

    Raises:
        InvalidRequest: a recording and a ``least`` too short to be mirrored at its ends, 201 samples.
    """
    filters, window = mel_filters(bins), np.hanning(WINDOW + 1)[:-1]
    found = [
        np.log10(np.maximum(_bands(_power(frames * window), filters), _QUIETEST))
        for frames in _frames(_filled(pieces, least))
    ]
    mels = _joined(found)[:-1]  # Whisper leaves the last frame out
    np.maximum(mels, mels.max() - np.float32(8), out=mels)
    mels += np.float32(4)
    mels /= np.float32(4)
    return mels


def log_magnitudes(samples: Samples, bands: int) -> NDArray[np.float32]:
    """Compute the features of Gemma 4: logarithms of magnitudes in triangular bands of the mel scale.

    Frames are 20 ms long, every 10 ms, under a Hann window; half a frame of silence comes first.  Bands have the
    height 1 and are even on the scale 2595 log10(1 + f / 700).

    Args:
        samples: float32 [n], one channel at 16,000 samples per second.
        bands: how many.

    Returns:
        float32 [n // 160, bands].
    """
    size, points = 320, 512
    padded = np.pad(samples, (size // 2, size))
    frames = sliding_window_view(padded, size)[: (len(samples) // HOP) * HOP : HOP]
    window, filters = np.hanning(size + 1)[:-1].astype(np.float32), _even_filters(bands, points)
    found = np.empty((len(frames), bands), np.float32)
    for at in range(0, len(frames), _AT_ONCE):
        seen = frames[at : at + _AT_ONCE] * window
        found[at : at + _AT_ONCE] = np.log(np.abs(np.fft.rfft(seen, points)) @ filters + 1e-3)
    return found


@lru_cache(maxsize=2)
def _even_filters(bands: int, points: int) -> Floats:
    """Return float64 [points / 2 + 1, bands]: the weight of each frequency in each band; read-only."""
    edges = 700 * (10 ** (np.linspace(0, 2595 * np.log10(1 + RATE / 2 / 700), bands + 2) / 2595) - 1)  # Hz
    heard = np.linspace(0, RATE / 2, points // 2 + 1)[:, None]
    rising = (heard - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - heard) / (edges[2:] - edges[1:-1])
    filters: Floats = np.maximum(0.0, np.minimum(rising, falling))
    filters.flags.writeable = False
    return filters


def _joined(pieces: list[Samples]) -> Samples:  # [n, bins] each -> [all, bins]
    """Join pieces, each of which is freed as soon as it is copied: a long recording is not held twice."""
    whole, end = np.empty((sum(map(len, pieces)), pieces[0].shape[1]), np.float32), 0
    pieces.reverse()
    while pieces:
        piece = pieces.pop()
        whole[end : end + len(piece)] = piece
        end += len(piece)
    return whole


def encoder_rows(mels: NDArray[np.float32], part: FeaturePart) -> NDArray[np.float32]:  # [frames, bands]
    """Arrange features as input of an encoder after two convolutions; see ``FeaturePart``.

    Returns float32 [frames // 2, 3 * columns].
    """
    frames, bands = mels.shape
    parts = np.zeros((frames + 1, part.columns), np.float32)  # of the frames -1, 0, ...; that of -1 stays zeros
    padded = np.pad(mels, ((1, 1), (0, 0)))
    parts[1:, : 3 * bands] = sliding_window_view(padded, (3, bands))[:, 0].reshape(frames, -1)
    parts[1:, 3 * bands] = 1
    return sliding_window_view(parts, (3, part.columns))[::2, 0].reshape(frames // 2, -1)


def _power(frames: Floats) -> Samples:  # [n, 400] -> [n, 201]
    """Square the spectrum, computed in float64: float32 would lose quiet parts in the presence of loud ones."""
    squares = np.square(np.fft.rfft(frames).view(np.float64))  # real and imaginary parts in turn
    return (squares[:, ::2] + squares[:, 1::2]).astype(np.float32)


def _bands(power: Samples, filters: Samples) -> Samples:  # [n, 201], [201, bins] -> [n, bins]
    """Multiply a few rows at a time, so that the linear algebra library starts no threads for so small a product."""
    rows = np.pad(power, ((0, -len(power) % _ROWS), (0, 0))).reshape(-1, _ROWS, power.shape[1])
    return (rows @ filters).reshape(-1, filters.shape[1])[: len(power)]


def _filled(pieces: Iterable[Samples], least: int) -> Iterator[Samples]:
    count = 0
    for piece in pieces:
        count += len(piece)
        yield piece
    if count < least:
        yield np.zeros(least - count, np.float32)


def _frames(pieces: Iterable[Samples]) -> Iterator[Samples]:
    """Cut a recording into frames, float32 [n, 400], some at a time; both ends are mirrored."""
    held, begun = np.zeros(0, np.float32), False
    for piece in pieces:
        held = np.concatenate([held, piece])
        if not begun:
            if len(held) <= _SIDE:
                continue
            held, begun = np.concatenate([held[_SIDE:0:-1], held]), True
        yield from _cut(held)
        held = held[max(0, (len(held) - WINDOW) // HOP + 1) * HOP :]  # a frame begins every HOP samples
    if not begun:
        raise InvalidRequest(f"the sound has {len(held)} samples: expected more than {_SIDE}")
    yield from _cut(np.concatenate([held, held[-2 : -_SIDE - 2 : -1]]))


def _cut(samples: Samples) -> Iterator[Samples]:
    """Cut all whole frames out of ``samples``."""
    if len(samples) < WINDOW:
        return
    frames = sliding_window_view(samples, WINDOW)[::HOP]
    for at in range(0, len(frames), _AT_ONCE):
        yield frames[at : at + _AT_ONCE]


def _hertz(mels: Floats) -> Floats:
    linear = _LINEAR / _STEP
    return np.where(mels < linear, mels * _STEP, _LINEAR * np.exp(_LOG_STEP * (np.maximum(mels, linear) - linear)))


def _mels(hertz: float) -> float:
    return hertz / _STEP if hertz < _LINEAR else _LINEAR / _STEP + np.log(hertz / _LINEAR) / _LOG_STEP


@lru_cache(maxsize=2)
def mel_filters(bins: int) -> Samples:
    """Return float32 [201, bins]: the weight of each frequency of a frame in each band; read-only."""
    edges = _hertz(np.linspace(0.0, _mels(RATE / 2), bins + 2))  # [bins + 2], Hz
    heard = np.linspace(0.0, RATE / 2, WINDOW // 2 + 1)[:, None]  # [201, 1]
    rising = (heard - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - heard) / (edges[2:] - edges[1:-1])
    areas = np.maximum(0.0, np.minimum(rising, falling)) * (2 / (edges[2:] - edges[:-2]))
    filters = areas.astype(np.float32)
    filters.flags.writeable = False
    return filters
