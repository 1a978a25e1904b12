"""Models that are run directly: their bundles are made, found again, listed and removed."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

import edgespec
from edgespec import library
from edgespec.errors import EdgespecError, InvalidRequest
from edgespec.runtimes.files.formats import EXPORT_FORMATS, FILE, ExportFormat
from tests.cli.conftest import Command
from tests.conftest import THREADS
from tests.support import hf
from tests.support.gguf_files import write_gguf

ASKED = ("--max-new-tokens", 4, "--threads", THREADS)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return hf.write_checkpoint(tmp_path / "tiny", hf.CONFIGS["llama_tied_gqa"], 3, chat_template=hf.CHAT_TEMPLATE)


def test_a_model_is_made_once_found_again_listed_and_removed(command: Command, cache: Path, model: Path) -> None:
    assert command("list", "--json").json == {"bundles": []}
    first = command("run", model, "--prompt", "how", *ASKED)
    assert first.code == 0
    assert "% quality loss, " in first.err
    (made,) = command("list", "--json").json["bundles"]
    assert (made["name"], made["model"]) == ("tiny", str(model.resolve()))
    assert Path(made["path"]).is_relative_to(cache)
    for name in (model, "tiny"):
        again = command("run", name, "--prompt", "how", *ASKED)
        assert (again.out, "quality loss" in again.err) == (first.out, False)
    assert command("info", "tiny", "--json").json["bundle"] == made["path"]
    for name in ("tiny", model):
        found = command("bench", name, "--max-prompts", 1, "--repeats", 1, "--method", "ngram", *ASKED, "--json")
        assert found.json["bundles"] == [made["path"]]
    assert command("plan", "tiny", "--json").json["pick"]["bundle"] == made["path"]
    with edgespec.load(model, threads=THREADS) as engine:
        assert engine.generate("how", max_new_tokens=4).text == first.out.removesuffix("\n")
        assert str(engine.bundle.path) == made["path"]
    assert command("rm", "tiny", "--json").json["removed"][0]["name"] == "tiny"
    assert not Path(made["path"]).exists()
    command("rm", "tiny").refused(1, "unknown bundle 'tiny'", "none yet")
    assert model.is_dir()


@contextmanager
def without_collector() -> Iterator[None]:
    """Let nothing but its last reference free an object."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def mapped_bytes(folder: Path) -> int:
    """Add up what this process maps of the weights of a bundle."""
    lines = Path("/proc/self/maps").read_text("utf-8").splitlines()
    ranges = [re.match(r"(\w+)-(\w+) ", line) for line in lines if line.endswith(f"{folder.name}/model.data")]
    return sum(int(found[2], 16) - int(found[1], 16) for found in ranges if found)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
@pytest.mark.parametrize("quantized", [True, False])
def test_the_first_run_maps_the_weights_once(cache: Path, model: Path, tmp_path: Path, quantized: bool) -> None:
    """A bundle in the file's own weights, and one whose format is measured first."""
    if quantized:
        model = tmp_path / "first.gguf"
        write_gguf(model, "llama_tied_gqa", kind=GGMLQuantizationType.Q8_0)
    with without_collector():
        bundle = library.ready(model)
        assert mapped_bytes(bundle) == 0
        with edgespec.load(bundle, threads=THREADS) as engine:
            size = (bundle / engine.bundle.manifest.target.weights).stat().st_size
            assert size <= mapped_bytes(bundle) < size + (1 << 16)
        assert mapped_bytes(bundle) == 0


def test_a_model_that_changed_is_another_bundle(cache: Path, model: Path, tmp_path: Path) -> None:
    first = library.ready(model)
    assert library.ready(model) == first == library.located(model)
    used = library.CachedBundle("tiny", "", "", first).used
    os.utime(first.with_name("tiny.json"), (1, 1))
    library.ready(model)
    assert library.CachedBundle("tiny", "", "", first).used > used - 1
    other = tmp_path / "other" / "tiny"
    shutil.copytree(model, other)
    assert library.ready(other) != first  # the name is taken
    weights = model / "model.safetensors"
    os.utime(weights, (2, 2))
    assert library.located(model) is None
    assert library.ready(model) == first  # in the place of the older one
    assert library.located(model) == first


