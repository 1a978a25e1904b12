"""Read sound as a model's input: one channel at 16 kHz, from a file, from bytes or from an array.

A file is read piece by piece, so memory does not grow with its length.  WAV files of 16-bit PCM at 16 kHz need only
the standard library.  libsndfile reads other files and soxr converts other rates; both come with the extra ``audio``.
FFmpeg's libraries read containers of videos and phones (m4a, mp4, webm), through PyAV of the extra ``media``.  FFmpeg
knows formats that name other files, so the caller states the expected format.
"""

from __future__ import annotations

import io
import os
import wave
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import InvalidRequest, install_hint

RATE = 16_000  # samples per second
MOST_HOURS = 4.0
PIECE = 1 << 16  # frames that are read at once
RATES = 2_000, 400_000  # minimum and maximum samples per second of a recording
MOST_CHANNELS = 64
EXTRA = install_hint("audio")
MEDIA = f"{install_hint('media')}, or convert it first, as in `ffmpeg -i talk.m4a talk.wav`"
_HEAD = 12  # bytes that tell a container

Samples = NDArray[np.float32]
Sound = str | os.PathLike[str] | bytes | NDArray[Any]


def pieces(sound: Sound, rate: int = RATE, most_hours: float = MOST_HOURS) -> Iterator[Samples]:
    """Read a sound piece by piece.

    Args:
        sound: a file, its bytes, or samples [n] or [n, channels]: floats from -1 to 1, or 16-bit integers.
        rate: of an array, in samples per second; a file has its own.
        most_hours: maximum length; a longer recording is refused once this much was read.

    Yields:
        float32 [m], m >= 1: one channel (the mean of all), ``RATE`` samples per second.

    Raises:
        InvalidRequest: no such file, one that holds no sound or cannot be read, nothing in it, NaN or infinite
            samples, a rate or a number of channels that no recording has, or more than ``most_hours``; a kind of file
            or a rate that needs the extra ``audio``, where that is not installed.
    """
    if isinstance(sound, np.ndarray):
        name = "the sound"
        found = _converted(_cut(_floats(sound)), _checked(name, rate, sound.shape[-1] if sound.ndim == 2 else 1))
    else:
        name = "the sound" if isinstance(sound, bytes) else str(sound)
        found = _read(sound, name)
    count, most = 0, int(most_hours * 3600 * RATE)
    for piece in found:
        if not np.isfinite(piece).all():
            raise InvalidRequest(f"{name} has samples that are NaN or infinite: expected numbers from -1 to 1")
        count += len(piece)
        if count > most:
            raise InvalidRequest(f"{name} is longer than {most_hours:g} hours, the most that is read", "cut it first")
        if len(piece):
            yield piece
    if not count:
        raise InvalidRequest(f"{name} has no samples: expected a recording")


def _floats(samples: NDArray[Any]) -> Samples:
    """Return float32 [n, channels] of samples in any accepted type."""
    if samples.ndim not in (1, 2) or samples.dtype.kind not in "fi" or samples.dtype in (np.int8, np.int64):
        raise InvalidRequest(
            f"the sound is {samples.dtype} {list(samples.shape)}: expected samples [n] or [n, channels], floats from "
            "-1 to 1 or 16- or 32-bit integers"
        )
    scale = 1.0 if samples.dtype.kind == "f" else 1 / (1 << (8 * samples.dtype.itemsize - 1))
    return ((samples[:, None] if samples.ndim == 1 else samples) * np.float32(scale)).astype(np.float32)


def _cut(samples: Samples) -> Iterator[Samples]:
    return (samples[at : at + PIECE] for at in range(0, len(samples), PIECE))


def _checked(name: str, rate: int, channels: int) -> int:
    """Return ``rate``, if a recording may have it and ``channels``."""
    if not RATES[0] <= rate <= RATES[1]:
        raise InvalidRequest(f"{name} has {rate} samples a second: expected {RATES[0]} to {RATES[1]}")
    if not 1 <= channels <= MOST_CHANNELS:
        raise InvalidRequest(f"{name} has {channels} channels: expected 1 to {MOST_CHANNELS}")
    return rate


def _read(sound: str | os.PathLike[str] | bytes, name: str) -> Iterator[Samples]:
    """Read a file or its bytes -> float32 [m], one channel at ``RATE``."""
    if not isinstance(sound, bytes) and not Path(sound).is_file():
        raise InvalidRequest(
            f"expected a sound file, and {name} is none", "name a wav, flac, ogg, mp3, m4a or webm file"
        )
    with io.BytesIO(sound) if isinstance(sound, bytes) else Path(sound).open("rb") as file, _pcm(file) as plain:
        if plain is not None:
            rate = _checked(name, plain.getframerate(), plain.getnchannels())
            yield from _converted(_wave_frames(plain), rate)
        else:
            file.seek(0)
            container = container_of(file.read(_HEAD))
            file.seek(0)
            yield from _by_libsndfile(file, name) if container is None else _by_pyav(file, name, container)


