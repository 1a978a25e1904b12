"""A loaded speech model: recordings to features, windows to the encoder, texts through the loop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.loop import Round
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.settings import Settings
from edgespec.drafters.registry import AR
from edgespec.engine.audio_windows import Cancelled, WindowedTranscription, how_decoded
from edgespec.engine.encoding import Source
from edgespec.engine.loaded import LoadedBundle
from edgespec.engine.request import Request, check_cancel
from edgespec.engine.result import Result
from edgespec.engine.stream import Stream
from edgespec.engine.transcription import Features, Transcription, TranscriptionSettings, filled
from edgespec.errors import InvalidRequest
from edgespec.runtimes.audio.features import HOP, encoder_rows, log_mel
from edgespec.runtimes.audio.reading import RATE, Samples, Sound, pieces
from edgespec.runtimes.files.manifest import Manifest
from edgespec.runtimes.files.speech import SpeechPart


def unsupported_audio_reason(manifest: Manifest) -> str | None:
    """Return why a bundle cannot transcribe; None = it can."""
    return None if manifest.hears else "this bundle's model reads text, not sound: expected a speech model"


def transcription(
    engine: LoadedBundle,
    sound: Sound,
    asked: TranscriptionSettings,
    settings: Settings,
    rate: int = RATE,
    on_text: Callable[[str], None] | None = None,
    cancel: threading.Event | None = None,
) -> Transcription | WindowedTranscription:
    """Begin a transcription; see ``Engine.transcription``."""
    check_cancel(cancel)
    if engine.bundle.manifest.target.hearing is not None:
        return WindowedTranscription(engine.usable, pieces(sound, rate), asked, settings, on_text, cancel)
    listener = EngineTranscriber(engine.usable, settings, cancel or threading.Event())
    features = listener.features(pieces(sound, rate))
    return Transcription(listener, features, len(features), asked, settings.sampling, on_text, listener.how)


def windows(engine: LoadedBundle, sound: Sound) -> list[Features | list[int]]:
    """Cut a recording into prompts: what the encoder reads at once, float32 [rows, columns].

    For a decoder with an audio encoder: token ids of the prompt of each window.

    Raises:
        InvalidRequest: not a speech model, or no sound.
    """
    if engine.bundle.manifest.target.hearing is not None:
        return list(WindowedTranscription(engine.usable, pieces(sound), TranscriptionSettings(), Settings()).prompts())
    listener = EngineTranscriber(engine.usable, Settings(), threading.Event())
    features, size = listener.features(pieces(sound)), listener.frames
    return [listener.rows(filled(features[at : at + size], size)) for at in range(0, len(features), size)]


class _Row:
    """A constraint that forbids nothing, and keeps the row that it is asked about."""

    scored = False

    def __init__(self) -> None:
        self.row: NDArray[np.float32] | None = None

    def allowed(self, prefix: Sequence[int], row: NDArray[np.float32] | None = None) -> NDArray[np.bool_] | None:
        self.row = None if row is None else row.copy()
        return None

    def forced(self, prefix: Sequence[int], most: int) -> list[int]:
        return []


class EngineTranscriber:
    """A ``SpeechModel``, which describes the methods, over a usable engine; raises InvalidRequest for other models."""

    def __init__(self, engine: LoadedBundle, settings: Settings, cancel: threading.Event) -> None:
        manifest = engine.bundle.manifest
        source = manifest.target.source
        if manifest.speech is None or source is None or source.features is None:
            raise InvalidRequest(
                unsupported_audio_reason(manifest) or "this bundle's model has no features of sound",
                "such as openai/whisper-small",
            )
        self.speech: SpeechPart = manifest.speech
        self.frames, self.bins = source.features.frames, source.features.bands
        self.vocab, self.context, self.eos = manifest.target.facts.vocab, engine.context, engine.eos
        self._part = source.features
        self._engine, self._settings, self._cancel = engine, settings, cancel
        self._window: Source | None = None
        self._results: list[Result] = []

    def hear(self, window: Features) -> None:
        self._window = Source.of(self.rows(window), (self.speech.start,))

    def features(self, sound: Iterable[Samples]) -> Features:
        """Compute the features of a recording, float32 [frames, bins], one frame or more."""
        count = 0

        def counted() -> Iterator[Samples]:
            nonlocal count
            for piece in sound:
                count += len(piece)
                yield piece

        found = log_mel(counted(), self.bins, least=self.frames * HOP)
        return found[: max(1, count // HOP)]

    def rows(self, window: Features) -> NDArray[np.float32]:
        """Arrange a window, [frames, bins], as the encoder reads it, [rows, columns]."""
        return encoder_rows(window, self._part)

    def row(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        kept = _Row()
        one = Settings(method=AR, max_new_tokens=1, ignore_eos=True, sampling=SamplingParams(constraint=kept))
        for _ in self._stream(tokens, one):
            pass
        assert kept.row is not None
        return kept.row

    def write(self, tokens: Sequence[int], sampling: SamplingParams, most: int) -> Iterator[Round]:
        settings = replace(self._settings, sampling=sampling, max_new_tokens=most, logprobs=True)
        stream = self._stream(tokens, settings)
        for chunk in stream:
            if chunk.round is not None:
                yield chunk.round
        self._results.append(stream.result)

    def _stream(self, tokens: Sequence[int], settings: Settings) -> Stream:
        if self._cancel.is_set():
            raise Cancelled("cancelled before the recording was transcribed")
        assert self._window is not None
        return Stream(Request(self._engine, self._window.beginning(tokens), settings, self._cancel))

    def encode(self, text: str) -> list[int]:
        return self._engine.codec.encode(text, special=False)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._engine.codec.decode(tokens)

    def how(self) -> dict[str, object]:
        """Say how the texts were decoded."""
        return how_decoded(self._results, self._settings.method, self._engine.operators.kind)
