"""Skip sets that are kept: what is read again, and what damage costs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.decoding.drafter import DraftRequest
from edgespec.decoding.target import SkipSet
from edgespec.drafters.skip_sets import OnlineSearch, Record, SkipStore, forget_sets, stored_sets
from edgespec.drafters.swift import StepCost
from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.sealed import write_sealed
from tests.drafters.test_swift import FLAT, LAYERS, START, make, write

# -- what is kept ------------------------------------------------------------------------------------------------------


@pytest.fixture
def manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """As much of a manifest as the store looks at, and a cache folder of its own."""
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path))
    files = {"model.data": SimpleNamespace(sha256="ab" * 32)}
    return SimpleNamespace(files=files, target=SimpleNamespace(weights="model.data"))


def test_a_found_set_is_kept_and_the_search_goes_on_from_it(manifest: Any, tmp_path: Path) -> None:
    target, drafter = make(store=SkipStore(manifest, "native", "text"))
    for at in range(4):
        write(target, drafter, 300, [at + 1])
    assert drafter.skip != START
    drafter.begin(DraftRequest([1]))
    (file,) = stored_sets(manifest)
    assert file.parent == tmp_path / "swift"
    data = json.loads(file.read_text("utf-8"))
    assert data.keys() == {"version", "layers", "records", "seal"}  # no tokens, no text
    assert {key for item in data["records"] for key in item} == {"attention", "mlp", "matched", "seen", "windows"}
    assert [path.name for path in file.parent.iterdir()] == [file.name]

    _, other = make(store=SkipStore(manifest, "native", "text"))
    assert other.skip == drafter.search.best
    assert other.search.records.keys() == drafter.search.records.keys()
    _, elsewhere = make(store=SkipStore(manifest, "native", "code"))
    assert elsewhere.skip == START
    _, stock = make(store=SkipStore(manifest, "stock", "text"))
    assert stock.skip == START
    assert forget_sets(manifest) == 1
    assert not stored_sets(manifest)


def test_forgetting_what_another_process_has_forgotten(manifest: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that goes between the listing and its turn is no failure, and the others go all the same."""
    stores = [SkipStore(manifest, "native", kind) for kind in ("chat", "code", "text")]
    for store in stores:
        store.save(search())
    files = stored_sets(manifest)
    assert files == [store.path for store in stores]
    files[1].unlink()
    monkeypatch.setattr("edgespec.drafters.skip_sets.stored_sets", lambda _: files)
    assert forget_sets(manifest) == 3
    assert not any(file.exists() for file in files)


def test_a_running_drafter_takes_what_another_one_found(manifest: Any) -> None:
    _, first = make(store=SkipStore(manifest, "native", "text"))
    target, second = make(store=SkipStore(manifest, "native", "text"))
    for at in range(4):
        write(target, second, 300, [at + 1])
    second._save()
    first.begin(DraftRequest([1]))
    assert first.skip == second.skip != START


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        {"version": 9, "layers": 8, "records": []},
        {"version": 1, "layers": 7, "records": []},
        {"version": 1, "layers": 8, "records": [{"attention": [0], "mlp": [], "matched": 1, "seen": 2, "windows": 1}]},
        {"version": 1, "layers": 8, "records": [{"attention": [1], "mlp": [], "matched": 3, "seen": 2, "windows": 1}]},
        {"version": 1, "layers": 8, "records": [{"attention": "x", "mlp": [], "matched": 1, "seen": 2}]},
        "[" * 100000,
        " " * (5 << 20),
    ],
)
def test_a_damaged_file_is_ignored_with_a_note(manifest: Any, content: str | dict[str, Any]) -> None:
    store = SkipStore(manifest, "native", "text")
    store.path.parent.mkdir(parents=True)
    if isinstance(content, str):
        store.path.write_text(content, "utf-8")
    else:
        write_sealed(store.path, store.purpose, content)
    target, drafter = make(store=store)
    assert drafter.skip == START
    assert "ignored" in drafter.reason
    write(target, drafter, 200)
    drafter._save()
    assert json.loads(store.path.read_text("utf-8"))["layers"] == LAYERS


