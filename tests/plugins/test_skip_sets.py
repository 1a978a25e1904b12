"""The search for skip sets: what it finds, whom it believes, when it ends; what is kept, and what damage costs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgespec.decoding.drafter import DraftRequest
from edgespec.decoding.target import SkipSet
from edgespec.errors import InvalidRequest
from edgespec.plugins.swift.drafter import StepCost
from edgespec.plugins.swift.search import OnlineSearch, Record, SkipStore
from edgespec.runtimes.files.sealed import write_sealed
from edgespec.runtimes.files.skip_sets import forget_sets, stored_sets
from tests.plugins.test_swift import FLAT, GOOD, LAYERS, START, make, write

# -- the search --------------------------------------------------------------------------------------------------------


def searched(seed: int, losses: Callable[[SkipSet], float], windows: int, layers: int = 12) -> OnlineSearch:
    """Run a search for ``windows`` windows of 16 guesses, each accepted with probability exp(-``losses``)."""
    odd = tuple(range(1, layers - 1, 2))
    search = OnlineSearch(layers, SkipSet(odd, odd), StepCost(0.03, 0.05), FLAT.v, seed)
    draw = np.random.default_rng(seed)
    for _ in range(windows):
        if search.stopped:
            break
        skip = search.ask()
        assert all(0 < layer < layers - 1 for layer in (*skip.attention, *skip.mlp))
        search.record_result(skip, int(draw.binomial(16, np.exp(-losses(skip)))), 16)
    return search


@pytest.mark.parametrize("seed", range(5))
def test_the_search_finds_a_planted_good_set(seed: int) -> None:
    def losses(skip: SkipSet) -> float:  # attention above layer 3 is free, everything else is expensive
        return (
            0.005 * sum(i > 3 for i in skip.attention)
            + 0.2 * sum(i <= 3 for i in skip.attention)
            + 0.15 * len(skip.mlp)
        )

    search = searched(seed, losses, 250)

    def truth(skip: SkipSet) -> float:
        return search.speed(skip, float(np.exp(-losses(skip))))

    planted = truth(SkipSet(tuple(range(4, 11))))
    assert truth(search.best) > 0.92 * planted
    assert truth(search.best) > 1.1 * truth(search.initial)


def test_three_choices_where_weights_have_two_planes() -> None:
    """Layer 5's attention is needed whole, layers 7 and 8 are not needed at all, high planes do for all others."""
    layers, cost = 10, StepCost(0.04, 0.06, 0.0, 0.02, 0.03, 0.05)

    def losses(skip: SkipSet) -> float:
        left = sum(0.001 if layer in (7, 8) else 0.2 for layer in (*skip.attention, *skip.mlp))
        high = sum(0.1 if layer == 5 else 0.002 for layer in skip.high_attention) + 0.002 * len(skip.high_mlp)
        return left + high

    for seed in range(3):
        search = OnlineSearch(layers, SkipSet.all_high(layers), cost, FLAT.v, seed)
        draw = np.random.default_rng(seed)
        while not search.stopped:
            skip = search.ask()
            assert not set(skip.attention) & set(skip.high_attention)
            assert not set(skip.mlp) & set(skip.high_mlp)
            assert {0, layers - 1} <= {*skip.high_attention} & {*skip.high_mlp}  # ends stay as they began
            assert skip.high_head
            search.record_result(skip, int(draw.binomial(16, np.exp(-losses(skip)))), 16)
        true = [search.speed(skip, float(np.exp(-losses(skip)))) for skip in (search.best, search.initial)]
        assert true[0] > 1.1 * true[1]
        assert {7, 8} & {*search.best.attention, *search.best.mlp}
        assert 5 not in search.best.high_attention


def test_records_name_planes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path))
    manifest = SimpleNamespace(files={}, target=SimpleNamespace(weights="weights"))
    first, other = (OnlineSearch(6, SkipSet.all_high(6), StepCost(0.05, 0.05), FLAT.v) for _ in range(2))
    found = SkipSet((2,), (), (0, 1, 3, 4, 5), (0, 1, 2, 3, 4, 5), True)
    for skip in (first.initial, found):
        first.record_result(skip, 15, 16)
    SkipStore(manifest, "native", "text").save(first)  # type: ignore[arg-type]
    assert SkipStore(manifest, "native", "text").load(other)  # type: ignore[arg-type]
    assert other.records == first.records


