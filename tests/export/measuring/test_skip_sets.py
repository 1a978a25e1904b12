"""Skip sets that are given."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.decoding.target import SkipSet
from edgespec.errors import ExportError
from edgespec.export.measuring.skip_search import read_skip_set
from edgespec.runtimes.files.bundle import Bundle


def test_skip_set_files(tmp_path: Path) -> None:
    file = tmp_path / "sets.json"
    file.write_text('{"attention": [3, 1, 1], "mlp": [0]}', "utf-8")
    assert read_skip_set(file, 4) == SkipSet((1, 3), (0,))
    file.write_text('{"only": {"attention": [], "mlp": [2]}}', "utf-8")
    assert read_skip_set(file, 4) == SkipSet((), (2,))
    file.write_text('{"a": {"attention": [1]}, "b": {"mlp": [0]}}', "utf-8")
    assert read_skip_set(Path(f"{file}:b"), 4) == SkipSet((), (0,))
    with pytest.raises(ExportError, match=r"several skip sets(.|\n)*a, b"):
        read_skip_set(file, 4)
    with pytest.raises(ExportError, match="several skip sets"):
        read_skip_set(Path(f"{file}:c"), 4)
    with pytest.raises(ExportError, match="names layer 1, but the model has layers 0 to 0"):
        read_skip_set(Path(f"{file}:a"), 1)
    file.write_text('{"attention": [-1]}', "utf-8")
    with pytest.raises(ExportError, match="names layer -1"):
        read_skip_set(file, 4)
    file.write_text('{"attention": [], "mlp": []}', "utf-8")
    with pytest.raises(ExportError, match="is empty"):
        read_skip_set(file, 4)
    for text in ("", "[]", "3", '{"attention": 3}', '{"attention": ["x"]}', '{"attention": [1.5]}'):
        file.write_text(text, "utf-8")
        with pytest.raises(ExportError):
            read_skip_set(file, 4)
    with pytest.raises(ExportError, match="cannot be read"):
        read_skip_set(tmp_path / "nothing.json", 4)


def test_published_skip_sets_are_read(shared: Path) -> None:
    folder = shared / "data" / "configs"
    for file in sorted(folder.glob("*.json")):
        for name, published in json.loads(file.read_text("utf-8")).items():
            skip = read_skip_set(Path(f"{file}:{name}"), 80)
            assert list(skip.attention) == sorted(published["attention"])
            assert list(skip.mlp) == sorted(published["mlp"])


def test_a_given_skip_set_is_used_as_it_is(bundle: Callable[..., Path]) -> None:
    layers = Bundle.open(bundle("int4")).manifest.target.facts.layers
    skip = Bundle.open(bundle("int4")).manifest.methods["self-spec"].skip
    assert skip is not None
    assert (skip.attention, skip.mlp) == ([1, layers - 2], [layers // 2])
