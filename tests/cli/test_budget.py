"""Recipes and budgets of commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgespec.decoding.target import Output, Pass
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.engine.sharing import PrefillBudget
from edgespec.errors import BudgetError
from edgespec.planning.footprint import Memory, memory_of
from edgespec.planning.memory_budget import CHUNKS
from edgespec.planning.recipes import recipes
from edgespec.runtimes.files.manifest import Operators, read_manifest
from edgespec.runtimes.options import RunOptions
from tests.cli.conftest import Command
from tests.conftest import DRAFT, OPERATORS, PROMPTS, TARGET, THREADS

NEW = 24


def peak(bundle: Path, method: str, operators: Operators, tokens: int, **more: Any) -> Memory:
    attention = more.pop("attention", None)
    use = RunOptions(method, operators, tokens, attention, threads=THREADS, **more)
    return memory_of(read_manifest(bundle), use)


def opened(bundle: Path, operators: Operators, budget: str | int | None) -> Engine:
    return load(bundle, operators=operators, threads=THREADS, budget=budget, check=False)


@pytest.mark.parametrize("operators", OPERATORS, indirect=True)
def test_a_request_within_its_budget_is_as_without_one(demo: Path, operators: Operators) -> None:
    free = opened(demo, operators, "off").generate(PROMPTS[1], method="speculative", max_new_tokens=NEW)
    engine = opened(demo, operators, "2GiB")
    bound = engine.generate(PROMPTS[1], method="speculative", max_new_tokens=NEW)
    assert bound.tokens == free.tokens
    assert bound.method_used == "speculative"
    assert free.predicted_bytes == 0
    assert 0 < bound.predicted_bytes < 2 << 30
    assert bound.as_dict()["stats"]["predicted_bytes"] == bound.predicted_bytes


@pytest.mark.parametrize("operators", OPERATORS, indirect=True)
def test_a_method_that_does_not_fit_gives_way(demo: Path, operators: Operators) -> None:
    tokens = 64 * 4
    limit = peak(demo, "ngram", operators, tokens, chunk=CHUNKS[-1]).peak + (64 << 10)
    assert limit < peak(demo, "speculative", operators, tokens, chunk=CHUNKS[-1]).peak
    engine = opened(demo, operators, limit)
    result = engine.generate([5] * 100, method="speculative", max_new_tokens=tokens - 100 - 1)
    assert (result.method_requested, result.method_used) == ("speculative", "ngram")
    assert result.reason.startswith("speculative needs")
    assert "ngram instead" in result.reason
    plain = opened(demo, operators, "off").generate([5] * 100, method="ar", max_new_tokens=tokens - 100 - 1)
    assert result.tokens == plain.tokens


@pytest.mark.parametrize("operators", OPERATORS, indirect=True)
def test_prefills_are_cut_smaller_where_that_makes_room(
    demo: Path, operators: Operators, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrefillBudget, "rows", lambda self, most, alone: most)  # independent of timing
    tokens = 64 * 4
    sizes = {chunk: peak(demo, "ar", operators, tokens, chunk=chunk).peak for chunk in CHUNKS}
    assert sizes[128] > sizes[32]
    engine = opened(demo, operators, sizes[32])
    seen: list[int] = []
    session = engine.sessions.take([])
    run = type(session.target).run

    def spy(slot: Any, wanted: Pass) -> Output:
        if wanted.read and wanted.tokens is not None:
            seen.append(len(wanted.tokens))
        return run(slot, wanted)

    monkeypatch.setattr(type(session.target), "run", spy)
    engine.sessions.give_back(session)
    engine.generate([5] * 200, method="ar", max_new_tokens=4)
    assert max(seen) <= 32
    seen.clear()
    opened(demo, operators, "off").generate([5] * 200, method="ar", max_new_tokens=4)
    assert max(seen) == 128


def test_what_cannot_fit_is_refused_before_it_is_loaded(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a session was opened")

    monkeypatch.setattr("onnxruntime.InferenceSession", refuse)
    with pytest.raises(BudgetError, match="needs at least") as caught:
        load(demo, budget="5MiB")
    assert "edgespec plan" in str(caught.value)
    least = peak(demo, "ar", "stock", 64, chunk=CHUNKS[-1]).peak
    with pytest.raises(BudgetError, match="a context of 512 tokens needs"):
        load(demo, operators="stock", context=512, budget=least + 4096, threads=THREADS)


def test_requests_that_cannot_fit_are_refused_and_leave_a_sound_engine(demo: Path) -> None:
    limit = peak(demo, "ar", "stock", 128, chunk=CHUNKS[-1]).peak + (128 << 10)
    engine = opened(demo, "stock", limit)
    with pytest.raises(BudgetError, match="tokens of prompt and answer need"):
        engine.generate([5] * 300, max_new_tokens=100)
    assert engine.generate([5] * 100, max_new_tokens=20).tokens


def test_from_the_command_line(command: Command, demo: Path) -> None:
    words = ("run", demo, "--prompt", "ROMEO:", "--max-new-tokens", "8", "--no-check", "--json")
    found = command(*words, "--budget", "1GiB").json
    assert 0 < found["stats"]["predicted_bytes"] < 1 << 30
    assert command(*words, "--budget", "off").json["stats"]["predicted_bytes"] == 0
    command(*words, "--budget", "5MiB").refused(1, "needs at least", "5.00 MiB", "edgespec plan")
    command(*words, "--budget", "1 potato").refused(1, "'1 potato' is no amount of memory")
    command("bench", demo, "--budget", "5MiB").refused(1, "needs at least")
    command("verify", demo, "--budget", "5MiB").refused(1, "needs at least")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Make a short calibration text, so that an export is quick; long enough for coded keys."""
    file = tmp_path / "text"
    file.write_text("A horse! a horse! my kingdom for a horse!\nWhat, will you not?\n" * 40, "utf-8")
    return file