def test_the_initial_set_is_scored_first_and_leads_until_another_is_confirmed() -> None:
    search = OnlineSearch(LAYERS, START, StepCost(0.06, 0.06), FLAT.v)
    assert search.ask() == START
    assert not search.record_result(START, 12, 16)
    assert search.candidates == 0
    other = search.ask()
    assert other != START
    assert search.candidates == 1
    assert not search.record_result(other, 16, 16)  # better, but seen once
    assert search.speed(other) > search.speed(START)
    assert search.best == START
    assert search.ask() == other
    assert search.record_result(other, 16, 16)
    assert search.best == other
    third = search.ask()
    assert not search.record_result(third, 0, 16)
    assert search.best == other


def test_what_led_is_scored_again_and_may_lose_its_lead() -> None:
    search = OnlineSearch(LAYERS, START, StepCost(0.06, 0.06), FLAT.v)
    search.record_result(search.ask(), 16, 16)
    search.record_result(START, 16, 16)
    search.records[GOOD] = Record(30, 32, 2)
    asked = []
    for _ in range(40):
        asked.append(skip := search.ask())
        search.record_result(skip, 4, 16)  # the text has changed: nothing that was good is
        if search.best == GOOD:
            break
    assert START in asked
    assert search.best == GOOD


def test_the_search_ends() -> None:
    search = searched(1, lambda skip: 0.5 * len(skip), 5000)
    assert search.stopped.startswith("no better set")
    assert 50 < search.candidates <= 1000
    assert OnlineSearch(2, SkipSet(), StepCost(0.1, 0.1), FLAT.v).stopped
    assert len(search.records) <= 65


def test_what_others_have_seen_is_taken_over_up_to_an_end() -> None:
    found, others = searched(1, lambda skip: 0.5 * len(skip), 60), searched(2, lambda skip: 0.5 * len(skip), 60)
    best = others.best
    found.resume(others.records)
    assert len(found.records) <= 65
    assert {best, found.initial} <= found.records.keys()


def test_a_tiny_model_can_be_searched_through() -> None:
    search = searched(0, lambda skip: 0.1 * len(skip), 60, layers=3)
    assert search.records.keys() == {SkipSet((1,), (1,)), SkipSet((1,)), SkipSet((), (1,))}


# -- its arithmetic, computed again ------------------------------------------------------------------------------------

INNER = LAYERS - 2
SINGLES = [*(SkipSet((layer,)) for layer in range(1, LAYERS - 1)), *(SkipSet((), (i,)) for i in range(1, LAYERS - 1))]


def test_a_record_counts_and_forgets() -> None:
    record = Record()
    record.add(3, 8)
    assert (record.matched, record.seen, record.windows) == (3, 8, 1)
    assert record.acceptance(0.5) == (3 + 8 * 0.5) / (8 + 8)  # the prior counts as eight guesses
    record = Record(50, 100, 2)
    record.add(150, 200)  # 256 are remembered: 56 of the old hundred
    assert [record.matched, record.seen, record.windows] == pytest.approx([178, 256, 3])
    record.add(1, 300)
    assert (record.matched, record.seen) == (1, 300)


def test_what_a_sub_layer_costs_is_a_weighted_least_squares_fit() -> None:
    """-log(share of right guesses) is the sum of the losses, each known beforehand to a standard deviation."""
    search = OnlineSearch(LAYERS, START, StepCost(0.06, 0.06), FLAT.v)
    prior = np.repeat([0.03, 0.06], INNER)
    assert [search.acceptance(skip) for skip in SINGLES] == pytest.approx(np.exp(-prior).tolist())
    shown = {START: (12, 16), SkipSet((1, 2)): (15, 16), SkipSet((2,), (6,)): (4, 9), SkipSet((6,), (1, 2)): (16, 16)}
    rows, wanted = [np.eye(2 * INNER) / 0.06], [prior / 0.06]
    for skip, (matched, seen) in shown.items():
        search.record_result(skip, matched, seen)
        left_out = [layer in skip.attention for layer in range(1, LAYERS - 1)]
        left_out += [layer in skip.mlp for layer in range(1, LAYERS - 1)]
        share = (matched + 0.5) / (seen + 0.5)
        weight = np.sqrt(seen * share / (1.05 - share))
        rows.append(weight * np.array([left_out], float))
        wanted.append(np.array([-weight * np.log(share)]))
    losses = np.linalg.lstsq(np.concatenate(rows), np.concatenate(wanted), rcond=None)[0]
    assert losses.min() < 0 < losses.max()  # a loss below nothing is none
    found = [search.acceptance(skip) for skip in SINGLES]
    assert found == pytest.approx(np.exp(-np.maximum(losses, 0)).tolist())


