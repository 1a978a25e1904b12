"""Render conversations with a model's own template, as transformers' ``apply_chat_template`` does.

Templates come with models, so they are untrusted programs (sandbox_process.py).  They receive plain data only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgespec.errors import BundleError, InvalidRequest
from edgespec.runtimes.files.bundle import TEMPLATE_FILE as TEMPLATE_FILE
from edgespec.runtimes.files.bundle import TEMPLATE_FOLDER as TEMPLATE_FOLDER
from edgespec.runtimes.files.json_file import read_regular
from edgespec.runtimes.text.sandbox_process import SandboxError, render_sandboxed

Message = dict[str, Any]  # {"role": ..., "content": ...}, of a tool's call also "tool_calls"

RESERVED = ("messages", "tools", "documents", "add_generation_prompt")  # given to templates by name, and not options
REASONING = ("reasoning_content", "thinking", "reasoning")  # what templates and servers call a message's thoughts
MOST_BYTES = 32 << 20  # of a template
_TAG = "EDGESPEC_THE_ANSWER_GOES_ON_HERE "


def find_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Find a model's templates by name: ``default``, perhaps ``tool_use`` and others.

    Args:
        folder: chat_template.jinja and additional_chat_templates/NAME.jinja count before the configuration.
        config: its tokenizer_config.json; ``chat_template`` is a text, or a list of names and texts.

    Raises:
        BundleError: a template file that is not UTF-8 text, or no regular file.
    """
    given = config.get("chat_template")
    named = given if isinstance(given, list) else [{"name": "default", "template": given}]
    found = {item.get("name"): item.get("template") for item in named if isinstance(item, dict)}
    files = {file.stem: file for file in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))}
    if os.path.lexists(folder / TEMPLATE_FILE):
        files["default"] = folder / TEMPLATE_FILE
    if files:  # files replace what the configuration has
        found = {name: _read(file) for name, file in files.items()}
    return {str(name): text for name, text in found.items() if name and isinstance(text, str) and text}


def choose_template(templates: Mapping[str, str], tools: Sequence[Any] | None) -> str:
    """Choose among ``templates``: ``tool_use`` where ``tools`` are given and it exists, else ``default``.

    Raises:
        InvalidRequest: the model has neither.
    """
    found = templates.get("tool_use") if tools is not None else None
    found = found or templates.get("default")
    if found is None:
        named = f" for this conversation; it has templates named {', '.join(templates)}" if templates else ""
        raise InvalidRequest(
            f"this model has no chat template{named}",
            "use plain prompts, or export a chat-tuned model with its template",
        )
    return found


def render(
    template: str,
    messages: Sequence[Message],
    tools: Sequence[Any] | None = None,
    *,
    names: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
    generation_prompt: bool = True,
    continue_final: bool = False,
    nulls: bool = False,
) -> str:
    """Render a conversation and return its text.

    Args:
        template: jinja.
        messages: the conversation so far.
        tools: JSON schemas of functions that the model may call.
        names: special tokens, such as ``bos_token``.
        options: further variables of the template, such as ``enable_thinking``.
        generation_prompt: end with the start of an answer.
        continue_final: end within the last message, which the model continues; then without generation prompt.
        nulls: the template sees fields that are null, as ``ChatForm.write`` left them; by default they are left out.

    Raises:
        InvalidRequest: no messages, values that are not plain data, or a template that rejects them.
    """
    given, schemas, extra = _messages(messages, nulls), _plain(tools), _plain(dict(options or {}))
    if taken := [name for name in extra if name in RESERVED]:
        raise InvalidRequest(f"{taken[0]!r} is no option of a template", "give messages and tools as such")
    if tools is not None and not all(isinstance(tool, dict) for tool in schemas):
        raise InvalidRequest("expected tools as JSON schemas (dicts)", "describe each function by a JSON schema")
    if continue_final:
        _mark(given[-1])
    values = {
        **(names or {}),
        **extra,
        "messages": given,
        "tools": schemas,
        "documents": None,
        "add_generation_prompt": generation_prompt and not continue_final,
    }
    try:
        text = render_sandboxed(template, values)
    except SandboxError as error:
        raise InvalidRequest(f"the model's chat template refuses these messages: {error}") from error
    return _cut(text) if continue_final else text


def _messages(messages: Sequence[Message], nulls: bool) -> list[Message]:
    """Copy messages, without keys that have no value, and with thoughts under the names that templates know."""
    if not messages:
        raise InvalidRequest("expected a conversation of at least one message, got none")
    found = []
    for message in messages:
        if not isinstance(message, Mapping):
            raise InvalidRequest(
                f"expected messages as dicts with role and content, got {type(message).__name__}",
                'as in [{"role": "user", "content": "Hello"}]',
            )
        made = {key: value for key, value in _plain(dict(message)).items() if nulls or value is not None}
        thoughts = next((made[key] for key in REASONING if made.get(key) is not None), None)
        if thoughts is not None:
            made = {"thinking": thoughts, **made, "reasoning_content": thoughts}
        found.append(made)
    return found


def _plain(value: Any) -> Any:
    """Copy ``value`` into plain JSON types, which have no methods that a template could call."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, (bool, int, float, str)):  # enumerations and other kinds of them
        kind = next(kind for kind in (bool, int, float, str) if isinstance(value, kind))
        return getattr(kind, "__str__" if kind is str else f"__{kind.__name__}__")(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    raise InvalidRequest(
        f"a {type(value).__name__} cannot be shown to a chat template", "use text, numbers, lists and dicts only"
    )


def _mark(message: Message) -> None:
    """Put the tag after the text to continue."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _TAG
        return
    for block in reversed(content if isinstance(content, (list, tuple)) else ()):
        if isinstance(block, dict) and isinstance(block.get("text"), str):
            block["text"] += _TAG
            return
    raise InvalidRequest("the last message has no text that an answer could continue")


def _cut(text: str) -> str:
    """Cut ``text`` before the tag; a template that trims the message has also trimmed the tag's space."""
    at = text.rfind(_TAG.strip())
    if at < 0:
        raise InvalidRequest("the model's chat template does not write the last message, so it cannot be continued")
    return text[:at] if text[at : at + len(_TAG)] == _TAG else text[:at].rstrip()


def _read(file: Path) -> str:
    try:
        return read_regular(file, MOST_BYTES).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except OSError as error:  # a pipe, a socket, a link to itself
        raise BundleError(f"{file}: cannot be read: {error.strerror or error}", "download it again") from error
    except UnicodeDecodeError as error:
        raise BundleError(f"{file}: not UTF-8 text: {error}", "download it again") from error
    except ValueError as error:
        raise BundleError(f"{file}: no chat template: {error}", "download it again") from error
