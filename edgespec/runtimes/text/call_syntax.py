"""Read tool calls in JSON while they arrive.

A reader is a generator over a ``Source``.  It yields if it needs more text, and raises ``NoCall`` if the text is not of
its kind.  It reports its findings to the source, with arguments always as JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from edgespec.runtimes.text.stops import StopStrings

MOST_DEPTH = 64  # of lists and objects
MOST_NAME = 256  # characters of a tool's name
Kind = Literal["text", "reasoning", "call", "arguments", "called"]
Reading = Generator[None, None, None]
Write = Callable[[str], None]
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
NAME = re.compile(r"[\w.:/\-]+")
WORD = re.compile(r"[\w.+\-]+")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
CONSTANTS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_NAMES, _ARGUMENTS = ("name", "tool_name"), ("arguments", "parameters", "args")


class NoCall(Exception):
    """The text is not of this kind."""


@dataclass(frozen=True)
class Event:
    """A piece of an answer."""

    kind: Kind  # text, reasoning, the beginning of a call, some of its arguments, or its end
    text: str = ""  # of it; of the beginning of a call the tool's name


class Source:
    """Text that is read while it grows.

    Args:
        tools: types of parameters by name, of each tool.

    Attributes:
        text, at: the text so far, and the next position to read.
        ended: the text is complete.
        found: events that were not returned yet.
        calling: a call has begun and not ended.
        told: end of the text that has become events.
        begun: number of calls that have begun.
        cut: the text ended because the model was stopped, not because it was done.
        hungry: the reader needs more text than there is.
        naming: where the name of a tool begins; -1 = nowhere yet.
        named: that name once it is complete.
    """

    def __init__(self, tools: Mapping[str, Mapping[str, str]] | None = None) -> None:
        self.tools = tools or {}
        self.text, self.at, self.ended = "", 0, False
        self.found: list[Event] = []
        self.calling, self.begun = False, 0
        self.told = 0
        self.cut = self.hungry = False
        self.naming, self.named = -1, ""

    def tell(self, kind: Kind, text: str = "") -> None:
        """Add an event for the text that was read; adjacent events of one kind are merged."""
        self.told = self.at
        if kind in ("text", "reasoning", "arguments"):
            if not text:
                return
            if self.found and self.found[-1].kind == kind:
                text = self.found.pop().text + text
        self.found.append(Event(kind, text))

    def begin(self, name: str) -> None:
        """Begin a call: it remains one, even if it breaks off."""
        if not name:
            raise NoCall
        self.calling = True
        self.begun += 1
        self.naming, self.named = -1, ""
        self.tell("call", name)

    def write(self, text: str) -> None:
        """Add to the arguments of the call."""
        self.tell("arguments", text)

    def end(self) -> None:
        """End the call, if one has begun."""
        if self.calling:
            self.calling = False
            self.tell("called")

    def peek(self) -> Generator[None, None, str]:
        """Look at the next character; none at the end."""
        while self.at >= len(self.text) and not self.ended:
            yield
        self.hungry |= self.at >= len(self.text)
        return self.text[self.at : self.at + 1]

    def take(self) -> Generator[None, None, str]:
        """Read a character.

        Raises:
            NoCall: there is none.
        """
        found = yield from self.peek()
        if not found:
            raise NoCall
        self.at += 1
        return found

    def spaces(self, write: Write = lambda _: None, among: str = " \t\r\n") -> Reading:
        """Read spaces and line ends, if there are any."""
        while (found := (yield from self.peek())) and found in among:
            self.at += 1
            write(found)

    def skip(self, word: str) -> Reading:
        """Read exactly ``word``."""
        for char in word:
            if (yield from self.peek()) != char:
                raise NoCall
            self.at += 1

    def may(self, word: str) -> Generator[None, None, bool]:
        """Read ``word`` if it comes next; otherwise nothing."""
        before = self.at
        for char in word:
            if (yield from self.peek()) != char:
                self.at = before
                return False
            self.at += 1
        return True

    def which(self, words: Iterable[str]) -> Generator[None, None, str]:
        """Read the one of ``words`` that comes next."""
        for word in words:
            if (yield from self.may(word)):
                return word
        raise NoCall

    def run(self, pattern: re.Pattern[str], most: int = 1 << 30) -> Generator[None, None, str]:
        """Read all characters that match a pattern of single characters."""
        begin = self.at
        while (yield from self.peek()):
            match = pattern.match(self.text, self.at)
            if match is None or match.end() - begin > most:
                break
            self.at = match.end()
        return self.text[begin : self.at]

    def until(self, words: Sequence[str], write: Write, within: bool = False) -> Generator[None, None, str]:
        """Write the text before the first of ``words`` as soon as it is certain -> that word, unread; empty at the end.

        With ``within``, the text is complete only if a word follows.  The beginning of a word at the end is then not
        part of it, and neither is a beginning at which the text was cut after a call.
        """
        stops = StopStrings(words)
        while True:
            rest = self.text[self.at :]
            if found := stops.find(rest):
                self.at += found[0]
                write(rest[: found[0]])
                return found[1]
            whole = self.ended and not within and not (self.cut and self.begun)
            sure = len(rest) - (0 if whole else stops.beginning(rest))
            self.at += sure
            write(rest[:sure])
            if self.ended:
                self.hungry = True
                return ""
            yield

    def name(self) -> Generator[None, None, str]:
        """Read the name of a tool."""
        self.naming, self.named = self.at, ""
        name = yield from self.run(NAME, MOST_NAME)
        if (yield from self.peek()):  # else more of it could come
            self.named = name
        return name


def escaped(text: str) -> str:
    """Write ``text`` as within a string of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


