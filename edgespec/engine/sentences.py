"""Long texts for a model that reads short ones: cut at ends of sentences."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

# after a full stop and closing marks, at white space, or in scripts without white space at the next character
_ENDS = re.compile(r"(?<=[.!?\u2026])[\"'\u2019\u201d)\]]*\s+|(?<=[\u3002\uff01\uff1f])[\u300d\u300f\uff09]*\s*|\n+")


def sentences(text: str) -> list[str]:
    """Split a text after every sentence, without losing a character."""
    found, begin = [], 0
    for end in _ENDS.finditer(text):
        found.append(text[begin : end.end()])
        begin = end.end()
    return [part for part in [*found, text[begin:]] if part]


def pieces(text: str, fits: Callable[[str], bool]) -> list[str]:
    """Cut a text into as few pieces as fit, each of whole sentences where one fits; joined they are the text."""
    found: list[str] = []
    for part in _fitting(text, fits):
        if found and fits((found[-1] + part).strip()):
            found[-1] += part
        else:
            found.append(part)
    return found or [text]


def _fitting(text: str, fits: Callable[[str], bool]) -> Iterator[str]:
    """Sentences, and parts of those that do not fit: at white space, else anywhere."""
    for sentence in sentences(text):
        if fits(sentence.strip()):
            yield sentence
            continue
        words = re.findall(r"\S+\s*|\s+", sentence)
        halves = [sentence[: len(sentence) // 2], sentence[len(sentence) // 2 :]]
        if len(words) > 1:
            middle = len("".join(words[: len(words) // 2]))
            halves = [sentence[:middle], sentence[middle:]]
        if len(sentence) < 2:
            yield sentence
            continue
        for half in halves:
            yield from _fitting(half, fits)