@pytest.mark.parametrize(
    "name, more, methods, run",
    [
        ("laptop-1b-chat", ("--draft", DRAFT), ["ar", "ngram", "speculative"], "--method speculative"),
        ("laptop-1b-quality", ("--trials", "2"), ["ar", "ngram", "self-spec"], "--method self-spec"),
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


def test_options_that_are_given_win(command: Command) -> None:
    """Also one that is the default: it is not the recipe's int8 then."""
    quality = ("export", TARGET, "--recipe", "laptop-1b-quality", "--dry-run", "--json")
    assert command(*quality).json["format"] == "int8"
    assert command(*quality, "--format", "int4").json["format"] == "int4"
    assert command(*quality, "--method", "swift").json["methods"] == ["ar", "ngram", "swift"]


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


@pytest.mark.parametrize("name", ["export", "plan"])
def test_the_list(command: Command, name: str) -> None:
    shown = command(name, "--recipe", "list")
    assert shown.code == 0
    assert all(recipe in shown.out for recipe in recipes())


def test_a_plan_says_what_a_recipe_needs(command: Command) -> None:
    recipe = ("plan", TARGET, "--recipe", "laptop-1b-chat", "--context", "256")
    longer = command(*recipe[:4], "--json").json["candidates"]  # the recipe's context is beyond the model's
    assert {one["context"] for one in longer} == {1024}
    needs = {one["method"]: one["needs"] for one in command(*recipe, "--json").json["candidates"]}
    assert needs["speculative"] == f"needs a draft: edgespec train draft {TARGET} -o draft"
    assert needs["ngram"] is None
    found = command(*recipe, "--draft", DRAFT, "--method", "speculative", "--goal", "quality", "--json").json
    assert found["goal"] == "quality"
    assert {one["needs"] for one in found["candidates"]} == {None}
    shown = command(*recipe, "--draft", DRAFT, "--method", "speculative").out
    made = shown.split("make it:")[1].splitlines()[0]
    assert "speculative" not in made or f"--draft {DRAFT}" in made
