"""Chats and guesses at a terminal."""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console

from edgespec.cli.markdown import colored as round_text
from edgespec.decoding.loop import Round
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.engine.request import Request
from edgespec.engine.result import Chunk
from edgespec.runtimes.text.codec import TextCodec
from tests.cli.conftest import Command
from tests.conftest import PROMPTS, THREADS
from tests.support import hf

if sys.platform == "win32":
    pytest.skip("needs pseudo-terminals", allow_module_level=True)

from tests.support.terminal import Terminal

ECHO = """
import json
from edgespec.cli.line_editor import line_editor, typing
with typing(), line_editor() as editor:
    while (line := editor.prompt("> ")) != "end":
        open("lines", "a").write(json.dumps(line) + "\\n")
print("done")
"""
LONG = "".join(f"{number:04d}," for number in range(2000))  # 10,000 characters, of which none is like another
DELETE, LEFT = "\x7f", "\x1b[D"


def lines(folder: Path) -> list[str]:
    return [json.loads(line) for line in (folder / "lines").read_text("utf-8").splitlines()]


@pytest.mark.parametrize("early", [False, True])
def test_a_line_of_10000_characters_arrives_whole(tmp_path: Path, early: bool) -> None:
    """Typed at the prompt, where stdout is a file, and before there is one."""
    slow = ECHO.replace("    while", "    print('busy', flush=True); import time; time.sleep(1)\n    while")
    with Terminal(["-c", slow if early else ECHO], tmp_path, None if early else tmp_path / "out") as terminal:
        terminal.wait_for("busy" if early else ">")
        terminal.type(f"{LONG}\rend\r")
        assert terminal.end() == 0
    assert lines(tmp_path) == [LONG]
    assert early or (tmp_path / "out").read_text("utf-8") == "done\n"


def test_lines_are_edited_in_any_script(tmp_path: Path) -> None:
    with Terminal(["-c", ECHO], tmp_path) as terminal:
        pasted = "\x1b[200~one\ntwo\n\nthree\x1b[201~"
        first = ((f"\uc548\ub155{DELETE}", "\uc548"), (f"ac{LEFT}b", "abc"), ("\x1b[A", "abc"))
        for keys, shown in (*first, (pasted, "three"), ("four\x1b\rfive", "five"), ("end", "end")):
            terminal.wait_for(">")
            terminal.type(keys)
            terminal.wait_for(shown)
            terminal.type("\r")
        assert terminal.end() == 0
    assert lines(tmp_path) == ["\uc548", "abc", "abc", "one\ntwo\n\nthree", "four\nfive"]  # pasted lines are one text


BUSY = """
import json, time
from edgespec.cli.chat import _ask_line
from edgespec.cli.line_editor import expect_pastes, gather, line_editor, typing
with typing(), line_editor() as editor:
    while True:
        gather(editor)
        line = editor.prompt("> ")
        expect_pastes(editor)
        open("lines", "a").write(json.dumps(line) + "\\n")
        if line == "end":
            break
        print("busy", flush=True)
        time.sleep(1)
        if line == "ask":
            open("lines", "a").write(json.dumps(_ask_line(editor, "really? ")) + "\\n")
        print("answered", flush=True)
"""
MANY = [f"line {number}" for number in range(200)]


@pytest.mark.parametrize(
    "keys, message",
    [
        ("second\r", "second"),
        ("".join(f"{line}\r" for line in MANY), "\n".join(MANY)),  # pasted where a terminal marks nothing
        ("\x1b[200~" + "\r".join(MANY) + "\x1b[201~\r", "\n".join(MANY)),
        (f"helo{DELETE}{DELETE}llo\r\r\r", "hello"),  # edited, and sent by an impatient one
        ("\r\rsecond\r", "\n\nsecond"),
    ],
    ids=["line", "lines", "paste", "edited", "empty"],
)
def test_what_is_typed_meanwhile_is_unseen_and_one_message(tmp_path: Path, keys: str, message: str) -> None:
    with Terminal(["-c", BUSY], tmp_path) as terminal:
        terminal.wait_for(">")
        terminal.type("first\r")
        terminal.wait_for("busy")
        terminal.type(keys)
        assert terminal.wait_for("answered").strip() == ""  # the answer does not contain it
        terminal.wait_for("busy")
        terminal.wait_for("answered")
        terminal.wait_for(">")
        terminal.type("end\r")
        assert terminal.end() == 0
    assert lines(tmp_path) == ["first", message, "end"]


