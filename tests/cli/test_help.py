"""The overview, help texts, defaults, and the messages of failures and results."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import pytest
from click.testing import CliRunner

import edgespec
from edgespec.cli.answer import summary
from edgespec.cli.app import COMMANDS, EXTRAS, cli
from edgespec.cli.common import COMMON, OUTPUT, SAMPLING, GroupedCommand
from edgespec.cli.export import default_output
from edgespec.cli.method_settings import NAMES
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.settings import MAX_NEW_TOKENS, Settings
from edgespec.export.options import ExportOptions
from edgespec.export.training.options import METHODS
from edgespec.runtimes.options import LoadOptions
from tests.cli.conftest import ROOT, Command, process
from tests.conftest import TARGET
from tests.support.requests import Get, ask

HEAVY = ("numpy", "onnxruntime", "onnx", "rich", "pydantic", "tokenizers", "safetensors", "optuna", "huggingface_hub")


def find(name: str) -> click.Command:
    command: click.Command = cli
    for part in name.split():
        assert isinstance(command, click.Group)
        found = command.get_command(click.Context(command), part)
        assert found is not None
        command = found
    return command


def defaults(name: str) -> dict[str, object]:
    return dict(find(name).make_context(name, [], resilient_parsing=True).params)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str) -> None:
    result = CliRunner().invoke(cli, [name, "--help"], prog_name="edgespec")
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"\n  edgespec {name} " in result.stdout  # an example
    assert "--json" in result.stdout
    for option in find(name).params:
        if isinstance(option, click.Argument):
            continue
        assert isinstance(option, click.Option)
        assert option.help, option.name
        assert option.opts[-1] in result.stdout


@pytest.mark.parametrize("name", ["run", "bench", "verify", "export", "train medusa", "plan"])
def test_few_options_come_first(name: str) -> None:
    command = find(name)
    assert isinstance(command, GroupedCommand)
    sections = list(command.sections(click.Context(command)).items())
    assert (sections[0][0], sections[-1][0]) == (COMMON, OUTPUT)
    assert 5 <= len(sections[0][1]) <= 10
    shown = CliRunner().invoke(cli, [*name.split(), "--help"]).stdout
    places = [shown.index(f"\n{heading}:\n") for heading, _ in sections]
    assert places == sorted(places)


def test_settings_of_one_method_are_listed() -> None:
    result = CliRunner().invoke(cli, ["run", "--set", "list"])
    assert (result.exit_code, result.stderr) == (0, "")
    assert [line.split()[0] for line in result.stdout.splitlines()] == list(NAMES)


def test_a_setting_typed_as_an_option_is_explained(command: Command, tmp_path: Path) -> None:
    command("run", tmp_path, "--branch", 2).refused(2, "--branch is a rare setting: --set branch=VALUE")
    command("plan", tmp_path, "--branch", 2).refused(2, "No such option")


@pytest.mark.parametrize("name", ["run", "serve", "export", "bench", "plan", "verify"])
def test_an_option_for_a_projector_is_answered_with_what_works(command: Command, tmp_path: Path, name: str) -> None:
    for option in (("--mmproj", "x.gguf"), ("--mmproj-url=https://x.example/x.gguf",), ("--no-mmproj",)):
        told = command(name, tmp_path / "model.gguf", *option)
        told.refused(2, "projectors in GGUF are not read", "Hugging Face checkpoint", "text alone")
        assert option[0].partition("=")[0] in told.err


def test_the_overview_lists_every_command() -> None:
    result = CliRunner().invoke(cli, ["-h"], prog_name="edgespec")
    assert result.exit_code == 0
    for name, line in COMMANDS.items():
        assert f"  {name} " in result.stdout
        assert line in result.stdout


def test_help_waits_for_no_library() -> None:
    code = """
import json, sys
from edgespec.__main__ import main
for words in ([], ["run"], ["cache"], ["cache", "list"], ["ngram"], ["ngram", "build"]):
    sys.argv = ["edgespec", *words, "--help"]
    main()
print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, encoding="utf-8", check=True, timeout=300
    )
    assert done.stdout.count("Usage:") == 6
    assert not set(HEAVY) & set(json.loads(done.stderr))