def test_the_fastest_set_is_that_of_all_sets() -> None:
    layers, inner = 5, 3
    search = OnlineSearch(layers, SkipSet((1,)), StepCost(0.05, 0.15), FLAT.v)
    bits = np.array([[number >> bit & 1 for bit in range(2 * inner)] for number in range(1, 1 << 2 * inner)], bool)
    every = [search._set(row) for row in bits]
    assert [search._bits(skip).tolist() for skip in every] == bits.tolist()
    for seed in range(20):
        loss = np.random.default_rng(seed).exponential(0.1, 2 * inner)
        speeds = {skip: search.speed(skip, float(np.exp(-loss @ row))) for skip, row in zip(every, bits, strict=True)}
        assert speeds[search._fastest(loss)] > 0.99 * max(speeds.values())
    search.records = {skip: Record(1, 2, 1) for skip in every}
    assert search._fastest(loss) == SkipSet()  # nothing new


class Watched(OnlineSearch):
    """Writes down where candidates come from."""

    def __init__(self) -> None:
        super().__init__(12, SkipSet((1, 2), (3,)), StepCost(0.03, 0.05), FLAT.v)
        self.sources: dict[int, str] = {}

    def _modelled(self) -> SkipSet:
        self.sources.setdefault(self.candidates, "model")
        return super()._modelled()

    def _uniform(self) -> SkipSet:
        self.sources.setdefault(self.candidates, "any")
        return super()._uniform()

    def _mutated(self) -> SkipSet:
        self.sources.setdefault(self.candidates, "like the best")
        return super()._mutated()


def test_where_candidates_come_from_and_when_the_best_is_scored_again() -> None:
    search = Watched()
    search.record_result(search.ask(), 15, 16)
    between, last = list[int](), 0
    for _ in range(270):
        skip = search.ask()
        if skip == search.initial:
            between.append(search.candidates - last)
            last = search.candidates
        search.record_result(skip, 15 if skip == search.initial else 1, 16)
    assert set(between) == {8}
    sources = [search.sources[number] for number in range(1, search.candidates + 1)]
    assert [source == "model" for source in sources] == [number % 3 == 0 for number in range(1, len(sources) + 1)]
    assert 0.2 < sources.count("any") / (len(sources) - sources.count("model")) < 0.4  # sampled again: 3 of 10


def test_sizes_of_candidates() -> None:
    search = Watched()
    best = search._bits(search.best)
    assert {len(search._uniform()) for _ in range(600)} == set(range(1, 16))  # up to three quarters of 20 sub-layers
    assert {int((search._bits(search._mutated()) ^ best).sum()) for _ in range(60)} == {1, 2, 3}


@pytest.mark.parametrize("share, last", [(0.5, 100), (1.0, 24)])
def test_a_search_with_nothing_in_sight_ends_early_only_where_nearly_all_guesses_stand(share: float, last: int) -> None:
    search = OnlineSearch(3, SkipSet((1,)), StepCost(0.1, 0.1), FLAT.v)
    for skip in (SkipSet((), (1,)), SkipSet((1,), (1,))):
        search.record_result(skip, 0, 16)
    while not search.stopped:
        skip = search.ask()
        search.record_result(skip, round(16 * share) if skip == search.initial else 0, 16)
    assert search.best == search.initial
    assert search.stopped == f"no better set among the last {last} candidates"
    search.resume({})
    assert search.stopped == ""
    none = OnlineSearch(2, SkipSet(), StepCost(0.1, 0.1), FLAT.v)
    none.resume({})
    assert none.stopped


# -- what is kept ------------------------------------------------------------------------------------------------------


@pytest.fixture
def manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the part of a manifest that the store reads, with a new cache folder."""
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
    assert file.parent == tmp_path / "skip-sets"
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
    """A file that vanishes after the listing raises no error, and the others are still removed."""
    stores = [SkipStore(manifest, "native", kind) for kind in ("chat", "code", "text")]
    for store in stores:
        store.save(search())
    files = stored_sets(manifest)
    assert files == [store.path for store in stores]
    files[1].unlink()
    monkeypatch.setattr("edgespec.runtimes.files.skip_sets.stored_sets", lambda _: files)
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

    monkeypatch.setattr("edgespec.plugins.swift.search.read_sealed", fail)
    other = SkipStore(manifest, "native", "text")
    assert not other.load(search())
    assert other.note == f"a stored skip set was ignored: {said}"


def foreign(store: SkipStore) -> None:
    """Write a sound record to ``store`` that was sealed for another purpose."""
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
    (tmp_path / "skip-sets").write_text("in the way", "utf-8")
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
    assert not reader.load(other)  # the file does not exist
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