def test_what_is_typed_without_enter_can_be_edited(tmp_path: Path) -> None:
    with Terminal(["-c", BUSY], tmp_path) as terminal:
        terminal.wait_for(">")
        terminal.type("first\r")
        terminal.wait_for("busy")
        terminal.type("two\rlines")
        terminal.wait_for("answered")
        terminal.wait_for("lines")
        terminal.type(" more\r")
        terminal.wait_for("answered")
        terminal.type("\x04")
        terminal.wait_for(">")
        assert terminal.end() == 1  # end of input
    assert lines(tmp_path) == ["first", "two\nlines more"]


def test_what_is_typed_before_a_question_does_not_answer_it(tmp_path: Path) -> None:
    """A tool is not allowed by letters of the next message; the answer is seen as it is typed."""
    with Terminal(["-c", BUSY], tmp_path) as terminal:
        terminal.wait_for(">")
        terminal.type("ask\r")
        terminal.wait_for("busy")
        terminal.type("yes, go on\r")
        terminal.wait_for("really? ")
        terminal.type("no\r")
        terminal.wait_for("no")
        terminal.wait_for("busy")
        terminal.wait_for("answered")
        terminal.wait_for(">")
        terminal.type("end\r")
        assert terminal.end() == 0
    assert lines(tmp_path) == ["ask", "no", "yes, go on", "end"]


def test_lines_that_are_pasted_into_a_chat_are_one_question(chatty: Path, tmp_path: Path) -> None:
    """Into a terminal that marks no paste: the first line is sent, and all others while it is answered."""
    with chat(chatty, tmp_path, "--session", "talk.session") as terminal:
        terminal.wait_for("you>")
        terminal.type("how?\r" + "".join(f"{line}\r" for line in MANY[:20]))
        terminal.wait_for("tokens at")
        terminal.wait_for("tokens at")
        terminal.wait_for("you>")
        terminal.type("/exit\r")
        assert terminal.end() == 0
    messages = load(chatty, threads=THREADS).restore_session(tmp_path / "talk.session")
    assert [message["content"] for message in messages if message["role"] == "user"] == ["how?", "\n".join(MANY[:20])]


# -- a chat ------------------------------------------------------------------------------------------------------------


def chat(bundle: Path, cwd: Path, *arguments: object, stdout: Path | None = None) -> Terminal:
    wanted = ["run", bundle, "--chat", "--threads", THREADS, "--max-new-tokens", 8, "--method", "ar", *arguments]
    return Terminal(["-m", "edgespec", *wanted], cwd, stdout)


def test_a_chat_reads_a_long_line_whole_and_goes_on(chatty: Path, tmp_path: Path) -> None:
    engine = load(chatty, threads=THREADS)
    with chat(chatty, tmp_path, "--session", "talk.session", stdout=tmp_path / "out") as terminal:
        terminal.wait_for("you>")
        terminal.type("how?\r" + LONG + "\r")  # the second while the first is answered
        whole = len(engine.codec.chat([{"role": "user", "content": LONG}]))  # without the first turn
        terminal.wait_for(f"error: the prompt has {whole} tokens")
        terminal.wait_for("you>")
        terminal.type("and then?\r\x04")
        assert terminal.end() == 0
    messages = engine.restore_session(tmp_path / "talk.session")
    assert [message["content"] for message in messages if message["role"] == "user"] == ["how?", "and then?"]
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    assert (tmp_path / "out").read_text("utf-8") == "".join(f"{answer}\n" for answer in answers)