def test_version() -> None:
    result = CliRunner().invoke(cli, ["--version"])
    assert result.stdout == f"edgespec, version {edgespec.__version__}\n"


def test_no_command_and_an_unknown_one(command: Command) -> None:
    command().refused(2, "Usage:", "export", "verify")
    command("exprot").refused(2, "No such command 'exprot'. Did you mean 'export'?")
    command("fly").refused(2, "No such command 'fly'.\n")


def test_from_another_folder(tmp_path: Path) -> None:
    result = process("--help", cwd=tmp_path)
    assert (result.code, result.err) == (0, "")
    process("run", cwd=tmp_path).refused(2, "Missing argument 'BUNDLE_OR_MODEL'")


@pytest.mark.parametrize("name", ["run", "bench", "verify"])
def test_defaults_are_those_of_the_library(name: str) -> None:
    found = defaults(name)
    assert {"operators", "device", "strict"} <= found.keys()
    for params in (Settings(), SamplingParams(), LoadOptions()):
        for field in dataclasses.fields(params):
            if field.name == "max_new_tokens" and name != "run":  # which compare texts of one length
                assert found[field.name] == MAX_NEW_TOKENS
            elif field.name in found and field.name not in SAMPLING:  # the model's own, else the library's
                assert found[field.name] == getattr(params, field.name), field.name
    assert all(found[name] is None for name in SAMPLING)


def test_export_defaults_are_those_of_the_library() -> None:
    found = defaults("export")
    assert found.pop("form") is None  # it is chosen by quality
    del found["output"]  # of the command it follows from the model's name
    for field in dataclasses.fields(ExportOptions):
        if field.name in found and field.default is not dataclasses.MISSING:
            assert found[field.name] == field.default, field.name


@pytest.mark.parametrize(
    "model, name",
    [
        ("builtin:shakespeare", "shakespeare-edge"),
        ("Qwen/Qwen2.5-0.5B", "Qwen2.5-0.5B-edge"),
        ("a/b/c/", "c-edge"),
        ("c", "c-edge"),
    ],
)
def test_default_name(model: str, name: str) -> None:
    assert default_output(model) == Path(name)


def test_default_name_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path / "model")
    assert default_output(".") == default_output("../model/") == Path("model-edge")


@pytest.mark.parametrize("module", EXTRAS)
def test_a_missing_extra_is_named(command: Command, monkeypatch: pytest.MonkeyPatch, demo: Path, module: str) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr("edgespec.engine.loading.load", fail)
    command("run", demo, "--prompt", "x").refused(1, module, f"hint: pip install -e '.[{EXTRAS[module]}]'")


def test_another_missing_module_is_a_bug(command: Command, monkeypatch: pytest.MonkeyPatch, demo: Path) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ModuleNotFoundError("No module named 'x'", name="x")

    monkeypatch.setattr("edgespec.engine.loading.load", fail)
    with pytest.raises(ModuleNotFoundError):
        command("run", demo, "--prompt", "x")


NONE = "builtin:nope"
MISSING = "Missing"  # stands for a path where nothing is
# arguments that a command refuses with 1; None = it has nothing to be refused
REFUSED: dict[str, tuple[str, ...] | None] = {
    "bench": (MISSING,),
    "cache clear": None,
    "cache limit": ("nonsense",),
    "cache list": None,
    "calibrate": (MISSING,),
    "devices": None,
    "embed": (MISSING, "x"),
    "export": (NONE,),
    "info": (MISSING,),
    "judge": None,  # 1 is a verdict: a server that cannot be asked is 2
    "list": None,
    "models": (NONE,),
    "ngram build": (MISSING, "--tokenizer", TARGET, "-o", "out"),
    "ngram clear": (MISSING,),
    "ngram info": (MISSING,),
    "paths": None,
    "plan": (NONE,),
    "pull": (NONE,),
    "rm": (MISSING,),
    "run": (MISSING, "--prompt", "x"),
    "serve": (MISSING,),
    **{f"train {kind}": (NONE, "-o", "out") for kind in METHODS},
    "verify": (MISSING,),
}


