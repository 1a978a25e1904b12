"""An export from beginning to end: what it writes, what it measures, and that it leaves nothing half done."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.decoding.drafter import Drafter
from edgespec.decoding.loop import decode
from edgespec.decoding.request import DecodeOptions
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.target import SkipSet
from edgespec.drafters.self_spec import SelfSpec
from edgespec.drafters.speculative import DraftModel
from edgespec.engine.loading import load
from edgespec.errors import EdgespecError, ExportError, IncompatibleDraft
from edgespec.export.bundle.model import open_model
from edgespec.export.graphs.graph import WeightFile
from edgespec.export.measuring import skip_search
from edgespec.export.measuring.acceptance import Acceptance, ChainScorer
from edgespec.export.measuring.skip_search import Candidate, SkipSearch, StepCosts
from edgespec.export.measuring.skip_sets import read_skip_set
from edgespec.export.options import ALWAYS, ExportOptions
from edgespec.export.pipeline import Exporter
from edgespec.export.planning.plan import weight_bytes
from edgespec.export.source.source import resolve
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.manifest import FORMATS, MANIFEST, METHODS, SCHEMA, Format
from edgespec.runtimes.slots.slot import Slot
from tests.conftest import DRAFT, HEAD_METHODS, LARGE, TARGET, Written, write_large
from tests.support import hf
from tests.support.heads import make_heads

NAME = "llama_tied_gqa"
CONFIG = hf.CONFIGS[NAME]


@pytest.fixture(scope="module")
def target(checkpoint: Callable[[str], Path]) -> str:
    return str(checkpoint(NAME))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same tokenizer, other weights."""
    return str(hf.write_checkpoint(tmp_path_factory.mktemp("draft") / "draft", CONFIG, 4))


@pytest.fixture
def skip_file(tmp_path: Path) -> Path:
    file = tmp_path / "skip.json"
    file.write_text('{"attention": [1], "mlp": [0]}', "utf-8")
    return file


@pytest.fixture
def heads(tmp_path_factory: pytest.TempPathFactory, target: str) -> list[str]:
    """Heads of every kind for the target."""
    folder = tmp_path_factory.mktemp("heads")
    return [str(make_heads(folder / kind, kind, target)) for kind in HEAD_METHODS]


def below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


# -- what is written ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "methods",
    [chosen for size in range(3) for chosen in combinations(("ngram", "speculative", "self-spec"), size)]
    + [tuple(name for name in METHODS if name != "swift")],  # for which this model has too few layers
)
def test_every_combination_of_methods(
    tmp_path: Path, target: str, draft: str, skip_file: Path, heads: list[str], methods: tuple[str, ...]
) -> None:
    options = ExportOptions(
        target,
        tmp_path / "out",
        methods,
        heads=heads if "medusa" in methods else (),
        draft=draft if "speculative" in methods else None,
        skip_set=skip_file if "self-spec" in methods else None,
        threads=1,
    )
    stages = []
    manifest = Exporter(options, lambda stage, done, of, detail: stages.append(stage)).run()
    assert list(manifest.methods) == [name for name in METHODS if name in methods or name in ALWAYS]
    assert Bundle.open(tmp_path / "out").manifest == manifest
    assert set(manifest.target.graphs) == {
        "gated" if {"self-spec", "swift"} & set(methods) else "strict",
        "plain",
        "native",
    }
    assert (manifest.draft is not None) == ("speculative" in methods) == (tmp_path / "out" / "draft").exists()
    assert stages[0] == "weights"
    assert "parity" in stages
    assert below(tmp_path) == {"out", "skip.json"} | {f"out/{name}" for name in below(tmp_path / "out")}
    engine = load(tmp_path / "out", threads=1)
    plain = engine.generate([5, 6, 7], method="ar", max_new_tokens=12, ignore_eos=True)
    for name in manifest.methods:
        settings: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True, "fallback": False}
        assert engine.generate([5, 6, 7], method=name, **settings).tokens == plain.tokens


