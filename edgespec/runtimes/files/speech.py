"""What a manifest says of a model that hears: the tokens that a transcript begins with, and those of times."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from edgespec.runtimes.files.bounds import MOST_VOCAB, Token, Tokens
from edgespec.runtimes.files.facts import Part

Task = Literal["transcribe", "translate"]
Language = Annotated[str, StringConstraints(pattern=r"^[a-z]{2,3}$")]


class SpeechPart(Part):
    """A model of Whisper's kind (arXiv 2212.04356).

    A text begins with ``start``, its language and its task, and goes on with times and words, or, behind
    ``no_timestamps``, with words alone.  The tokens of times follow that one: 20 ms apart, from 0.00 s on.

    ``languages``: the token of each, none where a model knows English alone; ``previous``: stands before what was said
    earlier; ``no_speech``: whose probability right behind ``start`` says that nobody speaks; ``suppressed``: never
    written; ``suppressed_first``: not at the beginning; ``latest_first``: the latest that a text may begin, in steps of
    20 ms.
    """

    start: Token
    languages: dict[Language, Token] = Field(default_factory=dict)
    tasks: dict[Task, Token] = Field(default_factory=dict)
    no_timestamps: Token
    previous: Token | None = None
    no_speech: Token | None = None
    suppressed: Tokens = Field(default_factory=list)
    suppressed_first: Tokens = Field(default_factory=list)
    latest_first: int | None = Field(default=None, ge=0, le=MOST_VOCAB)

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
