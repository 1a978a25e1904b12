"""``edgespec run --chat``."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from edgespec.engine.loading import load
from tests.cli.conftest import Command
from tests.conftest import PROMPTS, THREADS
from tests.support import hf

SHORT = ("--max-new-tokens", 24)
TWICE = ("--prompt", "how long?", "--prompt", "and then?")


def test_a_conversation_of_two_turns(command: Command, chatty: Path) -> None:
    more = ("--max-new-tokens", 8, "--system", "be brief")
    result = command("run", chatty, "--chat", *more, "--stats", *TWICE)
    assert result.code == 0
    (_, first), (of, second) = re.findall(r"prompt +(\d+) tokens, (\d+) of them still in the cache", result.err)
    assert int(first) == 0 < int(second) < int(of)
    answers = load(chatty, threads=THREADS)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "how long?"}]
    answer = answers.chat(messages, max_new_tokens=8, method="ar").text
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "and then?"}]
    assert result.out == f"{answer}\n{answers.chat(messages, max_new_tokens=8, method='ar').text}\n"


def test_a_prompt_to_a_chat_model_says_how_to_chat(command: Command, chatty: Path, demo: Path) -> None:
    hint = "this is a chat model; to talk to it: edgespec run "
    assert command("run", chatty, "--prompt", "how", *SHORT).err.startswith(hint)
    assert hint not in command("run", demo, "--prompt", "how", *SHORT).err


def test_a_chat_without_a_question(command: Command, chatty: Path) -> None:
    result = command("run", chatty, "--chat", stdin="")
    result.refused(1, "the question is empty", "hint: ")
    command("run", chatty, "--chat", stdin=None).refused(1, "stdin is closed")


def test_chat_without_room(command: Command, chatty: Path) -> None:
    slid = command("run", chatty, "--chat", "--context", 60, "--prompt", "a", "--prompt", "b")
    assert slid.code == 0
    assert "the context is full: the oldest 2 messages are not seen now" in slid.err
    never = command("run", chatty, "--chat", "--context", 10, stdin="a\n")
    assert never.code == 1
    assert "the context 10" in never.err


def test_a_session_goes_on_in_another_process(command: Command, chatty: Path, tmp_path: Path) -> None:
    file, more = tmp_path / "talk.session", ("--max-new-tokens", 8, "--stats")
    begin = ("run", chatty, "--chat", *more, "--system", "be brief")
    whole = command(*begin, *TWICE)
    first = command(*begin, "--session", file, stdin="how long?\n")
    second = command("run", chatty, "--chat", *more, "--session", file, stdin="and then?\n")
    assert (first.code, second.code) == (0, 0)
    assert first.out + second.out == whole.out
    ((of, held),) = re.findall(r"prompt +(\d+) tokens, (\d+) of them still in the cache", second.err)
    assert int(held) > int(of) // 2
    other = command("run", chatty, "--chat", "--system", "be long", "--session", file, stdin="hi")
    other.refused(1, "begun with another --system")


def test_a_system_message_is_computed_once(command: Command, chatty: Path, tmp_path: Path) -> None:
    file, system = tmp_path / "system.session", ("--system", "be brief, be kind and be quick, whatever they ask")
    with load(chatty, threads=THREADS) as engine:
        engine.conversation([{"role": "system", "content": system[1]}]).save(file)
    result = command("run", chatty, "--chat", *SHORT, "--stats", *system, "--session", file, stdin="how long?\n")
    ((of, held),) = re.findall(r"prompt +(\d+) tokens, (\d+) of them still in the cache", result.err)
    assert int(held) > int(of) // 2
    assert result.out == command("run", chatty, "--chat", *SHORT, *system, stdin="how long?\n").out


def test_a_prompt_finds_its_session(command: Command, demo: Path, tmp_path: Path) -> None:
    file, asked = tmp_path / "prompt.session", ("run", demo, "--prompt", PROMPTS[1], *SHORT, "--json", "--session")
    first, second = command(*asked, file).json, command(*asked, file).json
    assert first["tokens"] == second["tokens"]
    assert first["stats"]["reused_tokens"] == 0 < second["stats"]["reused_tokens"]
    file.write_bytes(b"something else")
    command(*asked, file).refused(1, "is no session file")
    assert file.read_bytes() == b"something else"


# -- one question ------------------------------------------------------------------------------------------------------


def test_one_question_by_an_option_by_a_pipe_and_as_json(command: Command, chatty: Path) -> None:
    question = "how long?\n\nand what then?"
    given = command("run", chatty, "--chat", "--prompt", question, *SHORT)
    assert given.code == 0
    answer = load(chatty, threads=THREADS).chat([{"role": "user", "content": question}], max_new_tokens=24)
    assert given.out == f"{answer.text}\n"
    for stdin in (question, f"{question}\n"):  # `echo` ends a line
        assert command("run", chatty, "--chat", *SHORT, stdin=stdin).out == given.out
        assert command("run", chatty, "--chat", "--prompt", "-", *SHORT, stdin=stdin).out == given.out
    made = command("run", chatty, "--chat", *SHORT, "--json", stdin=f"{question}\n").json
    assert (made["prompt"], made["text"]) == (question, answer.text)
    command("run", chatty, "--chat", "--prompt", " ").refused(1, "the question is empty", "hint: ")


def test_an_answer_goes_on_until_it_ends_or_the_context_is_full(command: Command, chatty: Path) -> None:
    engine = load(chatty, threads=THREADS)
    answer = engine.chat([{"role": "user", "content": "how long?"}])
    assert answer.finish == "context"
    assert len(answer.tokens) > 128
    made = command("run", chatty, "--chat", "--prompt", "how long?")
    assert (made.code, made.out) == (0, f"{answer.text}\n")
    assert f"note: cut after {len(answer.tokens)} tokens: the context of {engine.context} tokens is full" in made.err


def test_a_structured_answer_that_is_cut_exits_with_3(command: Command, chatty: Path) -> None:
    ask = ("run", chatty, "--chat", "--prompt", "how long?", "--regex", "[ab]{40}")
    whole = command(*ask)
    assert (whole.code, len(whole.out)) == (0, 41)
    for more in ((), ("--json",)):
        cut = command(*ask, "--max-new-tokens", 2, *more)
        assert cut.code == 3
        assert "before the grammar was complete" in cut.err


def test_the_next_command_that_is_named_works(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hf.write_checkpoint(tmp_path / "a b", hf.CONFIGS["llama_tied_gqa"], 3, chat_template=hf.CHAT_TEMPLATE)
    for more in ((), ("--recipe", "laptop-small-chat", "--method", "ngram")):
        made = command("export", "a b", "-o", "c d", "--overwrite", *more)
        assert made.code == 0, made.err
        words = next_words(made.out)
        assert words[-1] == "--chat"
        assert command(*words, stdin="how long?\n").code == 0
    said = command("bench", "c d", "--limit", 1, "--repeats", 1, "--max-new-tokens", 4).out
    assert command(*next_words(said), stdin="how long?\n").code == 0


def next_words(said: str) -> list[str]:
    """The command that a command names as the next one."""
    (line,) = re.findall(r"^next: edgespec (.*)$", said, re.MULTILINE)
    return shlex.split(line)
