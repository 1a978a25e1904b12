"""``edgespec run``, in this process and in a new one."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli.method_settings import NAMES
from edgespec.decoding.loop import Round
from edgespec.decoding.settings import Settings
from edgespec.decoding.verify import Accept
from edgespec.engine.engine import Engine
from edgespec.engine.request import Request
from edgespec.engine.result import Chunk
from edgespec.plugins.lossy import TopK
from edgespec.runtimes.files.manifest import Operators
from tests.cli.conftest import LONG, Command, process, start
from tests.conftest import OPERATORS, TARGET

METHODS = ("ar", "ngram", "self-spec", "speculative")
PROMPT = "ROMEO:"
SHORT = ("--max-new-tokens", 24)
posix = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
SUMMARY = re.compile(
    r"(plain decoding|nothing was guessed|(\d+\.\dx plain decoding|\d+\.\d tokens per pass), (same text|lossless)), "
    r"\d+ tokens at \d+\.\d per second, (auto: )?[a-z-]+\n(note: cut after \d+ tokens: .+\n)?$"
)
RESULT = {"text", "tokens", "finish", "method_requested", "method_used", "reason", "details", "lossless", "exact",
          "unverified",
          "approximations", "operators", "device", "stats"}  # fmt: skip


def text_of(command: Command, bundle: Path, *arguments: object) -> str:
    """Return the new text, as the JSON object has it."""
    text = command("run", bundle, "--prompt", PROMPT, "--json", *arguments).json["text"]
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("prompt", [PROMPT, "Ah\u00e7\u00fa \u2603", "\U0001f600", "<s>", "a\n\n", "  two  spaces"])
def test_a_pipe_gets_the_text_alone(command: Command, demo: Path, prompt: str) -> None:
    result = command("run", demo, "--prompt", prompt, *SHORT)
    assert result.code == 0
    made = command("run", demo, "--prompt", prompt, *SHORT, "--json").json
    assert result.out == f"{made['text']}\n"
    assert SUMMARY.match(result.err)
    assert made["prompt"] == prompt


def test_the_text_comes_piece_by_piece(command: Command, demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[str] = []
    monkeypatch.setattr(
        "click.echo", lambda text="", nl=True, err=False, color=None: None if err else pieces.append(text)
    )
    command("run", demo, "--prompt", PROMPT, "--method", "ar", *SHORT)
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
    shown = command("run", demo, "--prompt", PROMPT, *SHORT, "--method", "ngram", "--stats")
    assert shown.code == 0
    *lines, cut = shown.err.splitlines()
    assert cut == "note: cut after 24 tokens: --max-new-tokens N allows more"
    names = ["result", "method", "text", "prompt", "rounds", "acceptance", "recent", "speed", "work", "control", "time"]
    shown_names = [line.split()[0] for line in lines]
    assert [name for name in shown_names if name != "details"] == names
    assert "details" in shown_names
    assert shown.out == command("run", demo, "--prompt", PROMPT, *SHORT, "--method", "ngram").out


def test_switches_are_listed(command: Command, demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgespec.control.auto import Auto

    change = Auto._judge
    monkeypatch.setattr(
        Auto, "_judge", lambda self, control: self._change(None, "a test") if self._seen < 20 else change(self, control)
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


def test_every_option_reaches_the_decoder(command: Command, demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def note(self: Engine, prompt: str, settings: Settings) -> None:
        seen.append(settings)
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "stream", note)
    monkeypatch.setattr(Engine, "generate", note)
    given: dict[str, Any] = {
        "max_new_tokens": 3, "gamma": 2, "temperature": 0.5, "top_k": 4, "top_p": 0.5, "min_p": 0.1, "seed": 9,
        "repetition_penalty": 1.5, "acceptance": "coupled", "stop": "x", "method": "ngram", "accept": "top-k:3",
    }  # fmt: skip
    options = {name: f"--{name.replace('_', '-')}" for name in given} | {"gamma": "--num-draft-tokens"}
    flags = [item for name, value in given.items() for item in (options[name], value)]
    single = {"verification": "block", "branch": "3,2,1", "threshold": 0.5}
    single |= {"length-penalty": 0.6, "early-stopping": "never"}
    single |= {"guidance-scale": 1.5, "negative-prompt": "noise"}
    assert single.keys() | {"proposers"} == NAMES.keys()
    flags += [item for name, value in single.items() for item in ("--set", f"{name}={value}")]
    given |= {name.replace("-", "_"): value for name, value in single.items()}
    read = {"stop": ("x",), "branch": (3, 2, 1), "accept": TopK(k=3)}
    assert command("run", demo, "--prompt", PROMPT, "--no-fallback", *flags).code == 130
    settings = seen[0]
    for name, value in given.items():
        holders = (settings, settings.sampling, settings.drafts, settings.accept, settings.beams)
        got = next(getattr(holder, name) for holder in holders if hasattr(holder, name))
        assert got == read.get(name, value)
    assert settings.fallback is False


@pytest.mark.parametrize(
    "option, value, parts",
    [
        ("--accept", "typcial", ["'--accept'", "acceptance rule 'typcial'", "top-k:K"]),
        ("--accept", "top-k:0", ["'--accept'", "integer >= 1"]),
        ("--accept", "distance", ["'--accept'", "distance:D"]),
        ("--set", "branch=2,x", ["'--set'", "like 2 or 3,2,1"]),
        ("--set", "branch=0", ["'--set'", "from 1"]),
        ("--set", "branch=9,9", ["'--set'", "90 guesses"]),
        ("--set", "branch=", ["'--set'", "like 2 or 3,2,1"]),
        ("--set", "verification=tree", ["'--set'", "token, block"]),
        ("--set", "threshold=much", ["'--set'", "threshold is\n  minimum probability: "]),
        ("--set", "branch", ["'--set'", "expected NAME=VALUE", "threshold", "proposers"]),
        ("--set", "node=3", ["'--set'", "no setting 'node'", "branch", "threshold", "proposers"]),
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


@pytest.mark.parametrize(
    "arguments, code, parts",
    [
        ((), 2, ["give --prompt TEXT, --chat, or both"]),
        (("--prompt", "x", "--prompt", "y"), 2, ["several --prompt belong to --chat"]),
        (("--chat", "--prompt", "x", "--prompt", "y", "--json"), 2, ["--json prints one answer"]),
        (("--prompt", "x", "--system", "y"), 2, ["--system belongs to --chat"]),
        (("--chat",), 1, ["no chat template", "hint: "]),
        (("--prompt", ""), 1, ["the prompt is empty", "hint: "]),
        (("--prompt", " \n"), 1, ["the prompt is empty"]),
        (("--prompt", "word " * 20, "--context", "8"), 1, ["tokens and the context 8", "hint: "]),
        (("--prompt", "word " * 2000), 1, ["the context 1024", "hint: "]),
        (("--prompt", "x", "--context", "1025"), 1, ["context 1025: expected 2 to 1024"]),
        (("--prompt", "x", "--context", "1"), 2, ["--context"]),
        (("--prompt", "x", "--method", "magic"), 1, ["method 'magic' is not in this bundle", "ar, ngram", "hint: "]),
        (("--prompt", "x", "--num-draft-tokens", "0"), 1, ["gamma is 0: expected"]),
        (("--prompt", "x", "--num-draft-tokens", "two"), 2, ["'two' is not a valid int"]),
        (("--prompt", "x", "--max-new-tokens", "0"), 2, ["--max-new-tokens"]),
        (("--prompt", "x", "--temperature", "-1"), 1, ["temperature is -1"]),
        (("--prompt", "x", "--temperature", "nan"), 1, ["temperature is nan"]),
        (("--prompt", "x", "--top-p", "0"), 1, ["top_p"]),
        (("--prompt", "x", "--threads", "0"), 2, ["--threads"]),
        (("--prompt", "x", "--color"), 2, ["No such option"]),
        (("--prompt", "\udcff"), 1, ["cannot be encoded"]),
    ],
)
def test_wrong_input(command: Command, demo: Path, arguments: Any, code: int, parts: list[str]) -> None:
    command("run", demo, *arguments).refused(code, *parts)


def test_not_a_bundle(command: Command, tmp_path: Path) -> None:
    command("run", tmp_path / "none", "--prompt", "x").refused(
        1, "none: no such bundle or model", "hint: give a bundle's folder"
    )
    command("run", tmp_path, "--prompt", "x").refused(1, "neither a bundle nor a model", "hint: ")


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------


def test_ctrl_c_keeps_what_was_written(command: Command, demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Round] = []

    def interrupted(self: Request, item: Round) -> Chunk:
        calls.append(item)
        if len(calls) % 6 == 0:
            raise KeyboardInterrupt
        return take(self, item)

    take = Request._take
    monkeypatch.setattr(Request, "_take", interrupted)
    wanted = ("run", demo, "--prompt", PROMPT, "--method", "ar")
    result, as_json = command(*wanted), command(*wanted, "--json")
    assert (result.code, as_json.code) == (130, 130)
    made = json.loads(as_json.out)
    assert result.out == f"{made['text']}\n"
    assert SUMMARY.match(result.err)
    assert (made["finish"], len(made["tokens"])) == ("cancelled", 5)


def test_ctrl_c_while_loading(command: Command, demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("edgespec.engine.loading.load", interrupted)
    result = command("run", demo, "--prompt", "x")
    assert (result.code, result.out, result.err.strip()) == (130, "", "stopped")


def test_a_good_run_and_a_failure(demo: Path, tmp_path: Path) -> None:
    good = process("run", demo, "--prompt", "ROMEO:", "--max-new-tokens", 4, cwd=tmp_path)
    assert good.code == 0
    assert good.out.strip()
    assert re.search(r"4 tokens at [0-9.]+ per second", good.err)
    hub = process("export", "some/model", cwd=tmp_path, HF_HUB_OFFLINE="1")
    hub.refused(1, "error: some/model: no local folder of that name, and the hub", "\nhint: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [("run", "--prompt", "ROMEO:", "--max-new-tokens", 900), ("info",)])
def test_a_reader_that_goes_away(demo: Path, tmp_path: Path, arguments: tuple[object, ...]) -> None:
    running = start([arguments[0], demo, *arguments[1:]], tmp_path)
    assert running.stdout is not None
    assert running.stderr is not None
    running.stdout.close()
    err = running.stderr.read()
    running.stderr.close()
    assert running.wait(300) in (0, 1)
    assert err == ""


@pytest.mark.parametrize("encoding, more", [("ascii", ()), ("ascii", ("--json",)), ("cp1252", ())])
def test_any_encoding_of_the_output(demo: Path, tmp_path: Path, encoding: str, more: tuple[str, ...]) -> None:
    # the grammar makes it write what some encodings have no room for
    wanted = ("run", demo, "--prompt", "\u2603 caf\u00e9", "--regex", " caf\u00e9\u2603", *more)
    shown = process(*wanted, cwd=tmp_path, PYTHONIOENCODING=encoding, PYTHONUTF8="0")
    assert (shown.code, "Traceback" in shown.err) == (0, False)
    assert " caf" in shown.out
    assert not more or json.loads(shown.out)["prompt"] == "\u2603 caf\u00e9"


SIGNALLED = """
import io, signal, sys
from edgespec.__main__ import main