def test_embedded_weights_that_changed_are_another_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "builtin"
    for name in ("shakespeare", "shakespeare-73m"):
        shutil.copytree(Path(edgespec.__file__).parent / "builtin" / name, folder / name)
    monkeypatch.setattr(library, "EMBEDDED", folder)
    found = [library.embedded(f"builtin:{name}") for name in ("shakespeare", "shakespeare-73m", "none")]
    (folder / "shakespeare" / "model.safetensors").write_bytes(b"other")
    assert found[2] == "" == library.embedded("shakespeare")
    changed = [library.embedded(f"builtin:{name}") for name in ("shakespeare", "shakespeare-73m")]
    assert len({*found, *changed}) == 5  # the wide model is built from the other one


def test_what_is_neither_bundle_nor_model(command: Command, cache: Path, model: Path, demo: Path) -> None:
    near = command("run", f"{demo}s", "--prompt", "x")
    near.refused(1, "no such bundle or model", f"did you mean {demo}?")
    command("run", "tinyy", "--prompt", "x").refused(1, "no such bundle or model", "edgespec list")
    command("run", f"{demo}s").refused(1, f"did you mean {demo}?")  # even if other arguments are missing
    library.ready(model)
    command("run", "tinyy", "--prompt", "x").refused(1, "did you mean tiny?")
    with pytest.raises(InvalidRequest, match="no such bundle or model") as caught:
        edgespec.load("tinyy")
    assert caught.value.hint == "did you mean tiny?"
    (model / "config.json").write_text("{}", "utf-8")
    with pytest.raises(EdgespecError):
        library.ready(model)
    assert [one.name for one in library.made()] == ["tiny"]  # the older one is still there, for its name


@pytest.mark.parametrize("name", ["info", "verify", "bench", "calibrate"])
def test_every_command_says_what_a_name_may_have_meant(command: Command, cache: Path, model: Path, name: str) -> None:
    command(name, model).refused(1, "a model without a bundle", f"edgespec run {model}")
    library.ready(model)
    command(name, "tinyy").refused(1, "did you mean tiny?")
    os.utime(model / "config.json", (2, 2))
    command(name, model).refused(1, "changed since", f"edgespec run {model}")


def test_a_model_is_served_as_it_is_run(command: Command, cache: Path, model: Path) -> None:
    """Its bundle is made; what cannot be served is named before anything listens."""
    command("serve", model, "--port", "0", "--name", "a", "--name", "b").refused(1, "2 names for 1 bundles")
    assert [one.name for one in library.made()] == ["tiny"]
    command("serve", "tinyy").refused(1, "did you mean tiny?")
    command("serve", "tiny", "tiny").refused(1, "two bundles are called 'tiny'", "--name")
    command("serve", "tiny", "--unload-after", "0").refused(2, "--unload-after")


def test_what_is_missing_or_cannot_be_written_is_named(
    command: Command, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command("run", tmp_path / "no.gguf", "--prompt", "x").refused(1, "no.gguf: no such bundle or model")
    monkeypatch.chdir(tmp_path)
    command("run", "no.gguf", "--prompt", "x").refused(1, "no.gguf: no such bundle or model")
    (tmp_path / "file").touch()
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "file" / "cache"))
    command("run", model, "--prompt", "x").refused(1, "cannot write here", "EDGESPEC_CACHE")


