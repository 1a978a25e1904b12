"""A bundle is whole, unaltered and stays inside its folder, or it is not opened; and the file at fault is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgespec.engine.loading import load
from edgespec.errors import BundleError
from edgespec.runtimes.files.bundle import Bundle, sha256
from edgespec.runtimes.files.manifest import MANIFEST

FILES = (
    "model.strict.onnx",
    "model.plain.onnx",
    "model.data",
    "draft/model.plain.onnx",
    "draft/model.data",
    "tokenizer.json",
)


@pytest.fixture
def copy(bundle: Callable[..., Path], tmp_path: Path) -> Path:
    """Copy a bundle, so that the test may damage it."""
    return Path(shutil.copytree(bundle("int4"), tmp_path / "copy"))


def change(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Edit the manifest."""
    data = json.loads((folder / MANIFEST).read_text("utf-8"))
    edit(data)
    (folder / MANIFEST).write_text(json.dumps(data), "utf-8")


def refused(folder: Path, *words: str, check: bool = True) -> None:
    with pytest.raises(BundleError) as caught:
        Bundle.open(folder, check=check)
    for word in words:
        assert word in str(caught.value)


def test_a_sound_bundle_lists_every_file_it_has(bundle: Callable[..., Path]) -> None:
    folder = bundle("int4")
    opened = Bundle.open(folder)
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert set(opened.manifest.files) == there - {MANIFEST}
    assert set(FILES) <= there
    for name, entry in opened.manifest.files.items():
        assert entry.size == (folder / name).stat().st_size
        assert entry.sha256 == sha256(folder / name)
    assert opened.part("draft").weights == "draft/model.data"


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(copy: Path, name: str) -> None:
    (copy / name).unlink()
    refused(copy, str(copy / name), "missing")
    refused(copy, str(copy / name), "missing", check=False)


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_named(copy: Path, name: str) -> None:
    size = (copy / name).stat().st_size
    with (copy / name).open("r+b") as file:
        file.truncate(size - 1)
    refused(copy, str(copy / name), "truncated", f"expected {size} bytes, got {size - 1}")
    refused(copy, str(copy / name), "truncated", check=False)


@pytest.mark.parametrize("name", FILES)
def test_an_altered_file_is_named(copy: Path, name: str) -> None:
    content = bytearray((copy / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / name).write_bytes(bytes(content))
    refused(copy, str(copy / name), "altered", "SHA-256", "--no-check")
    Bundle.open(copy, check=False)


def test_a_longer_file_is_altered_too(copy: Path) -> None:
    with (copy / "config.json").open("ab") as file:
        file.write(b"\n")
    refused(copy, "config.json", "altered", check=False)


def test_nothing_to_open(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "is not a folder", "edgespec export")
    refused(tmp_path, "has no edgespec.json")
    (tmp_path / "file").write_text("x", "utf-8")
    refused(tmp_path / "file", "is not a folder")


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../model.onnx", "draft/../../model.onnx", "draft\\model.onnx", "C:model.onnx", ""]
)
def test_a_path_that_leaves_the_folder_is_refused(copy: Path, path: str) -> None:
    def use(data: dict[str, Any]) -> None:
        data["target"]["graphs"]["plain"]["file"] = path
        data["files"][path] = data["files"]["model.strict.onnx"]

    change(copy, use)
    refused(copy, MANIFEST, "only relative paths inside the folder", check=False)


@pytest.mark.parametrize("path", ["/etc/passwd", "../secret", "a\\b"])
def test_a_listed_path_that_leaves_the_folder_is_refused(copy: Path, path: str) -> None:
    change(copy, lambda data: data["files"].update({path: {"size": 1, "sha256": "0" * 64}}))
    refused(copy, MANIFEST, "only relative paths inside the folder")


def link(path: Path, target: Path) -> None:
    try:
        path.symlink_to(target)
    except OSError:
        pytest.skip("this system does not let us make symbolic links")


def test_a_link_out_of_the_folder_is_refused(copy: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.json"
    shutil.move(copy / "config.json", outside)
    link(copy / "config.json", outside)
    refused(copy, "config.json", "link that leaves the bundle")
    refused(copy, "config.json", "link that leaves the bundle", check=False)


def test_a_folder_link_out_of_the_bundle_is_refused(copy: Path, tmp_path: Path) -> None:
    shutil.move(copy / "draft", tmp_path / "elsewhere")
    link(copy / "draft", tmp_path / "elsewhere")
    refused(copy, "draft", "link that leaves the bundle", check=False)


def test_a_link_that_is_not_listed_is_refused_too(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("{{ messages }}", "utf-8")
    link(copy / "chat_template.jinja", tmp_path / "secret")
    refused(copy, "chat_template.jinja", "link that leaves the bundle", check=False)


def test_a_link_to_itself_is_no_endless_search(copy: Path) -> None:
    link(copy / "chat_template.jinja", copy / "chat_template.jinja")
    assert Bundle.open(copy).manifest.target.facts.layers


def test_a_link_inside_the_bundle_is_fine(copy: Path) -> None:
    shutil.move(copy / "config.json", copy / "kept.json")
    link(copy / "config.json", copy / "kept.json")
    Bundle.open(copy)


@pytest.mark.parametrize("name", ["model.strict.onnx", "model.data", "draft/model.data"])
def test_a_used_file_must_be_listed(copy: Path, name: str) -> None:
    change(copy, lambda data: data["files"].pop(name))
    refused(copy, MANIFEST, f"uses {name!r} but does not list it")


def test_a_graph_that_onnx_runtime_refuses_is_named(copy: Path) -> None:
    size = (copy / "model.strict.onnx").stat().st_size
    (copy / "model.strict.onnx").write_bytes(b"\0" * size)
    with pytest.raises(BundleError, match=r"model\.strict\.onnx: not a graph of a bundle: no protobuf"):
        load(copy, check=False, threads=1)


def test_a_bundle_without_a_draft_says_how_to_get_one(copy: Path) -> None:
    change(copy, lambda data: data.pop("draft"))
    with pytest.raises(BundleError, match=r"has no draft model(.|\n)*--draft"):
        Bundle.open(copy).part("draft")


def test_a_moved_bundle_works(copy: Path, bundle: Callable[..., Path], tmp_path: Path) -> None:
    moved = tmp_path / "some where else"
    copy.rename(moved)
    settings: dict[str, Any] = {"method": "speculative", "max_new_tokens": 8, "ignore_eos": True}
    expected = load(bundle("int4"), threads=1).generate("The", **settings).tokens
    assert load(moved, threads=1).generate("The", **settings).tokens == expected


def test_no_path_of_the_exporting_machine_is_in_the_bundle(bundle: Callable[..., Path]) -> None:
    folder = bundle("int4")

    def strings(value: object) -> list[str]:
        if isinstance(value, dict):
            return [text for pair in value.items() for item in pair for text in strings(item)]
        if isinstance(value, list):
            return [text for item in value for text in strings(item)]
        return [value] if isinstance(value, str) else []

    found = strings(json.loads((folder / MANIFEST).read_text("utf-8")))
    assert "model.data" in found
    assert not [text for text in found if text.startswith(("/", "~")) or "\\" in text or ".." in text]
    for graph in folder.rglob("*.onnx"):
        content = graph.read_bytes()
        assert str(folder.parent).encode() not in content
        assert str(Path.home()).encode() not in content