class Stderr(io.TextIOWrapper):
    def write(self, text):
        written = super().write(text)
        if text.startswith(f"{stage}: "):
            signal.raise_signal(int(number))
        return written

number, stage, *sys.argv[1:] = sys.argv[1:]
sys.stderr = Stderr(sys.stderr.buffer, "utf-8", line_buffering=True)
main()
"""
"""A command that gets a signal when a stage begins, however fast or slow the machine is."""


@posix
@pytest.mark.parametrize("stage, kept", [("weights", False), ("parity", False), ("skip set", True)])
def test_ctrl_c_during_an_export(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, kept: bool
) -> None:
    wanted = ["export", TARGET, "--quick", "--method", "self-spec", "--trials", LONG, "-o", "demo"]
    running = start([int(signal.SIGINT), stage, *wanted], tmp_path, program=("-c", SIGNALLED))
    out, err = running.communicate(timeout=300)
    assert (running.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "stopped"
    assert "Traceback" not in err
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ([".demo.search"] if kept else [])
    if kept:  # the next try continues from there, and cleans up
        assert [path.suffix for path in (tmp_path / ".demo.search").iterdir()] == [".journal"]
        wanted[wanted.index(LONG)] = 1
        monkeypatch.chdir(tmp_path)
        assert command(*wanted).code == 0
        assert [path.name for path in tmp_path.iterdir()] == ["demo"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk(demo: Path, tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        for arguments in (["run", demo, "--prompt", "x", "--max-new-tokens", 4], ["info", demo, "--json"]):
            running = start(arguments, tmp_path, stdout=full)
            _, err = running.communicate(timeout=300)
            assert running.returncode == 1
            assert err.startswith("error: ")
            assert "Traceback" not in err


@posix
def test_sigterm_during_an_export(tmp_path: Path) -> None:
    wanted = ["export", TARGET, "-o", "demo", "--quantizer", "rtn"]
    running = start([int(signal.SIGTERM), "weights", *wanted], tmp_path, program=("-c", SIGNALLED))
    out, err = running.communicate(timeout=300)
    assert (running.returncode, out) == (143, "")
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


WRITING = """
import signal, sys
import click
from edgespec.__main__ import main

def echo(*arguments, **how):
    written = original(*arguments, **how)
    echo.calls += 1
    if echo.calls == 5:
        signal.raise_signal(signal.SIGTERM)
    return written

original, echo.calls, click.echo = click.echo, 0, echo
main()
"""
"""A command that gets SIGTERM when it has written something."""


@posix
def test_sigterm_while_a_text_is_written(demo: Path, tmp_path: Path) -> None:
    wanted = ["run", demo, "--prompt", "ROMEO:", "--method", "ar", "--max-new-tokens", 60]
    running = start(wanted, tmp_path, program=("-c", WRITING))
    out, err = running.communicate(timeout=300)
    assert running.returncode == 143
    assert out
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []
