"""A command that fails says so under ``--json`` as well: one object on stdout, the words on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from edgespec.cli.app import cli
from tests.cli.conftest import Command
from tests.conftest import TARGET

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
    "export": (NONE,),
    "info": (MISSING,),
    "models": (NONE,),
    "ngram build": (MISSING, "--tokenizer", TARGET, "-o", "out"),
    "ngram clear": (MISSING,),
    "ngram info": (MISSING,),
    "plan": (NONE,),
    "pull": (NONE,),
    "run": (MISSING, "--prompt", "x"),
    "serve": (MISSING,),
    "train": ("medusa", NONE, "-o", "out"),
    "verify": (MISSING,),
}


def leaves(command: click.Command, name: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command that is no group of others, by what is typed."""
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
    if name == "train":
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
    command: Command, monkeypatch: pytest.MonkeyPatch, code: int, raised: BaseException, kind: str, said: str
) -> None:
    def end(*_: Any, **__: Any) -> None:
        raise raised

    monkeypatch.setattr("edgespec.runtimes.files.bundle.Bundle.open", end)
    error = command("info", "somewhere", "--json").failed(code)
    assert error["type"] == kind
    assert said in error["message"]


def test_a_time_that_is_no_number_is_refused(command: Command) -> None:
    """NaN is in no range, and yet in none is it out of it."""
    assert "--seconds nan" in command("calibrate", "Missing", "--seconds", "nan", "--json").failed(2)["message"]


def test_more_threads_than_a_machine_has_are_refused(command: Command) -> None:
    for arguments in (("run", "Missing", "--prompt", "x"), ("export", NONE)):
        assert "512" in command(*arguments, "--threads", str(10**12), "--json").failed(2)["message"]