def test_what_a_manifest_says(bundle: Callable[..., Path]) -> None:
    data = json.loads((bundle("int4") / MANIFEST).read_text("utf-8"))
    assert {"schema_version", "edgespec_version", "target", "draft", "methods", "tokenizer", "parity", "cost", "memory",
            "provenance", "files"} <= set(data)  # fmt: skip
    assert data["schema_version"] == SCHEMA
    facts, config = data["target"]["facts"], json.loads((resolve(TARGET) / "config.json").read_text("utf-8"))
    for ours, theirs in (("layers", "num_hidden_layers"), ("hidden", "hidden_size"), ("vocab", "vocab_size"),
                         ("context", "max_position_embeddings"), ("heads", "num_attention_heads"),
                         ("kv_heads", "num_key_value_heads"), ("intermediate", "intermediate_size")):  # fmt: skip
        assert facts[ours] == config[theirs]
    arch = open_model(resolve(TARGET), None)
    assert facts["parameters"] == sum(int(np.prod(arch.source.shape(name))) for name in arch.source.index)
    assert data["tokenizer"]["eos"] == [config["eos_token_id"]]
    parity = data["parity"]
    assert 0 < parity["weight_error"] < 0.2
    assert len(parity["weight_error_by_layer"]) == facts["layers"]
    assert 0.5 < parity["top1_agreement"] <= 1
    assert parity["perplexity"] == pytest.approx(parity["perplexity_source"], rel=0.3)
    assert len(parity["text_sha256"]) == 64
    for name in ("speculative", "self-spec"):
        method = data["methods"][name]
        (measured,) = method["measured"]
        assert len(measured["acceptance"]) >= method["gamma"] >= 1
        assert all(0 <= rate <= 1 for rate in measured["acceptance"])
        assert 0 < measured["acceptance"][0] < 1
        assert measured["positions"] >= 30
        assert method["draft_cost"] > 0
        assert method["predicted_speedup"] > 0
    assert data["provenance"]["model"] == TARGET
    assert set(data["memory"]["weight_bytes"]) == {"target", "draft", "heads"}
    assert data["cost"]["plain_ms"] > 0


def test_parity_of_fp32_is_exact(bundle: Callable[..., Path]) -> None:
    parity = Bundle.open(bundle("fp32")).manifest.parity
    assert parity["weight_error"] == 0
    assert parity["logit_max_error"] < 1e-3
    assert parity["top1_agreement"] == 1
    assert parity["perplexity"] == pytest.approx(parity["perplexity_source"], rel=1e-4)


def test_formats_are_ordered_by_their_error(bundle: Callable[..., Path]) -> None:
    errors = {form: Bundle.open(bundle(form)).manifest.parity["weight_error"] for form in FORMATS}
    assert errors["fp32"] < errors["int8"] < errors["w8a8"] < errors["int4"]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", [TARGET, DRAFT, *sorted(hf.CORE)])
def test_the_plan_knows_the_size(written: Callable[..., Written], name: str, form: Format) -> None:
    made = written(name, form)
    assert weight_bytes(made.arch, form, layout="stock") == (made.folder / made.part.weights).stat().st_size


def test_a_dry_run_writes_nothing(tmp_path: Path, target: str, draft: str) -> None:
    exporter = Exporter(ExportOptions(target, tmp_path / "deep" / "out", ["speculative"], draft=draft, context=100))
    plan = exporter.plan()
    assert below(tmp_path) == set()
    assert plan["methods"] == ["ar", "ngram", "speculative"]
    assert plan["context"] == 100
    assert plan["weight_bytes"]["target"] == plan["weight_bytes"]["draft"] > 0
    assert plan["kv_bytes_per_token"] == 2 * open_model(Path(target), None).facts.kv_bytes_per_token
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("x", "utf-8")
    with pytest.raises(ExportError, match="not a bundle"):
        Exporter(ExportOptions(target, tmp_path / "taken")).plan()


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"methods": ["eagle"]}, "unknown method 'eagle'"),
        ({"methods": ["speculative"]}, "needs a draft model"),
        ({"draft": DRAFT}, "not --method speculative"),
        ({"skip_set": Path("x.json")}, "not --method self-spec"),
        ({"context": 1}, "--context 1: expected 2 to 512"),
        ({"context": 0}, "--context 0"),
        ({"context": 513}, "--context 513"),
        ({"calibration": Path("/no/such/text")}, "cannot read the calibration text"),
    ],
)
def test_options_that_make_no_sense(tmp_path: Path, target: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ExportError) as caught:
        Exporter(ExportOptions(target, tmp_path / "out", **{"threads": 1, **changes}))
    assert message in str(caught.value)
    assert below(tmp_path) == set()


