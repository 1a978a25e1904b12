"""``edgespec run``."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from edgespec.cli.method_settings import NAMES
from edgespec.cli.run import coloured as round_text
from edgespec.decoding.accept import Accept
from edgespec.decoding.request import Round
from edgespec.decoding.settings import Settings
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.engine.request import Stream
from edgespec.engine.result import Chunk
from edgespec.runtimes.files.manifest import Operators
from edgespec.runtimes.text.codec import TextCodec
from tests.cli.conftest import ROOT, Command, start
from tests.conftest import OPERATORS, THREADS

METHODS = ("ar", "ngram", "self-spec", "speculative")
PROMPT = "ROMEO:"
SHORT = ("--max-new-tokens", 24)
SUMMARY = re.compile(
    r"(plain decoding|(\d+\.\dx plain decoding|\d+\.\d tokens a pass), (same text|lossless)), "
    r"\d+ tokens at \d+\.\d a second, (auto: )?[a-z-]+\n$"
)
RESULT = {
    "text",
    "tokens",
    "finish",
    "method_requested",
    "method_used",
    "reason",
    "lossless",
    "exact",
    "approximations",
    "operators",
    "device",
    "stats",
}


def text_of(command: Command, bundle: Path, *arguments: object) -> str:
    """The new text, as the JSON object has it."""
    text = command("run", bundle, "--prompt", PROMPT, "--json", *arguments).json["text"]
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("prompt", [PROMPT, "Ah\u00e7\u00fa \u2603", "\U0001f600", "<s>", "a\n\n", "  two  spaces"])
def test_the_text_follows_the_prompt(command: Command, demo: Path, prompt: str) -> None:
    result = command("run", demo, "--prompt", prompt, *SHORT)
    assert result.code == 0
    made = command("run", demo, "--prompt", prompt, *SHORT, "--json").json
    assert result.out == f"{prompt}{made['text']}\n"
    assert SUMMARY.match(result.err)
    assert made["prompt"] == prompt


def test_the_text_comes_piece_by_piece(command: Command, demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[str] = []
    monkeypatch.setattr("click.echo", lambda text="", nl=True, err=False: None if err else pieces.append(text))
    command("run", demo, "--prompt", PROMPT, "--method", "ar", *SHORT)
    assert pieces[0] == PROMPT
    assert len(pieces) > 10


@pytest.mark.parametrize("operators", OPERATORS, indirect=True)
@pytest.mark.parametrize("method", [None, "auto", *METHODS])
def test_json(command: Command, demo: Path, method: str | None, operators: Operators) -> None:
    wanted = () if method is None else ("--method", method)
    kind = "--operators", operators
    result = command("run", demo, "--prompt", PROMPT, *SHORT, *wanted, *kind, "--json")
    made = result.json
    assert made.keys() == {"bundle", "prompt"} | RESULT
    assert result.err == ""
    assert (made["bundle"], made["prompt"]) == (str(demo), PROMPT)
    assert made["method_requested"] == method
    assert method in (None, "auto", made["method_used"])
    assert made["lossless"] is True
    cache = ["float16 keys", "float16 values"] if operators == "native" else []
    assert made["approximations"] == ["int4 weights", "8-bit activations", *cache]
    assert made["operators"] == operators
    assert len(made["tokens"]) == made["stats"]["tokens"] <= 24
    assert made["text"] == text_of(command, demo, *SHORT, *kind, "--method", "ar")


def test_statistics_for_people(command: Command, demo: Path) -> None:
    shown = command("run", demo, "--prompt", PROMPT, *SHORT, "--method", "ngram", "--stats", "--set", "shadow=2")
    assert shown.code == 0
    lines = shown.err.splitlines()
    names = ["result", "method", "text", "prompt", "rounds", "acceptance", "of", "speed", "work", "control", "time"]
    assert [line.split()[0] for line in lines] == [*names, "shadow"]
    assert "every 2 rounds" in lines[-1]
    assert shown.out == command("run", demo, "--prompt", PROMPT, *SHORT, "--method", "ngram").out
    stats = command("run", demo, "--prompt", PROMPT, *SHORT, "--set", "shadow=1", "--json").json["stats"]
    assert stats["shadow"]["checked"] == stats["shadow"]["agreeing"] == stats["tokens"]
    command("run", demo, "--prompt", PROMPT, "--set", "shadow=-1").refused(2, "--set", "shadow -1")


def test_switches_are_listed(command: Command, demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgespec.control.auto import Switch

    change = Switch._judge
    monkeypatch.setattr(
        Switch, "_judge", lambda self: self._change(None, "a test") if self._seen < 20 else change(self)
    )
    shown = command("run", demo, "--prompt", PROMPT, *SHORT, "--method", "auto", "--stats")
    line = next(line for line in shown.err.splitlines() if line.startswith("switched "))
    assert re.fullmatch(r"switched +round 1\d: [a-z-]+ to plain, a test", line)
    found = command("run", demo, "--prompt", PROMPT, *SHORT, "--json").json
    switch = found["stats"]["switches"][0]
    assert (switch["to"], switch["why"]) == ("plain", "a test")
    command("run", demo, "--prompt", PROMPT, "--method", "auto", "--set", "proposers=ngram").refused(
        2, "--method chain"
    )


def test_the_prompt_from_stdin(command: Command, demo: Path) -> None:
    piped = command("run", demo, "--prompt", "-", *SHORT, stdin="Ah\u00e7\u00fa:\n")
    assert piped.code == 0
    assert piped.out == command("run", demo, "--prompt", "Ah\u00e7\u00fa:\n", *SHORT).out
    command("run", demo, "--prompt", "-", stdin="").refused(1, "the prompt is empty", "hint: ")
    command("run", demo, "--prompt", "-", stdin=None).refused(1, "stdin is closed", "hint: ")
    command("run", demo, "--prompt", "-", stdin=b"a\xff").refused(1, "stdin is not utf-8 text", "hint: ")


def test_stop(command: Command, demo: Path) -> None:
    whole = text_of(command, demo, "--max-new-tokens", 40)
    stop = whole[12:15]
    for method in METHODS:
        made = command(
            "run", demo, "--prompt", PROMPT, "--max-new-tokens", 40, "--stop", "no such text", "--stop", stop,
            "--method", method, "--json",
        ).json  # fmt: skip
        assert (made["text"], made["finish"]) == (whole[: whole.index(stop)], "stop")
    assert text_of(command, demo, *SHORT, "--stop", "") == text_of(command, demo, *SHORT, "--stop", "long" * 9999)


@pytest.mark.parametrize("method", METHODS)
def test_a_seed_gives_the_same_text_again(command: Command, demo: Path, method: str) -> None:
    def sampled(seed: int, *more: object) -> str:
        return text_of(command, demo, *SHORT, "--temperature", 1, "--seed", seed, "--method", method, *more)

    assert sampled(3) == sampled(3)
    assert len({sampled(seed) for seed in range(4)}) > 1
    coupled = text_of(command, demo, *SHORT, "--temperature", 1, "--seed", 3, "--method", "ar")
    assert sampled(3, "--acceptance", "coupled") == coupled


def test_every_option_reaches_the_decoder(command: Command, demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def note(self: Engine, prompt: str, settings: Settings) -> None:
        seen.append(settings)
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "stream", note)
    given: dict[str, Any] = {
        "max_new_tokens": 3,
        "gamma": 2,
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.5,
        "min_p": 0.1,
    }
    given |= {"repetition_penalty": 1.5, "seed": 9, "acceptance": "coupled", "stop": "x", "method": "ngram"}
    given |= {"accept": "top-k:3"}
    flags = [item for name, value in given.items() for item in (f"--{name.replace('_', '-')}", value)]
    single = {"verification": "block", "branch": "3,2,1", "min-block": 2, "nodes": 5, "threshold": 0.5, "cycles": 2}
    single |= {"kind": "code", "search": 0.5, "shadow": 3}
    assert single.keys() | {"proposers"} == NAMES.keys()
    flags += [item for name, value in single.items() for item in ("--set", f"{name}={value}")]
    given |= {name.replace("-", "_"): value for name, value in single.items()}
    read = {"stop": ("x",), "branch": (3, 2, 1), "accept": Accept("top-k", k=3, min_block=2)}
    assert command("run", demo, "--prompt", PROMPT, "--no-fallback", *flags).code == 130
    settings = seen[0]
    for name, value in given.items():
        holders = (settings, settings.sampling, settings.drafts, settings.accept)
        got = next(getattr(holder, name) for holder in holders if hasattr(holder, name))
        assert got == read.get(name, value)
    assert settings.fallback is False


@pytest.mark.parametrize(
    "option, value, parts",
    [
        ("--accept", "typcial", ["'--accept'", "acceptance rule 'typcial'", "top-k:K"]),
        ("--accept", "top-k:0", ["'--accept'", "integer >= 1"]),
        ("--accept", "distance", ["'--accept'", "distance:D"]),
        ("--set", "min-block=-1", ["'--set'", "min_block"]),
        ("--set", "branch=2,x", ["'--set'", "like 2 or 3,2,1"]),
        ("--set", "branch=0", ["'--set'", "from 1"]),
        ("--set", "branch=9,9", ["'--set'", "90 guesses"]),
        ("--set", "branch=", ["'--set'", "like 2 or 3,2,1"]),
        ("--set", "verification=tree", ["'--set'", "'token' or 'block'"]),
        ("--set", "nodes=many", ["'--set'", "nodes is\n  medusa: "]),
        ("--set", "nodes", ["'--set'", "expected NAME=VALUE", "threshold", "proposers"]),
        ("--set", "node=3", ["'--set'", "no setting 'node'", "nodes", "threshold", "proposers"]),
    ],
)
def test_options_of_guesses_that_cannot_be_read(
    command: Command, demo: Path, option: str, value: object, parts: list[str]
) -> None:
    command("run", demo, "--prompt", "x", option, value).refused(2, *parts)


@pytest.mark.parametrize("rule", ["typical", "top-k:2", "distance:3", "all"])
def test_a_lossy_rule_is_said_and_named(command: Command, demo: Path, rule: str) -> None:
    sampled = ("--temperature", 1, "--seed", 1, "--method", "speculative", "--no-fallback", *SHORT)
    made = command("run", demo, "--prompt", PROMPT, "--accept", rule, *sampled, "--json").json
    assert made["lossless"] is False
    assert made["exact"] is False
    assert made["approximations"][-1:] == Accept.parse(rule).approximations
    assert made["stats"]["dropped_reason"] is None
    assert ", lossy as asked for, " in command("run", demo, "--prompt", PROMPT, "--accept", rule, *sampled).err


def test_all_guesses_stand_and_a_block_does(command: Command, demo: Path) -> None:
    fixed = ("--method", "speculative", "--gamma", 3, "--no-fallback", "--max-new-tokens", 40)
    every = command("run", demo, "--prompt", PROMPT, *fixed, "--accept", "all", "--json").json["stats"]
    assert every["accepted"] == every["drafted"] > 0
    block = command("run", demo, "--prompt", PROMPT, *fixed, "--set", "min-block=1", "--json").json
    assert block["stats"]["histogram"][0] <= 1  # the last round may have no room for a guess
    assert block["lossless"] is False


@pytest.mark.parametrize("branch", ["2", "3,2,1"])
@pytest.mark.parametrize("operators", OPERATORS, indirect=True)
def test_a_tree_of_guesses(command: Command, demo: Path, branch: str, operators: Operators) -> None:
    more = ("--method", "speculative", "--set", f"branch={branch}", "--no-fallback", "--operators", operators, *SHORT)
    for sampled in ((), ("--temperature", 1, "--seed", 2)):
        made = command("run", demo, "--prompt", PROMPT, *more, *sampled, "--json").json
        assert made["lossless"] is True
        assert made["exact"] is False
        assert made["stats"]["dropped_reason"] is None
        assert made["stats"]["drafted"] >= 2 * made["stats"]["accepted"] > 0
        assert made["tokens"] == command("run", demo, "--prompt", PROMPT, *more, *sampled, "--json").json["tokens"]


def test_a_block_is_lossless_and_repeats_with_its_seed(command: Command, demo: Path) -> None:
    more = ("--method", "speculative", "--set", "verification=block", "--temperature", 1, "--seed", 2, *SHORT)
    first = command("run", demo, "--prompt", PROMPT, *more, "--json").json
    assert (first["lossless"], first["exact"]) == (True, False)
    assert first["tokens"] == command("run", demo, "--prompt", PROMPT, *more, "--json").json["tokens"]


@pytest.mark.parametrize(
    "arguments, code, parts",
    [
        ((), 2, ["give either --prompt TEXT or --chat"]),
        (("--prompt", "x", "--chat"), 2, ["give either --prompt TEXT or --chat"]),
        (("--chat", "--json"), 2, ["--chat is interactive"]),
        (("--prompt", "x", "--system", "y"), 2, ["--system belongs to --chat"]),
        (("--chat",), 1, ["no chat template", "hint: "]),
        (("--prompt", ""), 1, ["the prompt is empty", "hint: "]),
        (("--prompt", " \n"), 1, ["the prompt is empty"]),
        (("--prompt", "word " * 20, "--context", "8"), 1, ["tokens and the context 8", "hint: "]),
        (("--prompt", "word " * 2000), 1, ["the context 1024", "hint: "]),
        (("--prompt", "x", "--context", "1025"), 1, ["context 1025: expected 2 to 1024"]),
        (("--prompt", "x", "--context", "1"), 2, ["--context"]),
        (("--prompt", "x", "--method", "magic"), 1, ["method 'magic' is not in this bundle", "ar, ngram", "hint: "]),
        (("--prompt", "x", "--gamma", "0"), 1, ["gamma 0: expected at least 1", "hint: "]),
        (("--prompt", "x", "--gamma", "two"), 2, ["'two' is not a valid int"]),
        (("--prompt", "x", "--max-new-tokens", "0"), 2, ["--max-new-tokens"]),
        (("--prompt", "x", "--temperature", "-1"), 1, ["temperature is -1"]),
        (("--prompt", "x", "--temperature", "nan"), 1, ["temperature is nan"]),
        (("--prompt", "x", "--top-p", "0"), 1, ["top_p"]),
        (("--prompt", "x", "--threads", "0"), 2, ["--threads"]),
        (("--prompt", "x", "--colour"), 2, ["No such option"]),
        (("--prompt", "\udcff"), 1, ["cannot be encoded"]),
    ],
)
def test_wrong_input(command: Command, demo: Path, arguments: Any, code: int, parts: list[str]) -> None:
    command("run", demo, *arguments).refused(code, *parts)


def test_not_a_bundle(command: Command, tmp_path: Path) -> None:
    command("run", tmp_path / "none", "--prompt", "x").refused(1, "none: expected a bundle", "hint: make one with")
    command("run", tmp_path, "--prompt", "x").refused(1, "has no edgespec.json", "hint: ")


# -- drafts in colour --------------------------------------------------------------------------------------------------

GREEN, RED = {"32"}, {"31", "9"}
ESCAPE = re.compile(r"\x1b\[([0-9;]*)m")


def coloured(text: str) -> Iterator[tuple[frozenset[str], str]]:
    """(codes, text) of everything between escape sequences."""
    style: frozenset[str] = frozenset()
    for at, part in enumerate(ESCAPE.split(text)):
        if at % 2:
            style = frozenset(part.split(";")) - {"0", ""}
        elif part:
            yield style, part


@pytest.fixture
def colours(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment that asks for colours."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return monkeypatch


DRAFTING = ("--prompt", PROMPT, "--max-new-tokens", 80, "--method", "self-spec", "--no-fallback")


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Chunk, Round]]:
    """Every chunk that is made, with its round."""
    seen: list[tuple[Chunk, Round]] = []
    take = Stream._take

    def noted(self: Stream, item: Round) -> Chunk:
        chunk = take(self, item)
        seen.append((chunk, item))
        return chunk

    monkeypatch.setattr(Stream, "_take", noted)
    return seen


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The text of every refused draft that is asked for."""
    seen: list[str] = []
    continuation = TextCodec.continuation

    def noted(self: TextCodec, before: Sequence[int], tokens: Sequence[int]) -> str:
        seen.append(continuation(self, before, tokens))
        return seen[-1]

    monkeypatch.setattr(TextCodec, "continuation", noted)
    return seen


