"""Digits as espeak-ng says them, windows of them mixed on a device, and Whisper's features of these."""

from __future__ import annotations

import io
import random
import subprocess
import wave
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import WhisperFeatureExtractor

WORDS = {
    "en": "zero one two three four five six seven eight nine",
    "de": "null eins zwei drei vier fünf sechs sieben acht neun",
    "es": "cero uno dos tres cuatro cinco seis siete ocho nueve",
    "fr": "zéro un deux trois quatre cinq six sept huit neuf",
}
ACCENTS = {
    "en": ("en-us", "en-gb", "en-gb-scotland", "en-gb-x-gbclan", "en-gb-x-gbcwmd", "en-029", "en-us-nyc"),
    "de": ("de",),
    "es": ("es", "es-419"),
    "fr": ("fr-fr", "fr-be", "fr-ch"),
}
VOICES = ("", "m1", "m2", "m3", "m4", "m5", "m6", "m8", "f1", "f2", "f4", "Andy", "Annie", "Lee", "Mike", "Diogo",
          "antonio", "aunty", "belinda", "benjamin", "boris", "david", "ed", "edward", "gustave", "iven", "iven3",
          "john", "linda", "marcelo", "max", "miguel", "pablo", "paul", "quincy", "robert", "rob", "sandro", "steph",
          "travis", "victor", "zac")  # fmt: skip
HELD_OUT_VOICES = ("m7", "f3", "f5", "Jacky", "michel", "pedro", "steph3")
HELD_OUT_ACCENTS = {"en": ("en-us", "en-gb", "en-gb-x-rp"), "de": ("de",), "es": ("es", "es-419"), "fr": ("fr-fr",)}
RATE_HZ, WINDOW_S, MELS = 16000, 6, 80
SAMPLES = RATE_HZ * WINDOW_S  # of a window


@dataclass(frozen=True)
class Spoken:
    """Spoken digits.

    Attributes:
        language: "en", "de", "es" or "fr".
        digits: 0 to 9.
        sound: int16 [n], 16 kHz, without silence around it.
        how: espeak-ng's voice.
    """

    language: str
    digits: tuple[int, ...]
    sound: NDArray[np.int16]
    how: str

    def text(self, language: str) -> str:
        """Spell the digits, each with a space before it."""
        words = WORDS[language].split()
        return "".join(f" {words[digit]}" for digit in self.digits)


def speak(accents: dict[str, tuple[str, ...]], voices: tuple[str, ...], seed: str) -> Spoken:
    """Have espeak-ng say one to eight digits in a random voice, speed and pitch."""
    draw = random.Random(seed)
    language = draw.choice(list(WORDS))
    digits = tuple(draw.choices(range(10), k=draw.randint(1, 8)))
    voice = draw.choice(voices)
    how = draw.choice(accents[language]) + (f"+{voice}" if voice else "")
    words = WORDS[language].split()
    text = "".join(draw.choice((" ", " ", " ", ", ")) + words[digit] for digit in digits)
    manner = (
        "-s",
        str(draw.randint(120, 230)),
        "-p",
        str(draw.randint(20, 80)),
        "-g",
        str(draw.choice((0, 0, 0, 2, 5))),
    )
    made = subprocess.run(["espeak-ng", "-v", how, *manner, "--stdout", text], capture_output=True, check=True).stdout
    with wave.open(io.BytesIO(made)) as opened:
        rate = opened.getframerate()
    sound = np.frombuffer(made[44:], "<i2").astype(np.float64)
    loud = np.flatnonzero(np.abs(sound) > 0.02 * np.abs(sound).max())
    sound = sound[max(0, loud[0] - rate // 100) : loud[-1] + rate // 100]
    size = round(len(sound) * RATE_HZ / rate)  # resampled exactly: the spectrum is cut
    spectrum = np.fft.rfft(sound)[: size // 2 + 1]
    sound = np.fft.irfft(spectrum, size)
    return Spoken(language, digits, (sound / np.abs(sound).max() * 30000).astype(np.int16), how)


def spoken(count: int, seed: int, held_out: bool) -> list[Spoken]:
    """Make ``count`` utterances that fit a window, in as many processes as there are processors."""
    accents, voices = (HELD_OUT_ACCENTS, HELD_OUT_VOICES) if held_out else (ACCENTS, VOICES)
    with ProcessPoolExecutor() as pool:
        seeds = [f"{seed}.{index}" for index in range(count)]
        found = pool.map(partial(speak, accents, voices), seeds, chunksize=32)
        return [one for one in found if len(one.sound) < SAMPLES - RATE_HZ // 2]


class Features:
    """Whisper's log-mel features, equal to transformers' ``WhisperFeatureExtractor``, on the device."""

    def __init__(self, device: str) -> None:
        self.extractor = WhisperFeatureExtractor(feature_size=MELS, chunk_length=WINDOW_S)
        self.device = device

    @cached_property
    def _filters(self) -> torch.Tensor:  # [201, 80]
        return torch.tensor(self.extractor.mel_filters, dtype=torch.float32, device=self.device)

    def of(self, sounds: torch.Tensor) -> torch.Tensor:  # [n, 96000] -> [n, 80, 600]
        window = torch.hann_window(400, device=self.device)
        power = torch.stft(sounds, 400, 160, window=window, return_complex=True)[..., :-1].abs() ** 2
        logs = (self._filters.T @ power).clamp(min=1e-10).log10()
        logs = torch.maximum(logs, logs.amax((1, 2), keepdim=True) - 8.0)
        return (logs + 4.0) / 4.0


@dataclass(frozen=True)
class Scene:
    """The utterances and noise of a window.

    Attributes:
        said: begin in samples and number of each utterance.
        noise: its standard deviation, a share of full scale.
        low: whether the noise is low (a random walk), not white.
        loud: factor of all samples.
    """

    said: list[tuple[int, int]]
    noise: float = 0.0
    low: bool = False
    loud: float = 1.0


class Sounds:
    """All utterances on the device, and windows mixed there."""

    def __init__(self, said: list[Spoken], device: str) -> None:
        self.flat = torch.from_numpy(np.concatenate([one.sound for one in said])).to(device)
        self.sizes = [len(one.sound) for one in said]
        self.starts = np.concatenate([[0], np.cumsum(self.sizes)]).tolist()

    def mixed(self, scenes: list[Scene]) -> torch.Tensor:  # [n, 96000]
        """Return the samples of each window, between -1 and 1."""
        device, at = self.flat.device, torch.arange(SAMPLES, device=self.flat.device)
        column = partial(torch.tensor, dtype=torch.float32, device=device)
        made = torch.randn(len(scenes), SAMPLES, device=device) * column([one.noise for one in scenes])[:, None]
        walk = 0.1 * made.cumsum(1)
        low = torch.tensor([one.low for one in scenes], device=device)
        made = torch.where(low[:, None], walk - walk.mean(1, keepdim=True), made)
        for place in range(max(len(one.said) for one in scenes)):
            rows = [row for row, one in enumerate(scenes) if len(one.said) > place]
            parts = [scenes[row].said[place] for row in rows]
            begins, starts, sizes = torch.tensor(
                [(begin, self.starts[one], self.sizes[one]) for begin, one in parts], device=device
            ).T[:, :, None]
            inside = (at >= begins) & (at < begins + sizes)
            samples = self.flat[torch.where(inside, at - begins + starts, 0)]
            made[torch.tensor(rows, device=device)] += torch.where(inside, samples.float() / 32768, 0.0)
        return made * column([one.loud for one in scenes])[:, None]
