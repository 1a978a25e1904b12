"""Commands of a chat, and Markdown that is shown while it streams."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from edgespec.cli.chat import COMMANDS, Chat
from edgespec.cli.markdown import MarkdownStream, split_blocks
from edgespec.decoding.settings import Settings
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from tests.conftest import THREADS

Say = Callable[[str], str]


@pytest.fixture(scope="module")
def chat_engine(chatty: Path) -> Engine:
    return load(chatty, threads=THREADS)


@pytest.fixture
def chat(chat_engine: Engine) -> Chat:
    settings = Settings(max_new_tokens=6)
    return Chat(chat_engine, chat_engine.conversation([], settings), settings, set())


@pytest.fixture
def say(chat: Chat, capsys: pytest.CaptureFixture[str]) -> Say:
    """Type a line -> the output."""

    def typed(text: str) -> str:
        capsys.readouterr()
        chat.take(text)
        shown = capsys.readouterr()
        return shown.out + shown.err

    return typed


def roles(chat: Chat) -> list[str]:
    return [message["role"][0] for message in chat.conversation.messages]


@pytest.mark.parametrize("line, part", [
    ("/help", "/regenerate"),
    ("/halp", "did you mean '/help'"),
    ("/system", "no system message"),
    ("/regenerate", "nothing was asked yet"),
    ("/undo", "nothing was asked yet"),
    ("/bench", "nothing was asked yet"),
    ("/save", "expected a file"),
    ("/load", "expected a file"),
    ("/load nothing.session", "nothing.session"),
    ("/method magic", "magic"),
    ("/set temprature 1", "did you mean 'temperature'"),
    ("/set temperature hot", "temperature"),
    ("/set gamma 0", "gamma is 0"),
    ("/set threshold 3", "threshold"),
    ("/set drafts maybe", "expected on or off"),
    ("/set drafts", "/set drafts: expected on or off"),
    ("/set temperature", "0.0"),
    ("/tokens", "0 of "),
])  # fmt: skip
def test_what_is_wrong_or_empty_is_said_and_the_chat_goes_on(chat: Chat, say: Say, line: str, part: str) -> None:
    before = chat.settings
    assert part in say(line)
    assert (chat.settings, chat.ended, roles(chat)) == (before, False, [])


def test_settings_reach_the_next_answer(chat: Chat, say: Say) -> None:
    for line in ("/set temperature 0.7", "/set seed=5", "/set max-new-tokens 3", "/set branch 2,1", "/method ngram"):
        assert say(line) == ""
    shown = say("/set")
    assert "0.7" in shown
    say("how long?")
    settings = chat.conversation.settings
    assert (settings.sampling.temperature, settings.sampling.seed, settings.method) == (0.7, 5, "ngram")
    assert (settings.max_new_tokens, settings.drafts.branch) == (3, (2, 1))
    assert "* ngram" in say("/method")
    say("/set stats on")
    assert "acceptance" in say("and then?")
    for line in ("/set temperature default", "/set max-new-tokens default", "/set seed default"):
        assert say(line) == ""
    assert (chat.settings.sampling, chat.settings.max_new_tokens) == (chat.engine.defaults.sampling, None)


def test_an_answer_is_undone_and_made_again(chat: Chat, say: Say, chat_engine: Engine) -> None:
    say("/system be brief")
    say("one?")
    say("two?")
    first = chat.conversation.messages[-1]["content"]
    assert "greedy decoding gives the same answer" in say("/regenerate")
    assert (roles(chat), chat.conversation.messages[-1]["content"]) == (list("suaua"), first)
    say("/set temperature 1.5")
    say("/set seed 1")
    say("/regenerate")
    assert chat.settings.sampling.seed == 2
    drawn = chat_engine.chat(chat.conversation.messages[:-1], max_new_tokens=6, temperature=1.5, seed=2)
    assert chat.conversation.messages[-1]["content"].strip() == drawn.text.strip()
    assert "two?" in say("/undo")
    assert roles(chat) == list("sua")
    say("/reset")
    assert chat.conversation.messages == [{"role": "system", "content": "be brief"}]


def test_a_refused_question_keeps_the_last_answer(chat: Chat, say: Say) -> None:
    say("one?")
    kept = list(chat.conversation.messages)
    chat.settings = chat.settings.changed(method="magic")
    assert "magic" in say("/regenerate")
    assert chat.conversation.messages == kept


def test_a_saved_conversation_goes_on(chat: Chat, say: Say, tmp_path: Path) -> None:
    say("one?")
    kept = list(chat.conversation.messages)
    file = tmp_path / "talk.session"
    assert "saved 2 messages" in say(f"/save {file}")
    say("/reset")
    assert "you> one?" in say(f"/load {file}")
    assert chat.conversation.messages == kept
    assert list(chat.complete(f"/load {tmp_path}/ta")) == [str(file)]


def test_methods_are_compared_on_the_last_question(chat: Chat, say: Say) -> None:
    say("one?")
    kept = list(chat.conversation.messages)
    shown = say("/bench")
    assert "ngram" in shown
    assert "3/3" in shown
    assert chat.conversation.messages == kept


def test_words_are_completed(chat: Chat) -> None:
    assert list(chat.complete("/re")) == ["/regenerate", "/reset"]
    assert list(chat.complete("/method ng")) == ["ngram"]
    assert "top_k" in chat.complete("/set top")
    assert list(chat.complete("/set top_k 1")) == []
    assert list(chat.complete("hello")) == []
    assert set(chat.complete("/")) == set(COMMANDS)


# -- Markdown --------------------------------------------------------------------------------------------------------

TEXT = (
    "# A *title*\n\nLine one,\nline two.\n\n- a\n- b\n\n```python\nx = 1\n\ny = 2\n```\n"
    "after `code`\n\n| a | b |\n|---|---|\n| 1 | 2 |\n"
)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_blocks_end_where_they_end_however_a_text_comes(size: int) -> None:
    blocks, rest = [], ""
    for at in range(0, len(TEXT), size):
        found, rest = split_blocks(rest + TEXT[at : at + size])
        blocks += found
    assert blocks == [
        "# A *title*", "Line one,\nline two.", "- a\n- b", "```python\nx = 1\n\ny = 2\n```", "after `code`"
    ]  # fmt: skip
    assert rest == "| a | b |\n|---|---|\n| 1 | 2 |\n"


def test_markdown_is_rendered_once_and_whole() -> None:
    console = Console(file=io.StringIO(), force_terminal=False, width=60)
    with MarkdownStream(console) as blocks:
        for at in range(len(TEXT)):
            blocks.feed(TEXT[at])
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "```" not in shown
    assert "**" not in shown
    lines = [line.strip() for line in shown.splitlines()]
    for wanted in ("Line one,", "line two.", "x = 1", "y = 2", "after code"):
        assert lines.count(wanted) == 1, wanted
