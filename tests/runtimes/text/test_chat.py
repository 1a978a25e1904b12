"""Templates give what transformers' ``apply_chat_template`` gives: text, tokens and refusals."""

from __future__ import annotations

import enum
import importlib.util
import json
import os
import shutil
import socket
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from edgespec.errors import BundleError, InvalidRequest
from edgespec.runtimes.text.chat import render
from edgespec.runtimes.text.codec import TextCodec
from tests.support.chats import CONVERSATIONS, FOLDER, REFERENCE, TEMPLATES, one

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
ASKED = [{"role": "user", "content": "a"}]


@pytest.fixture(scope="module")
def codecs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextCodec]:
    """Every template in a model's folder, as transformers writes it."""
    made = {}
    for name in TEMPLATES:
        folder = tmp_path_factory.mktemp(name)
        shutil.copyfile(FOLDER / "tokenizer.json", folder / "tokenizer.json")
        shutil.copyfile(FOLDER / f"{name}.jinja", folder / "chat_template.jinja")
        (folder / "tokenizer_config.json").write_text(json.dumps(NAMES), "utf-8")
        made[name] = TextCodec(folder)
    return made


def how(chat: dict[str, Any]) -> dict[str, Any]:
    return {
        "options": chat["options"],
        "generation_prompt": chat.get("generation_prompt", True),
        "continue_final": chat.get("continue_final", False),
    }


def test_the_reference_is_of_these_files() -> None:
    assert sorted(REFERENCE) == TEMPLATES
    assert {name for made in REFERENCE.values() for name in made} == set(CONVERSATIONS)
    refused = [made for found in REFERENCE.values() for made in found.values() if "error" in made]
    assert 20 < len(refused) < len(TEMPLATES) * len(CONVERSATIONS) / 3


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_conversation_is_written_as_by_transformers(codecs: dict[str, TextCodec], template: str, name: str) -> None:
    chat, expected = CONVERSATIONS[name], REFERENCE[template][name]
    before = json.dumps(chat)
    if "error" in expected:
        with pytest.raises(InvalidRequest) as caught:
            codecs[template].write_chat(chat["messages"], chat.get("tools"), **how(chat))
        assert expected["error"] in str(caught.value)
        return
    assert codecs[template].write_chat(chat["messages"], chat.get("tools"), **how(chat)) == expected["text"]
    assert codecs[template].chat(chat["messages"], chat.get("tools"), **how(chat)) == expected["ids"]
    assert json.dumps(chat) == before


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("template", TEMPLATES)
def test_the_transformers_that_is_installed_agrees(template: str) -> None:
    text = (FOLDER / f"{template}.jinja").read_text("utf-8")
    assert {name: one(text, chat) for name, chat in CONVERSATIONS.items()} == REFERENCE[template]


def test_the_date_is_today() -> None:
    today = datetime.now().strftime("%d %b %Y")
    text = render((FOLDER / "llama31.jinja").read_text("utf-8"), ASKED, names=NAMES)
    assert today in text or datetime.now().strftime("%d %b %Y") in text


# -- which template ----------------------------------------------------------------------------------------------------

Folder = Callable[..., TextCodec]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    def get(config: dict[str, Any], **files: str) -> TextCodec:
        shutil.copyfile(FOLDER / "tokenizer.json", tmp_path / "tokenizer.json")
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
        for name, text in files.items():
            inside = tmp_path if name == "chat_template" else tmp_path / "additional_chat_templates"
            inside.mkdir(exist_ok=True)
            (inside / f"{name}.jinja").write_text(text, "utf-8")
        return TextCodec(tmp_path)

    return get


NAMED = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]


@pytest.mark.parametrize(
    "config, files, plain, with_tools",
    [
        ({"chat_template": "one"}, {}, "one", "one"),
        ({"chat_template": NAMED}, {}, "plain", "tools"),
        ({"chat_template": NAMED[1:]}, {}, None, "tools"),
        ({"chat_template": NAMED}, {"chat_template": "file"}, "file", "file"),
        ({"chat_template": "one"}, {"chat_template": "file", "tool_use": "apart"}, "file", "apart"),
        ({}, {"tool_use": "apart", "rag": "no"}, None, "apart"),
        ({}, {}, None, None),
    ],
)
def test_which_template_is_taken(folder: Folder, config: Any, files: Any, plain: Any, with_tools: Any) -> None:
    codec = folder(config, **files)
    for tools, expected in ((None, plain), ([{}], with_tools)):
        if expected is None:
            with pytest.raises(InvalidRequest, match="no chat template"):
                codec.write_chat(ASKED, tools)
        else:
            assert codec.write_chat(ASKED, tools) == expected
    assert (codec.chat_template is None) == (plain is None)