def test_ctrl_c_at_the_prompt_ends_a_chat_at_the_second_press(chatty: Path, tmp_path: Path) -> None:
    with chat(chatty, tmp_path, "--session", "talk.session") as terminal:
        terminal.wait_for("you>")
        terminal.type("half a quest")
        terminal.wait_for("quest")
        terminal.interrupt("Ctrl-C again, Ctrl-D or /exit ends the chat")
        terminal.wait_for("you>")
        terminal.type("how?\r")
        terminal.wait_for("tokens at")
        terminal.wait_for("you>")
        terminal.type("z")
        terminal.wait_for("z")
        terminal.interrupt("Ctrl-C again")  # a question came in between, so this counts as a first press
        terminal.wait_for("you>")
        terminal.type("z")
        terminal.wait_for("z")
        terminal.interrupt("\n")
        assert terminal.end() == 0
    messages = load(chatty, threads=THREADS).restore_session(tmp_path / "talk.session")
    assert messages[0] == {"role": "user", "content": "how?"}


def test_commands_of_a_chat(chatty: Path, tmp_path: Path) -> None:
    more = ("--system", "be brief", "--session", "talk.session")
    with chat(chatty, tmp_path, *more) as terminal:
        terminal.wait_for("/help lists the commands")
        for line, answer in (
            ("/help", "Ctrl-R"),
            ("/halp", "unknown command '/halp'"),
            ("first", "tokens at"),
            ("", "you>"),
        ):
            terminal.wait_for("you>")
            terminal.type(f"{line}\r")
            terminal.wait_for(answer)
        terminal.type("/reset\r")
        terminal.wait_for("you>")
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


GREEN, RED = {"32"}, {"31", "9"}
ESCAPE = re.compile(r"\x1b\[([0-9;]*)m")
HOSTILE = "a\x1b]0;title\x07b\x1b[2Jc\r\x9bd\u202ee"
SEEN = "a\ufffd]0;title\ufffdb\ufffd[2Jc\ufffdd\ufffde"


@pytest.mark.parametrize("more", [(), ("--show-drafts", "--method", "ngram")])
def test_a_text_cannot_order_a_terminal_about(demo: Path, tmp_path: Path, more: tuple[str, ...]) -> None:
    """Generated text cannot set a title, clear the screen or reverse letters: control characters are only shown."""
    expression = re.sub(r"([\[\]])", r"\\\1", HOSTILE)
    wanted = ["-m", "edgespec", "run", demo, "--prompt", "x", "--max-new-tokens", 90, "--threads", THREADS]
    with Terminal([*wanted, "--regex", expression, *more], tmp_path, kind="xterm-256color") as terminal:
        assert terminal.end() == 0
    assert SEEN in ESCAPE.sub("", terminal.raw)
    for order in ("\x1b]", "\x1b[2J", "\x07", "\x9b", "\u202e"):
        assert order not in terminal.raw


def test_a_text_in_a_pipe_is_as_it_was_written(command: Command, demo: Path) -> None:
    expression = re.sub(r"([\[\]])", r"\\\1", HOSTILE)
    assert command("run", demo, "--prompt", "x", "--max-new-tokens", 90, "--regex", expression).out == HOSTILE + "\n"


PROMPT = "ROMEO:"


def colored(text: str) -> Iterator[tuple[frozenset[str], str]]:
    """(codes, text) of everything between escape sequences."""
    style: frozenset[str] = frozenset()
    for at, part in enumerate(ESCAPE.split(text)):
        if at % 2:
            style = frozenset(part.split(";")) - {"0", ""}
        elif part:
            yield style, part


