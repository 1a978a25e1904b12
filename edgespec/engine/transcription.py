"""From features of sound to a transcript: windows of 30 s in order, as Whisper expects.

A window is decoded with the text before it as a prompt; the next one starts where its last whole segment ends.  A text
that is too unlikely or repeats itself is decoded again at a higher temperature; a window without speech is left
out.  The steps, their thresholds and their names are those of OpenAI's reference (github.com/openai/whisper,
transcribe.py).  Two rules are faster-whisper's: if every temperature fails, the likeliest text without repetition
is taken, and an uncertain language is detected again in later windows.  One rule is the paper's
(arXiv 2212.04356, section 4.5): the text before a window is a prompt only if the temperature is low.  One is
edgespec's: a silent window is left out, because the model invents words for it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.declared import copy_with
from edgespec.decoding.loop import Round
from edgespec.decoding.sampling import SamplingParams, log_softmax_at
from edgespec.decoding.speech_rules import SpeechRules
from edgespec.engine.transcript import Segment, Transcript
from edgespec.errors import InvalidRequest, unknown_name
from edgespec.runtimes.files.speech import SpeechPart, Task
from edgespec.runtimes.text.languages import choose_language, names_of

FRAME = 0.01  # seconds
STEP = 0.02  # seconds between two tokens of times
SOUNDLESS = np.float32((-7 + 4) / 4)  # feature of a band as loud as the rounding of 16-bit samples
RANGE = np.float32(8 / 4)  # how far features reach below the loudest one of a recording

Features = NDArray[np.float32]


class SpeechModel(Protocol):
    """A speech model and its text."""

    speech: SpeechPart  # its entry in the manifest
    frames: int  # frames of features per window
    vocab: int  # logits of a row
    context: int  # the maximum tokens of prompt and text together
    eos: frozenset[int]  # tokens that end a text; the lowest one follows all words

    def hear(self, window: Features) -> None:
        """Encode a window, float32 [frames, bins]; later calls refer to it."""

    def row(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """float32 [vocab]: the logits of the token after ``tokens``."""

    def write(self, tokens: Sequence[int], sampling: SamplingParams, most: int) -> Iterator[Round]:
        """Decode at most ``most`` tokens after ``tokens``; rounds have log-probabilities."""

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, without special ones."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, without special ones."""


@dataclass(frozen=True)
class TranscriptionSettings:
    """Settings of a transcription.

    Attributes:
        language: a code such as ``en``, or an English name; None = it is detected.
        task: transcribe, or translate into English.
        timestamps: whether the text has times; without them a segment is a window.
        initial_prompt: text before the first window: names and words to expect, a style.
        condition_on_previous_text: whether each window gets the text before it as a prompt.
        prompt_reset_on_temperature: above this temperature, previous text is not used as a prompt: lower temperatures
            may have copied it.  The window's own text is not a prompt for the next window either.
        temperatures: tried in order, until a text is likely enough and does not repeat itself.
        compression_ratio_threshold: a text that zlib compresses more than this repeats itself; None = no limit.
        logprob_threshold: mean log-probability of a window's tokens, below which it is decoded again; None = no limit.
        no_speech_threshold: probability of no speech, above which an unlikely window is left out; None = never:
            silent windows are decoded as well.
        language_detection_threshold: probability below which the language is detected again in further windows.
        language_detection_segments: the maximum number of windows with speech for detection; if none reaches the
            threshold, the most frequent language is taken.

    Raises:
        InvalidRequest: an unknown task, or no temperatures.
    """

    language: str | None = None
    task: Task = "transcribe"
    timestamps: bool = True
    initial_prompt: str | None = None
    condition_on_previous_text: bool = True
    prompt_reset_on_temperature: float = 0.5
    temperatures: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    compression_ratio_threshold: float | None = 2.4
    logprob_threshold: float | None = -1.0
    no_speech_threshold: float | None = 0.6
    language_detection_threshold: float = 0.5
    language_detection_segments: int = 4

    def __post_init__(self) -> None:
        if self.task not in ("transcribe", "translate"):
            raise unknown_name("task", self.task, ("transcribe", "translate"))
        if not self.temperatures:
            raise InvalidRequest("temperatures is empty: expected one or several", "as in (0.0, 0.2, 0.4)")
        if self.language_detection_segments < 1:
            raise InvalidRequest(
                f"language_detection_segments is {self.language_detection_segments}: expected 1 or more windows"
            )

    def changed(self, **changes: Any) -> TranscriptionSettings:
        """Copy with changes on top.

        Args:
            **changes: fields by name.

        Raises:
            InvalidRequest: an unknown name, or a value outside its range.
        """
        return copy_with(self, "setting", changes)


