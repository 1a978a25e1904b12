"""Find the notation of a model's calls and thoughts from its chat template."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgespec.errors import unknown_name
from edgespec.runtimes.text.call_notations import braced_call, function_tag, python_call, python_calls, tagged_call
from edgespec.runtimes.text.call_syntax import Reading, Source, json_calls, named_calls

GEMMA_QUOTE, FUNCTION_GEMMA_QUOTE = '<|"|>', "<escape>"
HARMONY = "gpt-oss"
JSON = "json"


@dataclass(frozen=True)
class CallFormat:
    """A notation of calls."""

    read: Callable[[Source, str], Reading]  # reads what follows a start, given which it was
    starts: tuple[str, ...] = ()  # what a call begins with
    ends: tuple[str, ...] = ()  # optional markers after a call, which are not text
    inner: tuple[str, ...] = ()  # other tokens of it that tokenizers may know as special ones
    bare: bool = False  # an answer may also begin with a call that is plain JSON, of a tool that was given
    template: tuple[str, ...] | None = None  # what chat templates of its models contain, all of it; None = the starts

    @property
    def markers(self) -> tuple[str, ...]:
        """All of its markers that may be special tokens."""
        return self.starts + self.ends + self.inner


def _tagged(source: Source, start: str) -> Reading:
    return tagged_call(source) if start == "<tool_call>" else function_tag(source)


def _json(source: Source, start: str) -> Reading:
    yield from source.spaces()
    yield from json_calls(source, known=start.startswith("`"))


def _python_tag(source: Source, start: str) -> Reading:
    yield from source.spaces()
    char = yield from source.peek()
    yield from json_calls(source) if char and char in "[{" else python_call(source)


def _braced(quote: str) -> Callable[[Source, str], Reading]:
    return lambda source, _: braced_call(source, quote)


FORMATS: dict[str, CallFormat] = {
    HARMONY: CallFormat(
        _json,  # after a head, which answer.py reads
        inner=("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"),
        template=("<|channel|>", "<|message|>"),
    ),
    "gemma": CallFormat(_braced(GEMMA_QUOTE), ("<|tool_call>",), ("<tool_call|>",), (GEMMA_QUOTE,)),
    "functiongemma": CallFormat(
        _braced(FUNCTION_GEMMA_QUOTE), ("<start_function_call>",), ("<end_function_call>",), (FUNCTION_GEMMA_QUOTE,)
    ),
    "lfm2": CallFormat(lambda source, _: python_calls(source), ("<|tool_call_start|>",), ("<|tool_call_end|>",)),
    "mistral": CallFormat(
        lambda source, _: named_calls(source),
        ("[TOOL_CALLS]",),
        inner=("[ARGS]", "[CALL_ID]"),
        template=("[TOOL_CALLS]", "[ARGS]"),
    ),
    "mistral-list": CallFormat(
        lambda source, _: named_calls(source), ("[TOOL_CALLS]",), ("[/TOOL_CALLS]",), ("[ARGS]", "[CALL_ID]")
    ),
    "qwen3-coder": CallFormat(
        _tagged, ("<tool_call>", "<function="), ("</function>", "</tool_call>"), template=("<function=", "<parameter=")
    ),
    "glm": CallFormat(_tagged, ("<tool_call>",), ("</tool_call>",), template=("<tool_call>", "<arg_key>")),
    "hermes": CallFormat(_tagged, ("<tool_call>",), ("</tool_call>",), bare=True),
    "phi": CallFormat(_json, ("<|tool_call|>",), ("<|/tool_call|>",), bare=True),
    "llama3": CallFormat(_python_tag, ("<|python_tag|>",), bare=True),
    JSON: CallFormat(_json, ("```json", "```tool_call"), ("```",), bare=True, template=()),
}

THOUGHTS: dict[str, tuple[str, str]] = {  # what a thought begins and ends with
    "think": ("<think>", "</think>"),
    "gemma": ("<|channel>thought", "<channel|>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed": ("<seed:think>", "</seed:think>"),
}


@dataclass(frozen=True)
class AnswerShape:
    """How to read an answer.

    Raises:
        InvalidRequest: an unknown notation.
    """

    calls: str | None = None  # the notation of its calls; None = it has none
    thoughts: str | None = None  # the notation of its thoughts; None = it has none
    opened: bool = False  # the prompt has begun a thought already, or harmony's head of a message
    # types of parameters by name, of each tool that may be called
    tools: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    forced: bool = False  # a grammar allows only calls, after a thought perhaps

    def __post_init__(self) -> None:
        if self.calls is not None and self.calls not in FORMATS:
            raise unknown_name("format of calls", self.calls, FORMATS)

    @classmethod
    def of(
        cls,
        template: str,
        prompt: str,
        tools: Sequence[Mapping[str, Any]],
        calls: str | None = None,
        reasoning: bool = True,
    ) -> AnswerShape:
        """Choose how to read the answer to a prompt.

        Args:
            template: the chat template that rendered it.
            prompt: its text.
            tools: JSON schemas of the functions that may be called; without any, calls are read as text.
            calls: the notation of calls; None = that of the template.
            reasoning: whether to separate thoughts from the text.
        """
        thoughts = thought_format(template) if reasoning else None
        form = (calls or call_format(template)) if tools else None
        return cls(form, thoughts, opened(prompt, thoughts), types_of(tools))

    @property
    def plain(self) -> bool:
        """Whether all of it is text."""
        return self.calls is None and self.thoughts is None

    @property
    def markers(self) -> tuple[str, ...]:
        """Return the markers that must stay in the text, even those that are special tokens."""
        read = {
            name: None for name in (self.calls, self.thoughts) if name in FORMATS
        }  # harmony's thoughts are marked so
        own = tuple(marker for name in read for marker in FORMATS[name].markers)
        tags = THOUGHTS[self.thoughts] if self.thoughts and self.thoughts in THOUGHTS else ()
        return own + tuple(tag.removesuffix("thought") for tag in tags)

    def new_call_id(self) -> str:
        """Make a call's id; Mistral's templates require nine letters and digits."""
        if (self.calls or "").startswith("mistral"):
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


def call_format(template: str) -> str:
    """Name the notation of calls that a template uses; ``json`` if it shows none."""
    return next(
        name
        for name, known in FORMATS.items()
        if all(part in template for part in (known.starts if known.template is None else known.template))
    )


def thought_format(template: str) -> str | None:
    """Name the notation of thoughts that a template uses."""
    if call_format(template) == HARMONY:
        return HARMONY
    return next((name for name, (_, close) in THOUGHTS.items() if close in template), None)


def opened(prompt: str, thoughts: str | None) -> bool:
    """Whether a prompt ends within a thought, or at the head of a message, which may be one."""
    if thoughts == HARMONY:
        return prompt.endswith("<|start|>assistant")
    return thoughts in THOUGHTS and prompt.rstrip().endswith(THOUGHTS[thoughts][0]) if thoughts else False


def types_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Collect the parameter types of each tool from its schema."""
    found: dict[str, dict[str, str]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        properties = (function.get("parameters") or {}).get("properties")
        properties = properties if isinstance(properties, dict) else {}
        found[str(function.get("name"))] = {name: _type(schema) for name, schema in properties.items()}
    return found


def _type(schema: Any) -> str:
    if not isinstance(schema, dict):
        return ""
    kind = schema.get("type")
    if isinstance(kind, str):
        return kind
    choices = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return "string" if choices and all(isinstance(choice, str) for choice in choices) else ""