# -- JSON --------------------------------------------------------------------------------------------------------------


def json_value(source: Source, write: Write, depth: int = 0) -> Reading:
    """Read a value and copy it; line ends in strings, and Python's constants, become those of JSON."""
    if depth > MOST_DEPTH:
        raise NoCall
    char = yield from source.peek()
    if char == '"':
        yield from json_string(source, write)
    elif char and char in "{[":
        source.at += 1
        write(char)
        yield from _members(source, write, char == "{", depth)
    else:
        write(plain((yield from source.run(WORD))))


def _members(source: Source, write: Write, keyed: bool, depth: int) -> Reading:
    """Read the members between brackets, and the closing bracket."""
    close, first = "}" if keyed else "]", True
    while True:
        yield from source.spaces(write)
        if first and (yield from source.may(close)):
            break
        if keyed:
            yield from json_string(source, write)
            yield from source.spaces(write)
            yield from source.skip(":")
            write(":")
            yield from source.spaces(write)
        yield from json_value(source, write, depth + 1)
        yield from source.spaces(write)
        first = False
        if (yield from source.which((close, ","))) == close:
            break
        write(",")
    write(close)


def json_string(source: Source, write: Write) -> Reading:
    """Read a string, its quotes included."""
    yield from source.skip('"')
    write('"')
    while True:
        write((yield from source.run(_PLAIN)))
        char = yield from source.take()
        if char == '"':
            write(char)
            return
        if char != "\\":
            write(escaped(char))
            continue
        char = yield from source.take()
        if char == "u":
            digits = ""
            for _ in range(4):
                digits += yield from source.take()
            if not re.fullmatch("[0-9a-fA-F]{4}", digits):
                raise NoCall
            write(f"\\u{digits}")
        else:  # a backslash that escapes nothing is one
            write(f"\\{char}" if char in '"\\/bfnrt' else f"\\\\{escaped(char)}")


def plain(word: str) -> str:
    """Write a number or a constant as JSON does."""
    if found := CONSTANTS.get(word):
        return found
    if not _NUMBER.fullmatch(word):
        raise NoCall
    return word


def decoded_string(source: Source) -> Generator[None, None, str]:
    """Read a string of JSON."""
    pieces: list[str] = []
    yield from json_string(source, pieces.append)
    return str(json.loads("".join(pieces)))


def json_call(source: Source, known: bool = False) -> Reading:
    """Read ``{"name": ..., "arguments": {...}}``, in any order and with the key names that models use.

    ``known``: only the tools that were given may be called.
    """
    yield from source.skip("{")
    yield from source.may("{")  # twice, as the template of Qwen2.5-Coder shows it
    name, written, done = "", None, False
    source.naming, source.named = -1, ""
    while True:
        yield from source.spaces()
        if done and (yield from source.peek()) not in ("}", ","):  # a bracket too few
            break
        if (yield from source.which(("}", ",", ""))) == "}":
            break
        yield from source.spaces()
        key = yield from decoded_string(source)
        if key in (*_NAMES, "function") and not name:
            source.naming = source.at
        yield from source.spaces()
        yield from source.skip(":")
        yield from source.spaces()
        if key == "function" and not name and (yield from source.peek()) == "{":
            yield from json_call(source, known)
            done = True
        elif key in (*_NAMES, "function") and not name:
            name = source.named = yield from decoded_string(source)
            if known and name not in source.tools:
                raise NoCall
        elif key in _ARGUMENTS and not done:
            pieces: list[str] = []
            direct = bool(name) and (yield from source.peek()) == "{"
            if direct:
                source.begin(name)
            yield from json_value(source, source.write if direct else pieces.append)
            written, done = "".join(pieces), direct
        else:
            yield from json_value(source, lambda _: None)
    if not done:
        if known and written is None:  # an object with a name is not a call yet
            raise NoCall
        arguments = _object_of(written)
        source.begin(name)
        source.write(arguments)
    source.end()


def _object_of(written: str | None) -> str:
    """Return arguments that came before the name, or as a string, or not at all, as an object."""
    if written in (None, "", "null", '""'):
        return "{}"
    assert written is not None
    text = json.loads(written) if written.startswith('"') else written
    try:
        if isinstance(json.loads(text), dict):
            return str(text)
    except (TypeError, ValueError):
        pass
    raise NoCall


def json_calls(source: Source, known: bool = False) -> Reading:
    """Read a call, or a list of calls."""
    if not (yield from source.may("[")):
        yield from json_call(source, known)
        return
    while True:
        yield from source.spaces()
        yield from json_call(source, known)
        yield from source.spaces()
        if (yield from source.which((",", "]"))) == "]":
            return


# -- a name before JSON ------------------------------------------------------------------------------------------------


def named_calls(source: Source) -> Reading:
    """Read what follows Mistral's marker: a list of calls, or ``NAME[ARGS]{...}``, or ``NAME{...}``."""
    yield from source.spaces()
    char = yield from source.peek()
    if char and char in "[{":
        yield from json_calls(source)
        return
    name = yield from source.name()
    if (yield from source.may("[CALL_ID]")):
        yield from source.run(NAME, MOST_NAME)
    yield from source.may("[ARGS]")
    yield from source.spaces()
    yield from arguments_of(source, name)


def arguments_of(source: Source, name: str) -> Reading:
    """Read an object of JSON: the arguments of a call."""
    if (yield from source.peek()) != "{":
        raise NoCall
    source.begin(name)
    yield from json_value(source, source.write)
    source.end()
