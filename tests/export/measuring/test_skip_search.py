"""The search for a skip set, and published sets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.decoding.target import SkipSet
from edgespec.errors import ExportError
from edgespec.export.measuring import skip_search
from edgespec.export.measuring.acceptance import ChainScorer
from edgespec.export.measuring.skip_search import (
    Candidate,
    SkipSearch,
    StepCosts,
    measure_steps,
    read_skip_set,
)
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.export.quantization.calibration_text import read_calibration
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.manifest import MANIFEST
from edgespec.runtimes.slots.slot import Slot
from edgespec.runtimes.text.codec import TextCodec
from tests.conftest import TARGET, Written
from tests.support import hf

NAME = "llama_tied_gqa"
CONFIG = hf.CONFIGS[NAME]


@pytest.fixture(scope="module")
def target(checkpoint: Callable[[str], Path]) -> str:
    return str(checkpoint(NAME))


def below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


# -- the search --------------------------------------------------------------------------------------------------------

COSTS = StepCosts(plain=10.0, attention=0.7, mlp=0.9, verify={1: 10.0, 2: 10.2, 3: 10.5, 4: 11.0, 6: 12.0, 7: 12.5})


class Recorded(SkipSearch):
    """A search that remembers what it scored, and can be interrupted."""

    def __init__(self, *given: Any, stop_after: int | None = None, **named: Any) -> None:
        super().__init__(*given, **named)
        self.scored: list[Candidate] = []
        self.stop_after = stop_after

    def score(self, skip: SkipSet, gamma: int | None = None) -> Candidate:
        known = (skip, gamma) in self._scored
        found = super().score(skip, gamma)
        if not known:
            self.scored.append(found)
            if self.stop_after is not None and len(self.scored) >= self.stop_after:
                raise KeyboardInterrupt
        return found


def test_a_search_that_finds_nothing_stops_and_says_so(scorer: tuple[Slot, ChainScorer]) -> None:
    """If a draft step costs nearly a whole one, no set is faster, for any number of trials."""
    slot, chains = scorer
    dear = replace(COSTS, attention=0.01, mlp=0.01)
    told: list[tuple[int, int, str]] = []
    search = Recorded(slot, chains, dear, 3)
    found = search.run(64, lambda *step: told.append(step))
    assert found.speedup < 1
    assert search.stopped is not None
    assert skip_search.PATIENCE <= search.stopped < 32
    done, of, what = told[-1]
    assert done == of
    assert what.startswith("nothing pays: best 0.")
    assert what.endswith(f"after {search.stopped} of 64")
    kept = Recorded(slot, chains, COSTS, 3)  # a search with a faster set continues
    assert kept.run(12).speedup >= 1
    assert kept.stopped is None or kept.stopped >= skip_search.PATIENCE


def test_when_a_search_is_hopeless() -> None:
    last = [0.8] * skip_search.PATIENCE
    assert skip_search.hopeless([0.7, 0.9, *last], 2)
    assert not skip_search.hopeless([0.7, *last], 2)  # the unions of the best sub-layers come first
    assert not skip_search.hopeless([0.7, 0.75, *last], 2)  # it still gains
    assert not skip_search.hopeless(last, 0)


def test_the_search_is_reproducible_and_beats_every_single(scorer: tuple[Slot, ChainScorer]) -> None:
    slot, chains = scorer
    first, second = (Recorded(slot, chains, COSTS, 3) for _ in range(2))
    best = first.run(12)
    assert second.run(12) == best
    assert [c.skip for c in first.scored] == [c.skip for c in second.scored]
    singles = [c for c in first.scored if len(c.skip) == 1]
    assert len(singles) == 2 * slot.layers
    assert best.speedup >= max(c.speedup for c in first.scored)
    assert len(first.scored) > len(singles)
    other = Recorded(slot, chains, COSTS, 4)
    other.run(12)
    assert [c.skip for c in other.scored] != [c.skip for c in first.scored]


@pytest.mark.parametrize("stop", ["in the singles", "in the trials"])
def test_an_interrupted_search_goes_on(tmp_path: Path, scorer: tuple[Slot, ChainScorer], stop: str) -> None:
    slot, chains = scorer
    expected = Recorded(slot, chains, COSTS, 3).run(12)
    store = tmp_path / "deep" / "search.journal"
    count = slot.layers if stop == "in the singles" else 2 * slot.layers + 4
    interrupted = Recorded(slot, chains, COSTS, 3, store, stop_after=count)
    with pytest.raises(KeyboardInterrupt):
        interrupted.run(12)
    slower = StepCosts(plain=20.0, attention=0.1, mlp=0.1, verify=COSTS.verify)  # the machine is busy by now
    resumed = Recorded(slot, chains, slower, 3, store)
    assert resumed.run(12) == expected
    if stop == "in the trials":
        assert len(resumed.scored) < 12


def test_what_leaving_out_saves_is_timed(writer: Callable[..., Written], monkeypatch: pytest.MonkeyPatch) -> None:
    """Savings of sub-layers, planes and rows of the head, each timed in separate passes."""
    took = {(): 20.0, (6, 0): 14.0, (0, 6): 8.0, ("attention",): 18.0, ("mlp",): 17.0, ("head",): 16.0,
            (512,): 15.0, (256,): 14.5, (128,): 14.25}  # fmt: skip

    def measured(run: Callable[[int], object], sizes: Iterable[int], repeats: int) -> dict[int, list[float]]:
        found = {size: [20.0] for size in sizes}
        return found | {at: [ms] for at, ms in enumerate(took.values())} if isinstance(sizes, range) else found

    monkeypatch.setattr(skip_search, "measure_all", measured)
    monkeypatch.setattr(skip_search, "LEAST_ROWS", 128)
    costs = skip_search.measure_steps(writer("native", TARGET, "int8").slot("native", 2), 2)
    assert (costs.attention, costs.mlp) == (1.0, 2.0)
    assert [costs.high_attention, costs.high_mlp, costs.high_head] == pytest.approx([2 / 6, 0.5, 4.0])
    assert costs.cut_head == {512: 1.0, 256: 1.5, 128: 1.75}
    assert costs.draft_ms(SkipSet.all_high(6)) == pytest.approx(20 - 2 - 3 - 4)
    assert costs.draft_ms(replace(SkipSet.all_high(6), head_rows=256)) == pytest.approx(20 - 2 - 3 - 4 - 1.5)


@pytest.mark.usefixtures("native")
def test_three_choices_of_two_planes(writer: Callable[..., Written], tmp_path: Path) -> None:
    """The search begins from high planes, resumes after an interruption, and is never slower than them."""
    made = writer("native", TARGET, "int8")
    text, _ = read_calibration(None, made.arch.source.path / "none", TextCodec(made.arch.source.path))
    tokens = TextCodec(made.arch.source.path).encode(text)[:120]
    slot, chains = made.slot("native", 2), ChainScorer(made.slot("native", 2), tokens, positions=24, gamma=4)
    costs = replace(COSTS, high_attention=0.3, high_mlp=0.45, high_head=1.0)
    search = Recorded(slot, chains, costs, 3, planes=True)
    best = search.run(12)
    high = SkipSet.all_high(slot.layers)
    assert search.scored[0].skip == high
    assert best.speedup >= search.score(high).speedup > search.score(SkipSet((1,), (1,))).speedup
    tried = [one.skip for one in search.scored]
    assert any(skip.attention and skip.high_mlp for skip in tried)
    assert any(len(skip.high_mlp) + len(skip.mlp) < slot.layers for skip in tried)  # some of it whole
    assert not any(set(skip.attention) & set(skip.high_attention) for skip in tried)
    assert best.draft_cost == pytest.approx(costs.draft_ms(best.skip) / costs.plain)
    interrupted = Recorded(slot, chains, costs, 3, tmp_path / "journal", planes=True, stop_after=2 * slot.layers + 5)
    with pytest.raises(KeyboardInterrupt):
        interrupted.run(12)
    assert Recorded(slot, chains, costs, 3, tmp_path / "journal", planes=True).run(12) == best
    measured = measure_steps(slot, 2, repeats=2)
    assert set(measured.as_dict()) <= {*costs.as_dict()}


@pytest.mark.usefixtures("native")
def test_the_export_of_two_planes_searches_among_three(tmp_path: Path, target: str) -> None:
    options = ExportOptions(target, tmp_path / "out", ["self-spec"], format="int8", trials=2, threads=1)
    manifest = export_model(options, golden=False)
    skip = manifest.methods["self-spec"].skip
    assert skip is not None
    assert skip.high_attention or skip.high_mlp or skip.attention or skip.mlp


def test_the_export_searches_and_cleans_up(tmp_path: Path, target: str) -> None:
    options = ExportOptions(target, tmp_path / "out", ["self-spec"], trials=4, threads=1, keep_search=tmp_path / "keep")
    manifest = export_model(options, golden=False)
    skip = manifest.methods["self-spec"].skip
    assert skip is not None
    assert len(skip.attention) + len(skip.mlp) >= 1
    assert list((tmp_path / "keep").glob("*.journal")) == []


def test_an_interrupted_export_keeps_its_search(tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ExportOptions(target, tmp_path / "out", ["self-spec"], trials=4, threads=1, keep_search=tmp_path / "keep")
    original = SkipSearch.score

    def interrupt(self: SkipSearch, skip: SkipSet, gamma: int | None = None) -> Candidate:
        if len(self._scored) > 5:
            raise KeyboardInterrupt
        return original(self, skip, gamma)

    with monkeypatch.context() as patch:
        patch.setattr(SkipSearch, "score", interrupt)
        with pytest.raises(KeyboardInterrupt):
            export_model(options, golden=False)
    assert below(tmp_path) - {"keep"} == {f"keep/{file.name}" for file in (tmp_path / "keep").glob("*.journal*")}
    assert list((tmp_path / "keep").glob("*.journal"))
    export_model(options, golden=False)
    assert (tmp_path / "out" / MANIFEST).is_file()
    assert list((tmp_path / "keep").glob("*.journal*")) == []


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
