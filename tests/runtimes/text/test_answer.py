"""Generated answers, read whole, in pieces and cut: calls are whole, and nothing is lost."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.errors import InvalidRequest
from edgespec.runtimes.text.answer import AnswerReader
from edgespec.runtimes.text.call_formats import FORMATS, AnswerShape, call_format, opened, thought_format, types_of
from edgespec.runtimes.text.call_syntax import Event
from tests.support.calls import TEMPLATES, TYPES, WRITE, Call, call

CASES = 30  # of each format
BEFORE = ("", "Let me look.\n", "Was ist <tool_cal> und [TOOL?\n\n", "서울\n", "a < b {c}\n")
AFTER = ("", "Done.", "<tool_calls are fine", "{not a call}")

Read = tuple[str, str, list[tuple[str, str, bool]]]  # thoughts, text, calls: name, arguments, whether it has ended


def collected(events: list[Event]) -> Read:
    """Put an answer together, as a client does."""
    parts = {"text": "", "reasoning": ""}
    calls: list[tuple[str, str, bool]] = []
    for event in events:
        if event.kind == "call":
            calls.append((event.text, "", False))
        elif event.kind in parts:
            parts[event.kind] += event.text
        else:
            name, arguments, _ = calls.pop()
            calls.append((name, arguments + event.text, event.kind == "called"))
    return parts["reasoning"], parts["text"], calls


def read(shape: AnswerShape, pieces: list[str], cut: bool = False) -> Read:
    reader = AnswerReader(shape)
    return collected([event for piece in pieces for event in reader.push(piece)] + reader.finish(cut))


def cut(text: str, draw: random.Random) -> list[str]:
    at = sorted(draw.sample(range(len(text) + 1), min(len(text), draw.randint(0, 40))))
    return [text[begin:end] for begin, end in zip([0, *at], [*at, len(text)], strict=True)]


def made(form: str, seed: int) -> tuple[str, str, list[Call]]:
    """Make an answer -> as it is written, what a client should get as text, and its calls."""
    draw = random.Random(f"{form} {seed}")
    calls = [call(draw) for _ in range(draw.randint(1, 3))]
    before, after = draw.choice(BEFORE), draw.choice(AFTER)
    if form in ("gpt-oss", "json", "llama3", "mistral", "phi"):
        after = ""  # their calls end the answer
    if form == "json":
        before = ""
    written = WRITE[form](calls)
    if form == "gpt-oss" and before:
        return f"<|channel|>commentary<|message|>{before}<|end|><|start|>assistant{written}", before.rstrip(), calls
    return before + written + after, before.rstrip() + after, calls


@pytest.mark.parametrize("form", WRITE)
@pytest.mark.parametrize("seed", range(CASES))
def test_every_call_is_read_whole_and_in_pieces(form: str, seed: int) -> None:
    written, text, calls = made(form, seed)
    shape, draw = AnswerShape(form, tools=TYPES), random.Random(seed)
    whole = read(shape, [written])
    assert whole[1] == text
    assert [(name, json.loads(arguments), ended) for name, arguments, ended in whole[2]] == [
        (name, arguments, True) for name, arguments in calls
    ]
    for _ in range(3):
        assert read(shape, cut(written, draw)) == whole
    assert read(shape, list(written)) == whole


@pytest.mark.parametrize("form", WRITE)
def test_an_answer_that_is_cut_anywhere_keeps_its_calls(form: str) -> None:
    """Finished calls are complete, the last call is a prefix, and there are no other calls."""
    for seed in (1, 2, 3):
        written, _, _ = made(form, seed)
        shape = AnswerShape(form, tools=TYPES)
        _, _, calls = read(shape, [written])
        seen = 0
        for end in range(len(written)):
            _, text, found = read(shape, [written[:end]])
            assert len(found) <= len(calls)
            *ended, last = found or [("", "", True)]
            assert ended == calls[: len(ended)]
            if found:
                name, arguments, _ = calls[len(ended)]
                assert last[0] == name
                assert arguments.startswith(last[1])
            assert len(found) >= seen
            seen = len(found)
            assert not found or "<|channel|>" not in text


@pytest.mark.parametrize("form", WRITE)
def test_no_piece_of_a_call_that_was_cut_is_text(form: str) -> None:
    """A call appears once its name is complete, first without arguments, then with the first of them."""
    for seed in (1, 2, 3):
        draw = random.Random(seed)
        written = WRITE[form]([call(draw), call(draw)])
        for forced in (True, False):
            shape = AnswerShape(form, tools=TYPES, forced=forced)
            _, _, calls = read(shape, [written])
            seen = 0
            for end in range(len(written)):
                if form == "gpt-oss" and re.search(r"<\|[^>]*$", f"{written[:end]}|"):
                    continue  # its marks are tokens, which come whole
                _, text, found = read(shape, [written[:end]], cut=True)
                assert read(shape, list(written[:end]), cut=True) == ("", text, found)
                for (name, arguments, whole), (its_name, its_arguments, ended) in zip(found, calls, strict=False):
                    assert (name, ended) == (its_name, True)
                    assert its_arguments == arguments if whole else its_arguments.startswith(arguments)
                assert all(whole for _, _, whole in found[:-1])
                assert seen <= len(found) <= len(calls)
                seen = len(found)
                if seen or forced:
                    assert text == ""
                else:  # as far as it may be the beginning of anything
                    assert written.startswith(text)
                    assert text in ("", "[", "{", '{"') or not any(f'"{key}"' in text for key in ("name", "arguments"))


@pytest.mark.parametrize(
    "form, text, calls, rest",
    [
        ("hermes", '{"name":', [], ""),
        ("hermes", '```json\n{\n  "name": "Ba', [], ""),
        ("hermes", '{"name": "Ada", "born": 18', [], '{"name": "Ada", "born": 18'),
        ("hermes", '{"name": "Al', [], '{"name": "Al'),
        ("hermes", '{"born": 18', [], '{"born": 18'),
        ("hermes", '{"name": "Bash", "argum', [("Bash", "")], ""),
        ("hermes", 'So:\n<tool_call>\n{"na', [], "So:"),
        ("hermes", '<tool_call>\n{"name": "Bash", "arguments": {"on": tr', [("Bash", '{"on": ')], ""),
        ("hermes", '<tool_call>\n{"name": "Bash", "arguments": {}}\n</tool', [("Bash", "{}")], ""),
        ("hermes", "the <tool_call> tag is", [], "the <tool_call> tag is"),
        ("qwen3-coder", "<tool_call>\n<function=get_wea", [], ""),
        ("qwen3-coder", "<tool_call>\n<function=Bash>\n<param", [("Bash", "")], ""),
        ("mistral", "[TOOL_CALLS]read_f", [], ""),
        ("mistral", "[TOOL_CALLS]read_file[ARGS]", [("read_file", "")], ""),
        ("lfm2", "<|tool_call_start|>[Bash(pa", [("Bash", "")], ""),
        ("llama3", "<|python_tag|>import nu", [], "<|python_tag|>import nu"),
        ("gpt-oss", "<|channel|>commentary to=functions.Bash<|message|>", [("Bash", "")], ""),
    ],
)  # fmt: skip
def test_where_a_call_is_cut(form: str, text: str, calls: list[tuple[str, str]], rest: str) -> None:
    for pieces in ([text], list(text)):
        _, said, found = read(AnswerShape(form, tools=TYPES), pieces, cut=True)
        assert said == rest
        assert [(name, arguments) for name, arguments, _ in found] == calls


@pytest.mark.parametrize("form", FORMATS)
@given(text=st.text(alphabet=st.characters(exclude_characters="{[`<"), max_size=60))
def test_a_text_without_marks_is_a_text(form: str, text: str) -> None:
    assert read(AnswerShape(form, tools=TYPES), list(text)) == ("", text, [])


@pytest.mark.parametrize(
    "form, text",
    [
        ("hermes", "the <tool_call> tag and <tool_call"),
        ("hermes", '<tool_call>\n{"nam": 3}\n</tool_call>'),
        ("hermes", '{"name": "unknown", "arguments": {"a": 1}}'),
        ("hermes", '{"name": "Bash"}'),
        ("hermes", "{{ name }} is a placeholder"),
        ("hermes", '```json\n{"name": "unknown", "arguments": {"a": 1}}\n```'),
        ("hermes", '```json\n{"a": 1}\n``` and more'),
        ("hermes", "```js\nlet a = {}\n```"),
        ("hermes", 'Such as\n```json\n{"name": "Bash", "arguments": {"n": 1}}\n```'),
        ("hermes", '<tool_call>\n{"name": "Bash", "arguments": [1]}'),
        ("qwen3-coder", "<function=Bash> is <function=x"),
        ("llama3", '{"name": "Bash", "age": 3}'),
        ("llama3", "<|python_tag|>print(1)"),
        ("mistral", "[TOOL_CALLS] is what it writes"),
        ("gemma", "<|tool_call>shout:Bash{}"),
        ("lfm2", "<|tool_call_start|>nothing"),
        ("json", "```json\n[1, 2]\n```"),
        ("json", "[1] is a list"),
        ("gpt-oss", "no head at all"),
    ],
)
def test_what_only_looks_like_a_call_is_text(form: str, text: str) -> None:
    for pieces in ([text], list(text)):
        assert read(AnswerShape(form, tools=TYPES), pieces) == ("", text, [])


@pytest.mark.parametrize(
    "form, text, calls, rest",
    [
        ("hermes", '<tool_call>{"arguments": {"n": 1}, "name": "Bash"}</tool_call>', [("Bash", {"n": 1})], ""),
        ("hermes", '<tool_call>{"name": "Bash", "arguments": "{\\"n\\": 1}"}</tool_call>', [("Bash", {"n": 1})], ""),
        ("hermes", '<tool_call>{"name": "Bash", "arguments": null}</tool_call>', [("Bash", {})], ""),
        ("hermes", '<tool_call>[{"name": "Bash"}, {"name": "Bash"}]</tool_call>', [("Bash", {})] * 2, ""),
        ("hermes", '<tool_call>{"name": "Bash", "arguments": {"n": 1}</tool_call>so', [("Bash", {"n": 1})], "so"),
        ("hermes", '<tool_call>{"name": "Bash", "arguments": {"n": 1}}}</tool_call>', [("Bash", {"n": 1})], ""),
        ("hermes", '<tool_call>{"name": "Bash", "arguments": {"p": "a\nb\\d"}}', [("Bash", {"p": "a\nb\\d"})], ""),
        ("hermes", '{"type": "function", "function": {"name": "Bash", "arguments": {}}}', [("Bash", {})], ""),
        ("hermes", '```json\n{"name": "Bash", "arguments": {"n": 1}}\n```', [("Bash", {"n": 1})], ""),
        ("hermes", '```json\n[{"name": "Bash", "arguments": {}}]\n```\n', [("Bash", {})], ""),
        ("llama3", '```json\n{"name": "Bash", "parameters": {"n": 1}}\n```', [("Bash", {"n": 1})], ""),
        ("hermes", '{{"name": "Bash", "arguments": {"n": 1}}}', [("Bash", {"n": 1})], ""),
        ("hermes", '<tool_call>\n{{"name": "Bash", "arguments": {"n":1}}}\n</tool_call>so', [("Bash", {"n": 1})], "so"),
        ("llama3", '{"name": "Bash", "parameters": {"on": True}}', [("Bash", {"on": True})], ""),
        ("llama3", '<|python_tag|>brave.call(query="x")', [("brave", {"query": "x"})], ""),
        ("mistral", '[TOOL_CALLS]Bash[CALL_ID]abc123XYZ[ARGS]{"n": 1}', [("Bash", {"n": 1})], ""),
        ("mistral", '[TOOL_CALLS]Bash{"n": 1}', [("Bash", {"n": 1})], ""),
        ("qwen3-coder", "<function=Bash><parameter=n>7</parameter></function>", [("Bash", {"n": 7})], ""),
        ("qwen3-coder", '<function=Bash>{"n": 7}</function>', [("Bash", {"n": 7})], ""),
        ("qwen3-coder", '<tool_call>{"name": "Bash", "arguments": {}}</tool_call>', [("Bash", {})], ""),
        ("lfm2", "<|tool_call_start|>[Bash(path='it's me', n=1)]", [("Bash", {"path": "it's me", "n": 1})], ""),
        ("lfm2", '<|tool_call_start|>[{"name": "Bash", "arguments": {}}]<|tool_call_end|>', [("Bash", {})], ""),
        ("json", '```json\n[{"name": "Bash", "arguments": {}}]\n```', [("Bash", {})], ""),
        ("gpt-oss", '<|channel|>commentary to=python<|message|>print(1)<|end|>', [], "print(1)"),
        ("gpt-oss", ' to=functions.Bash<|channel|>commentary<|message|>{}', [("Bash", {})], ""),
    ],
)  # fmt: skip
def test_calls_as_small_models_write_them(form: str, text: str, calls: list[Call], rest: str) -> None:
    for pieces in ([text], list(text)):
        _, said, found = read(AnswerShape(form, tools=TYPES), pieces)
        assert said == rest
        assert [(name, json.loads(arguments)) for name, arguments, _ in found] == calls


def test_what_breaks_a_call_off_is_text_again() -> None:
    text = '<tool_call>{"name": "Bash", "arguments": {"n": 1,, "path": 2}}</tool_call>'
    assert read(AnswerShape("hermes"), list(text)) == (
        "", ', "path": 2}}</tool_call>', [("Bash", '{"n": 1,', True)])  # fmt: skip


@pytest.mark.parametrize(
    "form, thoughts, text, expected",
    [
        ("hermes", "think", "<think>\nhm <b>\n</think>\n\nYes", ("hm <b>", "Yes")),
        ("hermes", "think", "Yes <think> no", ("", "Yes <think> no")),
        ("hermes", "think", "<thinking> aloud", ("", "<thinking> aloud")),
        (None, "think", "\n<think>hm</think>Yes\n", ("hm", "Yes\n")),
        (None, "think", "<think>cut", ("cut", "")),
        (None, "mistral", "[THINK]hm[/THINK]Yes", ("hm", "Yes")),
        ("gemma", "gemma", "<|channel>thought\nhm\n<channel|>Yes", ("hm", "Yes")),
        (None, "gpt-oss", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes",
         ("hm", "Yes")),
    ],
)  # fmt: skip
def test_thoughts_are_told_apart(form: str | None, thoughts: str, text: str, expected: tuple[str, str]) -> None:
    for pieces in ([text], list(text)):
        assert read(AnswerShape(form, thoughts), pieces)[:2] == expected


def test_a_thought_that_the_prompt_began() -> None:
    shape = AnswerShape("hermes", "think", opened=True, tools=TYPES)
    text = 'hm <tool_call>\n</think>\n\nSo:\n<tool_call>\n{"name": "Bash", "arguments": {}}\n</tool_call>'
    for pieces in ([text], list(text)):
        assert read(shape, pieces) == ("hm <tool_call>", "So:", [("Bash", "{}", True)])
    assert opened("<|im_start|>assistant\n<think>\n", "think")
    assert not opened("<|im_start|>assistant\n<think>\n\n</think>\n\n", "think")


@pytest.mark.parametrize("form", TEMPLATES)
def test_a_template_says_its_format(form: str) -> None:
    assert call_format(TEMPLATES[form]) == form
    with pytest.raises(InvalidRequest, match="format of calls"):
        AnswerShape(f"{form}x")


def test_a_template_says_how_its_model_thinks() -> None:
    assert thought_format("{% if '</think>' in content %}") == "think"
    assert thought_format(TEMPLATES["gpt-oss"]) == "gpt-oss"
    assert thought_format(TEMPLATES["hermes"]) is None


@pytest.mark.parametrize(
    "schema, type_",
    [({"type": "string"}, "string"), ({"enum": ["a", "b"]}, "string"), ({"const": "a"}, "string"), ({}, ""), (3, ""),
     ({"type": ["string", "null"]}, ""), ({"enum": ["a", 1]}, "")],
)  # fmt: skip
def test_types_of_parameters(schema: Any, type_: str) -> None:
    tool = {"function": {"name": "f", "parameters": {"properties": {"x": schema}}}}
    assert types_of([tool]) == {"f": {"x": type_}}