def test_a_hub_id_is_asked_of_the_hub_alone_where_it_is_no_path(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert library.is_model("owner/name")
    (tmp_path / "owner").mkdir()
    assert not library.is_model("owner/name")  # a bundle that was misspelled
    assert not library.is_model("name")
    with pytest.raises(InvalidRequest, match="no such bundle or model"):
        library.ready("owner/name")


def test_progress_is_told(cache: Path, model: Path) -> None:
    stages: list[str] = []
    with edgespec.load(model, threads=THREADS, progress=lambda stage, *_: stages.append(stage)):
        pass
    assert {"model", "open", "quality", "choice", "weights", "golden"} <= set(stages)


@pytest.mark.skipif(sys.platform == "win32", reason="needs pseudo-terminals")
def test_a_chat_model_chats_at_a_terminal(cache: Path, model: Path, demo: Path, tmp_path: Path) -> None:
    from tests.support.terminal import Terminal

    with Terminal(["-m", "edgespec", "run", model, *ASKED], tmp_path) as terminal:
        terminal.wait_for("you>")
        terminal.type("how?\r")
        terminal.wait_for("tokens at")
        terminal.type("/exit\r")
        assert terminal.end() == 0
    assert terminal.escapes
    assert "/set max_new_tokens N allows more" in terminal.shown
    with Terminal(["-m", "edgespec", "run", model, *ASKED], tmp_path, kind="dumb") as terminal:
        terminal.wait_for("you>")
        terminal.type("how?\r")
        terminal.wait_for("tokens at")
        terminal.type("/exit\r")
        assert terminal.end() == 0
    assert not terminal.escapes
    with Terminal(["-m", "edgespec", "run", demo, *ASKED], tmp_path) as terminal:
        assert terminal.end() == 2
    assert "has no chat template" in terminal.shown


def test_broken_facts_are_passed_over(cache: Path, model: Path) -> None:
    path = library.ready(model)
    (path.with_name("tiny.json")).write_text(json.dumps({"model": 1, "more": 2}), "utf-8")
    assert list(library.made()) == []
    assert library.ready(model) == path


def test_a_format_that_is_asked_for_is_a_bundle_beside_the_chosen_one(
    command: Command, cache: Path, model: Path
) -> None:
    chosen = library.ready(model)
    asked = command("run", model, "--prompt", "how", "--format", "fp32", *ASKED)
    assert "quality loss" not in asked.err  # that was consent
    assert sorted((one.name, one.format) for one in library.made()) == [("tiny", ""), ("tiny-fp32", "fp32")]
    assert library.located(model) == chosen
    assert library.located(model, "fp32") == chosen.with_name("tiny-fp32") == library.ready(model, form="fp32")
    command("run", chosen, "--prompt", "x", "--format", "w8a8").refused(1, "--format w8a8 was given", "for a model")
    facts = chosen.with_name("tiny.json")
    made = json.loads(facts.read_text("utf-8"))
    del made["format"]  # from a version that chose only by speed
    facts.write_text(json.dumps(made), "utf-8")
    assert library.located(model) is None


@pytest.mark.parametrize("form", [form for form in EXPORT_FORMATS if form != FILE])  # which is for quantized models
def test_every_format_can_be_asked_for_and_is_found_again(
    command: Command, cache: Path, model: Path, tmp_path: Path, form: ExportFormat
) -> None:
    made = command("run", model, "--prompt", "how", "--format", form, *ASKED)
    assert made.code == 0, made.err
    assert library.ready(model, form=form) == library.located(model, form)
    again = command("run", f"tiny-{form}", "--prompt", "how", "--format", form, *ASKED)
    assert again.out == made.out, again.err
    edgespec.export(model, tmp_path / "bundle", format=form, quick=True)


def test_a_format_that_ruins_a_model_is_taken_only_when_asked_for(
    command: Command, cache: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only int4 fits, and it loses too much: the command names the one that accepts it."""
    from edgespec.export import format_choice

    monkeypatch.setattr(format_choice, "KL_BOUND", -1.0)  # everything loses too much
    refused = command("run", model, "--prompt", "how", "--budget", "1GiB", *ASKED)
    refused.refused(1, "of quality (bound: 2%)", f"edgespec run {model} --budget 1GiB --format ")
    command("export", model, "--quick", "-o", "out").refused(1, f"edgespec export {model} -o out --format ")
    assert list(library.made()) == []
    assert not Path("out").exists()
