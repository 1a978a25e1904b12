"""The history format of a template is found from its output, and histories are written in it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edgespec.runtimes.text.chat import render
from edgespec.runtimes.text.chat_forms import ChatForm

CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"place": "here"}'}}
ASKED = {"role": "user", "content": "What is here?"}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "a chair"}
EACH = "{% for m in messages %}<{{ m.role }}>{% for c in m.tool_calls or [] %}"
OBJECT = "[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
TEMPLATES = {  # and what they want
    "joins the content": (EACH + OBJECT + "{{ '' + m.content }}{% endfor %}", ChatForm(content="empty")),
    "writes None": (
        EACH + OBJECT + "{% if m.content is defined %}{{ m.content }}{% endif %}{% endfor %}",
        ChatForm(content="absent"),
    ),
    "tells a call by none": (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and m['content'] is none %}"
        "{% for c in m.tool_calls %}[{{ c.function.name + ' ' + c.function.arguments }}]{% endfor %}"
        "{% elif m['content'] is not none %}{{ '' + m['content'] }}{% endif %}{% endfor %}",
        ChatForm(text_arguments=True, content="none"),
    ),
    "joins arguments": (
        EACH + "[{{ c.function.name + ' ' + c.function.arguments }}]{% endfor %}{{ m.content or '' }}{% endfor %}",
        ChatForm(text_arguments=True),
    ),
    "prints arguments": (
        EACH + "[{{ c.function.name }} {{ c.function.arguments }}]{% endfor %}{{ m.content or '' }}{% endfor %}",
        ChatForm(text_arguments=True),
    ),
    "iterates over arguments": (
        EACH + "[{{ c.function.name }}{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}]"
        "{% endfor %}{{ m.content or '' }}{% endfor %}",
        ChatForm(),
    ),
    "wants ids of nine": (
        EACH + "{% if c.id | length != 9 %}{{ raise_exception('id') }}{% endif %}{{ c.id }}" + OBJECT
        + "{{ m.content or '' }}{% endfor %}",
        ChatForm(short_ids=True),
    ),
    "knows developers": (
        EACH + OBJECT + "{{ m.content or '' }}{% if m.role == 'developer' %}!{% endif %}{% endfor %}",
        ChatForm(developer=True),
    ),
    "refuses a late system": (
        EACH + OBJECT + "{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
        "{{ m.content or '' }}{% endfor %}",
        ChatForm(late_system=False),
    ),
    "drops a late system": (
        EACH + OBJECT + "{% if m.role != 'system' or loop.first %}{{ m.content or '' }}{% endif %}{% endfor %}",
        ChatForm(late_system=False),
    ),
    "wants parts": (
        "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}",
        ChatForm(parts=True),
    ),
    "knows no calls": (
        "{% for m in messages %}<{{ m.role }}>{{ '' + m.content }}{% endfor %}",
        ChatForm(content="empty"),
    ),
    "refuses everything": ("{{ raise_exception('no') }}", ChatForm()),
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_wants_is_found(name: str) -> None:
    template, expected = TEMPLATES[name]
    assert ChatForm.of(template, {"bos_token": "<s>"}) == expected


def turn(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [CALL], **fields}


HISTORIES: dict[str, list[dict[str, Any]]] = {  # of the same
    "null": [ASKED, turn(content=None), RESULT],
    "left out": [ASKED, turn(), RESULT],
    "empty": [ASKED, turn(content=""), RESULT],
    "no parts": [ASKED, turn(content=[]), RESULT],
    "other nulls": [
        {**ASKED, "name": None},
        turn(content=None, refusal=None, audio=None, function_call=None, reasoning_content=None),
        {**RESULT, "tool_calls": None},
    ],
    "empty lists": [{**ASKED, "tool_calls": []}, turn(), RESULT],
    "an object": [
        ASKED,
        turn(tool_calls=[{**CALL, "function": {"name": "look", "arguments": {"place": "here"}}}]),
        RESULT,
    ],
    "before tools": [
        ASKED,
        {"role": "assistant", "content": None, "function_call": CALL["function"]},
        {"role": "function", "name": "look", "content": "a chair"},
    ],
    "no ids": [
        ASKED,
        turn(tool_calls=[{"type": "function", "function": CALL["function"]}]),
        {"role": "tool", "content": "a chair"},
    ],
    "no type": [ASKED, turn(tool_calls=[{key: value for key, value in CALL.items() if key != "type"}]), RESULT],
}
WITHOUT_IDS = [name for name in TEMPLATES if name not in ("wants parts", "refuses everything", "wants ids of nine")]


@pytest.mark.parametrize("template", WITHOUT_IDS)
@pytest.mark.parametrize("history", HISTORIES)
def test_one_history_gives_one_text(template: str, history: str) -> None:
    text, form = TEMPLATES[template][0], ChatForm.of(TEMPLATES[template][0], {})
    before = json.dumps(HISTORIES[history])
    found = render(text, form.write(HISTORIES[history]), nulls=True)
    assert json.dumps(HISTORIES[history]) == before
    assert found == render(text, form.write(HISTORIES["null"]), nulls=True)
    assert "a chair" in found
    assert "None" not in found
    assert ("look" in found) == (template != "knows no calls")
    assert "{'" not in found
    assert '\\"' not in found


@pytest.mark.parametrize("id_", ["call_1", "toolu_01A09q90qw90lq917835lq9", "", "a\ud800", "abc def g", 5])
def test_ids_of_nine(id_: Any) -> None:
    """An id always maps to the same id; valid ones stay the same."""
    form = ChatForm(short_ids=True)
    messages = [ASKED, turn(tool_calls=[{**CALL, "id": id_}]), {**RESULT, "tool_call_id": id_}]
    found = form.write(messages)
    call, result = found[1]["tool_calls"][0]["id"], found[2]["tool_call_id"]
    assert call == result
    assert len(call) == 9
    assert call.isalnum()
    assert form.write(messages) == found
    assert form.write([turn(tool_calls=[{**CALL, "id": "abcdefgh1"}])])[0]["tool_calls"][0]["id"] == "abcdefgh1"


def test_calls_without_ids_are_told_apart() -> None:
    calls = [{"function": {"name": name, "arguments": "{}"}} for name in ("one", "two")]
    found = ChatForm().write(
        [turn(tool_calls=calls), {"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    )
    ids = [call["id"] for call in found[0]["tool_calls"]]
    assert len(set(ids)) == 2
    assert [(one["tool_call_id"], one["name"]) for one in found[1:]] == list(zip(ids, ("one", "two"), strict=True))


@pytest.mark.parametrize(
    "given, expected",
    [
        ("", {}), (None, {}), ("null", {}), ("{}", {}), ('{"a": "b"}', {"a": "b"}), ({"a": "b"}, {"a": "b"}),
        ('{"a": "b', {"unfinished": '{"a": "b'}), ("[1]", {"unfinished": "[1]"}), ([1], {"unfinished": "[1]"}),
        ('{"a": NaN}', {"unfinished": '{"a": NaN}'}),
    ],
)  # fmt: skip
def test_arguments(given: Any, expected: Any) -> None:
    messages = [turn(tool_calls=[{"id": "1", "function": {"name": "f", "arguments": given}}])]
    for form, made in ((ChatForm(), expected), (ChatForm(text_arguments=True), json.dumps(expected))):
        assert form.write(messages)[0]["tool_calls"][0]["function"]["arguments"] == made


def test_developers_and_the_system_between_turns() -> None:
    rule, late = {"role": "developer", "content": "rule"}, {"role": "system", "content": "late"}
    roles = [one["role"] for one in ChatForm().write([rule, ASKED, late])]
    assert roles == ["system", "user", "system"]
    form = ChatForm(late_system=False, developer=True)
    assert form.write([rule, ASKED, late])[1:] == [{"role": "user", "content": "What is here?\n\nlate"}]
    answer = {"role": "assistant", "content": "A chair."}
    found = form.write([ASKED, answer, late, ASKED])
    assert [one["role"] for one in found] == ["user", "assistant", "user"]
    assert found[-1]["content"] == "late\n\nWhat is here?"
    parts = {"role": "user", "content": [{"type": "image"}]}
    assert form.write([ASKED, answer, parts, late])[-1]["content"] == [
        {"type": "image"},
        {"type": "text", "text": "late"},
    ]


def test_a_message_without_content_is_empty() -> None:
    assert [one["content"] for one in ChatForm().write([{"role": role} for role in ("user", "assistant", "tool")])] == [
        ""
    ] * 3
    assert ChatForm(parts=True).write([{"role": "user", "content": "x"}])[0]["content"] == [
        {"type": "text", "text": "x"}
    ]