@dataclass
class Written:
    """A window's text."""

    tokens: list[int] = field(default_factory=list)  # without the one that ended it
    logprobs: list[float] = field(default_factory=list)  # of all, that one too
    temperature: float = 0.0
    no_speech: float | None = None
    text: str = ""

    @property
    def avg_logprob(self) -> float:
        """Mean log-probability of the tokens."""
        return sum(self.logprobs) / max(1, len(self.logprobs))

    @property
    def compression(self) -> float:
        """Bytes of the text over bytes that zlib makes of them."""
        text = self.text.strip().encode()
        return len(text) / len(zlib.compress(text))


class Transcription:
    """A running transcription: iterate over it for segments; ``transcript`` has those so far.

    Args:
        listener: the model.
        features: float32 [frames, bins] of the whole recording.
        frames: length of the recording in frames; further features are ignored.
        settings: the settings.
        sampling: other sampling settings; temperature and constraint are set here.
        on_text: called with the whole text of the current window as it grows; it may start again.
        how: returns how texts were decoded, for the transcript.

    Raises:
        InvalidRequest: an unknown language or task, or a prompt that the model does not take.
    """

    def __init__(
        self,
        listener: SpeechModel,
        features: Features,
        frames: int,
        settings: TranscriptionSettings,
        sampling: SamplingParams | None = None,
        on_text: Callable[[str], None] | None = None,
        how: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self._how = how
        self._listener, self._features, self._frames = listener, features, frames
        self._settings, self._sampling, self._on_text = settings, sampling or SamplingParams(), on_text
        self._speech = speech = listener.speech
        self._loudest = features.max(initial=-np.inf)
        self.segments: list[Segment] = []
        self.language = _language(speech, settings)
        self.language_probability: float | None = None
        if settings.task == "translate" and "translate" not in speech.tasks:
            raise InvalidRequest("this model does not translate", "use one that knows several languages")
        self._before: list[int] = []  # tokens of the initial prompt and of the transcript
        if settings.initial_prompt and settings.initial_prompt.strip():
            if speech.previous is None:
                raise InvalidRequest("this model takes no prompt: it has no token for one")
            self._before = listener.encode(" " + settings.initial_prompt.strip())
        self._initial = len(self._before)  # how many of them are of the initial prompt
        self._pieces = self._run()

    def __iter__(self) -> Iterator[Segment]:
        return self._pieces

    def close(self) -> None:
        """End it now."""
        self._pieces.close()

    @property
    def transcript(self) -> Transcript:
        """The transcript so far."""
        return Transcript(
            list(self.segments),
            self.language,
            self._settings.task,
            self._frames * FRAME,
            self.language_probability,
            self._how(),
        )

    def _run(self) -> Generator[Segment, None, None]:
        speech, settings, seek = self._speech, self._settings, 0
        while seek < self._frames:
            held = min(self._listener.frames, self._frames - seek)
            if self._soundless(seek, held):
                seek += held
                continue
            if self.language is None and speech.languages:
                self.language, self.language_probability = self._detect(seek)
            self._listener.hear(self._window(seek, held))
            written = self._write()
            if self._silent(written):
                seek += held
                continue
            segments, moved = self._cut(written, seek, held)
            said = [one for one in segments if one.start < one.end and one.text.strip()]
            fresh = written.temperature > settings.prompt_reset_on_temperature
            if fresh or not settings.condition_on_previous_text:
                self._before, self._initial = [], 0
            else:
                self._before = self._before + [token for segment in said for token in segment.tokens]
            for segment in said:
                self.segments.append(segment)
                yield segment
            seek += moved

    def _window(self, seek: int, held: int) -> Features:
        """Return the features [frames, bins] from ``seek`` on, padded with zeros after the recording."""
        return filled(self._features[seek : seek + held], self._listener.frames)

    def _soundless(self, seek: int, held: int) -> bool:
        """Whether all of a window is as quiet as features can tell, or as the rounding of 16-bit samples."""
        if self._settings.no_speech_threshold is None:
            return False
        return bool(self._features[seek : seek + held].max() <= max(SOUNDLESS, self._loudest - RANGE))

    def _detect(self, seek: int) -> tuple[str, float]:
        """Detect the language from ``seek`` on -> its code, and its probability among those of the model.

        Windows without speech are ignored, unless there are no others.
        """
        settings, size = self._settings, self._listener.frames
        voiced: list[tuple[str, float]] = []
        silent: tuple[str, float] | None = None
        for at in range(seek, self._frames, size):
            held = min(size, self._frames - at)
            if self._soundless(at, held):
                continue
            self._listener.hear(self._window(at, held))
            row = self._listener.row([self._speech.start])
            found = self._likeliest(row)
            if self._quiet(self._no_speech(row)):
                silent = silent or found
            elif found[1] >= settings.language_detection_threshold:
                return found
            else:
                voiced.append(found)
            if len(voiced) == settings.language_detection_segments:
                break
        if not voiced:
            assert silent is not None
            return silent
        codes = [code for code, _ in voiced]
        most = max(codes, key=codes.count)  # of several the first
        return most, max(sure for code, sure in voiced if code == most)

    def _likeliest(self, row: NDArray[np.float32]) -> tuple[str, float]:
        codes = list(self._speech.languages)
        scores = row[[self._speech.languages[code] for code in codes]].astype(np.float64)
        best = int(scores.argmax())
        return codes[best], float(1 / np.exp(scores - scores[best]).sum())

    def _no_speech(self, row: NDArray[np.float32]) -> float | None:
        """Return the probability of no speech, from the row after the start token."""
        if self._settings.no_speech_threshold is None or self._speech.no_speech is None:
            return None
        return float(np.exp(log_softmax_at(row, self._speech.no_speech)))

    def _prompt(self, temperature: float) -> tuple[list[int], int]:
        """Return the window's prompt, and the index of its start token; at a high temperature without previous text."""
        speech, settings = self._speech, self._settings
        begin = list(speech.begin(self.language, settings.task, settings.timestamps))
        fresh = temperature > settings.prompt_reset_on_temperature
        before = self._before[: self._initial] if fresh else self._before
        if not before or speech.previous is None:
            return begin, 0
        before = [speech.previous, *before[-(self._listener.context // 2 - 1) :]]
        return before + begin, len(before)

    def _write(self) -> Written:
        """Write the window's text, at higher temperatures where it did not go well."""
        settings, no_speech = self._settings, None
        prompt, start = self._prompt(settings.temperatures[0])
        if settings.no_speech_threshold is not None and self._speech.no_speech is not None:
            no_speech = self._no_speech(self._listener.row(prompt[: start + 1]))
        tried: list[Written] = []
        for temperature in settings.temperatures:
            written = self._attempt(self._prompt(temperature)[0], temperature)
            written.no_speech = no_speech
            if not self._astray(written):
                return written
            tried.append(written)
        best = max([one for one in tried if not self._repeats(one)] or tried, key=lambda one: one.avg_logprob)
        # a high temperature keeps it out of the next window's prompt
        return replace(best, temperature=tried[-1].temperature)

    def _attempt(self, prompt: list[int], temperature: float) -> Written:
        listener, speech = self._listener, self._speech
        rules = SpeechRules(
            vocab=listener.vocab,
            prompt=len(prompt),
            eos=min(listener.eos),
            first_time=speech.first_time,
            timestamps=self._settings.timestamps,
            no_timestamps=speech.no_timestamps,
            suppress_tokens=tuple(speech.suppress_tokens),
            begin_suppress_tokens=tuple(speech.begin_suppress_tokens),
            max_initial_timestamp_index=speech.max_initial_timestamp_index,
        )
        sampling = replace(self._sampling, temperature=temperature, constraint=rules)
        written = Written(temperature=temperature)
        for made in listener.write(prompt, sampling, self._most(len(prompt))):
            written.tokens += made.tokens
            written.logprobs += made.logprobs or []
            if self._on_text is not None:
                self._on_text(self._text(written.tokens))
        if written.tokens and written.tokens[-1] in listener.eos:
            written.tokens.pop()
        written.text = self._text(written.tokens)
        return written

    def _most(self, prompt: int) -> int:
        """Count the tokens that a window's text may have: half of what the model sees, as in the reference."""
        context = self._listener.context
        return min(context - prompt, max(1, context // 2))

    def _unlikely(self, written: Written) -> bool:
        least = self._settings.logprob_threshold
        return least is not None and written.avg_logprob < least

    def _repeats(self, written: Written) -> bool:
        most = self._settings.compression_ratio_threshold
        return most is not None and written.compression > most

    def _astray(self, written: Written) -> bool:
        """Whether a text is to be written again."""
        if self._unlikely(written) and self._quiet(written.no_speech):
            return False
        return self._unlikely(written) or self._repeats(written)

    def _quiet(self, no_speech: float | None) -> bool:
        most = self._settings.no_speech_threshold
        return most is not None and no_speech is not None and no_speech > most

    def _silent(self, written: Written) -> bool:
        """Whether the window has no speech."""
        least = self._settings.logprob_threshold
        return self._quiet(written.no_speech) and not (least is not None and written.avg_logprob > least)

    def _cut(self, written: Written, seek: int, held: int) -> tuple[list[Segment], int]:
        """Cut a window's text into segments -> these, and the number of frames that are done.

        ``held``: frames of the window, from ``seek`` on.  Two timestamps mark the end of a segment and the beginning of
        the next.  A single timestamp at the end means that nothing is spoken after it.  Otherwise the part after the
        last pair is transcribed again with the next window.
        """
        first, tokens = self._speech.first_time, written.tokens
        if not self._settings.timestamps:
            return [self._segment(written, tokens, seek, 0.0, held * FRAME)], held
        times = [token >= first for token in tokens]
        pairs = [at for at in range(1, len(tokens)) if times[at - 1] and times[at]]
        if not pairs:
            last = next((token - first for token in reversed(tokens) if token > first), None)
            length = held * FRAME if last is None else last * STEP
            return [self._segment(written, tokens, seek, 0.0, length)], held
        single = times[-2:] == [False, True]
        ends = [*pairs, len(tokens)] if single else pairs
        segments = []
        for begin, end in zip([0, *ends], ends, strict=False):
            part = tokens[begin:end]
            segments.append(self._segment(written, part, seek, (part[0] - first) * STEP, (part[-1] - first) * STEP))
        moved = round((tokens[ends[-1] - 1] - first) * STEP / FRAME)
        return segments, held if single or moved <= 0 else min(held, moved)

    def _segment(self, written: Written, tokens: list[int], seek: int, start: float, end: float) -> Segment:
        at = seek * FRAME
        return Segment(
            start=at + start,
            end=at + end,
            text=self._text(tokens),
            tokens=tokens,
            seek=seek,
            temperature=written.temperature,
            avg_logprob=written.avg_logprob,
            compression_ratio=written.compression,
            no_speech_prob=written.no_speech,
        )

    def _text(self, tokens: Sequence[int]) -> str:
        end = min(self._listener.eos)  # special tokens and timestamps come after it
        return self._listener.decode([token for token in tokens if token < end])


def filled(features: Features, frames: int) -> Features:
    """Pad features [n, bins] to ``frames`` with zeros, as the reference does; features of silence would be lower."""
    return np.pad(features, ((0, frames - len(features)), (0, 0)))


def _language(speech: SpeechPart, settings: TranscriptionSettings) -> str | None:
    """Return the language that was asked for; None = it is to be detected; an ``InvalidRequest``: it is not known."""
    asked = settings.language
    if not speech.languages:
        if asked is not None and "en" not in names_of(asked):
            raise InvalidRequest(f"this model knows English alone, not {asked!r}")
        return "en"
    return None if asked is None else choose_language(asked, speech.languages)