def in_style(text: str, style: set[str]) -> str:
    return "".join(part for codes, part in coloured(text) if codes == style)


def test_drafts_in_colour(
    command: Command,
    demo: Path,
    colours: pytest.MonkeyPatch,
    rounds: list[tuple[Chunk, Round]],
    refused: list[str],
) -> None:
    shown = command("run", demo, *DRAFTING, "--show-drafts").out
    assert {frozenset(), frozenset(GREEN), frozenset(RED)} == {style for style, _ in coloured(shown)}
    accepted = "".join("".join(chunk.pieces[: item.accepted]) for chunk, item in rounds)
    assert in_style(shown, GREEN) == accepted.replace("\n", "")  # the end of a line has no colour
    assert in_style(shown, RED) == "".join(refused).replace("\n", "")
    assert len(refused) == sum(bool(item.rejected) for _, item in rounds)
    broken = sum(text.count("\n") for text in refused)
    kept = "".join(text for style, text in coloured(shown) if style != RED)
    plain = command("run", demo, *DRAFTING).out
    assert kept == plain if not broken else kept.replace("\n", "") == plain.replace("\n", "")


@pytest.mark.parametrize("change", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {"FORCE_COLOR": ""}])
def test_without_colours_refused_drafts_are_left_out(
    command: Command, demo: Path, colours: pytest.MonkeyPatch, change: dict[str, str]
) -> None:
    for name, value in change.items():
        colours.setenv(name, value) if value else colours.delenv(name)
    assert command("run", demo, *DRAFTING, "--show-drafts").out == command("run", demo, *DRAFTING).out


