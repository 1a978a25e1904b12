"""Lines typed at a terminal, and a chat there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from edgespec.engine.loading import load
from tests.conftest import THREADS

if sys.platform == "win32":
    pytest.skip("needs pseudo-terminals", allow_module_level=True)
pytest.importorskip("readline", reason="this Python was built without readline")

from tests.support.terminal import Terminal

ECHO = """
import json, sys
from edgespec.cli.answer import read_line, typing
from edgespec.errors import EdgespecError
with typing():
    while True:
        try:
            line = read_line("> ")
        except EdgespecError as error:
            print("error:", error.message, flush=True)
            continue
        open("lines", "a").write(json.dumps(line) + "\\n")
        if line == "end":
            break
print("done")
"""
WITHOUT_READLINE = 'import sys; sys.modules["readline"] = None\n'
LONG = "".join(f"{number:04d}," for number in range(2000))  # 10,000 characters, of which none is like another
DELETE, LEFT = "\x7f", "\x1b[D"


def lines(folder: Path) -> list[str]:
    return [json.loads(line) for line in (folder / "lines").read_text("utf-8").splitlines()]


def test_a_line_of_10000_characters_arrives_whole(tmp_path: Path) -> None:
    with Terminal(["-c", ECHO], tmp_path) as terminal:
        terminal.wait_for("> ")
        terminal.type(f"{LONG}\rend\r")
        assert terminal.end() == 0
    assert lines(tmp_path) == [LONG, "end"]


def test_what_is_typed_before_the_prompt_arrives_whole(tmp_path: Path) -> None:
    slow = ECHO.replace("    while True:", "    print('busy', flush=True); import time; time.sleep(1)\n    while True:")
    with Terminal(["-c", slow], tmp_path) as terminal:
        terminal.wait_for("busy")
        terminal.type(f"{LONG}\rend\r")
        assert terminal.end() == 0
    assert lines(tmp_path) == [LONG, "end"]


def test_lines_are_edited_in_any_script(tmp_path: Path) -> None:
    with Terminal(["-c", ECHO], tmp_path) as terminal:
        for keys in (f"\uc548\ub155{DELETE}", f"ac{LEFT}b", "\x1b[A", "\x1b[200~one\ntwo\n\nthree\x1b[201~", "end"):
            terminal.wait_for("> ")
            terminal.type(keys)
            terminal.wait_for({"\x1b[A": "abc"}.get(keys, keys[:2].strip("\x1b[")))  # what is typed is shown
            terminal.type("\r")
        assert terminal.end() == 0
    assert lines(tmp_path) == ["\uc548", "abc", "abc", "one\ntwo\n\nthree", "end"]  # pasted lines are one text


def test_the_terminal_edits_where_stdout_is_a_file(tmp_path: Path) -> None:
    with Terminal(["-c", ECHO], tmp_path, stdout=tmp_path / "out") as terminal:
        terminal.wait_for("> ")
        terminal.type(f"{LONG}\rend\r")
        assert terminal.end() == 0
    assert lines(tmp_path) == [LONG, "end"]
    assert (tmp_path / "out").read_text("utf-8") == "done\n"


def test_without_an_editor_a_line_that_was_cut_is_refused(tmp_path: Path) -> None:
    with Terminal(["-c", WITHOUT_READLINE + ECHO], tmp_path) as terminal:
        terminal.wait_for("> ")
        terminal.type(f"{LONG}\n")
        terminal.wait_for("may have been cut")
        terminal.type("short\nend\n")
        assert terminal.end() == 0
    assert lines(tmp_path) == ["short", "end"]


# -- a chat ------------------------------------------------------------------------------------------------------------


def chat(bundle: Path, cwd: Path, *arguments: object, stdout: Path | None = None) -> Terminal:
    wanted = ["run", bundle, "--chat", "--threads", THREADS, "--max-new-tokens", 8, "--method", "ar", *arguments]
    return Terminal(["-m", "edgespec", *wanted], cwd, stdout)


def test_a_chat_reads_a_long_line_whole_and_goes_on(chatty: Path, tmp_path: Path) -> None:
    engine = load(chatty, threads=THREADS)
    with chat(chatty, tmp_path, "--session", "talk.session", stdout=tmp_path / "out") as terminal:
        terminal.wait_for("you> ")
        terminal.type("how?\r" + LONG + "\r")  # the second while the first is answered
        whole = len(engine.codec.chat([{"role": "user", "content": LONG}]))  # without the first turn
        terminal.wait_for(f"error: the prompt has {whole} tokens")
        terminal.wait_for("you> ")
        terminal.type("and then?\r\x04")
        assert terminal.end() == 0
    messages = engine.restore_session(tmp_path / "talk.session")
    assert [message["content"] for message in messages if message["role"] == "user"] == ["how?", "and then?"]
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    assert (tmp_path / "out").read_text("utf-8") == "".join(f"{answer}\n" for answer in answers)


def test_ctrl_c_at_the_prompt_ends_a_chat_at_the_second_press(chatty: Path, tmp_path: Path) -> None:
    with chat(chatty, tmp_path, "--session", "talk.session") as terminal:
        terminal.wait_for("you> ")
        terminal.type("half a quest")
        terminal.wait_for("quest")
        terminal.interrupt("Ctrl-C again, Ctrl-D or /exit ends the chat")
        terminal.wait_for("you> ")
        terminal.type("how?\r")
        terminal.wait_for("tokens at")
        terminal.wait_for("you> ")
        terminal.type("z")
        terminal.wait_for("z")
        terminal.interrupt("Ctrl-C again")  # this is a first press again: something was asked in between
        terminal.wait_for("you> ")
        terminal.type("z")
        terminal.wait_for("z")
        terminal.interrupt("\n")
        assert terminal.end() == 0
    messages = load(chatty, threads=THREADS).restore_session(tmp_path / "talk.session")
    assert messages[0] == {"role": "user", "content": "how?"}


def test_commands_of_a_chat(chatty: Path, tmp_path: Path) -> None:
    more = ("--system", "be brief", "--session", "talk.session")
    with chat(chatty, tmp_path, *more) as terminal:
        terminal.wait_for("/help shows the commands of the chat")
        for line, answer in (("/help", "/reset"), ("/halp", "no command /halp"), ("first", "tokens at"), ("", "you> ")):
            terminal.wait_for("you> ")
            terminal.type(f"{line}\r")
            terminal.wait_for(answer)
        terminal.type("/reset\r")
        terminal.wait_for("you> ")
        terminal.type("second\r")
        terminal.wait_for("tokens at")
        terminal.type("/exit\r")
        assert terminal.end() == 0
    messages = load(chatty, threads=THREADS).restore_session(tmp_path / "talk.session")
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    assert messages[1]["content"] == "second"


def test_a_terminal_shows_the_prompt_before_the_text(demo: Path, tmp_path: Path) -> None:
    wanted = ["-m", "edgespec", "run", demo, "--prompt", "ROMEO:", "--max-new-tokens", 4, "--threads", THREADS]
    text = load(demo, threads=THREADS).generate("ROMEO:", max_new_tokens=4).text
    with Terminal(wanted, tmp_path) as terminal:
        assert terminal.end() == 0
    assert terminal.shown.startswith(f"ROMEO:{text}\n")
    with Terminal([*wanted, "--regex", "(yes|no)"], tmp_path) as terminal:  # such a text is for programs
        assert terminal.end() == 0
    assert terminal.shown.startswith(("yes\n", "no\n"))