@pytest.mark.parametrize("context", [2, 3, 40, 512])
def test_any_context_can_be_exported(tmp_path: Path, target: str, draft: str, skip_file: Path, context: int) -> None:
    options = ExportOptions(
        target,
        tmp_path / "out",
        ("speculative", "self-spec"),
        draft=draft,
        skip_set=skip_file,
        context=context,
        threads=1,
    )
    manifest = Exporter(options).run()
    assert manifest.draft is not None
    assert (manifest.target.facts.context, manifest.draft.facts.context) == (context, context)
    result = load(tmp_path / "out", threads=1).generate([5], method="speculative", ignore_eos=True, max_new_tokens=600)
    assert (result.finish, len(result.tokens)) == ("context", context - 1)


def test_calibration_text(tmp_path: Path, target: str) -> None:
    text = tmp_path / "text.txt"
    text.write_text("She had heard it before. " * 30, "utf-8")
    manifest = Exporter(ExportOptions(target, tmp_path / "out", calibration=text, threads=1)).run()
    assert manifest.parity["text"] == "text.txt"
    text.write_text("She", "utf-8")
    with pytest.raises(ExportError, match="at least 32 tokens"):
        Exporter(ExportOptions(target, tmp_path / "other", calibration=text))
    text.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ExportError, match="cannot read the calibration text"):
        Exporter(ExportOptions(target, tmp_path / "other", calibration=text))


def test_a_vocabulary_of_another_size_is_refused(tmp_path: Path) -> None:
    config = {**CONFIG, "vocab_size": 270}
    target = hf.write_checkpoint(tmp_path / "target", config, 1)
    draft = hf.write_checkpoint(tmp_path / "draft", {**config, "vocab_size": 400}, 1)
    with pytest.raises(IncompatibleDraft, match="the draft's vocabulary has 400 tokens, the target's 270"):
        Exporter(ExportOptions(str(target), tmp_path / "out", ["speculative"], draft=str(draft)))


def test_a_token_that_the_target_does_not_know_is_named(tmp_path: Path) -> None:
    config = {**CONFIG, "vocab_size": 300}
    target = hf.write_checkpoint(tmp_path / "target", config, 1)
    draft = hf.write_checkpoint(tmp_path / "draft", config, 1)
    hf.write_tokenizer(target, {**config, "vocab_size": 290})
    token = hf.make_tokenizer(300, True).id_to_token(290)
    with pytest.raises(IncompatibleDraft) as caught:
        Exporter(ExportOptions(str(target), tmp_path / "out", ["speculative"], draft=str(draft)))
    assert f"token 290 is {token!r} in the draft's tokenizer and unknown in the target's" in str(caught.value)
    Exporter(ExportOptions(str(draft), tmp_path / "out", ["speculative"], draft=str(draft)))


def test_a_token_that_differs_is_named(tmp_path: Path, target: str, draft: str) -> None:
    other = tmp_path / "draft"
    hf.write_checkpoint(other, CONFIG, 4)
    tokenizer = json.loads((other / "tokenizer.json").read_text("utf-8"))
    vocab = tokenizer["model"]["vocab"]
    first, second = (next(token for token, number in vocab.items() if number == at) for at in (20, 21))
    vocab[first], vocab[second] = 21, 20
    (other / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    with pytest.raises(IncompatibleDraft) as caught:
        Exporter(ExportOptions(target, tmp_path / "out", ["speculative"], draft=str(other)))
    assert f"token 20 is {first!r} in the target's tokenizer and {second!r} in the draft's" in str(caught.value)
    Exporter(ExportOptions(target, tmp_path / "out", ["speculative"], draft=draft))


def test_a_draft_may_have_more_unused_rows(tmp_path: Path, draft: str) -> None:
    """Vocabularies padded differently: what the draft says beyond the target's is ignored."""
    config = {**CONFIG, "vocab_size": 192}
    target = hf.write_checkpoint(tmp_path / "target", config, 5)
    hf.write_tokenizer(target, CONFIG)
    Exporter(ExportOptions(str(target), tmp_path / "a", ["speculative"], draft=draft, threads=1)).run()
    Exporter(ExportOptions(draft, tmp_path / "b", ["speculative"], draft=str(target), threads=1)).run()
    for name in ("a", "b"):
        engine = load(tmp_path / name, threads=1)
        settings: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True, "fallback": False}
        samplings: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 3, "acceptance": "coupled"}]
        for sampling in samplings:
            plain = engine.generate([5, 6], method="ar", **settings, **sampling)
            result = engine.generate([5, 6], method="speculative", **settings, **sampling)
            assert result.tokens == plain.tokens
            assert result.stats.dropped_reason is None
            assert result.stats.drafted > 0


