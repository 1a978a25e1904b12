"""The manifest's part of a speech model: tokens that start a transcript, and timestamp tokens."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from edgespec.runtimes.files.bounds import MOST_VOCAB, Token, Tokens
from edgespec.runtimes.files.facts import Part

Task = Literal["transcribe", "translate"]
Language = Annotated[str, StringConstraints(pattern=r"^[a-z]{2,3}$")]


class SpeechPart(Part):
    """A model of Whisper's kind (arXiv 2212.04356).

    A text begins with ``start``, its language and its task.  Timestamps and words follow, or only words after
    ``no_timestamps``.  The timestamp tokens follow that one: one per 20 ms, from 0.00 s.

    ``languages``: the token of each, empty for English-only models; ``previous``: comes before the earlier transcript;
    ``no_speech``: its probability right after ``start`` is the chance of silence; ``suppress_tokens``: never written;
    ``begin_suppress_tokens``: not at the beginning; ``max_initial_timestamp_index``: the latest first timestamp, in
    steps of 20 ms.
    """

    start: Token
    languages: dict[Language, Token] = Field(default_factory=dict)
    tasks: dict[Task, Token] = Field(default_factory=dict)
    no_timestamps: Token
    previous: Token | None = None
    no_speech: Token | None = None
    suppress_tokens: Tokens = Field(default_factory=list)
    begin_suppress_tokens: Tokens = Field(default_factory=list)
    max_initial_timestamp_index: int | None = Field(default=None, ge=0, le=MOST_VOCAB)

    @property
    def first_time(self) -> int:
        """The token of 0.00 s."""
        return self.no_timestamps + 1

    def begin(
        self, language: str | None = None, task: Task = "transcribe", timestamps: bool = False
    ) -> tuple[int, ...]:
        """Tokens that a text begins with; ``language``: one of ``languages``, None = English or the first."""
        found = [self.start]
        if self.languages:
            found.append(self.languages[language or ("en" if "en" in self.languages else next(iter(self.languages)))])
        if task in self.tasks:
            found.append(self.tasks[task])
        return (*found, *(() if timestamps else (self.no_timestamps,)))
