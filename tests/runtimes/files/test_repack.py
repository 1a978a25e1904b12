"""The other layout on demand: the very bytes of a direct export, made once, whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from edgespec.errors import BundleError
from edgespec.runtimes.files import repack
from edgespec.runtimes.files.cache import cache_folder, is_gone, set_limit
from edgespec.runtimes.files.formats import FORMATS, Format
from edgespec.runtimes.files.manifest import Operators
from edgespec.runtimes.files.repack import repacked_bytes, usable_graph
from tests.conftest import Written
from tests.support import hf
from tests.support.older import rename_weights

ROOT = Path(__file__).resolve().parents[3]
NAMES = (*sorted(hf.CORE), "builtin:shakespeare")
OTHER: dict[Operators, Operators] = {"stock": "native", "native": "stock"}

Write = Callable[..., Written]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the test a separate cache; return its folder."""
    folder = tmp_path / "own-cache"
    monkeypatch.setenv("EDGESPEC_CACHE", str(folder))
    return folder


@pytest.fixture
def copied(writer: Write, tmp_path: Path) -> Written:
    """Copy a model in the native layout, so that the test may change it."""
    made = writer("native", "qwen2_tied_gqa7", "int4")
    return Written(Path(shutil.copytree(made.folder, tmp_path / "model")), made.arch, made.part, made.errors)


def convert(made: Written) -> Path:
    """Convert ``made`` to the other kind of operators where needed; return the path of that graph."""
    name = "gated" if made.part.layout == "native" else "native"
    return usable_graph(made.folder, made.part, made.part.graphs[name])


def data(graph: Path) -> Path:
    """Return the one file of converted weights next to ``graph``."""
    (found,) = graph.parent.glob("*.data")
    return found


# -- the bytes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["stock", "native"])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", NAMES)
def test_converted_weights_are_those_of_a_direct_export(
    writer: Write, cache: Path, name: str, form: Format, layout: Operators
) -> None:
    made, direct = writer(layout, name, form), writer(OTHER[layout], name, form)
    graph = convert(made)
    assert graph.is_relative_to(cache)
    its, same = (onnx.load(path, load_external_data=False) for path in (graph, direct.folder / graph.name))
    assert rename_weights(same, "model.data", f"model.{OTHER[layout]}.data") > 0
    assert its == same
    assert data(graph).read_bytes() == (direct.folder / "model.data").read_bytes()
    own = made.main
    assert usable_graph(made.folder, made.part, made.part.graphs[own]) == made.folder / made.part.graphs[own].file


@pytest.mark.parametrize("form", FORMATS)
def test_a_few_tiles_at_a_time_give_the_same_bytes(
    writer: Write, cache: Path, form: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repack, "_TILES", 3)
    for layout in OTHER:
        made, direct = writer(layout, "builtin:shakespeare", form), writer(OTHER[layout], "builtin:shakespeare", form)
        assert data(convert(made)).read_bytes() == (direct.folder / "model.data").read_bytes()


@pytest.mark.usefixtures("native")
def test_converted_weights_run(writer: Write, cache: Path) -> None:
    """Native operators give the same results over converted weights as over their own, and so do stock ones."""
    import numpy as np

    tokens = np.arange(2, 22)
    for graph in ("native", "gated"):
        rows = [writer(layout, "qwen2_untied", "int4").slot(graph).forward(tokens).logits.copy() for layout in OTHER]
        np.testing.assert_array_equal(*rows)


# -- the cache ---------------------------------------------------------------------------------------------------------


def test_a_second_use_finds_what_the_first_made(copied: Written, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = convert(copied)
    monkeypatch.setattr(repack, "_convert", None)
    assert convert(copied) == first
    plain = usable_graph(copied.folder, copied.part, copied.part.graphs["plain"])  # the same weights, another graph
    assert plain.parent == first.parent
    assert sorted(path.name for path in first.parent.iterdir()) == [
        *("model.plain.onnx", "model.stock.data", "model.strict.onnx", "origin.json")
    ]
    assert conversions(cache) == [first.parent]


def test_what_a_slower_process_left_is_removed_by_the_next_that_finds_it_made(copied: Written, cache: Path) -> None:
    first = convert(copied)
    part = cache / f".{first.parent.name}.part-1"
    part.mkdir()
    os.utime(part, (1, 1))
    assert convert(copied) == first
    assert not part.exists()
    assert conversions(cache) == [first.parent]


def test_making_one_removes_others_beyond_the_limit(copied: Written, cache: Path) -> None:
    first = convert(copied).parent
    os.utime(first, (1, 1))
    set_limit(1 << 40)
    change(copied.folder / "model.data")
    assert convert(copied).parent != first
    assert first.is_dir()
    set_limit(1)
    change(copied.folder / "model.data")
    third = convert(copied).parent
    assert third.is_dir()
    assert not first.exists()


def test_a_changed_bundle_is_converted_anew(copied: Written, cache: Path) -> None:
    """Even with the same size and time, the bundle runs its own weights."""
    first = convert(copied)
    weights = copied.folder / "model.data"
    before = weights.read_bytes()
    change(weights)
    second = convert(copied)
    assert second.parent != first.parent
    assert data(second).read_bytes() != data(first).read_bytes()
    weights.write_bytes(before)
    assert convert(copied).parent == first.parent
    graph = copied.folder / "model.strict.onnx"
    changed = graph.read_bytes() + b"\x82\x01\x00"
    graph.write_bytes(changed)  # a newer graph over the same weights
    assert convert(copied).read_bytes() == changed


def test_a_copy_elsewhere_uses_the_same_conversion(copied: Written, cache: Path, tmp_path: Path) -> None:
    """Its origin is an existing bundle."""
    other = Written(Path(shutil.copytree(copied.folder, tmp_path / "other")), copied.arch, copied.part, copied.errors)
    first = convert(copied).parent
    shutil.rmtree(copied.folder)
    assert is_gone(first)
    assert convert(other).parent == first
    assert not is_gone(first)
    assert json.loads((first / "origin.json").read_text("utf-8"))["weights"] == str(tmp_path / "other" / "model.data")


def conversions(cache: Path) -> list[Path]:
    """Return those in a cache."""
    return sorted(cache.glob("*-stock"))


def change(file: Path) -> None:
    """Another byte in place; size and time of modification stay."""
    before = file.stat()
    content = bytearray(file.read_bytes())
    content[len(content) // 2] = (content[len(content) // 2] + 1) % 256
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_the_cache_says_how_large_it_is(copied: Written, cache: Path) -> None:
    assert repacked_bytes(copied.folder, copied.part) == 0
    graph = convert(copied)
    sizes = sum(path.stat().st_size for path in graph.parent.iterdir())
    assert repacked_bytes(copied.folder, copied.part) == sizes > graph.stat().st_size
    assert repacked_bytes(copied.folder, copied.part.model_copy(update={"index": None})) == 0


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("EDGESPEC_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    assert cache_folder() == Path.home() / ".cache" / "edgespec"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a"))
    assert cache_folder() == tmp_path / "a" / "edgespec"
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "b"))
    assert cache_folder() == tmp_path / "b"


