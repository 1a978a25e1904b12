"""Calls of tools as the models of each template write them, made from a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

Call = tuple[str, dict[str, Any]]
WORDS = (
    *("Seoul", "a b", "서울의 달", "שלום", 'say "hi"', "it's", "{}", "},{", "[x]", "line\nbreak\ttab", "\\d+\\", ""),
    *("e\u0301", "<tool>", "</tool_call>", "[TOOL_CALLS]", "```json", '{"name": "Bash", "arguments": {}}', "😀"),
    *("a, b)", "x=1"),
)
NAMES = ("read_file", "get_weather", "mcp__fs__write", "Bash", "a.b-c")
TYPES = {
    name: {"path": "string", "text": "string", "n": "integer", "deep": "object", "flags": "array", "on": "boolean"}
    for name in NAMES
}


def value(draw: random.Random, type_: str, depth: int = 0) -> Any:
    if type_ == "string":
        return " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, 3)))
    if type_ == "integer":
        return draw.choice((0, -7, 12345678901234567890, 42))
    if type_ == "boolean":
        return draw.random() < 0.5
    if depth > 2:
        return draw.choice((None, 1.5, -2e-07, "x"))
    kinds = ("string", "integer", "boolean", "object", "array", "none")
    inside = [value(draw, draw.choice(kinds), depth + 1) for _ in range(draw.randint(0, 3))]
    return {f"k{at} {at}": one for at, one in enumerate(inside)} if type_ == "object" else inside


def call(draw: random.Random) -> Call:
    name = draw.choice(NAMES)
    chosen = draw.sample(list(TYPES[name]), draw.randint(0, 4))
    return name, {key: value(draw, TYPES[name][key]) for key in chosen}


def _json(made: Any) -> str:
    return json.dumps(made, ensure_ascii=False)


def _named(one: Call, arguments: str = "arguments") -> str:
    return _json({"name": one[0], arguments: one[1]})


def _xml(one: Call) -> str:
    pairs = (
        f"<parameter={key}>\n{item if isinstance(item, str) else _json(item)}\n</parameter>\n"
        for key, item in one[1].items()
    )
    return f"<tool_call>\n<function={one[0]}>\n{''.join(pairs)}</function>\n</tool_call>"


def _glm(one: Call) -> str:
    pairs = (
        f"<arg_key>{key}</arg_key>\n<arg_value>{item if isinstance(item, str) else _json(item)}</arg_value>\n"
        for key, item in one[1].items()
    )
    return f"<tool_call>{one[0]}\n{''.join(pairs)}</tool_call>"


def _gemma(item: Any, keys: bool = True) -> str:
    if isinstance(item, str):
        return f'<|"|>{item}<|"|>'
    if isinstance(item, dict):
        pairs = (f"{_gemma(key) if keys else key}:{_gemma(one)}" for key, one in item.items())
        return f"{{{','.join(pairs)}}}"
    return f"[{','.join(map(_gemma, item))}]" if isinstance(item, list) else _json(item)


def _python(one: Call) -> str:
    return f"{one[0]}({', '.join(f'{key}={item!r}' for key, item in one[1].items())})"


WRITE: dict[str, Callable[[list[Call]], str]] = {
    "hermes": lambda calls: "\n".join(f"<tool_call>\n{_named(one)}\n</tool_call>" for one in calls),
    "qwen3-coder": lambda calls: "\n".join(map(_xml, calls)),
    "glm": lambda calls: "\n".join(map(_glm, calls)),
    "llama3": lambda calls: "<|python_tag|>" + "; ".join(_named(one, "parameters") for one in calls),
    "mistral": lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(given)}" for name, given in calls),
    "mistral-list": lambda calls: f"[TOOL_CALLS] [{', '.join(map(_named, calls))}]",
    "gemma": lambda calls: "".join(
        f"<|tool_call>call:{name}{_gemma(given, keys=False)}<tool_call|>" for name, given in calls
    ),
    "lfm2": lambda calls: f"<|tool_call_start|>[{', '.join(map(_python, calls))}]<|tool_call_end|>",
    "gpt-oss": lambda calls: "<|end|><|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(given)}" for name, given in calls
    ),
    "phi": lambda calls: f"<|tool_call|>[{', '.join(map(_named, calls))}]<|/tool_call|>",
    "json": lambda calls: "\n".join(map(_named, calls)),
}
"""A format -> its models' output."""

TEMPLATES = {
    "hermes": "<tool_call>\n{{ call | tojson }}\n</tool_call>",
    "qwen3-coder": "<tool_call>\n<function={{ name }}>\n<parameter=x>",
    "glm": "<tool_call>{{ name }}<arg_key>",
    "llama3": "<|start_header_id|>assistant<|end_header_id|>{% if b %}<|python_tag|>{% endif %}",
    "mistral": "[TOOL_CALLS]{{ name }}[ARGS]",
    "mistral-list": "[TOOL_CALLS] [",
    "gemma": "<|turn>model\n<|tool_call>call:",
    "lfm2": "<|tool_call_start|>[",
    "gpt-oss": "<|start|>assistant<|channel|>commentary<|message|>",
    "phi": "<|tool_call|>",
    "json": "{{ messages }}",
}
"""Text in the chat templates of a format."""
