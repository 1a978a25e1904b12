"""``--recipe`` of export and plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgespec.planning.recipes import recipes
from tests.cli.conftest import Command
from tests.conftest import DRAFT, TARGET


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A short calibration text, so that an export is quick; long enough for coded keys."""
    file = tmp_path / "text"
    file.write_text("A horse! a horse! my kingdom for a horse!\nWhat, will you not?\n" * 40, "utf-8")
    return file


@pytest.mark.parametrize(
    "name, more, methods, run",
    [
        ("laptop-1b-chat", ("--draft", DRAFT), ["ar", "ngram", "speculative"], "--method speculative"),
        ("laptop-1b-quality", (), ["ar", "ngram", "medusa"], "--method medusa"),
        ("phone-8gb-3b-memory", ("--trials", "2"), ["ar", "ngram", "self-spec"], "--method self-spec"),
        ("single-board-1b-memory", (), ["ar", "ngram", "swift"], "--method ngram"),
        ("laptop-small-batch", (), ["ar", "ngram"], "edgespec bench"),
    ],
)
@pytest.mark.usefixtures("native")
def test_an_export_by_a_recipe(
    command: Command, tmp_path: Path, text: Path, name: str, more: tuple[str, ...], methods: list[str], run: str
) -> None:
    out = tmp_path / "out"
    done = command("export", TARGET, "--recipe", name, *more, "--calibration", text, "--threads", "1", "-o", out)
    assert done.code == 0, done.err
    assert f"recipe {name}: " in done.out
    assert run in done.out.splitlines()[-1]
    manifest = json.loads((out / "edgespec.json").read_text("utf-8"))
    assert list(manifest["methods"]) == methods
    assert manifest["target"]["format"] == ("int8" if "quality" in name else "int4")
    assert manifest["target"]["facts"]["context"] == 1024  # the model's own limit is below the recipe's
    if run != "edgespec bench":
        ran = command("run", out, "--prompt", "ROMEO:", "--max-new-tokens", "4", "--method", run.split()[-1])
        assert ran.code == 0, ran.err


def test_options_that_are_given_win(command: Command, text: Path) -> None:
    def plan(*options: object) -> dict[str, object]:
        return command("export", TARGET, "--recipe", "laptop-1b-chat", *options, "--dry-run", "--json").json

    found = plan("--draft", DRAFT)
    assert (found["format"], found["head_format"], found["context"]) == ("int4", "int8", 1024)
    found = plan("--draft", DRAFT, "--format", "fp32", "--context", "64")
    assert (found["format"], found["head_format"], found["context"]) == ("fp32", "fp32", 64)
    assert plan("--draft", DRAFT, "--head-format", "int4")["head_format"] == "int4"
    # the default, but given: it wins over the recipe's int8
    quality = ("export", TARGET, "--recipe", "laptop-1b-quality", "--dry-run", "--json")
    assert command(*quality, "--format", "int4").json["format"] == "int4"
    assert command(*quality).json["format"] == "int8"
    assert plan("--method", "swift")["methods"] == ["ar", "ngram", "swift"]


def test_what_is_refused(command: Command, tmp_path: Path) -> None:
    refused = command("export", TARGET, "--recipe", "laptop-1b-chat", "-o", tmp_path / "out")
    refused.refused(1, "recipe laptop-1b-chat: method speculative needs a draft model, --draft", "same family")
    command("export", TARGET, "--recipe", "nothing").refused(1, "no recipe 'nothing'", "laptop-1b-chat")
    (tmp_path / "own.json").write_text("{}", "utf-8")
    command("export", TARGET, "--recipe", tmp_path / "own.json").refused(1, "own.json: name: Field required")
    command("export", TARGET, "--recipe", "laptop-1b-chat", "--draft", DRAFT, "--method", "swift", "--dry-run").refused(
        1, "--draft was given, but not --method speculative"
    )
    assert not (tmp_path / "out").exists()


def test_heads_are_asked_for(command: Command, tmp_path: Path) -> None:
    source = Path(__file__).parents[1] / "data" / "configs" / "llama-3.2-1b.json"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_bytes(source.read_bytes())
    refused = command("export", tmp_path / "model", "--recipe", "laptop-1b-quality")
    refused.refused(1, "method medusa needs trained heads: `edgespec train medusa MODEL")


@pytest.mark.parametrize("name", ["export", "plan"])
def test_the_list(command: Command, name: str) -> None:
    shown = command(name, "--recipe", "list")
    assert shown.code == 0
    assert all(recipe in shown.out for recipe in recipes())


def test_a_plan_by_a_recipe(command: Command) -> None:
    found = command("plan", TARGET, "--recipe", "phone-4gb-1b-memory", "--context", "256", "--json").json
    assert found["budget"] == 3 << 29
    assert found["goal"] == "memory"
    assert found["pick"]["format"] == "int4"
    assert found["pick"]["context"] == 256


def test_a_plan_says_what_a_recipe_needs(command: Command) -> None:
    recipe = ("plan", TARGET, "--recipe", "laptop-1b-chat", "--context", "256")
    needs = {one["method"]: one["needs"] for one in command(*recipe, "--json").json["candidates"]}
    assert needs["speculative"] == f"needs a draft: edgespec train draft {TARGET} -o draft"
    assert needs["ngram"] is None
    found = command(*recipe, "--draft", DRAFT, "--method", "speculative", "--goal", "quality", "--json").json
    assert found["goal"] == "quality"
    assert {one["needs"] for one in found["candidates"]} == {None}
    shown = command(*recipe, "--draft", DRAFT, "--method", "speculative").out
    assert "speculative" not in shown.split("make it:")[1] or f"--draft {DRAFT}" in shown
