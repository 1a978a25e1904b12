"""Speech generation: the answer to a text is codes, and their sound arrives frame by frame."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.settings import Settings
from edgespec.engine.loaded import LoadedBundle
from edgespec.engine.outputs import Output, Written
from edgespec.engine.request import Request
from edgespec.engine.result import Result
from edgespec.engine.stream import Stream
from edgespec.errors import BundleError, InvalidRequest
from edgespec.runtimes.audio.spoken import Samples, Windows, frame_noise, pcm, speech_prompt, wav_header
from edgespec.runtimes.files.codes import CodesPart, SoundCodes

if TYPE_CHECKING:
    from edgespec.runtimes.files.manifest import Manifest


def sound_part(manifest: Manifest) -> tuple[CodesPart, SoundCodes]:
    """Return how a bundle generates speech; an ``InvalidRequest``: it does not."""
    part = manifest.codes
    if part is None or part.sound is None:
        raise InvalidRequest("this bundle's model does not speak", "expected one like Orpheus, exported with --codec")
    return part, part.sound


def windows(engine: LoadedBundle, seed: int | None) -> Windows:
    """Make the converter of a text's tokens to sound; ``seed``: of the decoder's noise."""
    part, sound = sound_part(engine.bundle.manifest)
    decoder = engine.code_decoder

    def decode(codes: NDArray[np.int64], first: int) -> Samples:
        noise = {"noise": frame_noise(abs(seed or 0), first, len(codes), sound.noise)} if sound.noise else {}
        found = decoder.run(codes, **noise)
        if found.ndim != 1 or len(found) % len(codes) or not np.isfinite(found).all():
            raise BundleError(f"{part.graph}: gives no sound of whole frames", "export the bundle again")
        return found

    return Windows(part, decode)


class Speech:
    """Speech on its way: iterate for float32 [n], samples of ``rate`` a second; leaving it, or ``close``, ends it.

    See ``Engine.speak``.
    """

    def __init__(
        self,
        engine: LoadedBundle,
        text: str,
        voice: str | None,
        settings: Settings,
        cancel: threading.Event | None = None,
    ) -> None:
        _, sound = sound_part(engine.bundle.manifest)
        self.rate = sound.rate
        self._windows = windows(engine, settings.sampling.seed)
        self.stream = Stream(Request(engine, speech_prompt(sound, engine.codec, text, voice), settings, cancel))

    def __iter__(self) -> Iterator[Samples]:
        try:
            for chunk in self.stream:
                if chunk.round is not None:
                    yield from self._windows.push(chunk.round.tokens)
            yield from self._windows.finish()
        finally:
            self.close()

    @property
    def result(self) -> Result:
        """The codes as tokens, and the decoding details."""
        return self.stream.result

    def close(self) -> None:
        """End it, and free its slot."""
        self.stream.close()


class SpeechOutput(Output):
    """Speech."""

    file = "speech.wav"
    options = ("voice",)

    def fits(self, manifest: Manifest) -> bool:
        return manifest.codes is not None and manifest.codes.sound is not None

    def defaults(self, engine: LoadedBundle) -> Settings:
        """Return the sampling of Orpheus' package."""
        return engine.defaults.changed(temperature=0.6, top_p=0.8, repetition_penalty=1.3)

    def make(
        self,
        engine: LoadedBundle,
        prompt: str,
        settings: Settings | None,
        cancel: threading.Event | None = None,
        **options: Any,
    ) -> Speech:
        return Speech(engine, prompt, options.get("voice"), settings or self.defaults(engine), cancel)

    def write(
        self, engine: LoadedBundle, prompt: str, settings: Settings, live: BinaryIO | None, **options: Any
    ) -> Written:
        """Write the answer to a WAV file; Ctrl-C ends it early, and the file keeps the speech so far."""
        speech, pieces = self.make(engine, prompt.rstrip("\r\n"), settings, **options), []
        if live is not None:
            live.write(wav_header(speech.rate))
        try:
            for piece in speech:
                pieces.append(pcm(piece))
                if live is not None:
                    live.write(pieces[-1])
                    live.flush()
        except KeyboardInterrupt:
            speech.close()
        samples = sum(map(len, pieces)) // 2
        seconds = samples / speech.rate
        data = wav_header(speech.rate, samples) + b"".join(pieces)
        return Written(data, f"{seconds:.1f} s of speech", speech.result, {"seconds": seconds})


OUTPUT = SpeechOutput()
