"""Grammars of calls in a model's own notation: texts that are calls of given tools, with arguments by their schemas.

They are Lark as llguidance reads it: a string that spells a special token is that token, and ``%json`` takes a schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edgespec.decoding.settings import Grammar
from edgespec.errors import InvalidRequest
from edgespec.runtimes.text.call_formats import FUNCTION_GEMMA_QUOTE, GEMMA_QUOTE, HARMONY, THOUGHTS, AnswerShape
from edgespec.runtimes.text.call_syntax import MOST_NAME
from edgespec.runtimes.text.guidance import JSON_FORM, prepared
from edgespec.runtimes.text.schemas import parameters

MOST_CALLS = 16  # of an answer that must call
Schema = Mapping[str, Any]
_CALLABLE = re.compile(r"[\w.:/\-]+")


def calls_grammar(
    shape: AnswerShape, tools: Sequence[Mapping[str, Any]], many: bool, special: Mapping[str, int]
) -> Grammar:
    """Build the grammar of one call or more, after the rest of a thought if the prompt has begun one.

    Args:
        shape, tools: how the answer is written, and functions that may be called: name, parameters as a JSON schema.
        many: several calls are allowed.
        special: ids of the markers that are special tokens.

    Raises:
        InvalidRequest: no tools, or a name that the notation cannot write.
    """
    if not tools:
        raise InvalidRequest("a call is asked for, and no tool is given", "give tools, or tool_choice auto")
    write, begin, between, end = _NOTATIONS[shape.calls or ""]
    rules = _Rules(special)
    calls = []
    for tool in tools:
        name = str(tool.get("name", ""))
        if not _CALLABLE.fullmatch(name) or len(name) > MOST_NAME:
            raise InvalidRequest(f"the tool's name is {name[:80]!r}: expected letters, digits and any of _ . : / -")
        calls.append(write(rules, name, parameters(tool.get("parameters"), name)))
    call = rules.add(" | ".join(calls))
    more = f"({rules.text(between)} {call}){{0,{MOST_CALLS - 1}}}" if many and between is not None else ""
    text = f"{rules.text(begin)} {call} {more} {rules.text(end)}"
    if shape.thoughts == HARMONY:
        text = f"{rules.analysis()} {text}"
    elif shape.thoughts and shape.opened:
        text = f"{rules.thought(shape.thoughts)} {text}"
    return Grammar.lark(f"start: {text}\n" + "\n".join(rules.lines))


def after_thoughts(grammar: Grammar, shape: AnswerShape, special: Mapping[str, int]) -> Grammar:
    """Allow a thought before a grammar, or the rest of one that the prompt has begun; Lark names whole texts itself."""
    if grammar.kind == "lark" or shape.thoughts is None:
        return grammar
    rules = _Rules(special)
    if shape.thoughts == HARMONY:
        thought = f"{rules.analysis()} {rules.text('<|channel|>final<|message|>')}"
    else:
        thought = rules.thought(shape.thoughts)
    if grammar.kind == "json_schema":
        body = rules.json(json.loads(grammar.text))
    else:
        body = rules.add(f"/{grammar.text.replace('/', chr(92) + '/')}/")
    return Grammar.lark(f"start: {thought} {body}\n" + "\n".join(rules.lines))


class _Rules:
    """Rules of a grammar, numbered in order."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self.lines: list[str] = []
        self._special = special
        self._split = re.compile(f"({'|'.join(map(re.escape, special))})")

    def add(self, body: str, attributes: str = "") -> str:
        """Add a rule -> its name."""
        name = f"rule{len(self.lines)}"
        self.lines.append(f"{name}{attributes}: {body}")
        return name

    def any(self, end: str, schema: Any = None) -> str:
        """Add any text up to ``end``, inclusive; a schema may limit its length."""
        most = schema.get("maxLength") if isinstance(schema, dict) else None
        text = f"(.|\\n){{0,{most}}}" if isinstance(most, int) else "(.|\\n)*"
        if end in self._special:  # no text contains it
            return self.add(f"/{text}/ {self.text(end)}")
        return self.add(f"/{text}{_as_regex(end)}/", "[lazy]")

    def thought(self, thoughts: str) -> str:
        """Add the rest of a thought, and the text between it and the answer."""
        return self.add(f"{self.any(THOUGHTS[thoughts][1])} /\\n{{0,2}}/")

    def analysis(self) -> str:
        """Add harmony's channel of thoughts, which may be left out, and the beginning of the next message."""
        before, behind = self.text("<|channel|>analysis<|message|>"), self.text("<|start|>assistant")
        return self.add(f"({before} {self.any('<|end|>')} {behind})?")

    def text(self, text: str) -> str:
        """Write exactly ``text``, with special tokens as such."""
        pieces = self._split.split(text) if self._special else [text]
        return " ".join(f"<[{self._special[one]}]>" if one in self._special else _quoted(one) for one in pieces if one)

    def json(self, schema: Any) -> str:
        """Add the JSON that a schema allows."""
        formed = {"x-guidance": JSON_FORM} | prepared(schema) if isinstance(schema, dict) else schema
        return self.add(f"%json {json.dumps(formed)}")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _as_regex(text: str) -> str:
    return re.sub(r"([^\w\n <>=])", r"\\\1", text).replace("\n", "\\n")