def leaves(command: click.Command, name: str = "") -> Iterator[tuple[str, click.Command]]:
    """Yield every command that is not a group, with the words typed for it."""
    if not isinstance(command, click.Group):
        yield name, command
        return
    context = click.Context(command)
    for sub in command.list_commands(context):
        found = command.get_command(context, sub)
        assert found is not None
        yield from leaves(found, f"{name} {sub}".strip())


def test_every_command_is_tried() -> None:
    found = dict(leaves(cli))
    assert found.keys() == REFUSED.keys()
    assert all("as_json" in {param.name for param in command.params} for command in found.values())


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_use_is_said(command: Command, name: str) -> None:
    error = command(*name.split(), "--json", "--nonsense").failed(2)
    assert (error["type"], error["hint"]) == ("UsageError", None)
    assert "--nonsense" in error["message"]


@pytest.mark.parametrize("name", [name for name, arguments in REFUSED.items() if arguments is not None])
def test_what_was_refused_is_said(command: Command, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))
    if name.startswith("train"):
        monkeypatch.setitem(sys.modules, "torch", None)  # not installed: it takes seconds to import
    error = command(*name.split(), *(REFUSED[name] or ()), "--json").failed(1)
    assert error["type"].endswith(("Error", "Request", "Model"))
    assert error["message"]
    assert not command(*name.split(), *(REFUSED[name] or ())).out


@pytest.mark.parametrize(
    ("code", "raised", "kind", "said"),
    [
        (1, PermissionError(13, "Permission denied"), "OSError", "Permission denied"),
        (1, MemoryError(), "MemoryError", "out of memory"),
        (1, ModuleNotFoundError(name="optuna"), "ModuleNotFoundError", "this command needs optuna"),
        (130, KeyboardInterrupt(), "KeyboardInterrupt", "stopped"),
    ],
)
def test_what_the_system_ends_is_said(
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    demo: Path,
    code: int,
    raised: BaseException,
    kind: str,
    said: str,
) -> None:
    def end(*_: Any, **__: Any) -> None:
        raise raised

    monkeypatch.setattr("edgespec.runtimes.files.bundle.Bundle.open", end)
    error = command("info", demo, "--json").failed(code)
    assert error["type"] == kind
    assert said in error["message"]


def test_a_time_that_is_no_number_is_refused(command: Command, demo: Path) -> None:
    """NaN is in no range, and yet in none is it out of it."""
    assert "--duration nan" in command("calibrate", demo, "--duration", "nan", "--json").failed(2)["message"]


def test_more_threads_than_a_machine_has_are_refused(command: Command) -> None:
    for arguments in (("run", "Missing", "--prompt", "x"), ("export", NONE)):
        assert "512" in command(*arguments, "--threads", str(10**12), "--json").failed(2)["message"]


def test_nothing_guessed_is_said_so(engine: Get) -> None:
    """Method auto that found nothing to guess is not called plain decoding by another method."""
    drafted = ask(engine(), method="ngram", max_new_tokens=24)
    nothing = replace(drafted, stats=replace(drafted.stats, drafted=0), method_requested=None)
    assert summary(nothing).startswith("nothing was guessed, ")
    assert summary(nothing).endswith("auto: ngram")
    assert summary(ask(engine(), method="ar", max_new_tokens=4)).startswith("plain decoding, ")


def test_the_reason_says_what_was_measured(engine: Get) -> None:
    """It is shown with the prediction, and equals the first figure of the summary; a short request shows none."""
    # one plain step is enough to see that it is shown: how many there are depends on the clock
    with patch("edgespec.decoding.stats.TELLING", 0), patch("edgespec.decoding.stats.ENOUGH", 1):
        made = ask(engine(), method="self-spec", max_new_tokens=48)
        speed = made.stats.request_speedup
        assert made.stats.drafted
        assert speed is not None
        assert f"measured {speed:.2f}x in this request" in made.details
        assert summary(made).startswith(f"{speed:.1f}x plain decoding")
    with patch("edgespec.decoding.stats.TELLING", made.stats.decode_ms + 1):
        assert made.stats.request_speedup is None
        assert summary(made).startswith(f"{made.stats.tokens_per_round:.1f} tokens per pass")
