"""``edgespec run --chat``."""

from __future__ import annotations

import re
from pathlib import Path

from edgespec.engine.loading import load
from tests.cli.conftest import Command
from tests.conftest import THREADS

SHORT = ("--max-new-tokens", 24)


def test_a_conversation_of_two_turns(command: Command, chatty: Path) -> None:
    more = ("--max-new-tokens", 8, "--system", "be brief")
    result = command("run", chatty, "--chat", *more, "--stats", stdin="how long?\nand then?\n")
    assert result.code == 0
    (_, first), (of, second) = re.findall(r"prompt +(\d+) tokens, (\d+) of them still in the cache", result.err)
    assert int(first) == 0 < int(second) < int(of)
    answers = load(chatty, threads=THREADS)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "how long?"}]
    answer = answers.chat(messages, max_new_tokens=8, method="ar").text
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "and then?"}]
    assert result.out == f"{answer}\n{answers.chat(messages, max_new_tokens=8, method='ar').text}\n"


def test_commands_of_a_chat(command: Command, chatty: Path) -> None:
    more = ("run", chatty, "--chat", "--max-new-tokens", 8, "--system", "be brief")
    once = command(*more, stdin="how long?\n")
    twice = command(*more, "--stats", stdin="how long?\n/reset\nhow long?\n/exit\nnever asked\n")
    assert twice.code == 0
    assert twice.out == 2 * once.out  # what was said is forgotten, the system message is not
    shown = command(*more, stdin="/help\n/halp\n")
    assert (shown.code, shown.out.strip()) == (0, "")
    assert shown.err.count("/reset") == 2
    assert "no command /halp" in shown.err


def test_a_prompt_to_a_chat_model_says_how_to_chat(command: Command, chatty: Path, demo: Path) -> None:
    hint = "this is a chat model; to talk to it: edgespec run "
    assert command("run", chatty, "--prompt", "how", *SHORT).err.startswith(hint)
    assert hint not in command("run", demo, "--prompt", "how", *SHORT).err


def test_chat_ends_with_its_input(command: Command, chatty: Path) -> None:
    result = command("run", chatty, "--chat", stdin="")
    assert (result.code, result.out.strip()) == (0, "")
    command("run", chatty, "--chat", stdin=None).refused(1, "stdin is closed")


def test_chat_without_room(command: Command, chatty: Path) -> None:
    slid = command("run", chatty, "--chat", "--context", 60, stdin="a\nb\n")
    assert slid.code == 0
    assert "the context is full: the oldest 2 messages are not seen now" in slid.err
    never = command("run", chatty, "--chat", "--context", 10, stdin="a\nb\n")
    assert never.code == 1
    assert "the context 10" in never.err


def test_a_session_goes_on_in_another_process(command: Command, chatty: Path, tmp_path: Path) -> None:
    file, more = tmp_path / "talk.session", ("--max-new-tokens", 8, "--stats")
    begin = ("run", chatty, "--chat", *more, "--system", "be brief")
    whole = command(*begin, stdin="how long?\nand then?\n")
    first = command(*begin, "--session", file, stdin="how long?\n")
    second = command("run", chatty, "--chat", *more, "--session", file, stdin="and then?\n")
    assert (first.code, second.code) == (0, 0)
    assert first.out + second.out == whole.out
    ((of, held),) = re.findall(r"prompt +(\d+) tokens, (\d+) of them still in the cache", second.err)
    assert int(held) > int(of) // 2
    other = command("run", chatty, "--chat", "--system", "be long", "--session", file, stdin="")
    other.refused(1, "begun with another --system")


def test_a_system_message_is_computed_once(command: Command, chatty: Path, tmp_path: Path) -> None:
    file, system = tmp_path / "system.session", ("--system", "be brief, be kind and be quick, whatever they ask")
    assert command("run", chatty, "--chat", *system, "--session", file, stdin="/exit\n").code == 0
    result = command("run", chatty, "--chat", *SHORT, "--stats", *system, "--session", file, stdin="how long?\n")
    ((of, held),) = re.findall(r"prompt +(\d+) tokens, (\d+) of them still in the cache", result.err)
    assert int(held) > int(of) // 2
    assert result.out == command("run", chatty, "--chat", *SHORT, *system, stdin="how long?\n").out


def test_a_prompt_finds_its_session(command: Command, demo: Path, tmp_path: Path) -> None:
    file, asked = tmp_path / "prompt.session", ("run", demo, "--prompt", "ROMEO:", *SHORT, "--json", "--session")
    first, second = command(*asked, file).json, command(*asked, file).json
    assert first["tokens"] == second["tokens"]
    assert first["stats"]["reused_tokens"] == 0 < second["stats"]["reused_tokens"]
    file.write_bytes(b"something else")
    command(*asked, file).refused(1, "is no session file")
    assert file.read_bytes() == b"something else"
