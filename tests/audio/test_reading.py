"""Sound files of every kind become one channel of 16,000 samples per second, or an error that states the reason."""

from __future__ import annotations

import contextlib
import io
import sys
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.errors import InvalidRequest
from edgespec.runtimes.audio.reading import RATE, Sound, container_of, pieces

soundfile = pytest.importorskip("soundfile", reason="needs edgespec[audio]")


def tone(seconds: float = 1.5, rate: int = RATE) -> NDArray[np.float32]:
    """float32 [n]: 440 Hz."""
    return (0.5 * np.sin(2 * np.pi * 440 * np.arange(int(seconds * rate)) / rate)).astype(np.float32)


def read(sound: Sound, **options: Any) -> NDArray[np.float32]:
    return np.concatenate(list(pieces(sound, **options)))


def pcm(samples: NDArray[np.float32], channels: int = 1) -> bytes:
    """Write a WAV file of 16 bits, by the standard library."""
    file = io.BytesIO()
    with wave.open(file, "wb") as made:
        made.setnchannels(channels)
        made.setsampwidth(2)
        made.setframerate(RATE)
        made.writeframes((samples * 32767).astype("<i2").tobytes())
    return file.getvalue()


@pytest.mark.parametrize(
    "kind, rate, channels, allowed",
    [("wav", RATE, 1, 1e-4), ("wav", 44_100, 2, 2e-3), ("flac", 8_000, 1, 2e-3), ("ogg", 48_000, 2, 0.05),
     ("mp3", 22_050, 1, 0.05)],
)  # fmt: skip
def test_files_of_any_kind_rate_and_number_of_channels(
    tmp_path: Path, kind: str, rate: int, channels: int, allowed: float
) -> None:
    file = tmp_path / f"tone.{kind}"
    soundfile.write(file, np.repeat(tone(rate=rate)[:, None], channels, 1), rate)
    for sound in (file, str(file), file.read_bytes()):
        found = read(sound)
        assert abs(len(found) - 1.5 * RATE) < 2500 if kind == "mp3" else len(found) == 1.5 * RATE
        assert found.dtype == np.float32
        middle = found[RATE // 2 : RATE]  # mp3 begins later
        assert abs(np.abs(np.fft.rfft(middle)).argmax() * 2 - 440) <= 2
        assert abs(np.abs(middle).max() - 0.5) < allowed


def test_arrays_and_pieces_that_do_not_end_where_files_do() -> None:
    whole = np.random.default_rng(0).uniform(-1, 1, 200_001).astype(np.float32)
    assert (read(whole) == whole).all()
    assert (read(np.stack([whole, -whole], 1)) == 0).all()  # the mean of two channels
    assert np.abs(read((whole * 32767).astype(np.int16)) - whole).max() < 1e-4
    assert len(read(tone(rate=48_000), rate=48_000)) == 1.5 * RATE


def test_wav_files_need_the_standard_library_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("soundfile", "soxr"):
        monkeypatch.setitem(sys.modules, name, None)
    sound = tone()
    assert np.abs(read(pcm(sound)) - sound).max() < 1e-4
    with pytest.raises(InvalidRequest, match=r"soxr.*\n.*\.\[audio\]"):
        read(sound, rate=8_000)
    (tmp_path / "x.flac").write_bytes(b"fLaC")
    with pytest.raises(InvalidRequest, match=r"soundfile.*\n.*\.\[audio\]"):
        read(tmp_path / "x.flac")


@pytest.mark.parametrize(
    "sound, message",
    [
        ("nothing.wav", "is none"),
        (b"", "is none"),
        (b"ID3 nothing of this is sound" * 50, "ffmpeg"),
        (pcm(tone())[:20], "is none"),
        (pcm(tone()[:0]), "no samples"),
        (np.zeros(0, np.float32), "no samples"),
        (np.full(9, np.nan, np.float32), "NaN"),
        (np.zeros((2, 3, 4), np.float32), r"\[2, 3, 4\]"),
        (np.zeros(9, np.complex64), "complex64"),
        (np.zeros((9, 65), np.float32), "65 channels"),
    ],
)
def test_what_is_no_sound_is_refused_by_name(sound: Sound, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read(sound)


def test_a_file_that_was_cut_is_read_up_to_there_and_a_long_one_refused() -> None:
    whole = pcm(tone())
    assert 0 < len(read(whole[:20_001])) < 10_000
    with pytest.raises(InvalidRequest, match=r"0\.0001 hours"):
        read(whole, most_hours=1e-4)
    with pytest.raises(InvalidRequest, match="1 samples a second"):
        read(tone(), rate=1)


# -- containers of phones and videos -----------------------------------------------------------------------------------

KEPT = Path(__file__).parents[1] / "data" / "sounds"  # 440 Hz for .6 s, written by Debian's ffmpeg


@pytest.mark.parametrize("name", ["tone.m4a", "tone.webm", "tone.aac"])
@pytest.mark.parametrize("given", ["file", "bytes"])
def test_files_of_phones_and_videos_are_read(name: str, given: str) -> None:
    pytest.importorskip("av", reason="needs edgespec[media]")
    file = KEPT / name
    samples = np.concatenate(list(pieces(file if given == "file" else file.read_bytes())))
    assert 0.55 * RATE < len(samples) < 0.75 * RATE
    spectrum = np.abs(np.fft.rfft(samples[2000:6000]))
    assert abs(int(spectrum.argmax()) * RATE / 4000 - 440) < 5


def test_containers_that_hold_no_sound_or_end_early_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("av", reason="needs edgespec[media]")
    with pytest.raises(InvalidRequest, match="no sound"):
        list(pieces(KEPT / "silent.mp4"))
    whole = (KEPT / "tone.m4a").read_bytes()
    for size in (12, 40, 700):
        with pytest.raises(InvalidRequest, match="the sound"):
            list(pieces(whole[:size]))
    rng = np.random.default_rng(0)
    for name in ("tone.m4a", "tone.webm"):
        good = (KEPT / name).read_bytes()
        for _ in range(60):
            broken = bytearray(good)
            for at in rng.integers(12, len(broken), 4):
                broken[at] = int(rng.integers(256))
            with contextlib.suppress(InvalidRequest):
                list(pieces(bytes(broken), most_hours=0.1))


def test_without_pyav_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(InvalidRequest, match="m4a or mp4") as raised:
        list(pieces(KEPT / "tone.m4a"))
    assert ".[media]" in (raised.value.hint or "")


def test_a_playlist_is_no_container() -> None:
    assert container_of(b"#EXTM3U\nfile") is None
    assert container_of(b"ffconcat ver") is None
    with pytest.raises(InvalidRequest):
        list(pieces(b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n"))
