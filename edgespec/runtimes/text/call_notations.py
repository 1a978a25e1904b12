"""Read tool calls in XML tags, in Gemma's and in Python's notation, while they arrive."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from functools import partial

from edgespec.runtimes.text.call_syntax import (
    CONSTANTS,
    MOST_DEPTH,
    MOST_NAME,
    WORD,
    NoCall,
    Reading,
    Source,
    Write,
    arguments_of,
    escaped,
    json_call,
    json_calls,
    json_string,
    plain,
)

_KEY = re.compile(r"[\w\-]+")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "a": "\a", "v": "\v"}

# -- tags --------------------------------------------------------------------------------------------------------------


def tagged_call(source: Source) -> Reading:
    """Read what follows ``<tool_call>``: JSON, ``<function=...>`` (Qwen), or ``NAME<arg_key>...`` (GLM)."""
    yield from source.spaces()
    char = yield from source.peek()
    if char and char in "[{":
        yield from json_calls(source)
    elif char == "<":
        yield from source.skip("<function=")
        yield from function_tag(source)
    else:
        name = yield from source.name()
        yield from source.spaces()
        yield from _pairs(source, name, "<arg_key>", "</arg_key>", "</tool_call>")


def function_tag(source: Source) -> Reading:
    """Read what follows ``<function=``: parameters, each in a tag, or JSON."""
    name = yield from source.name()
    yield from source.skip(">")
    yield from source.spaces()
    if (yield from source.peek()) == "{":
        yield from arguments_of(source, name)
        yield from source.spaces()
        yield from source.may("</function>")
    else:
        yield from _pairs(source, name, "<parameter=", ">", "</function>")


def _pairs(source: Source, name: str, open_: str, close: str, end: str) -> Reading:
    """Read keys and values in tags, up to ``end``."""
    first = yield from source.which((open_, end))
    source.begin(name)
    types, separator = source.tools.get(name, {}), "{"
    while first == open_:
        key = (yield from source.run(re.compile(r"[^<>\n]+"), MOST_NAME)).strip()
        yield from source.skip(close)
        if open_ == "<arg_key>":
            yield from source.spaces()
            yield from source.skip("<arg_value>")
        source.write(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        close_value = "</arg_value>" if open_ == "<arg_key>" else "</parameter>"
        others = (open_,) if end == "</tool_call>" else (open_, end)
        yield from _tagged_value(source, types.get(key, ""), close_value, others)
        separator = ", "
        yield from source.spaces()
        first = yield from source.which((open_, end, "</tool_call>"))
    source.write("{}" if separator == "{" else "}")
    source.end()


def _tagged_value(source: Source, type_: str, close: str, others: Sequence[str]) -> Reading:
    """Read a value up to its closing tag, without one line end at its beginning and one at its end.

    Models sometimes omit the closing tag, so one of ``others``, the tags that may follow it, also ends the value.
    """
    lines = close == "</parameter>"
    if lines:
        yield from source.may("\r")
        yield from source.may("\n")
    pieces: list[str] = []
    write: Write = pieces.append
    if type_ == "string":
        source.write('"')
        write = lambda text: source.write(escaped(text))  # noqa: E731  as the other one
    ends = (close, *others)
    found = yield from source.until((*(f"\n{end}" for end in ends if lines), *ends), write, within=True)
    if not found:
        raise NoCall
    if found.strip() == close:
        yield from source.skip(found)
    source.write('"' if type_ == "string" else _guessed("".join(pieces)))


def _guessed(text: str) -> str:
    """Write a value whose type is not a string: as JSON if it is valid, otherwise as a string."""
    word = CONSTANTS.get(text.strip(), text.strip())
    try:
        json.loads(word, parse_constant=_no_number)
    except ValueError:
        return f'"{escaped(text)}"'
    return word


def _no_number(name: str) -> None:
    raise ValueError(name)


# -- Gemma's and Python's notation -------------------------------------------------------------------------------------


def braced_call(source: Source, quote: str) -> Reading:
    """Read ``call:NAME{key:value,...}``, as Gemma writes it; ``quote``: the token around a string."""
    yield from source.spaces()
    yield from source.skip("call:")
    name = yield from source.name()
    if (yield from source.peek()) != "{":
        raise NoCall
    source.begin(name)
    yield from _braced(source, quote, 0)
    source.end()


def _braced(source: Source, quote: str, depth: int) -> Reading:
    """Read a value."""
    if depth > MOST_DEPTH:
        raise NoCall
    if (yield from source.may(quote)):
        yield from _quoted(source, quote)
        return
    char = yield from source.peek()
    if char == '"':
        yield from json_string(source, source.write)
    elif char and char in "{[":
        source.at += 1
        close, key = ("}", partial(_braced_key, source, quote)) if char == "{" else ("]", None)
        yield from _members(source, close, key, partial(_braced, source, quote, depth + 1))
    else:
        source.write(plain((yield from source.run(WORD))))


def _braced_key(source: Source, quote: str) -> Reading:
    if (yield from source.may(quote)):
        yield from _quoted(source, quote)
    elif (yield from source.peek()) == '"':
        yield from json_string(source, source.write)
    else:
        key = yield from source.run(re.compile(r"[^:{}\[\],\"<>]+"), MOST_NAME)
        if not key.strip() or (yield from source.peek()) != ":":
            raise NoCall
        source.write(json.dumps(key.strip(), ensure_ascii=False))


def _members(
    source: Source, close: str, key: Callable[[], Reading] | None, value: Callable[[], Reading], loose: bool = False
) -> Reading:
    """Read the members between brackets, and the closing bracket; ``loose`` allows a trailing comma."""
    source.write("{" if key else "[")
    separator = ""
    while True:
        yield from source.spaces()
        if (loose or not separator) and (yield from source.may(close)):
            break
        source.write(separator)
        if key:
            yield from key()
            yield from source.spaces()
            yield from source.skip(":")
            source.write(": ")
            yield from source.spaces()
        yield from value()
        yield from source.spaces()
        separator = ", "
        if (yield from source.which((close, ","))) == close:
            break
    source.write("}" if key else "]")


def _quoted(source: Source, quote: str) -> Reading:
    """Read a string up to its closing quote."""
    source.write('"')
    if not (yield from source.until((quote,), lambda text: source.write(escaped(text)), within=True)):
        raise NoCall
    yield from source.skip(quote)
    source.write('"')


def python_calls(source: Source) -> Reading:
    """Read ``[NAME(key=value, ...), ...]``, or one call without brackets, or JSON instead."""
    yield from source.spaces()
    listed = yield from source.may("[")
    yield from source.spaces()
    while True:
        if (yield from source.peek()) == "{":
            yield from json_call(source)
        else:
            yield from python_call(source)
        yield from source.spaces()
        if not listed or (yield from source.which((",", "]"))) == "]":
            return
        yield from source.spaces()


def python_call(source: Source) -> Reading:
    """Read ``NAME(key=value, ...)``."""
    name = (yield from source.name()).removesuffix(".call")
    source.named = source.named and name
    yield from source.skip("(")
    yield from source.spaces()
    if (yield from source.may(")")):
        source.begin(name)
        source.write("{}")
        source.end()
        return
    separator = "{"
    while True:
        key = yield from source.run(_KEY, MOST_NAME)
        yield from source.spaces()
        yield from source.skip("=")
        if separator == "{":
            source.begin(name)
        source.write(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        yield from source.spaces()
        yield from _python_value(source, 0)
        yield from source.spaces()
        separator = ", "
        if (yield from source.which((")", ","))) == ")":
            break
        yield from source.spaces()
    source.write("}")
    source.end()


def _python_value(source: Source, depth: int) -> Reading:
    """Read a literal."""
    if depth > MOST_DEPTH:
        raise NoCall
    char = yield from source.peek()
    if char and char in "\"'":
        yield from _python_string(source)
    elif char and char in "[({":
        source.at += 1
        close, key = {"[": "]", "(": ")", "{": "}"}[char], partial(_python_string, source) if char == "{" else None
        yield from _members(source, close, key, partial(_python_value, source, depth + 1), loose=True)
    else:
        source.write(plain((yield from source.run(WORD))))


def _python_string(source: Source) -> Reading:
    """Read a string; a quote that nothing fitting follows is part of it, as templates write strings without escapes."""
    quote = yield from source.which(("'", '"'))
    source.write('"')
    while True:
        source.write(escaped((yield from source.run(re.compile(r"[^\\'\"]+")))))
        char = yield from source.take()
        if char == quote:
            before = source.at
            yield from source.spaces(among=" \n")
            follows = yield from source.peek()
            if not follows or follows in ",)]}:":
                break
            source.at = before
        elif char == "\\":
            char = yield from _python_escape(source)
        source.write(escaped(char))
    source.write('"')


def _python_escape(source: Source) -> Generator[None, None, str]:
    """Read the character after a backslash; an invalid escape is the character itself."""
    char = yield from source.take()
    if (digits := {"x": 2, "u": 4, "U": 8}.get(char)) is None:
        return _ESCAPES.get(char, char if char in "\\'\"" else f"\\{char}")
    number = ""
    for _ in range(digits):
        number += yield from source.take()
    try:
        return chr(int(number, 16))
    except (ValueError, OverflowError) as error:
        raise NoCall from error
