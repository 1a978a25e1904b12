"""The overview and the help texts."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import edgespec
from edgespec.cli.app import COMMANDS, EXTRAS, cli
from edgespec.cli.common import COMMON, NAMES, OUTPUT, SAMPLING, GroupedCommand
from edgespec.cli.export import default_output
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.settings import MAX_NEW_TOKENS, Settings
from edgespec.export.options import ExportOptions
from tests.cli.conftest import ROOT, Command, process

HEAVY = ("numpy", "onnxruntime", "onnx", "rich", "pydantic", "tokenizers", "safetensors", "optuna", "huggingface_hub")


def find(name: str) -> click.Command:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
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


@pytest.mark.parametrize("name", ["run", "bench", "verify", "export", "train", "plan"])
def test_few_options_come_first(name: str) -> None:
    command = find(name)
    assert isinstance(command, GroupedCommand)
    sections = list(command.sections(click.Context(command)).items())
    assert (sections[0][0], sections[-1][0]) == (COMMON, OUTPUT)
    assert 5 <= len(sections[0][1]) <= 10
    shown = CliRunner().invoke(cli, [name, "--help"]).stdout
    places = [shown.index(f"\n{heading}:\n") for heading, _ in sections]
    assert places == sorted(places)


def test_settings_of_one_method_are_listed() -> None:
    result = CliRunner().invoke(cli, ["run", "--set", "list"])
    assert (result.exit_code, result.stderr) == (0, "")
    assert [line.split()[0] for line in result.stdout.splitlines()] == list(NAMES)


def test_a_setting_typed_as_an_option_is_explained(command: Command, tmp_path: Path) -> None:
    command("run", tmp_path, "--nodes", 8).refused(2, "--nodes is a setting of one method: --set nodes=VALUE")
    command("plan", tmp_path, "--nodes", 8).refused(2, "No such option")


def test_the_overview_lists_every_command() -> None:
    result = CliRunner().invoke(cli, ["-h"], prog_name="edgespec")
    assert result.exit_code == 0
    for name, line in COMMANDS.items():
        assert f"  {name} " in result.stdout
        assert line in result.stdout


def test_the_overview_waits_for_no_library(tmp_path: Path) -> None:
    code = (
        "import json, sys; sys.argv = ['edgespec', '--help']; from edgespec.__main__ import main; main();"
        "print(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, encoding="utf-8", check=True, timeout=300
    )
    assert "export" in done.stdout
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
    process("run", cwd=tmp_path).refused(2, "Missing argument 'BUNDLE'")


@pytest.mark.parametrize("name", ["run", "bench", "verify"])
def test_defaults_are_those_of_the_library(name: str) -> None:
    found = defaults(name)
    for params in (Settings(), SamplingParams()):
        for field in dataclasses.fields(params):
            if field.name == "max_new_tokens" and name != "run":  # which compare texts of one length
                assert found[field.name] == MAX_NEW_TOKENS
            elif field.name in found and field.name not in SAMPLING:  # the model's own, else the library's
                assert found[field.name] == getattr(params, field.name), field.name
    assert all(found[name] is None for name in SAMPLING)


def test_export_defaults_are_those_of_the_library() -> None:
    found = defaults("export")
    found |= {"format": found["form"]}
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
    command("run", demo, "--prompt", "x").refused(1, module, f"hint: pip install 'edgespec[{EXTRAS[module]}]'")


def test_another_missing_module_is_a_bug(command: Command, monkeypatch: pytest.MonkeyPatch, demo: Path) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ModuleNotFoundError("No module named 'x'", name="x")

    monkeypatch.setattr("edgespec.engine.loading.load", fail)
    with pytest.raises(ModuleNotFoundError):
        command("run", demo, "--prompt", "x")