# -- skip sets ---------------------------------------------------------------------------------------------------------


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
    with pytest.raises(ExportError, match="cannot read"):
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


# -- the search --------------------------------------------------------------------------------------------------------

COSTS = StepCosts(plain=10.0, attention=0.7, mlp=0.9, verify={1: 10.0, 2: 10.2, 3: 10.5, 4: 11.0, 6: 12.0, 7: 12.5})


@pytest.fixture(scope="module")
def scorer(writer: Callable[..., Written]) -> tuple[Slot, ChainScorer]:
    made = writer("stock", TARGET, "fp32")
    slot = made.slot("gated", 2)
    tokens = open_text(made)
    return slot, ChainScorer(slot, tokens, positions=24, gamma=4)


def open_text(made: Written) -> list[int]:
    from edgespec.runtimes.text.codec import TextCodec

    text = (Path(skip_search.__file__).with_name("calibration.txt")).read_text("utf-8")
    return TextCodec(made.arch.source.path).encode(text)[:120]


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


def test_the_search_is_reproducible_and_beats_every_single(scorer: tuple[Slot, ChainScorer]) -> None:
    slot, chains = scorer
    first, second = (Recorded(slot, [chains], COSTS, 3) for _ in range(2))
    best = first.run(12)
    assert second.run(12) == best
    assert [c.skip for c in first.scored] == [c.skip for c in second.scored]
    singles = [c for c in first.scored if len(c.skip) == 1]
    assert len(singles) == 2 * slot.layers
    assert best.speedup >= max(c.speedup for c in first.scored)
    assert len(first.scored) > len(singles)
    other = Recorded(slot, [chains], COSTS, 4)
    other.run(12)
    assert [c.skip for c in other.scored] != [c.skip for c in first.scored]


@pytest.mark.parametrize("stop", ["in the singles", "in the trials"])
def test_an_interrupted_search_goes_on(tmp_path: Path, scorer: tuple[Slot, ChainScorer], stop: str) -> None:
    slot, chains = scorer
    expected = Recorded(slot, [chains], COSTS, 3).run(12)
    store = tmp_path / "deep" / "search.journal"
    count = slot.layers if stop == "in the singles" else 2 * slot.layers + 4
    interrupted = Recorded(slot, [chains], COSTS, 3, store, stop_after=count)
    with pytest.raises(KeyboardInterrupt):
        interrupted.run(12)
    slower = StepCosts(plain=20.0, attention=0.1, mlp=0.1, verify=COSTS.verify)  # the machine is busy by now
    resumed = Recorded(slot, [chains], slower, 3, store)
    assert resumed.run(12) == expected
    if stop == "in the trials":
        assert len(resumed.scored) < 12


def test_costs_survive_json() -> None:
    assert StepCosts.from_dict(json.loads(json.dumps(COSTS.as_dict()))) == COSTS


def test_the_export_searches_and_cleans_up(tmp_path: Path, target: str) -> None:
    options = ExportOptions(target, tmp_path / "out", ["self-spec"], trials=4, threads=1, keep_search=tmp_path / "keep")
    manifest = Exporter(options).run()
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
            Exporter(options).run()
    assert below(tmp_path) - {"keep"} == {f"keep/{file.name}" for file in (tmp_path / "keep").glob("*.journal*")}
    assert list((tmp_path / "keep").glob("*.journal"))
    Exporter(options).run()
    assert (tmp_path / "out" / MANIFEST).is_file()
    assert list((tmp_path / "keep").glob("*.journal*")) == []


# -- acceptance --------------------------------------------------------------------------------------------------------


