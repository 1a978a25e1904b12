"""An export from beginning to end: what it writes, what it measures, and that it leaves nothing half done."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.drafters.registry import METHODS, needing
from edgespec.engine.loading import load
from edgespec.errors import ExportError
from edgespec.export import pipeline
from edgespec.export.bundle.model_part import open_model
from edgespec.export.loading import load_source
from edgespec.export.measuring import method_parts
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import dry_run, export_model
from edgespec.export.quantization.weights import WeightChoice
from edgespec.export.source.source import resolve
from edgespec.export.tokenizers.facts import vocabularies_differ
from edgespec.export.tokenizers.files import open_codec
from edgespec.planning import profiles as quiet
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.formats import FORMATS, Format
from edgespec.runtimes.files.manifest import MANIFEST, SCHEMA
from tests.conftest import DRAFT, HEAD_METHODS, TARGET
from tests.support import hf
from tests.support.checkpoints import make_heads

NAME = "llama_tied_gqa"
CONFIG = hf.CONFIGS[NAME]


@pytest.fixture(scope="module")
def target(checkpoint: Callable[[str], Path]) -> str:
    return str(checkpoint(NAME))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write a draft model with the target's tokenizer and other weights."""
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
    + [tuple(name for name in METHODS if name not in ("swift", *needing("drafter"), *needing("adapter")))],
)
def test_every_combination_of_methods(
    tmp_path: Path, target: str, draft: str, skip_file: Path, heads: list[str], methods: tuple[str, ...]
) -> None:
    """Without swift, for which the model has too few layers."""
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
    manifest = export_model(options, lambda stage, done, of, detail: stages.append(stage), golden=False)
    assert list(manifest.methods) == [name for name in METHODS if name in methods or METHODS[name].needs == "text"]
    assert Bundle.open(tmp_path / "out").manifest == manifest
    assert set(manifest.target.graphs) == {
        "gated" if {"self-spec", "swift"} & set(methods) else "strict",
        "plain",
        "native",
    }
    assert (manifest.draft is not None) == ("speculative" in methods) == (tmp_path / "out" / "draft").exists()
    assert stages[0] == "open"
    assert "weights" in stages
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


def test_a_dry_run_writes_nothing(tmp_path: Path, target: str, draft: str) -> None:
    options = ExportOptions(target, tmp_path / "deep" / "out", ["speculative"], draft=draft, context=100)
    plan = dry_run(options)
    assert below(tmp_path) == set()
    assert plan["methods"] == ["ar", "ngram", "speculative"]
    assert plan["context"] == 100
    assert plan["weight_bytes"]["target"] == plan["weight_bytes"]["draft"] > 0
    mixed = dry_run(replace(options, format="int8"))["weight_bytes"]
    assert mixed["target"] > mixed["draft"] == plan["weight_bytes"]["draft"]
    assert dry_run(replace(options, format="int8", draft_format="int8"))["weight_bytes"]["draft"] > mixed["draft"]
    assert plan["kv_bytes_per_token"] == 2 * open_model(Path(target), None).facts.kv_bytes_per_token
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("x", "utf-8")
    with pytest.raises(ExportError, match="not a bundle"):
        dry_run(ExportOptions(target, tmp_path / "taken"))


def test_a_small_draft_is_in_the_faster_format(
    tmp_path: Path, target: str, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which one that is the clock says, so the test tells what the usual one must be ahead by."""
    monkeypatch.setattr(pipeline, "_SMALL", 1.0)
    usual = ExportOptions(target, tmp_path / "b", ["speculative"], draft=draft, overwrite=True, quantizer="mse")
    cases: tuple[tuple[float, Format, bool, Format], ...] = (
        (0.0, "int8", False, "int4"), (math.inf, "int4", False, "int4"), (0.0, "int4", True, "int4"),
        (0.0, "int8", False, "int8"), (0.0, "int4", True, "int8"),
    )  # fmt: skip
    for ahead, form, quick, of in cases:
        monkeypatch.setattr(method_parts, "_USUAL", ahead)
        options = replace(usual, quick=quick, format=of)
        manifest = export_model(options, golden=False)
        assert manifest.draft is not None
        assert manifest.draft.format == form
        draft_model = load_source(options).models.draft
        assert draft_model is not None
        choice = WeightChoice.of(form, None, None)
        assert manifest.memory["weight_bytes"]["draft"] == draft_model.weight_bytes(choice, "auto")["model"]
        assert sorted(path.name for path in (tmp_path / "b").iterdir() if path.name.startswith(".")) == []
        assert load(tmp_path / "b").generate([5, 6, 7], max_new_tokens=4, method="speculative").exact


def test_a_busy_machine_predicts_nothing(
    tmp_path: Path, target: str, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its times are kept and marked; no speed is predicted by them, and the export says why."""
    for spread in (0.0, math.inf):  # every machine is busy, none is
        monkeypatch.setattr(quiet, "BUSY", spread)
        options = ExportOptions(
            target, tmp_path / str(spread), ["speculative", "self-spec"], draft=draft, context=100, trials=1
        )
        made = export_model(options, golden=False)
        busy = spread == 0
        assert (made.methods["speculative"].predicted_speedup is None) == busy
        assert made.cost["spread"] >= 1
        notes = made.provenance.get("notes") or []
        told = "; ".join(part.notes or "" for part in made.methods.values())
        assert ("predicted" in told) == (not busy)  # nowhere, and not only in the figures
        assert any("the machine was busy" in note and "no speed is predicted" in note for note in notes) == busy


@pytest.mark.usefixtures("native")
def test_a_draft_with_a_large_vocabulary_scores_frequent_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {
        "methods": ["speculative"],
        "draft": DRAFT,
        "operators": "native",
        "threads": 1,
        "quick": True,
    }
    assert not export_model(ExportOptions(TARGET, tmp_path / "small", **options)).methods["speculative"].head_rows
    monkeypatch.setattr(pipeline, "_LARGE", 1024)
    manifest = export_model(ExportOptions(TARGET, tmp_path / "large", **options))
    assert manifest.draft is not None
    assert manifest.draft.facts.vocab == 1024
    assert manifest.methods["speculative"].head_rows == 336  # a third, in whole tiles
    cut = export_model(ExportOptions(TARGET, tmp_path / "cut", draft_vocab=300, **options))
    assert not cut.methods["speculative"].head_rows
    with load(tmp_path / "large", threads=1, operators="native") as engine:
        for prompt in ("ROMEO:", "Why, what is"):
            for sampled in ({}, {"temperature": 1.0, "seed": 3, "acceptance": "coupled"}):
                how: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True, **sampled}
                drafted = engine.generate(prompt, method="speculative", fallback=False, **how)
                assert drafted.tokens == engine.generate(prompt, method="ar", **how).tokens
                assert drafted.stats.drafted


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"methods": ["hydra"]}, "unknown method 'hydra'"),
        ({"methods": ["eagle"]}, "needs a drafter"),
        ({"methods": ["speculative"]}, "needs a draft model"),
        ({"draft": DRAFT}, "not --method speculative"),
        ({"codes": Path("nowhere")}, "--codec nowhere: there is no such folder"),
        ({"draft_format": "int4"}, "--draft-format was given, but not --method speculative"),
        ({"skip_set": Path("x.json")}, "not --method self-spec"),
        ({"context": 1}, "--context 1: expected 2 to 512"),
        ({"context": 0}, "--context 0"),
        ({"context": 513}, "--context 513"),
        ({"calibration": Path("/no/such/text")}, "cannot read the calibration text"),
    ],
)
def test_options_that_make_no_sense(tmp_path: Path, target: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ExportError) as caught:
        load_source(ExportOptions(target, tmp_path / "out", **{"threads": 1, **changes}))
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
    manifest = export_model(options, golden=False)
    assert manifest.draft is not None
    assert (manifest.target.facts.context, manifest.draft.facts.context) == (context, context)
    result = load(tmp_path / "out", threads=1).generate([5], method="speculative", ignore_eos=True, max_new_tokens=600)
    assert (result.finish, len(result.tokens)) == ("context", context - 1)