# -- what can go wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["_to_stock", "shutil.copyfile"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()], ids=repr)
def test_what_ends_a_conversion_leaves_nothing(
    copied: Written, cache: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: BaseException
) -> None:
    """In the middle of the weights, or with the graph."""
    original, calls = repack._to_stock, 0

    def fail(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if where == "shutil.copyfile" or calls == 4:
            raise error
        return original(*arguments)

    monkeypatch.setattr(f"edgespec.runtimes.files.repack.{where}", fail)
    with pytest.raises((BundleError, KeyboardInterrupt)) as caught:
        convert(copied)
    if isinstance(error, OSError):
        assert all(word in str(caught.value) for word in ("No space left", "EDGESPEC_CACHE"))
    weights = ("model.stock.data", "origin.json") if where == "shutil.copyfile" else ()  # whole, and of use
    assert not [path for path in cache.rglob("*") if path.is_file() and path.name not in weights]
    monkeypatch.undo()
    monkeypatch.setenv("EDGESPEC_CACHE", str(cache))
    assert convert(copied).is_file()


def test_a_cache_that_cannot_be_written(copied: Written, cache: Path) -> None:
    cache.write_text("a file", "utf-8")
    with pytest.raises(BundleError, match=r"own-cache(.|\n)*EDGESPEC_CACHE"):
        convert(copied)


def test_a_bundle_without_an_index_cannot_be_converted(copied: Written, cache: Path) -> None:
    part = copied.part.model_copy(update={"index": None})
    with pytest.raises(BundleError, match="has no weights for stock operators"):
        usable_graph(copied.folder, part, part.graphs["gated"])
    assert not cache.exists()


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", '{"matrices": {}, "stock": {}}'])
def test_a_broken_index_is_named(copied: Written, cache: Path, content: str) -> None:
    (copied.folder / "model.weights.json").write_text(content, "utf-8")
    with pytest.raises(BundleError, match=r"model\.weights\.json"):
        convert(copied)


CONVERT = """
import sys
from pathlib import Path
from edgespec.runtimes.files.manifest import ModelPart
from edgespec.runtimes.files.repack import usable_graph

part = ModelPart.model_validate_json(sys.argv[2])
print(usable_graph(Path(sys.argv[1]), part, part.graphs["gated"]))
"""


def start(made: Written) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CONVERT, str(made.folder), json.dumps(made.part.model_dump(mode="json"))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def test_two_processes_at_once(copied: Written, writer: Write, cache: Path) -> None:
    running = [start(copied) for _ in range(2)]
    graphs = set()
    for one in running:
        out, err = one.communicate(timeout=300)
        assert one.returncode == 0, err
        graphs.add(out.strip())
    (graph,) = map(Path, graphs)
    assert conversions(cache) == [graph.parent]
    assert sorted(path.name for path in graph.parent.iterdir()) == [
        "model.stock.data",
        "model.strict.onnx",
        "origin.json",
    ]
    direct = writer("stock", "qwen2_tied_gqa7", "int4").folder
    assert data(graph).read_bytes() == (direct / "model.data").read_bytes()


def test_the_loser_of_a_race_uses_what_the_winner_made(
    copied: Written, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have converted; the other one's folder takes the name just before ours would."""
    original = repack._to_stock
    winner = convert(copied)
    kept = cache / "winner"
    winner.parent.rename(kept)

    def overtaken(*arguments: Any) -> Any:
        if kept.exists():
            kept.rename(winner.parent)
        return original(*arguments)

    monkeypatch.setattr(repack, "_to_stock", overtaken)
    assert convert(copied) == winner
    assert [path.name for path in cache.iterdir()] == [winner.parent.name]