@pytest.mark.parametrize(
    "error, said", [(ValueError("it is odd\nas line 2 says"), "it is odd"), (ValueError(), "ValueError")]
)
def test_why_a_file_is_ignored_is_said(
    manifest: Any, monkeypatch: pytest.MonkeyPatch, error: ValueError, said: str
) -> None:
    """In one line, and by its kind where an error says nothing."""
    store = SkipStore(manifest, "native", "text")
    store.save(search())
    again = SkipStore(manifest, "native", "text")
    write_sealed(store.path, store.purpose, {"version": 1, "layers": 9, "records": []})
    assert not again.load(search())
    assert again.note == "a stored skip set was ignored: it is of another version or model"

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("edgespec.drafters.skip_sets.read_sealed", fail)
    other = SkipStore(manifest, "native", "text")
    assert not other.load(search())
    assert other.note == f"a stored skip set was ignored: {said}"


def foreign(store: SkipStore) -> None:
    """A sound record that was sealed for another bundle, or by nobody."""
    write_sealed(store.path, f"{store.purpose}x", {"version": 1, "layers": LAYERS, "records": []})


def endless(store: SkipStore) -> None:
    store.path.symlink_to("/dev/zero")


def pipe(store: SkipStore) -> None:
    os.mkfifo(store.path)


@pytest.mark.skipif(os.name != "posix", reason="pipes and devices are POSIX's")
@pytest.mark.parametrize("put", [foreign, endless, pipe])
def test_what_was_not_written_here_is_ignored_at_once(manifest: Any, put: Callable[[SkipStore], None]) -> None:
    store = SkipStore(manifest, "native", "text")
    store.path.parent.mkdir(parents=True)
    put(store)
    assert not store.load(search())
    assert "a stored skip set was ignored: " in store.note


def test_a_folder_that_cannot_be_written_is_no_failure(manifest: Any, tmp_path: Path) -> None:
    (tmp_path / "swift").write_text("in the way", "utf-8")
    target, drafter = make(store=SkipStore(manifest, "native", "text"))
    write(target, drafter, 400)
    drafter._save()
    assert "cannot be kept" in drafter.reason


@pytest.mark.parametrize("kind", ["", "../x", "A", "a/b", "a" * 40, "a b"])
def test_a_kind_is_part_of_a_name(manifest: Any, kind: str) -> None:
    with pytest.raises(InvalidRequest, match="stream kind"):
        SkipStore(manifest, "native", kind)


def search() -> OnlineSearch:
    return OnlineSearch(LAYERS, START, StepCost(0.06, 0.06), FLAT.v)


def test_counts_are_kept_to_a_thousandth_and_a_file_is_read_once(
    manifest: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "not" / "there"))
    writer, reader = (SkipStore(manifest, "native", "text") for _ in range(2))
    found, other = search(), search()
    assert not reader.load(other)  # there is no file
    found.records = {SkipSet((1, 6), (2,)): Record(12.3456, 20.7654, 3), SkipSet((), (1, 6)): Record(0, 10**6, 10**6)}
    writer.save(found)
    assert not writer.note
    assert not writer.load(found)  # it has written it
    assert reader.load(other)
    assert not reader.load(other)
    assert other.records == {
        SkipSet((1, 6), (2,)): Record(12.346, 20.765, 3), SkipSet((), (1, 6)): Record(0, 10**6, 10**6)
    }  # fmt: skip


@pytest.mark.parametrize(
    "changed",
    [
        {"attention": [0, 3]},
        {"attention": [3, 7]},
        {"mlp": [7]},
        {"mlp": [2, 2]},
        {"mlp": [3, 2]},
        {"matched": -0.5},
        {"seen": 1e6 + 1},
        {"matched": 9},
        {"windows": -1},
        {"windows": 10**6 + 1},
    ],
    ids=str,
)
def test_a_record_that_cannot_be(manifest: Any, changed: dict[str, Any]) -> None:
    good = {"attention": [1, 6], "mlp": [1, 6], "matched": 0, "seen": 8, "windows": 0}
    for record, fine in ((good, True), ({**good, **changed}, False)):
        store = SkipStore(manifest, "native", "text")
        write_sealed(store.path, store.purpose, {"version": 1, "layers": LAYERS, "records": [record]})
        assert store.load(search()) == fine
        assert bool(store.note) != fine


def test_a_bundle_that_lists_no_weights_is_one_of_its_kind(manifest: Any) -> None:
    assert SkipStore(manifest, "native", "text").path.name == f"{'ab' * 12}-native-text.json"
    manifest.files.clear()
    assert SkipStore(manifest, "native", "text").path.name == "unknown-native-text.json"
