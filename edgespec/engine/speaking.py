"""Speech: a text is answered by codes, and their sound comes frame by frame."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.settings import Settings
from edgespec.engine.loaded import LoadedBundle
from edgespec.engine.request import Stream
from edgespec.engine.result import Result
from edgespec.errors import BundleError, InvalidRequest
from edgespec.runtimes.audio.spoken import Samples, Windows, frame_noise, speech_prompt
from edgespec.runtimes.files.codes import CodesPart, SoundCodes

if TYPE_CHECKING:
    from edgespec.runtimes.files.manifest import Manifest


def sound_part(manifest: Manifest) -> tuple[CodesPart, SoundCodes]:
    """Say how a bundle speaks; an ``InvalidRequest``: it does not."""
    part = manifest.codes
    if part is None or part.sound is None:
        raise InvalidRequest("this bundle's model does not speak", "expected one like Orpheus, exported with --codes")
    return part, part.sound


def windows(engine: LoadedBundle, seed: int | None) -> Windows:
    """Make what turns a text's tokens into sound; ``seed``: of the noise that the decoder adds."""
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
        self.stream = Stream(engine.usable, speech_prompt(sound, engine.codec, text, voice), settings, cancel)

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
        """The codes as tokens, and how they were decoded."""
        return self.stream.result

    def close(self) -> None:
        """End it, and free its place."""
        self.stream.close()