def test_a_stop_string_ends_coloured_text_too(
    command: Command,
    demo: Path,
    colours: pytest.MonkeyPatch,
    rounds: list[tuple[Chunk, Round]],
    refused: list[str],
) -> None:
    whole = text_of(command, demo, "--max-new-tokens", 40)
    for stop in sorted({whole[at : at + 2] for at in range(5, 60)} - {""}):
        rounds.clear()
        refused.clear()
        shown = command("run", demo, *DRAFTING, "--show-drafts", "--stop", stop).out
        kept = "".join(text for style, text in coloured(shown) if style != RED)
        assert kept.replace("\n", "") == f"{PROMPT}{whole[: whole.index(stop)]}".replace("\n", "")
        # what came after the stop string in its round is nobody's business
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


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_terminal_shows_colours(demo: Path, tmp_path: Path) -> None:
    import pty

    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "NO_COLOR")}
    running = subprocess.Popen(
        [sys.executable, "-m", "edgespec", "run", str(demo), *map(str, DRAFTING), "--show-drafts"],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"},
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 4096):
            shown += piece
    except OSError:
        pass  # Linux: the other end was closed
    finally:
        os.close(ours)
    assert running.wait(300) == 0
    assert {frozenset(GREEN), frozenset(RED)} <= {style for style, _ in coloured(shown.decode("utf-8"))}


