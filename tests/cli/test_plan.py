"""``edgespec plan``: its output, its sources, and its errors; it never loads a model."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from edgespec.export.source.opening import open_source
from edgespec.export.source.source import resolve
from edgespec.export.source.stored import Opened
from edgespec.planning.profiles import Profile
from edgespec.runtimes.files.formats import FORMATS
from edgespec.runtimes.files.manifest import read_manifest
from tests.cli.conftest import Command
from tests.conftest import TARGET
from tests.support import hf
from tests.support.gguf_files import write_gguf
from tests.support.planning import profile

KEYS = ["sources", "seconds", "budget", "goal", "pick", "reason", "hints", "candidates", "profiles"]
CANDIDATE = ["bundle", "method", "format", "precision", "kl", "operators", "attention", "context", "batch",
             "lossless", "fits", "needs", "export", "memory", "speed", "streaming"]  # fmt: skip
SPEED = ["speedup", "tokens_per_second", "plain_tokens_per_second", "prefill_tokens_per_second", "basis"]


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Planning is for before anything is loaded; and what this machine was calibrated to be is none of a test's."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a plan opened a session")

    monkeypatch.setattr("onnxruntime.InferenceSession", refuse)
    monkeypatch.setattr("edgespec.export.source.stored.Stored.read", refuse, raising=False)
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def config_alone(tmp_path: Path) -> Path:
    """Make the embedded model's config.json and nothing else."""
    folder = tmp_path / "config-alone"
    folder.mkdir()
    shutil.copy(resolve(TARGET) / "config.json", folder)
    return folder


def written(path: Path, found: Profile) -> Path:
    path.write_text(found.model_dump_json(), "utf-8")
    return path


def methods(found: dict[str, Any]) -> set[str]:
    return {candidate["method"] for candidate in found["candidates"]}


@pytest.mark.usefixtures("native")
def test_a_bundle(command: Command, demo: Path) -> None:
    found = command("plan", demo, "--budget", "1GiB", "--json").json
    assert list(found) == KEYS
    assert all(list(candidate) == CANDIDATE for candidate in found["candidates"])
    assert list(found["pick"]["speed"]) == SPEED
    assert (found["budget"], found["goal"], found["sources"]) == (1 << 30, "auto", [str(demo)])
    assert methods(found) == set(read_manifest(demo).methods)
    assert found["pick"] == found["candidates"][0]
    memory = found["pick"]["memory"]
    assert memory["peak"] <= 1 << 30
    assert memory["private"] == sum(part["private"] for part in memory["parts"])
    assert {"weights", "kv", "process"} <= {part["name"] for part in memory["parts"]}
    basis = {candidate["method"]: candidate["speed"]["basis"] for candidate in found["candidates"]}
    assert basis == {name: "exported" if part.measured else None for name, part in read_manifest(demo).methods.items()}
    assert all(candidate["speed"]["tokens_per_second"] for candidate in found["candidates"])
    assert found["pick"]["export"] is None


def test_weights_of_no_bytes_are_refused(command: Command, demo: Path, tmp_path: Path) -> None:
    """They are rejected even if the hash is right: predictions would divide by their size."""
    bundle = Path(shutil.copytree(demo, tmp_path / "bundle"))
    (bundle / "model.data").write_bytes(b"")
    data = json.loads((bundle / "edgespec.json").read_text("utf-8"))
    data["files"]["model.data"] = {"size": 0, "sha256": hashlib.sha256(b"").hexdigest()}
    (bundle / "edgespec.json").write_text(json.dumps(data), "utf-8")
    for name in ("plan", "info"):
        command(name, bundle).refused(1, "at least", "model.data has 0", "hint: ")


@pytest.mark.usefixtures("native")
def test_what_people_see(command: Command, demo: Path) -> None:
    shown = command("plan", demo, "--budget", "1GiB")
    assert shown.code == 0
    assert "pick" in shown.out.splitlines()[1]
    for part in ("speculative", "self-spec", "private", "mapped", "predicted peak", "the model's whole context of"):
        assert part in shown.out
    assert "int8" not in shown.out  # coarser keys, while those of the bundle fit
    assert "int8" in command("plan", demo, "--budget", "1GiB", "--all").out


def test_a_model_by_its_config_alone(command: Command, config_alone: Path) -> None:
    found = command("plan", config_alone, "--budget", "1GiB", "--context", "256", "--json").json
    assert {candidate["format"] for candidate in found["candidates"]} == {*FORMATS}
    speeds = {candidate["method"]: candidate["speed"]["speedup"] for candidate in found["candidates"]}
    assert speeds == {name: 1.0 if name == "ar" else None for name in speeds}  # no gain was measured
    assert any(hint.startswith("not measured: ") for hint in found["hints"])
    needs = {candidate["method"] for candidate in found["candidates"] if candidate["needs"]}
    assert needs == {"medusa", "blockwise", "paradecode", "eagle"}
    shown = command("plan", config_alone, "--budget", "1GiB", "--format", "int4", "--method", "self-spec")
    assert "make it: edgespec export" in shown.out
    assert "fp32" not in shown.out