@pytest.fixture
def colors(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Make an environment that asks for colors."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return monkeypatch


DRAFTING = ("--prompt", PROMPT, "--max-new-tokens", 80, "--method", "self-spec", "--no-fallback")


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Chunk, Round]]:
    """Every chunk that is made, with its round."""
    seen: list[tuple[Chunk, Round]] = []
    take = Request._take

    def noted(self: Request, item: Round) -> Chunk:
        chunk = take(self, item)
        seen.append((chunk, item))
        return chunk

    monkeypatch.setattr(Request, "_take", noted)
    return seen


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the text of every rejected draft that is decoded."""
    seen: list[str] = []
    continuation = TextCodec.continuation

    def noted(self: TextCodec, before: Sequence[int], tokens: Sequence[int]) -> str:
        seen.append(continuation(self, before, tokens))
        return seen[-1]

    monkeypatch.setattr(TextCodec, "continuation", noted)
    return seen


def in_style(text: str, style: set[str]) -> str:
    return "".join(part for codes, part in colored(text) if codes == style)


def test_drafts_in_color(
    command: Command, demo: Path, colors: pytest.MonkeyPatch, rounds: list[tuple[Chunk, Round]], refused: list[str]
) -> None:
    shown = command("run", demo, *DRAFTING, "--show-drafts").out
    assert {frozenset(), frozenset(GREEN), frozenset(RED)} == {style for style, _ in colored(shown)}
    accepted = "".join("".join(chunk.pieces[: item.accepted]) for chunk, item in rounds)
    assert in_style(shown, GREEN) == accepted.replace("\n", "")  # the end of a line has no color
    assert in_style(shown, RED) == "".join(refused).replace("\n", "")
    assert len(refused) == sum(bool(item.rejected) for _, item in rounds)
    broken = sum(text.count("\n") for text in refused)
    kept = "".join(text for style, text in colored(shown) if style != RED)
    plain = command("run", demo, *DRAFTING).out
    assert kept == plain if not broken else kept.replace("\n", "") == plain.replace("\n", "")


@pytest.mark.parametrize("change", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {"FORCE_COLOR": ""}])
def test_without_colors_refused_drafts_are_left_out(
    command: Command, demo: Path, colors: pytest.MonkeyPatch, change: dict[str, str]
) -> None:
    for name, value in change.items():
        colors.setenv(name, value) if value else colors.delenv(name)
    assert command("run", demo, *DRAFTING, "--show-drafts").out == command("run", demo, *DRAFTING).out


def test_a_stop_string_ends_colored_text_too(
    command: Command, demo: Path, colors: pytest.MonkeyPatch, rounds: list[tuple[Chunk, Round]], refused: list[str]
) -> None:
    whole = command("run", demo, "--prompt", PROMPT, "--json", "--max-new-tokens", 40).json["text"]
    for stop in sorted({whole[at : at + 2] for at in range(5, 60, 4)} - {""}):
        rounds.clear()
        refused.clear()
        shown = command("run", demo, *DRAFTING, "--show-drafts", "--stop", stop).out
        kept = "".join(text for style, text in colored(shown) if style != RED)
        assert kept.replace("\n", "") == whole[: whole.index(stop)].replace("\n", "")
        # tokens after the stop string in its round do not matter
        whole_rounds = [item for chunk, item in rounds if len(chunk.pieces) == len(item.tokens)]
        assert len(refused) == sum(bool(item.rejected) for item in whole_rounds)


@pytest.mark.parametrize("pieces, text", [(("a", "b", "c"), "abXc"), (("a",), "a")])
def test_nothing_is_shown_of_a_round_after_its_stop_string(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, pieces: tuple[str, ...], text: str
) -> None:
    monkeypatch.setattr(TextCodec, "continuation", lambda *_: "X")
    item = Round([1, 2, 3], [1, 2, 4], 2, range(2), [4], None, None)
    console = Console(file=io.StringIO(), soft_wrap=True)
    with closing(engine().stream("The")) as stream:
        console.print(round_text(engine(), stream, Chunk("".join(pieces), item, pieces)), end="")
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == text


def test_a_terminal_shows_colors(demo: Path, tmp_path: Path) -> None:
    words = ["-m", "edgespec", "run", demo, *DRAFTING, "--show-drafts"]
    with Terminal(words, tmp_path, kind="xterm-256color") as terminal:
        assert terminal.end() == 0
    assert {frozenset(GREEN), frozenset(RED)} <= {style for style, _ in colored(terminal.raw)}


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
    said = command("bench", "c d", "--max-prompts", 1, "--repeats", 1, "--max-new-tokens", 4).out
    assert command(*next_words(said), stdin="how long?\n").code == 0


def next_words(said: str) -> list[str]:
    """Return the command that a command names as the next one."""
    (line,) = re.findall(r"^next: edgespec (.*)$", said, re.MULTILINE)
    return shlex.split(line)