def _object(before: str, after: str) -> Callable[[_Rules, str, Schema], str]:
    """Write the arguments as JSON between two texts, in which NAME is the tool's."""

    def call(rules: _Rules, name: str, schema: Schema) -> str:
        return rules.add(f"{rules.text(before.replace('NAME', name))} {rules.json(schema)} {rules.text(after)}")

    return call


def _parameters(schema: Schema) -> list[tuple[str, Any, bool]]:
    """List a tool's parameters: name, schema, and whether it is required; each gets the definitions."""
    properties = schema.get("properties")
    required = schema.get("required") or []
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    found = properties.items() if isinstance(properties, dict) else ()
    return [(name, one | shared if isinstance(one, dict) else one, name in required) for name, one in found]


def _each(
    rules: _Rules, schema: Schema, pair: Callable[[str, Any], str], separator: str, open_: str, close: str
) -> str:
    """Write parameters in the order of the schema, optional ones optionally, with separators between."""
    tail = rules.text(close)
    after = tail  # what may follow where something has been written
    for name, one, required in reversed(_parameters(schema)):
        written = pair(name, one)
        with_it = f"{written} {after}"
        # `after` begins with a separator unless nothing follows, and `tail` is used where nothing was written yet
        first = rules.add(with_it if required else f"{with_it} | {tail}")
        later = f"{rules.text(separator)} {written} {after}" if separator else with_it
        after = rules.add(later if required else f"{later} | {after}")
        tail = first
    return rules.add(f"{rules.text(open_)} {tail}")


def _values(schema: Any) -> list[str] | None:
    """List the strings that a schema allows; None = it does not list strings."""
    listed = schema.get("enum", [schema["const"]] if "const" in schema else []) if isinstance(schema, dict) else []
    return listed if listed and all(isinstance(one, str) for one in listed) else None


def _is_string(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.get("type") == "string"


def _xml(rules: _Rules, name: str, schema: Schema) -> str:
    """Write ``<function=NAME>`` with a tag for each parameter."""

    def pair(key: str, one: Any) -> str:
        open_, close = f"<parameter={key}>\n", "\n</parameter>\n"
        return _tagged(rules, one, open_, close)

    return _each(rules, schema, pair, "", f"<tool_call>\n<function={name}>\n", "</function>\n</tool_call>")


def _glm(rules: _Rules, name: str, schema: Schema) -> str:
    """Write NAME with tags for keys and values."""

    def pair(key: str, one: Any) -> str:
        return _tagged(rules, one, f"<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n")

    return _each(rules, schema, pair, "", f"<tool_call>{name}\n", "</tool_call>")


def _tagged(rules: _Rules, one: Any, open_: str, close: str) -> str:
    if listed := _values(one):
        value = f"({' | '.join(map(rules.text, listed))}) {rules.text(close)}"
    elif _is_string(one):
        value = rules.any(close, one)
    else:
        value = f"{rules.json(one)} {rules.text(close)}"
    return rules.add(f"{rules.text(open_)} {value}")


def _braced(opening: str, quote: str, closing: str) -> Callable[[_Rules, str, Schema], str]:
    """Write ``call:NAME{key:value,...}``; lists and objects within are JSON."""

    def call(rules: _Rules, name: str, schema: Schema) -> str:
        def pair(key: str, one: Any) -> str:
            if listed := _values(one):
                value = f"{rules.text(quote)} ({' | '.join(map(rules.text, listed))}) {rules.text(quote)}"
            elif _is_string(one):
                value = f"{rules.text(quote)} {rules.any(quote, one)}"
            else:
                value = rules.json(one)
            return rules.add(f"{rules.text(f'{key}:')} {value}")

        return _each(rules, schema, pair, ",", f"{opening}call:{name}{{", f"}}{closing}")

    return call


def _python(rules: _Rules, name: str, schema: Schema) -> str:
    """Write ``NAME(key=value, ...)``, with values as JSON, which the reader of Python's notation accepts."""
    return _each(
        rules, schema, lambda key, one: rules.add(f"{rules.text(f'{key}=')} {rules.json(one)}"), ", ", f"{name}(", ")"
    )


_NAMED = _object('{"name": "NAME", "arguments": ', "}")
# how to write a call; text before the first call, between two (None: only one call) and after the last
_NOTATIONS: dict[str, tuple[Callable[[_Rules, str, Schema], str], str, str | None, str]] = {
    HARMONY: (_object("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", ""), "", None, ""),
    "gemma": (_braced("<|tool_call>", GEMMA_QUOTE, "<tool_call|>"), "", "", ""),
    "functiongemma": (_braced("<start_function_call>", FUNCTION_GEMMA_QUOTE, "<end_function_call>"), "", "", ""),
    "lfm2": (_python, "<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
    "mistral": (_object("[TOOL_CALLS]NAME[ARGS]", ""), "", "", ""),
    "mistral-list": (_NAMED, "[TOOL_CALLS] [", ", ", "]"),
    "qwen3-coder": (_xml, "", "\n", ""),
    "glm": (_glm, "", "\n", ""),
    "hermes": (_object('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>"), "", "\n", ""),
    "phi": (_NAMED, "<|tool_call|>[", ", ", "]<|/tool_call|>"),
    "llama3": (_object('{"name": "NAME", "parameters": ', "}"), "", "; ", ""),
    "json": (_NAMED, "", "\n", ""),
}