# -- chat --------------------------------------------------------------------------------------------------------------


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
    result = command("run", chatty, "--chat", "--context", 60, stdin="a\nb\n")
    assert result.code == 1
    assert "the context 60" in result.err


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------


def test_ctrl_c_keeps_what_was_written(command: Command, demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Round] = []

    def interrupted(self: Stream, item: Round) -> Chunk:
        calls.append(item)
        if len(calls) % 6 == 0:
            raise KeyboardInterrupt
        return take(self, item)

    take = Stream._take
    monkeypatch.setattr(Stream, "_take", interrupted)
    wanted = ("run", demo, "--prompt", PROMPT, "--method", "ar")
    result = command(*wanted)
    made = command(*wanted, "--json").json
    assert result.code == 0
    assert result.out == f"{PROMPT}{made['text']}\n"
    assert SUMMARY.match(result.err)
    assert (made["finish"], len(made["tokens"])) == ("cancelled", 5)


def test_ctrl_c_while_loading(command: Command, demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("edgespec.engine.loading.load", interrupted)
    result = command("run", demo, "--prompt", "x")
    assert (result.code, result.out, result.err.strip()) == (130, "", "stopped")


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
def test_ctrl_c_for_real(demo: Path, tmp_path: Path) -> None:
    running = start(["run", demo, "--prompt", PROMPT, "--max-new-tokens", 1000, "--threads", 1], tmp_path)
    assert running.stdout is not None
    begin = running.stdout.read(len(PROMPT) + 1)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=300)
    assert begin.startswith(PROMPT)
    assert running.returncode in (0, 130)
    assert "Traceback" not in err