def test_templates_without_a_default_are_named(folder: Folder) -> None:
    with pytest.raises(InvalidRequest, match="it has templates named tool_use"):
        folder({"chat_template": NAMED[1:]}).chat(ASKED)


def test_a_template_that_is_no_text(folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BundleError, match=r"chat_template\.jinja: not UTF-8"):
        folder({})


@pytest.mark.skipif(os.name != "posix", reason="pipes and sockets are POSIX's")
@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/a.jinja"])
@pytest.mark.parametrize("kind", ["pipe", "link to itself", "socket", "device"])
def test_a_template_that_is_no_file_is_refused_at_once(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "socket":
        monkeypatch.chdir(file.parent)  # paths of sockets are short
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(file.name)
    else:
        file.symlink_to(file if kind == "link to itself" else Path("/dev/zero"))
    with pytest.raises(BundleError, match=rf"{file.name}: cannot be read"):
        folder({})


@pytest.mark.parametrize(
    "config, others, bos",
    [
        ({"bos_token": "<s>"}, {}, "<s>"),
        ({"bos_token": {"content": "<s>", "lstrip": False}}, {}, "<s>"),
        ({"bos_token": None}, {"bos_token": "<s>"}, None),
        ({}, {"bos_token": {"content": "<s>"}}, "<s>"),
        ({}, {}, None),
    ],
)
def test_where_special_tokens_are_named(folder: Folder, tmp_path: Path, config: Any, others: Any, bos: Any) -> None:
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(others), "utf-8")
    codec = folder(config, chat_template="{{ bos_token is defined }} {{ bos_token }}")
    assert codec.special("bos_token") == bos
    assert codec.write_chat(ASKED) == f"{bos is not None} {bos or ''}"


# -- inputs of a template ---------------------------------------------------------------------------------------------


class Kind(str, enum.Enum):
    USER = "user"


class Size(enum.IntEnum):
    TWO = 2


def test_templates_see_plain_data_only() -> None:
    message = {"role": Kind.USER, "content": "x", "size": Size.TWO, "pair": (1, [2.5])}
    text = render("{{ messages[0] }} {{ messages[0].role.value is defined }}", [message])
    assert text == "{'role': 'user', 'content': 'x', 'size': 2, 'pair': (1, [2.5])} False"


@pytest.mark.parametrize(
    "messages, more, message",
    [
        ([], {}, "at least one message"),
        (["hello"], {}, "expected messages as dicts"),
        ([{"role": "user", "content": object()}], {}, "a object cannot be shown"),
        ([{"role": "user", "content": b"x"}], {}, "a bytes cannot be shown"),
        (ASKED, {"tools": [len]}, "builtin_function_or_method cannot be shown"),
        (ASKED, {"tools": ["x"]}, "expected tools as JSON schemas"),
        (ASKED, {"options": {"messages": []}}, "'messages' is no option"),
        (ASKED, {"options": {"add_generation_prompt": False}}, "'add_generation_prompt' is no option"),
        ([{"role": "assistant"}], {"continue_final": True}, "no text that an answer could continue"),
        ([{"role": "assistant", "content": [{"type": "image"}]}], {"continue_final": True}, "no text that an answer"),
    ],
)
def test_what_is_no_conversation(messages: Any, more: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        render("{{ messages }}", messages, **more)


def test_a_template_that_leaves_the_last_message_out_cannot_go_on_with_it() -> None:
    with pytest.raises(InvalidRequest, match="does not write the last message"):
        render("{{ messages[0].role }}", ASKED, continue_final=True)
    blocks = [{"role": "assistant", "content": [{"type": "text", "text": "so "}, {"type": "image"}]}]
    assert render("{{ messages[0].content[0].text }} end", blocks, continue_final=True) == "so "


@pytest.mark.parametrize(
    "template",
    [
        "{% set n = namespace(__class__=1) %}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}{{ n }}",
        "{% set n = namespace(_x=1) %}",
        "{{ dict.__class__.__base__.__subclasses__() }}",
        "{{ dict.__init__.__globals__ }}",
        "{{ namespace.__globals__.json }}",
        "{% generation %}{{ self.__init__.__globals__ }}{% endgeneration %}",
        "{% generation %}",
        "{{ [1] | tojson(indent=object()) }}",
        "{{ raise_exception | tojson }}",
    ],
)
def test_what_templates_must_not_do(template: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template refuses"):
        render(template, ASKED)
