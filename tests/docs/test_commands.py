"""Every command that a page shows can be typed: the names and the values are there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from edgespec.cli.app import COMMANDS, cli
from edgespec.cli.method_settings import NAMES as SETTINGS
from edgespec.errors import InvalidRequest
from tests.docs.conftest import NAMES, commands, inline

# options of other programs that pages name without the program
FOREIGN = {"--merge", "--from", "--cpu", "--num_processes", "--calibrate-on", "--most", "--root"}
FOREIGN |= {"--temp", "--repeat-penalty", "--lora", "--mmproj", "--prompt-cache"}  # llama.cpp's


def words_of(line: str) -> list[list[str]]:
    """Give the edgespec commands of a shell line, without what they are called by."""
    found = []
    for part in re.split(r"&&|;|(?<=\s)\|(?=\s)", line):
        words = shlex.split(part, comments=True)
        words = words[1:] if words[:1] == ["$"] else words
        if "edgespec" in words and words[0] not in ("uvx", "pip", "pipx", "eval", "conda"):
            at = words.index("edgespec")
            if all("=" in word or word in ("python", "-m", "accelerate", "torchrun") for word in words[:at][:1]):
                found.append(words[at + 1 :])
    return found


def parse(words: list[str], whole: bool) -> None:
    """Parse a command as the shell would; ``whole`` = nothing may be missing."""
    words = [re.sub(r"^([\w-]+)(\|[\w-]+)+$", r"\1", word) for word in words]  # the first of several alternatives
    if not words:
        return
    group: click.Command = cli
    name = "edgespec"
    while isinstance(group, click.Group) and words and not words[0].startswith("-"):
        command = group.get_command(click.Context(group), words[0])
        assert command is not None, f"no command {words[0]}"
        name, group, words = words[0], command, words[1:]
    try:
        group.make_context(name, list(words), resilient_parsing=not (whole or words))
    except click.exceptions.Exit:
        pass  # --help, or a list
    except InvalidRequest as error:
        if "no such bundle or model" not in str(error):
            raise  # else: a page's bundle, which is not here
    except click.MissingParameter:
        assert not whole
    except (click.BadParameter, click.BadOptionUsage) as error:
        if whole or not ("NAME" in str(error) or "requires an argument" in str(error)):
            raise  # else: a placeholder, or an option without its value


@pytest.mark.parametrize("page", NAMES)
def test_commands_in_blocks(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "person.json").write_text("{}", "utf-8")  # the only file that is read while a command is parsed
    monkeypatch.chdir(tmp_path)
    for line in commands(page):
        if re.search(r"(^|[\s$;&|])edgespec(\s|$)", line) and not re.match(r"\s*(edgespec:|\"|#|from|import)", line):
            for words in words_of(line):
                parse(words, whole=True)


@pytest.mark.parametrize("page", NAMES)
def test_commands_in_text(page: str) -> None:
    for code in inline(page):
        if code.startswith("edgespec ") and not code.startswith("edgespec COMMAND"):
            for words in words_of(code):
                parse(words, whole=False)


def test_a_wrong_command_would_be_seen() -> None:
    for line in ("edgespec run demo --branch 2", "edgespec bench", "A=1 edgespec exprot x", "edgespec run d --set x=1"):
        (words,) = words_of(line)
        with pytest.raises((click.UsageError, AssertionError)):
            parse(words, whole=True)


def options() -> set[str]:
    """Every option of every command."""
    found: set[str] = set()
    todo = [cli.get_command(click.Context(cli), name) for name in COMMANDS]
    while todo:
        command = todo.pop()
        assert command is not None
        if isinstance(command, click.Group):
            context = click.Context(command)
            todo += filter(None, (command.get_command(context, name) for name in command.list_commands(context)))
        for param in command.params:
            found |= {*param.opts, *param.secondary_opts}
    return found | {"--help", "-h", "--version"}


@pytest.mark.parametrize("page", [page for page in NAMES if page != "CONTRIBUTING.md"])  # which names tools' options
def test_options_in_text(page: str) -> None:
    known = options() | FOREIGN
    for code in inline(page):
        if (code.startswith("-") and " " not in code.split("=")[0].strip()) or code.startswith("--"):
            name = re.split(r"[\s=]", code)[0]
            if name.startswith("--"):
                assert name in known, f"{page}: no option {name}"
        for setting in re.findall(r"--set ([\w-]+)=", code):
            assert setting in SETTINGS, f"{page}: no setting {setting}"