def measured_by_the_loop(
    target: Slot, drafter: Drafter, tokens: list[int], positions: list[int], gamma: int
) -> Acceptance:
    """One real round after each position, counted by hand."""
    offered, accepted = Counter[int](), Counter[int]()
    for position in positions:
        options = DecodeOptions(gamma + 1, gamma, sampling=SamplingParams())
        item = next(decode(target, drafter, tokens[: position + 1], options))
        assert len(item.drafted) == gamma
        for at in range(gamma):
            if at <= item.accepted:
                offered[at] += 1
                accepted[at] += at < item.accepted
    return Acceptance(tuple(offered[at] for at in range(gamma)), tuple(accepted[at] for at in range(gamma)))


@pytest.mark.parametrize("skip", [SkipSet((1,)), SkipSet((), (2,)), SkipSet((0, 2), (3,))], ids=str)
def test_self_draft_acceptance_is_that_of_the_loop(
    written: Callable[..., Written], scorer: tuple[Slot, ChainScorer], skip: SkipSet
) -> None:
    slot, chains = scorer
    made = written(TARGET, "fp32")
    target = made.slot("gated", 2)
    drafter = SelfSpec(target, skip, stop=0.0)
    found = chains.score(slot, skip)
    assert found == measured_by_the_loop(target, drafter, chains.tokens, chains.positions.tolist(), chains.gamma)
    assert 0 < sum(found.accepted) < sum(found.offered)


def test_draft_model_acceptance_is_that_of_the_loop(
    written: Callable[..., Written], scorer: tuple[Slot, ChainScorer]
) -> None:
    _, chains = scorer
    model = written(DRAFT, "fp32")
    drafter = DraftModel(model.slot("plain", 2), model.part.facts.vocab)
    target = written(TARGET, "fp32").slot("gated", 2)
    found = chains.score(model.slot("plain", 2))
    assert found == measured_by_the_loop(target, drafter, chains.tokens, chains.positions.tolist(), chains.gamma)
    assert 0 < sum(found.accepted) < sum(found.offered)


def test_the_target_accepts_itself(scorer: tuple[Slot, ChainScorer]) -> None:
    slot, chains = scorer
    found = chains.score(slot)
    assert found.accepted == found.offered == (len(chains.positions),) * chains.gamma
    assert found.rates == [1.0] * chains.gamma
    assert Acceptance((4, 0), (0, 0)).rates == [0.0, 0.0]


# -- whole or not at all -----------------------------------------------------------------------------------------------


def test_what_is_there_is_not_replaced_unasked(tmp_path: Path, target: str) -> None:
    options = ExportOptions(target, tmp_path / "out", format="int8", threads=1)
    (tmp_path / "out").mkdir()  # an empty folder may be used
    Exporter(options).run()
    before = (tmp_path / "out" / MANIFEST).read_bytes()
    with pytest.raises(ExportError, match=r"already there(.|\n)*--overwrite"):
        Exporter(options).run()
    assert (tmp_path / "out" / MANIFEST).read_bytes() == before
    again = ExportOptions(target, tmp_path / "out", format="int4", threads=1, overwrite=True)
    Exporter(again).run()
    assert Bundle.open(tmp_path / "out").manifest.target.format == "int4"
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


@pytest.mark.parametrize("overwrite", [True, False])
def test_something_that_is_no_bundle_is_never_replaced(tmp_path: Path, target: str, overwrite: bool) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work", "utf-8")
    (tmp_path / "file").write_text("more work", "utf-8")
    for name in ("out", "file"):
        with pytest.raises(ExportError, match="exists and is not a bundle"):
            Exporter(ExportOptions(target, tmp_path / name, overwrite=overwrite, threads=1)).run()
    assert below(tmp_path) == {"out", "out/thesis.txt", "file"}


def full_disk(*_: object, **__: object) -> Iterator[Any]:
    raise OSError(errno.ENOSPC, "No space left on device")


def interrupted(*_: object, **__: object) -> Iterator[Any]:
    raise KeyboardInterrupt


PLACES = ["edgespec.export.graphs.graph.WeightFile.put", "edgespec.export.graphs.graph.GraphBuilder.save",
          "edgespec.export.pipeline.copy_tokenizer", "edgespec.export.pipeline.parity_report",
          "edgespec.export.measuring.method_parts.measure_steps", "edgespec.export.pipeline.write_manifest",
          "edgespec.export.bundle.writer.save_manifest", "pathlib.Path.rename"]  # fmt: skip


