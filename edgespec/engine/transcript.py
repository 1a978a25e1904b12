"""Result of a transcription: segments with their times, as text, subtitles (SubRip, WebVTT) or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from edgespec.errors import unknown_name

TextFormat = Literal["txt", "srt", "vtt", "json"]
FORMATS: tuple[TextFormat, ...] = get_args(TextFormat)


@dataclass(frozen=True)
class Segment:
    """A segment, usually one sentence.

    Attributes:
        start: seconds from the beginning of the recording.
        end: seconds from the beginning of the recording.
        text: the generated words, usually with a leading space.
        tokens: including timestamp tokens.
        seek: first frame of 10 ms of its window.
        temperature: the temperature of its window.
        avg_logprob: mean log-probability of the window's tokens.
        compression_ratio: bytes of the window's text over its size in zlib: high if it repeats itself.
        no_speech_prob: probability of a window without speech; None = not measured.
    """

    start: float
    end: float
    text: str
    tokens: list[int] = field(repr=False)
    seek: int = 0
    temperature: float = 0.0
    avg_logprob: float = 0.0
    compression_ratio: float = 1.0
    no_speech_prob: float | None = None

    def as_dict(self, number: int = 0) -> dict[str, Any]:
        """For JSON, by the names of OpenAI's ``verbose_json``."""
        return {"id": number, **vars(self), "no_speech_prob": self.no_speech_prob or 0.0}


@dataclass(frozen=True, repr=False)
class Transcript:
    """The transcript of a recording; ``str`` of it is its text.

    Attributes:
        segments: in their order.
        language: of the speech, as a code such as ``en``; None = the model does not report it.
        language_probability: of that language, if it was detected; None = it was given.
        task: transcribe, or translate into English.
        duration: seconds of the recording.
        how: how the text was decoded: method, rounds, guesses and their gain.
    """

    segments: Sequence[Segment]
    language: str | None
    task: str
    duration: float
    language_probability: float | None = None
    how: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(segment.text for segment in self.segments).strip()

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<Transcript {self.text[:60]!r}, {len(self.segments)} segments, {self.duration:.1f} s>"

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the keys are stable, and those of OpenAI's ``verbose_json`` are among them."""
        return {
            "task": self.task,
            "language": self.language,
            "language_probability": self.language_probability,
            "duration": self.duration,
            "text": self.text,
            "segments": [segment.as_dict(number) for number, segment in enumerate(self.segments)],
            "how": self.how,
        }

    def write(self, form: TextFormat) -> str:
        """Write it as ``txt``, a line a segment; ``srt``; ``vtt``; or ``json``.

        Raises:
            InvalidRequest: another form.
        """
        if form not in FORMATS:
            raise unknown_name("format", form, FORMATS)
        if form == "json":
            import json

            return json.dumps(self.as_dict(), ensure_ascii=False, indent=2) + "\n"
        head = "WEBVTT\n\n" if form == "vtt" else ""
        return head + "".join(written(segment, form, number) for number, segment in enumerate(self.segments, 1))


def written(segment: Segment, form: TextFormat, number: int) -> str:
    """Write one segment, the ``number``-th, from 1 on, as a part of ``txt``, ``srt`` or ``vtt``."""
    text = segment.text.strip()
    if form == "txt":
        return f"{text}\n"
    text = "\n".join(line for line in text.replace("-->", "->").splitlines() if line)  # an empty line would end it
    if form == "srt":
        return f"{number}\n{clock(segment.start, ',')} --> {clock(segment.end, ',')}\n{text}\n\n"
    return f"{clock(segment.start, '.')} --> {clock(segment.end, '.')}\n{text}\n\n"


def clock(seconds: float, point: str = ".") -> str:
    """Write a time as hours, minutes, seconds and thousandths: ``01:02:03.456``."""
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}{point}{thousandths:03}"
