"""Split a model's output into the parts of an answer while it arrives: text, thoughts and tool calls.

A call counts as a call once its name and the beginning of its arguments are read.  Anything shorter is text, including
its marker.  The characters that break a call off are text again, so no output is lost.  If the model was stopped within
a call, the call has the arguments so far.  The beginning of a call that has no name yet is not text.
"""

from __future__ import annotations

import re
from collections.abc import Generator

from edgespec.runtimes.text.call_formats import FORMATS, HARMONY, THOUGHTS, AnswerShape
from edgespec.runtimes.text.call_syntax import Event, Kind, NoCall, Reading, Source, arguments_of, json_calls

_HEADS = ("<|start|>", "<|channel|>", " to=", "<|constrain|>", "<|message|>")
_ENDS = ("<|end|>", "<|call|>", "<|return|>")


class AnswerReader:
    """Reads one answer."""

    def __init__(self, shape: AnswerShape) -> None:
        self._source = Source(shape.tools)
        self._reading = (
            _harmony(self._source, shape) if HARMONY in (shape.calls, shape.thoughts) else _read(self._source, shape)
        )
        self._over = False

    def push(self, text: str) -> list[Event]:
        """Add text -> what is certain now."""
        self._source.text += text
        return self._go_on()

    def finish(self, cut: bool = False) -> list[Event]:
        """Return what was held back, at the end of the answer.

        Args:
            cut: the model was stopped, by a limit for example, and had more to write.
        """
        self._source.ended, self._source.cut = True, cut
        return self._go_on()

    @property
    def calling(self) -> bool:
        """Whether a call has begun and not ended."""
        return self._source.calling

    def _go_on(self) -> list[Event]:
        if not self._over:
            self._over = next(self._reading, self) is self  # yields None while there is more to read
        found, self._source.found = self._source.found, []
        return found


class _Text:
    """Text or thoughts: spaces at either end are written only if something follows.

    Where calls are forced, a text that was cut contains nothing else.
    """

    def __init__(self, source: Source, kind: Kind, trim: bool = False, forced: bool = False) -> None:
        self._source, self._kind, self._forced = source, kind, forced
        self._begun, self.held = not trim, ""

    def write(self, text: str) -> None:
        if self._forced and self._source.cut:
            return
        text = self.held + text
        if not self._begun:
            text = text.lstrip()
        said = text.rstrip()
        self.held = text[len(said) :]
        if said:
            self._begun = True
            self._source.tell(self._kind, said)

    def flush(self) -> None:
        """Return the spaces at the end."""
        self._source.tell(self._kind, self.held)
        self.held = ""


def _read(source: Source, shape: AnswerShape) -> Reading:
    """Read an answer whose parts are marked."""
    if shape.thoughts:
        yield from _thoughts(source, THOUGHTS[shape.thoughts], shape.opened)
    if shape.calls is None:
        yield from source.until((), lambda text: source.tell("text", text))
        return
    form, text = FORMATS[shape.calls], _Text(source, "text", forced=shape.forced)
    fresh = form.bare  # whether JSON may be a call here
    while True:
        if fresh:
            before = source.at
            yield from source.spaces(among=" \t\r\n;,")
            ends = form.ends
            if (yield from source.may("```json")) or (yield from source.may("```tool_call")):  # as coders do
                yield from source.spaces()
                ends = ("```", *ends)
            char = yield from source.peek()
            if (
                char
                and char in "{["
                and (yield from _call(source, json_calls(source, known=True), ends, sure=bool(source.begun)))
            ):
                text.held = ""
                continue
            fresh = False
            if char or not (source.cut and source.begun):
                source.at = before
        start = yield from source.until(form.starts, text.write)
        if not start:
            break
        begin = source.at
        source.at += len(start)
        if (yield from _call(source, form.read(source, start), form.ends, sure=not start.startswith("`"))):
            text.held, fresh = "", form.bare
        else:
            source.at = begin + len(start)
            text.write(start)
    if not source.begun:
        text.flush()


def _thoughts(source: Source, tags: tuple[str, str], opened: bool) -> Reading:
    """Read the thought that an answer may begin with."""
    before = source.at
    if not opened:
        yield from source.spaces()
        if not (yield from source.may(tags[0])):
            source.at = before
            return
    thought = _Text(source, "reasoning", trim=True)
    if (yield from source.until(tags[1:], thought.write)):
        source.at += len(tags[1])
        yield from source.spaces()


def _call(
    source: Source, reading: Reading, ends: tuple[str, ...], sure: bool = True, named: str = ""
) -> Generator[None, None, bool]:
    """Try to read calls -> whether there was one; a broken one is text.

    ``sure``: the next part is a call if it is well-formed; otherwise only if it names a tool.  ``named``: that tool,
    if its name is known already.
    """
    begin, begun = source.at, source.begun
    source.hungry, source.naming, source.named = False, -1, named
    try:
        yield from reading
    except NoCall:
        if source.cut and source.hungry and _was_cut(source, sure or source.begun > begun):
            return True
        if source.begun == begun:
            source.at = begin
            return False
        source.at = source.told
        source.end()
        return True
    source.told = source.at
    yield from source.spaces(among=" \t\r\n}")
    while ends and not source.ended:
        for end in ends:
            if (yield from source.may(end)):
                yield from source.spaces()
                break
        else:
            break
    if source.cut and (rest := source.text[source.at :]) and any(end.startswith(rest) for end in ends):
        source.at = len(source.text)
    return True


def _was_cut(source: Source, sure: bool) -> bool:
    """Read the beginning of a call that the end of the text cut -> whether there was one."""
    if not source.calling:
        if source.named in source.tools:
            source.begin(source.named)
        elif source.naming >= 0:
            name = source.text[source.naming :].lstrip(' \t\r\n:"')
            if not any(tool.startswith(name) for tool in source.tools):
                return False
        elif not sure:
            return False
    source.at = len(source.text)  # and it has not ended
    return True


def _harmony(source: Source, shape: AnswerShape) -> Reading:
    """Read messages with heads: ``<|channel|>NAME to=RECIPIENT<|message|>...<|end|>``."""
    text, thought = _Text(source, "text", forced=shape.forced), _Text(source, "reasoning", trim=True)
    while (yield from source.peek()):
        try:
            begin = source.at
            yield from source.which(_HEADS)
            source.at = begin
        except NoCall:
            if not (yield from source.until(_HEADS[:2], text.write)):
                break
            continue
        pieces: list[str] = []
        if not (yield from source.until(("<|message|>",), pieces.append)):
            return
        source.at += len("<|message|>")
        head = "".join(pieces)
        recipient, channel = re.search(r"to=([\w.:\-]+)", head), re.search(r"<\|channel\|>(\w+)", head)
        called = False
        if recipient:
            name = recipient[1].removeprefix("functions.")
            called = yield from _call(source, arguments_of(source, name), (), named=name)
        if not called:
            part = thought if channel and channel[1] == "analysis" else text
            yield from source.until((*_ENDS, "<|start|>"), part.write)
        for end in _ENDS:
            yield from source.may(end)
    if not source.begun:
        text.flush()