@contextmanager
def _pcm(file: Any) -> Iterator[wave.Wave_read | None]:
    """Open a WAV file of 16-bit PCM; None = it is another kind."""
    try:
        found = wave.open(file, "rb")  # noqa: SIM115
    except (wave.Error, EOFError, RuntimeError):  # RuntimeError: chunks that do not fit each other
        yield None
        return
    with closing(found):
        yield found if found.getsampwidth() == 2 else None


def _wave_frames(plain: wave.Wave_read) -> Iterator[Samples]:
    """Yield float32 [m, channels] until the file ends; the length in its header may be wrong."""
    channels = plain.getnchannels()
    while data := plain.readframes(PIECE):
        whole = len(data) // (2 * channels) * channels
        yield np.frombuffer(data, "<i2", whole).reshape(-1, channels).astype(np.float32) / np.float32(1 << 15)


def container_of(head: bytes) -> str | None:
    """Name FFmpeg's format of a container by its first 12 bytes; None = not a container, or libsndfile can read it."""
    if head[4:8] == b"ftyp":
        return "mov"  # m4a, mp4, mov, 3gp
    if head.startswith(b"\x1a\x45\xdf\xa3"):
        return "matroska"  # webm, mkv
    if head[:2] in (b"\xff\xf1", b"\xff\xf9"):
        return "aac"
    return None


def _by_pyav(file: Any, name: str, container: str) -> Iterator[Samples]:
    """Read the first stream of sound in a container."""
    try:
        import av
    except ImportError as error:
        kinds = {"mov": "an m4a or mp4", "matroska": "a webm or mkv", "aac": "an aac"}
        raise InvalidRequest(
            f"{name} is {kinds[container]} file; reading it needs PyAV, which is not installed", MEDIA
        ) from error
    try:
        with av.open(file, format=container, metadata_errors="ignore") as opened:
            stream = next(iter(opened.streams.audio), None)
            codec = None if stream is None else stream.codec_context  # None: of a kind that FFmpeg does not decode
            if codec is None:
                raise InvalidRequest(f"{name} has no sound that can be decoded: expected a recording")
            rate = _checked(name, codec.sample_rate or 0, codec.channels)
            planes = av.AudioResampler(format="fltp", layout=codec.layout, rate=rate)

            def frames() -> Iterator[Samples]:
                for frame in opened.decode(stream):
                    yield from (one.to_ndarray().T for one in planes.resample(frame))
                yield from (one.to_ndarray().T for one in planes.resample(None))

            yield from _converted(frames(), rate)
    except (av.error.FFmpegError, EOFError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise InvalidRequest(
            f"expected a file that FFmpeg's libraries read, and {name} is none: {why}",
            "convert it first, as in `ffmpeg -i talk.m4a talk.wav`",
        ) from error


def _by_libsndfile(file: Any, name: str) -> Iterator[Samples]:
    """Read the formats of libsndfile: wav, flac, ogg, mp3 and others."""
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: without its library
        raise InvalidRequest(
            f"reading {name} needs soundfile, which is not installed (16-bit PCM in a WAV file needs nothing)", EXTRA
        ) from error
    try:
        with soundfile.SoundFile(file) as opened:
            rate = _checked(name, opened.samplerate, opened.channels)

            def frames() -> Iterator[Samples]:
                while len(piece := opened.read(PIECE, "float32", always_2d=True)):
                    yield piece

            yield from _converted(frames(), rate)
    except soundfile.SoundFileError as error:
        why = getattr(error, "error_string", str(error)).strip().rstrip(".")  # without the name of a file object
        raise InvalidRequest(
            f"expected a sound file that libsndfile reads (wav, flac, ogg, mp3), and {name} is none: {why}",
            "convert it first, as in `ffmpeg -i talk.m4a talk.wav`",
        ) from error


def _converted(frames: Iterable[Samples], rate: int) -> Iterator[Samples]:
    """Convert pieces [m, channels] at ``rate`` to one channel at ``RATE``."""
    mono = (piece[:, 0] if piece.shape[1] == 1 else piece.mean(1, dtype=np.float32) for piece in frames)
    return mono if rate == RATE else _resampled(mono, rate)


def _resampled(mono: Iterator[Samples], rate: int) -> Iterator[Samples]:
    try:
        import soxr
    except ImportError as error:
        raise InvalidRequest(
            f"the sound has {rate} samples a second; making {RATE} of them needs soxr, which is not installed", EXTRA
        ) from error
    stream = soxr.ResampleStream(rate, RATE, 1, dtype="float32", quality="HQ")
    for piece in mono:
        yield np.asarray(stream.resample_chunk(np.ascontiguousarray(piece)), np.float32)
    yield np.asarray(stream.resample_chunk(np.zeros(0, np.float32), last=True), np.float32)
