"""``edgespec info``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from edgespec.runtimes.files.manifest import Manifest, Operators
from tests.cli.conftest import Command
from tests.conftest import OPERATORS


def test_json(command: Command, demo: Path) -> None:
    result = command("info", demo, "--json")
    made = result.json
    assert result.err == ""
    assert made.keys() == {"bundle", "operators", "manifest"}
    assert made["operators"].keys() == {"active", "reason", "exact_rows", "layout", "repacked_bytes", "graphs"}
    assert made["operators"]["layout"] == "native"
    assert made["operators"]["graphs"] == {"gated": "stock", "plain": "stock", "native": "native"}
    assert made["manifest"].keys() == set(Manifest.model_fields)
    assert Manifest.model_validate(made["manifest"]) == Manifest.model_validate_json(
        (demo / "edgespec.json").read_text("utf-8")
    )


def test_table_on_a_small_terminal(command: Command, demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = command("info", demo)
    assert (result.code, result.err) == (0, "")
    assert max(map(len, result.out.splitlines())) <= 80
    for word in ("model", "shape", "draft", "format", "context", "size", "KV", "operators", "parity", "made by"):
        assert f"\n {word} " in f"\n{result.out}"
    for word in ("int4", "1024 tokens", "ngram", "self-spec", "speculative", "skips"):
        assert word in " ".join(result.out.split())


def test_names_are_not_markup(command: Command, chatty: Path) -> None:
    assert "[red]a $b$ :+1:: llama" in command("info", chatty).out


def test_what_the_export_noted_is_printed_once(command: Command, demo: Path, tmp_path: Path) -> None:
    """Whole, below the table; what stands at a method is not said again."""
    folder = Path(shutil.copytree(demo, tmp_path / "noted"))
    manifest = json.loads((folder / "edgespec.json").read_text("utf-8"))
    manifest["methods"]["speculative"]["notes"] = "right half the time; as measured"
    manifest["provenance"]["notes"] = ["read in another way", "as measured"]
    (folder / "edgespec.json").write_text(json.dumps(manifest), "utf-8")
    out = command("info", folder, "--no-check").out
    assert out.count("as measured") == 1
    assert out.count("note: read in another way") == 1


@pytest.fixture
def altered(demo: Path, tmp_path: Path) -> Path:
    """A bundle with one byte changed."""
    folder = Path(shutil.copytree(demo, tmp_path / "altered"))
    data = bytearray((folder / "model.strict.onnx").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "model.strict.onnx").write_bytes(data)
    return folder


def test_an_altered_file_is_named(command: Command, altered: Path) -> None:
    for name in ("info", "bench", "verify"):
        command(name, altered).refused(1, "model.strict.onnx: altered", "hint: ", "--no-check")
    command("run", altered, "--prompt", "x").refused(1, "model.strict.onnx: altered")
    assert command("info", altered, "--no-check").code == 0


@pytest.mark.parametrize("operators", OPERATORS, indirect=True)
def test_a_graph_that_cannot_be_loaded(command: Command, altered: Path, operators: Operators) -> None:
    graph = altered / ("model.native.onnx" if operators == "native" else "model.strict.onnx")
    graph.write_bytes(b"\xff" * graph.stat().st_size)
    command("run", altered, "--no-check", "--prompt", "x", "--operators", operators).refused(1, graph.name)


def test_a_missing_and_a_short_file(command: Command, demo: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(demo, tmp_path / "short"))
    weights = next(folder.glob("draft/*.data"))
    weights.write_bytes(weights.read_bytes()[:-1])
    command("info", folder, "--no-check").refused(1, weights.name, "truncated", "hint: ")
    weights.unlink()
    command("info", folder).refused(1, weights.name, "missing from the bundle", "hint: ")


def test_wrong_input(command: Command, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command("info").refused(2, "Missing argument 'BUNDLE'")
    command("info", tmp_path).refused(1, "has no edgespec.json", "hint: make one with `edgespec export MODEL`")
    command("info", tmp_path / "file").refused(1, "is not a folder")
    (tmp_path / "edgespec.json").write_text("{", "utf-8")
    command("info", tmp_path).refused(1, "edgespec.json: not readable as JSON", "hint: ")
    (tmp_path / "edgespec.json").write_text('{"schema_version": 99}', "utf-8")
    command("info", tmp_path).refused(1, "schema 99 is newer", "hint: upgrade edgespec")
