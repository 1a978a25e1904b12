"""Parts of messages that clients keep: refusals, thoughts, pictures of tools, and items other than messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgespec.errors import InvalidRequest
from edgespec.runtimes.text.codec import TextCodec
from edgespec.server.apis import Kind
from edgespec.server.tooling import said, write_chat
from tests.support.published_templates import chat_of, open_codec

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ '' + m.content }}{% if m.thinking %}({{ m.thinking }}){% endif %}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "{% endfor %}"
)
PIXEL = "iVBORw0KGgo="


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    made = open_codec(tmp_path_factory.mktemp("codec"))
    made.templates = {"default": TEMPLATE}
    return made


def text(codec: TextCodec, kind: Kind, **sent: Any) -> str:
    body = {"model": "m", **sent} | ({"max_tokens": 5} if kind == "message" else {})
    return write_chat(chat_of(kind, body), codec)[0].text


@pytest.mark.parametrize(
    "turn, expected",
    [
        ({"content": [{"type": "refusal", "refusal": "No."}]}, "No."),
        ({"content": None, "refusal": "No."}, "No."),
        ({"content": "Yes.", "refusal": None}, "Yes."),
        ({"content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "Yes."}]}, "Yes.(hm)"),
        ({"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}]}, "(hm)"),
        ({"content": [{"type": "reasoning", "text": "hm"}], "reasoning_content": "own"}, "(own)"),
        ({"content": [{"type": "output_text", "text": "a"}, {"type": "input_text", "text": "b"}]}, "ab"),
        ({"content": [{"type": "text", "text": None}, {"type": "output_text"}, {"type": "text", "text": "a"}]}, "a"),
        ({"content": [{"type": "refusal", "refusal": None}, {"type": "thinking", "thinking": None}]}, ""),
        ({"content": [{"type": "thinking", "thinking": [{"type": "text", "text": None}]}]}, ""),
        ({"content": []}, ""),
        ({}, ""),
    ],
)
def test_parts_of_an_answer(codec: TextCodec, turn: dict[str, Any], expected: str) -> None:
    talk = [{"role": "user", "content": "x"}, {"role": "assistant", **turn}, {"role": "user", "content": "y"}]
    assert text(codec, "chat", messages=talk) == f"<user>x<assistant>{expected}<user>y"


def test_a_refusal_and_nulls_in_other_apis(codec: TextCodec) -> None:
    items = [
        {"role": "user", "content": "x"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": None}]},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"type": "message", "role": "assistant", "content": None},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": None},
        {"type": "function_call_output", "call_id": "c", "output": None},
    ]
    assert text(codec, "response", input=items).endswith("<assistant>No.<assistant>[f {}]<tool>")
    turns = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": None}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": None}]},
        {"role": "assistant", "content": [{"type": "text", "text": None}], "id": "msg_1"},
    ]
    assert text(codec, "message", messages=turns) == "<user>x<assistant>[f {}]<tool><assistant>"


DOCUMENTS = [
    ({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Once."}}, "Once."),
    (
        {
            "type": "document",
            "title": "A tale",
            "context": None,
            "citations": {"enabled": True},
            "source": {"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        },
        "A tale\na\n\nb",
    ),
    ({"type": "document", "source": {"type": "content", "content": "Once."}, "title": ""}, "Once."),
    (
        {"type": "search_result", "source": "u", "title": "A page", "content": [{"type": "text", "text": "a"}]},
        "A page\na",
    ),
]


@pytest.mark.parametrize("block, expected", DOCUMENTS)
def test_a_document_of_text_is_text(codec: TextCodec, block: dict[str, Any], expected: str) -> None:
    """Documents from the user and from a tool."""
    given = {"role": "user", "content": [block, {"type": "text", "text": "Why?"}]}
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]}
    gave = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [block]}]}
    written = text(codec, "message", messages=[given, call, gave])
    assert written == f"<user>{expected}\n\nWhy?<assistant>[f {{}}]<tool>{expected}"


BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
URL = f"data:image/png;base64,{PIXEL}"
PICTURES: list[tuple[Kind, dict[str, Any]]] = [
    ("message", {"messages": [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [BLOCK]}]}]}),
    ("response", {"input": [
        {"role": "user", "content": "x"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": URL}]}]}),
    ("chat", {"messages": [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "image_url", "image_url": {"url": URL}}]}]}),
    ("chat", {"messages": [{"role": "user", "content": 5}]}),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "file", "file": {}}]}]}),
    *(
        ("message", {"messages": [{"role": "user", "content": [{"type": "document", "source": source}]}]})
        for source in (
            {},
            None,
            {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="},
            {"type": "url", "url": "https://example.org/a.pdf"},
            {"type": "text", "data": None},
            {"type": "content", "content": [BLOCK]},
        )
    ),
    ("message", {"messages": [{"role": "user", "content": ["no block"]}]}),
    ("message", {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": [[]]}]}),
    ("message", {"messages": [{"role": "user", "content": "x"}], "system": [5]}),
    ("response", {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}),
]  # fmt: skip


@pytest.mark.parametrize("kind, sent", PICTURES)
def test_what_a_model_of_text_does_not_read(codec: TextCodec, kind: Kind, sent: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        text(codec, kind, **sent)
    assert caught.value.hint == "this model reads text alone"


def test_a_late_system_is_the_same_in_every_api(codec: TextCodec) -> None:
    talk = [{"role": "user", "content": "x"}, {"role": "system", "content": "late"}]
    texts = {
        text(codec, "chat", messages=talk),
        text(codec, "message", messages=talk),
        text(codec, "response", input=talk),
    }
    assert texts == {"<user>x<system>late"}


def test_systems_at_the_beginning_are_one(codec: TextCodec) -> None:
    messages = [{"role": role, "content": role} for role in ("system", "developer", "user")]
    found = said(chat_of("chat", {"model": "m", "messages": messages}), codec)
    assert [one["content"] for one in found] == ["system\n\ndeveloper", "user"]


def test_every_open_tag_of_a_value(tmp_path: Path) -> None:
    """Values whose closing tag is left out end where the next one begins; those that are closed are whole."""
    from edgespec.runtimes.text.answer import AnswerReader
    from edgespec.runtimes.text.call_formats import AnswerShape

    types = {"read": {"path": "string", "lines": "integer"}}
    texts = {
        "qwen3-coder": [
            "<function=read>\n<parameter=path>\na.txt\n<parameter=lines>\n5\n</function>\n</tool_call>",
            "<function=read><parameter=path>a.txt<parameter=lines>5</function></tool_call>",
            "<function=read>\n<parameter=path>\na.txt\n</parameter>\n<parameter=lines>\n5\n</function>\n</tool_call>",
        ],
        "glm": [
            "read\n<arg_key>path</arg_key>\n<arg_value>a.txt<arg_key>lines</arg_key><arg_value>5</arg_value></tool_call>"
        ],
    }
    for form, written in texts.items():
        for one in written:
            for step in (1, 7, 1000):
                reader = AnswerReader(AnswerShape(form, None, False, types))
                whole = f"<tool_call>{one}"
                events = [event for at in range(0, len(whole), step) for event in reader.push(whole[at : at + step])]
                events += reader.finish()
                arguments = "".join(event.text for event in events if event.kind == "arguments")
                assert json.loads(arguments) == {"path": "a.txt", "lines": 5}, (form, one)