@pytest.mark.parametrize("older", [True, False], ids=["over an older bundle", "new"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("failure, error", [(full_disk, ExportError), (interrupted, KeyboardInterrupt)])
def test_a_failed_export_leaves_nothing(
    tmp_path: Path,
    target: str,
    monkeypatch: pytest.MonkeyPatch,
    failure: Callable[..., Any],
    error: type[BaseException],
    place: str,
    older: bool,
) -> None:
    if older:
        Exporter(ExportOptions(target, tmp_path / "out", format="int8", threads=1)).run()
    before = below(tmp_path)
    exporter = Exporter(ExportOptions(target, tmp_path / "out", format="int4", threads=1, overwrite=True))
    with monkeypatch.context() as patch:
        patch.setattr(place, failure)
        with pytest.raises(error) as caught:
            exporter.run()
    if error is ExportError:
        assert "No space left" in str(caught.value)
        assert "free some space" in str(caught.value)
    assert below(tmp_path) == before
    if older:
        assert Bundle.open(tmp_path / "out").manifest.target.format == "int8"
        assert load(tmp_path / "out", threads=1).generate([5], max_new_tokens=3, ignore_eos=True).tokens


def test_an_older_bundle_survives_a_failed_last_step(
    tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Exporter(ExportOptions(target, tmp_path / "out", format="int8", threads=1)).run()
    before, original = below(tmp_path), Path.rename

    def rename(self: Path, to: Path) -> Path:
        if self.name.startswith(".out.part-") and not self.name.endswith(".old"):
            full_disk()
        return original(self, to)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(ExportError, match="No space left"):
        Exporter(ExportOptions(target, tmp_path / "out", format="int4", threads=1, overwrite=True)).run()
    assert below(tmp_path) == before
    assert Bundle.open(tmp_path / "out").manifest.target.format == "int8"


def test_a_disk_that_fills_up_in_the_middle_of_a_tensor(
    tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = WeightFile.put
    written = 0

    def put(self: WeightFile, name: str, dims: tuple[int, ...], dtype: Any, pieces: Any) -> None:
        nonlocal written
        written += 1
        original(self, name, dims, dtype, full_disk() if written == 5 else pieces)

    monkeypatch.setattr(WeightFile, "put", put)
    with pytest.raises(ExportError, match="No space left"):
        Exporter(ExportOptions(target, tmp_path / "out", threads=1)).run()
    assert written == 5
    assert below(tmp_path) == set()


def test_a_place_that_cannot_be_written(tmp_path: Path, target: str) -> None:
    (tmp_path / "file").write_text("x", "utf-8")
    with pytest.raises(EdgespecError, match="cannot write here"):
        Exporter(ExportOptions(target, tmp_path / "file" / "out", threads=1)).run()


# -- memory ------------------------------------------------------------------------------------------------------------

CONVERT = """
import sys, threading, time
from pathlib import Path
from edgespec.export.bundle.model import open_model, write_model
from edgespec.export.quantization.quantizers import QUANTIZERS, DirectLevels

chosen = DirectLevels(QUANTIZERS["mse"])

def private():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024

source, folder, form = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
tiny = folder / "tiny"
tiny.mkdir()
write_model(tiny, open_model(Path(sys.argv[4]), None), form, chosen=chosen, gated=True)  # everything is imported now
arch = open_model(source, None)
before = peak = private()
done = threading.Event()

def watch():
    global peak
    while not done.is_set():
        peak = max(peak, private())
        time.sleep(0.002)

watcher = threading.Thread(target=watch)
watcher.start()
write_model(folder, arch, form, chosen=chosen, gated=True)
peak = max(peak, private())
done.set()
watcher.join()
print(peak - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize("form", ["int4", "w8a8", "fp32"])
def test_a_conversion_holds_one_tensor_at_a_time(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, target: str, form: Format
) -> None:
    large = tmp_path_factory.getbasetemp() / "large"
    if not large.exists():
        assert write_large(large, LARGE) > 100_000_000
    command = [sys.executable, "-c", CONVERT, str(large), str(tmp_path), form, target]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])
    assert ran.returncode == 0, ran.stderr
    largest = 4 * LARGE["vocab_size"] * LARGE["hidden_size"]
    growth = int(ran.stdout)
    assert 1 << 20 < growth < largest + (64 << 20)
    size = (tmp_path / "model.data").stat().st_size
    assert size > 50 << 20
    assert weight_bytes(open_model(large, None), form) == size