def test_what_is_to_be_typed_makes_the_bundle_of_the_plan(command: Command, tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    shown = command("plan", TARGET, "--budget", "1GiB", "--context", "256", "--format", "int8").out
    (line,) = (line for line in shown.splitlines() if line.startswith("make it: "))
    words = line.removeprefix("make it: edgespec ").split()
    monkeypatch.undo()
    made = command(*words, "-o", tmp_path / "made", "--trials", "1")
    assert made.code == 0, made.err
    assert read_manifest(tmp_path / "made").target.format == "int8"
    assert read_manifest(tmp_path / "made").target.facts.context == 256


def test_a_draft_makes_speculation_a_candidate(command: Command) -> None:
    found = command("plan", TARGET, "--draft", "builtin:shakespeare-draft", "--budget", "1GiB", "--json").json
    assert "speculative" in methods(found)


def test_where_nothing_fits(command: Command, demo: Path) -> None:
    refused = command("plan", demo, "--budget", "10MiB")
    assert refused.code == 1
    for part in ("nothing fits 10.00 MiB", "closest is", "which needs", "hint: ", "a budget of"):
        assert part in refused.err
    assert "too large" in refused.out
    found = command("plan", demo, "--budget", "10MiB", "--json")
    assert found.code == 1
    value = json.loads(found.out)
    assert value["pick"] is None
    assert not any(candidate["fits"] for candidate in value["candidates"])
    enough = value["hints"][-1].removeprefix("a budget of ").replace(" ", "")
    assert command("plan", demo, "--budget", enough).code == 0


def test_other_nonsense(command: Command, demo: Path, tmp_path: Path) -> None:
    command("plan", demo, "--budget", "1 potato").refused(1, "error: ", "hint: ")
    command("plan", demo, "--device", tmp_path / "phone.json").refused(1, "phone.json")
    command("plan", demo, "--context", "1").refused(1, "context 1: expected 2 to")
    command("plan", demo, "--context", "99999999").refused(1, "expected 2 to")
    command("plan", demo, "--method", "telepathy").refused(1, "'telepathy' is not in")
    command("plan", demo, "--attention", "nomad").refused(1, "nomad")
    command("plan", demo, "--format", "int4").refused(2, "--format is for models")
    command("plan", demo, "--plot", tmp_path / "picture.gif").refused(1, ".png")
    command("plan", tmp_path / "nothing").refused(1)
    command("plan", demo, "--goal", "fame").refused(2)
    command("plan", demo, "--batch", "0").refused(2)
    command("plan").refused(2)


def test_several_bundles(command: Command, demo: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(demo, tmp_path / "copy")
    found = command("plan", demo, copy, demo, "--budget", "1GiB", "--json").json
    assert {candidate["bundle"] for candidate in found["candidates"]} == {str(demo), str(copy)}
    assert len(found["candidates"]) == 2 * len([c for c in found["candidates"] if c["bundle"] == str(demo)])


def test_for_another_device(command: Command, demo: Path, tmp_path: Path) -> None:
    made = profile(read_manifest(demo))
    phone = made.model_copy(update={"machine": made.machine.model_copy(update={"memory": 600 << 20})})
    file = written(tmp_path / "phone.json", phone)
    found = command("plan", demo, "--device", file, "--json").json
    assert found["budget"] == 600 << 20  # what the phone has
    assert found["profiles"][0]["machine"]["processor"] == phone.machine.processor
    assert found["pick"]["operators"] == phone.operators
    assert all(candidate["speed"]["tokens_per_second"] for candidate in found["candidates"])
    command("plan", demo, "--device", file, "--budget", "1GiB").refused(1, "1.00 GiB", "600.0 MiB")


def test_for_the_gpu(command: Command, demo: Path, config_alone: Path) -> None:
    found = command("plan", config_alone, "--device", "webgpu", "--budget", "1GiB", "--json").json
    assert {candidate["operators"] for candidate in found["candidates"]} == {"stock"}
    assert "swift" not in methods(found)
    command("plan", demo, "--device", "webgpu").refused(1, "no graphs for webgpu", "--device webgpu")


def test_a_picture(command: Command, demo: Path, tmp_path: Path) -> None:
    assert command("plan", demo, "--budget", "1GiB", "--plot", tmp_path / "plan.png").code == 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_within_a_recipe(command: Command, config_alone: Path) -> None:
    found = command("plan", config_alone, "--recipe", "phone-4gb-1b-memory", "--context", "256", "--json").json
    assert found["goal"] == "memory"
    assert {candidate["format"] for candidate in found["candidates"]} == {"int4"}
    command("plan", config_alone, "--recipe", "toaster").refused(1, "toaster")


def test_a_plan_opens_a_model_once_and_no_tokenizer(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening a tokenizer of hundreds of thousands of pieces takes seconds, and a plan needs only its size."""
    file, folder = tmp_path / "tiny.gguf", tmp_path / "folder"
    write_gguf(file, "llama_tied_gqa")
    hf.write_checkpoint(folder, hf.CONFIGS["llama_tied_gqa"], 3)
    (folder / "tokenizer.json").write_text("no JSON", "utf-8")
    opened: list[Path] = []

    def counted(path: Path, tokenizer: bool = True) -> Opened:
        opened.append(path)
        return open_source(path, tokenizer)

    def described(*given: object) -> None:
        raise AssertionError("a tokenizer was described")

    monkeypatch.setattr("edgespec.export.source.source.open_source", counted)
    monkeypatch.setattr("edgespec.export.source.gguf_files.describe_tokenizer", described)
    for model in (file, folder):
        opened.clear()
        assert command("plan", model, "--json").json["pick"] is not None
        assert opened == [model]