def test_calibration_text(tmp_path: Path, target: str) -> None:
    text = tmp_path / "text.txt"
    text.write_text("She had heard it before. " * 30, "utf-8")
    manifest = export_model(ExportOptions(target, tmp_path / "out", calibration=text, threads=1), golden=False)
    assert manifest.parity["text"] == "text.txt"
    text.write_text("She", "utf-8")
    with pytest.raises(ExportError, match="at least 32 tokens"):
        load_source(ExportOptions(target, tmp_path / "other", calibration=text))
    text.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ExportError, match="cannot read the calibration text"):
        load_source(ExportOptions(target, tmp_path / "other", calibration=text))


def translated(target: Path | str, draft: Path) -> str | None:
    """Open a pair -> what differs between its tokenizers; None = nothing does."""
    source = load_source(ExportOptions(str(target), Path("out"), ["speculative"], draft=str(draft)))
    found = source.models.draft
    assert found is not None
    ours, theirs = source.tokenizers.codec, open_codec(found.source.path)
    why = vocabularies_differ(source.models.target.facts, found.facts, ours, theirs)
    assert (why is None) is (found.translation is None)
    return why


def test_what_differs_between_two_tokenizers(tmp_path: Path, target: str, draft: str) -> None:
    config = {**CONFIG, "vocab_size": 270}
    small = hf.write_checkpoint(tmp_path / "small", config, 1)
    large = hf.write_checkpoint(tmp_path / "large", {**config, "vocab_size": 400}, 1)
    assert translated(small, large) == "the draft's vocabulary has 400 tokens, the target's 270"

    config = {**CONFIG, "vocab_size": 300}
    fewer = hf.write_checkpoint(tmp_path / "fewer", config, 1)
    more = hf.write_checkpoint(tmp_path / "more", config, 1)
    hf.write_tokenizer(fewer, {**config, "vocab_size": 290})
    token = hf.make_tokenizer(300, True).id_to_token(290)
    assert translated(fewer, more) == f"token 290 is {token!r} in the draft's tokenizer and unknown in the target's"
    assert translated(more, more) is None

    other = tmp_path / "draft"
    hf.write_checkpoint(other, CONFIG, 4)
    tokenizer = json.loads((other / "tokenizer.json").read_text("utf-8"))
    vocab = tokenizer["model"]["vocab"]
    first, second = (next(token for token, number in vocab.items() if number == at) for at in (20, 21))
    vocab[first], vocab[second] = 21, 20
    (other / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    assert translated(target, other) == f"token 20 is {first!r} in the target's tokenizer and {second!r} in the draft's"
    assert translated(target, Path(draft)) is None


def test_a_draft_may_have_more_unused_rows(tmp_path: Path, draft: str) -> None:
    """The vocabularies have different padding: the draft's logits beyond the target's are ignored."""
    config = {**CONFIG, "vocab_size": 192}
    target = hf.write_checkpoint(tmp_path / "target", config, 5)
    hf.write_tokenizer(target, CONFIG)
    export_model(ExportOptions(str(target), tmp_path / "a", ["speculative"], draft=draft, threads=1), golden=False)
    export_model(ExportOptions(draft, tmp_path / "b", ["speculative"], draft=str(target), threads=1), golden=False)
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
