"""Transcripts by a decoder with an audio encoder (Qwen3-ASR, Voxtral): one prompt per window of a recording.

A window is at most 30 s long and ends at the quietest point of its last 5 s, so that words stay whole.  It is a segment
of the transcript.  The prompt is the model's own request for a transcript (``TranscriptPrompt``), with the language if
one is given.  Otherwise the model detects the language in each window.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace

import numpy as np

from edgespec.decoding.settings import Settings
from edgespec.drafters.registry import AR
from edgespec.engine.input import MultimodalTokens
from edgespec.engine.loaded import LoadedBundle
from edgespec.engine.request import Request
from edgespec.engine.result import Result, of_all
from edgespec.engine.stream import Stream
from edgespec.engine.transcript import Segment, Transcript
from edgespec.engine.transcription import TranscriptionSettings, Written
from edgespec.errors import EdgespecError, InvalidRequest
from edgespec.runtimes.audio.audio import Audio
from edgespec.runtimes.audio.features import HOP, WINDOW_SAMPLES
from edgespec.runtimes.audio.reading import RATE, Samples
from edgespec.runtimes.files.sound import SoundPart, TranscriptPrompt
from edgespec.runtimes.text.languages import choose_language, names_of

MOST = 512  # tokens of a window's text, as in the authors' code: a model that repeats itself ends there
SEARCHED, STEP = 5 * RATE, RATE // 10  # samples at a window's end that are searched for a quiet place, of that length
_WRITTEN = re.compile(r"[\u3000-\u9fff\uf900-\ufaff\uff00-\uffef]")  # scripts without spaces between words


class Cancelled(EdgespecError):
    """A transcription was cancelled."""


def cut(pieces: Iterable[Samples], most: int = WINDOW_SAMPLES) -> Iterator[Samples]:
    """Cut a recording into windows of ``most`` samples or less, where it is quiet."""
    held = np.zeros(0, np.float32)
    for piece in pieces:
        held = np.concatenate([held, piece])
        while len(held) > most:
            searched = min(SEARCHED, most // 2) // STEP * STEP
            steps = np.abs(held[most - searched : most]).reshape(-1, min(STEP, searched)).mean(1)
            at = most - searched + (2 * int(steps.argmin()) + 1) * STEP // 2
            yield held[:at]
            held = held[at:]
    if len(held):
        yield held


class WindowedTranscription:
    """A running transcription: iterate for segments as they come; ``transcript`` has those that came.

    It needs a usable engine of a model with ``ModelPart.hearing``, and the output of ``audio.reading.pieces``.  It uses
    the requested language, prompt and first temperature; only Whisper uses the other settings.

    Raises:
        InvalidRequest: a language, a task or a prompt that this model does not know.
    """

    def __init__(
        self,
        engine: LoadedBundle,
        pieces: Iterable[Samples],
        asked: TranscriptionSettings,
        settings: Settings,
        on_text: Callable[[str], None] | None = None,
        cancel: threading.Event | None = None,
    ) -> None:
        part = engine.bundle.manifest.target.hearing
        assert part is not None
        self._part: SoundPart = part
        self._engine, self._windows, self._asked = engine, cut(pieces), asked
        self._on_text, self._cancel = on_text, cancel or threading.Event()
        sampling = replace(settings.sampling, temperature=asked.temperatures[0])
        self._settings = replace(settings, sampling=sampling, logprobs=True)
        self.language = _language(part.transcript_prompt, asked.language)
        self._question = _question(part.transcript_prompt, asked, self.language)
        self.segments: list[Segment] = []
        self._samples = 0
        self._results: list[Result] = []
        self._running = self._run()

    def __iter__(self) -> Iterator[Segment]:
        return self._running

    def close(self) -> None:
        """End it now."""
        self._running.close()

    def prompts(self) -> Iterator[MultimodalTokens]:
        """Ask for the transcript of each window -> token ids, with those of its rows."""
        for window in self._windows:
            self._samples += len(window)
            yield self._engine.inputs.reader.ask(self._engine.codec, self._question, Audio(window))

    @property
    def transcript(self) -> Transcript:
        """The transcript so far."""
        how = how_decoded(self._results, self._settings.method, self._engine.operators.kind)
        return Transcript(list(self.segments), self.language, self._asked.task, self._samples / RATE, None, how)

    def _run(self) -> Generator[Segment, None, None]:
        begin = 0
        for prompt in self.prompts():
            written = self._write(prompt)
            heard, text = parted(self._part.transcript_prompt, written.text)
            self.language = self.language or heard
            if text:
                spaced = self.segments and not _WRITTEN.match(text) and not _WRITTEN.match(self.segments[-1].text[-1])
                found = Segment(
                    start=begin / RATE,
                    end=self._samples / RATE,
                    text=f" {text}" if spaced else text,
                    tokens=written.tokens,
                    seek=begin // HOP,
                    temperature=written.temperature,
                    avg_logprob=written.avg_logprob,
                    compression_ratio=written.compression,
                )
                self.segments.append(found)
                yield found
            begin = self._samples

    def _write(self, prompt: MultimodalTokens) -> Written:
        """Let the model answer."""
        if self._cancel.is_set():
            raise Cancelled("cancelled before the recording was transcribed")
        engine = self._engine
        room = engine.context - len(prompt)
        if room < 1:
            raise InvalidRequest(
                f"a window of {len(prompt)} tokens and rows leaves no room in a context of {engine.context}",
                "load the bundle with a longer context",
            )
        written = Written(temperature=self._settings.sampling.temperature)
        settings = replace(self._settings, max_new_tokens=min(room, MOST))
        stream = Stream(Request(engine, prompt, settings, self._cancel))
        stream.keep_nothing()  # a long recording would fill the disk, and is rarely transcribed twice
        for chunk in stream:
            if chunk.round is not None:
                written.tokens += chunk.round.tokens
                written.logprobs += chunk.round.logprobs or []
            if self._on_text is not None:
                self._on_text(parted(self._part.transcript_prompt, engine.codec.decode(written.tokens))[1])
        self._results.append(stream.result)
        if written.tokens and written.tokens[-1] in engine.eos:
            written.tokens.pop()
        written.text = engine.codec.decode(written.tokens)
        return written


def parted(ask: TranscriptPrompt, text: str) -> tuple[str | None, str]:
    """Split a generated text into the code of the detected language, if it names one, and the transcript."""
    before, marker, behind = text.partition(ask.marker) if ask.marker else ("", "", text)
    if ask.marker and not marker:  # the prompt gave the language, or the marker has not come yet
        lead = ask.language.partition("{")[0]
        return None, "" if text.startswith(lead) or lead.startswith(text) else text.strip()
    named = ask.language.partition(ask.marker)[0] if ask.marker else ""
    codes = {named.replace("{name}", name): code for code, name in ask.languages.items()}
    return codes.get(before.strip()), behind.strip()


def how_decoded(found: list[Result], requested: str | None, operators: str) -> dict[str, object]:
    """Say how texts were decoded; the keys are stable."""
    stats = [result.stats for result in found]
    used = [result.method_used for result in found if result.stats.drafted] or [one.method_used for one in found]
    return {
        "method_requested": requested,
        "method_used": max(used, key=used.count) if used else AR,
        "lossless": of_all(result.lossless for result in found),
        "exact": of_all(result.exact for result in found),
        "operators": operators,
        "texts": len(found),
        "tokens": sum(one.tokens for one in stats),
        "rounds": sum(one.rounds for one in stats),
        "drafted": sum(one.drafted for one in stats),
        "accepted": sum(one.accepted for one in stats),
        "decode_ms": round(sum(one.decode_ms for one in stats), 1),
    }


def _language(ask: TranscriptPrompt, asked: str | None) -> str | None:
    """Return the code of the requested language; None = the model detects it."""
    if asked is None:
        return None
    by_name = {name.lower(): code for code, name in ask.languages.items()}
    wanted = by_name.get(asked.strip().lower(), asked)
    if ask.languages:
        return choose_language(wanted, ask.languages)
    return next((name for name in sorted(names_of(wanted)) if len(name) == 2), wanted.strip().lower())


def _question(ask: TranscriptPrompt, asked: TranscriptionSettings, language: str | None) -> tuple[str, str]:
    """Return the text before and after a window."""
    if asked.task != "transcribe":
        raise InvalidRequest("this model only transcribes: it does not translate", "leave --task translate out")
    if asked.initial_prompt and "{prompt}" not in ask.text:
        raise InvalidRequest("this model takes no prompt before a transcript", "leave it out")
    named = ask.language.replace("{code}", language or "").replace("{name}", ask.languages.get(language or "", ""))
    before, behind = ask.text.split("{sound}")
    before = before.replace("{prompt}", (asked.initial_prompt or "").strip())
    return before, behind.replace("{language}", named if language else "")
