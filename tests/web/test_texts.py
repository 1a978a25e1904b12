"""Tokenizers and chat templates of the npm package: Python's tokens, or an error."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from edgespec.runtimes.text.codec import TextCodec
from tests.support import golden
from tests.support.chats import CONVERSATIONS, REFERENCE, TEMPLATES, model_folder

pytestmark = pytest.mark.nightly
SCRIPT = Path(__file__).with_name("texts.mjs")
INEXACT = {"unigram", "unigram_folded", "unigram_bytes", "unigram_across_words"}  # the library differs from Python's
TRIMMED = "bpe_trimmed"  # a text of blanks alone has a token in the library
TOO_NEW = {"features"}  # it has filters and methods that the library lacks

Ask = Callable[[list[dict[str, Any]]], list[Any]]


@pytest.fixture(scope="module")
def ask(package: Path, node: str) -> Ask:
    def go(folders: list[dict[str, Any]]) -> list[Any]:
        asked = json.dumps({"package": str(package), "folders": folders}, default=str)
        done = subprocess.run([node, str(SCRIPT)], input=asked, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]
        found: list[Any] = json.loads(done.stdout)
        return found

    return go


@pytest.fixture
def folder_of(tmp_path: Path) -> Callable[[str], Path]:
    """Make a model's folder with a template."""
    return partial(model_folder, tmp_path)


def test_tokenizers_of_every_kind_as_in_python(ask: Ask, tmp_path: Path) -> None:
    given = golden.tokenizers(tmp_path)
    folders = [{"folder": one["folder"], "texts": [case["text"] for case in one["cases"]],
                "ids": [case["ids"] for case in one["decoded"]]} for one in given]  # fmt: skip
    exact = set()
    for one, found in zip(given, ask(folders), strict=True):
        kind = Path(one["folder"]).name
        if kind in INEXACT or "error" in found:
            assert "ids: true" in found["error"], kind
            continue
        exact.add(kind)
        for case, ids in zip(one["cases"], found["texts"], strict=True):
            if not (kind == TRIMMED and not case["text"].strip(" \u2581")):
                assert ids == case["ids"], (kind, case["text"])
        assert found["decoded"] == [case["text"] for case in one["decoded"]], kind
    assert exact >= {"byte_level", "llama", "no_prefix"}


def given_to_page(chat: dict[str, Any]) -> dict[str, Any]:
    """Return a conversation with its options, as calls of the package have them."""
    made = {"messages": chat["messages"], **chat.get("options", {})}
    if chat.get("tools") is not None:
        made["tools"] = chat["tools"]
    if chat.get("continue_final"):
        return made | {"continueFinal": True}
    return made | ({"add_generation_prompt": chat["generation_prompt"]} if "generation_prompt" in chat else {})


def test_conversations_as_in_transformers(ask: Ask, folder_of: Callable[[str], Path]) -> None:
    chats = [given_to_page(chat) for chat in CONVERSATIONS.values()]
    found = ask([{"folder": folder_of(template), "chats": chats} for template in TEMPLATES])
    for template, one in zip(TEMPLATES, found, strict=True):
        compared = 0
        for (name, chat), ids in zip(CONVERSATIONS.items(), one["chats"], strict=True):
            contents = [message.get("content") for message in chat["messages"]]
            expected = REFERENCE[template][name]
            if template in TOO_NEW or not all(isinstance(text, str) or text is None for text in contents):
                assert "error" in ids, (template, name)
            elif "error" not in expected:
                assert ids == expected["ids"], (template, name)
                compared += 1
            elif None not in contents:  # which is an empty text here
                assert expected["error"] in ids["error"], (template, name)
        assert template in TOO_NEW or compared > 10, template


@pytest.mark.parametrize("template", ["qwen25", "llama31", "gemma"])
def test_special_tokens_in_messages_are_text(ask: Ask, folder_of: Callable[[str], Path], template: str) -> None:
    folder, drawn = folder_of(template), random.Random(len(template))
    codec, compared = TextCodec(folder), 0
    words = [*sorted(codec.control.words), "<|im_", "hello", " ", "\n", "<", "|>", "\ue000", "\\ue001", '"', "<think>"]
    conversations = [
        [
            {"role": role, "content": "".join(drawn.choices(words, k=drawn.randrange(1, 6)))}
            for role in ("user", "assistant", "user")
        ]
        for _ in range(150)
    ]
    asked = [{"messages": one, "continueFinal": more} for one in conversations for more in (False, True)]
    (found,) = ask([{"folder": folder, "chats": asked}])
    for at, messages in enumerate(conversations):
        assert found["chats"][2 * at] == codec.chat(messages), messages
        assert found["chats"][2 * at + 1] == codec.chat(messages, continue_final=True), messages
        compared += any(word in one["content"] for one in messages for word in codec.control.words)
    assert compared > 50


def test_what_is_refused(ask: Ask, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("qwen25")
    said = {"role": "user", "content": "Hello"}
    blocks = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    chats = [
        {"messages": []},
        {"messages": [blocks]},
        {"messages": [said, {"role": "assistant"}], "continueFinal": True},
    ]
    (found,) = ask([{"folder": folder, "chats": chats}])
    for one, words in zip(found["chats"], ("at least one message", "expected a text", "no text"), strict=True):
        assert words in one["error"]
    (folder / "chat_template.jinja").write_text("{% for %}", "utf-8")
    (found,) = ask([{"folder": folder}])
    assert "chat template" in found["error"]
