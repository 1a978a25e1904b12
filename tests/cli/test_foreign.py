"""A bundle of an export by optimum, end to end: methods reproduce plain decoding's text, others are rejected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgespec.engine.loaded
from edgespec.decoding.proposal import Proposal
from edgespec.decoding.settings import Settings
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.errors import BundleError, InvalidRequest
from edgespec.export.architectures import ARCHITECTURES
from edgespec.reports.proof import prove
from edgespec.runtimes.files.formats import FORMATS, Format
from edgespec.runtimes.ort.native_library import native_library
from tests.cli.conftest import Command, export
from tests.conftest import THREADS
from tests.support import hf
from tests.support.foreign import write_export

NAME = "llama_tied_gqa"
CONFIG, SEED = hf.CONFIGS[NAME], hf.SEEDS[NAME]
PROMPTS = [
    "The harbour",
    "On the quay the men",
    "How long",
    "She had heard it before. She",
    "the the the",
    "It was 1873",
]
NATIVE = native_library().path is not None
METHODS = ("ngram", "speculative", "chain")
Paired = Callable[..., Path]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_export(tmp_path_factory.mktemp("export"), CONFIG, SEED)


@pytest.fixture(scope="module")
def paired(source: Path, checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Paired:
    """(format, origin of the draft, of the target) -> a bundle of a target and a draft of nearly its weights."""
    made: dict[tuple[str, ...], Path] = {}

    def get(form: Format = "int4", draft: str = "own", target: str = "foreign") -> Path:
        key = form, draft, target
        if key not in made:
            models = {"own": checkpoint(NAME), "foreign": source}
            output = tmp_path_factory.mktemp("bundle") / "harbour"
            pair = ("--method", "speculative", "--draft", models[draft])
            made[key] = export(output, str(models[target]), *pair, "--format", form)
        return made[key]

    return get


# -- the commands ------------------------------------------------------------------------------------------------------


def test_export_says_what_it_compares_with(command: Command, source: Path, tmp_path: Path) -> None:
    result = command("export", source, "-o", tmp_path / "bundle")
    assert result.code == 0, result.err
    assert "against the float32 graph of optimum: top-1 agreement" in result.out
    assert "methods ar, ngram" in result.out
    again = command("export", source, "-o", tmp_path / "bundle", "--overwrite", "--json").json
    assert again["manifest"]["target"]["origin"] == "optimum"
    assert len(again["manifest"]["golden"]) == 8


def test_a_dry_run(command: Command, source: Path, tmp_path: Path) -> None:
    result = command("export", source, "-o", tmp_path / "bundle", "--dry-run")
    assert result.code == 0
    assert "target weights: " in result.out
    assert not list(tmp_path.iterdir())


def test_models_says_how_it_goes(command: Command, source: Path) -> None:
    shown = command("models", source).out
    assert "harbour, 2 layers of 64, 4 heads on 2" in shown
    assert "goes through optimum: methods ar, ngram, speculative" in shown
    assert command("models", source, "--json").json["weight_bytes"].keys() == {*FORMATS} - {"w8a8"}


def test_info_marks_it(command: Command, paired: Paired) -> None:
    shown = command("info", paired()).out
    assert "exported by optimum" in shown
    active = "native" if NATIVE else "stock"
    assert f"{active} (the graph was exported by optimum" in " ".join(shown.split())
    told = command("info", paired(), "--json").json
    assert told["manifest"]["target"]["origin"] == "optimum"
    assert told["manifest"]["draft"]["origin"] == "edgespec"
    assert told["operators"]["active"] == active
    own = command("info", paired("int4", "foreign", "own"))
    assert "exported by optimum" in own.out.split("draft", 1)[1].split("\n\n")[0]


@pytest.mark.parametrize("form", ["fp32", "int4", "int8"])
def test_verify(command: Command, paired: Paired, form: Format) -> None:
    told = command("verify", paired(form), "--max-new-tokens", 60, "--json").json
    assert told["passed"]
    assert [row["method"] for row in told["methods"]] == ["ngram", "speculative"]
    assert told["golden"]["same"] == told["golden"]["of"] == 8
    loose = command("verify", paired(form), "--max-new-tokens", 60, "--no-strict", "--json").json
    assert (loose["passed"], loose["strict"]) == (True, False)
    sampled = ("--temperature", 0.8, "--seed", 1, "--acceptance", "coupled")
    assert command("verify", paired(form), "--max-new-tokens", 40, *sampled).code == 0


def test_verify_where_rows_depend_on_their_neighbours(
    command: Command, paired: Paired, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof then accepts near-ties, and reports that; other differences still fail."""
    monkeypatch.setattr(edgespec.engine.loaded, "rows_exact", lambda slot: False)
    result = command("verify", paired(), "--max-new-tokens", 20)
    assert result.code == 0
    assert "near-ties may differ" in result.err
    told = command("verify", paired(), "--max-new-tokens", 20, "--json").json
    assert told["strict"] is False
    engine = load(paired(), threads=THREADS)
    short = engine.generate(PROMPTS[0], method="ngram", max_new_tokens=5)
    assert (short.lossless, short.exact) == (True, False)
    wrong = engine.generate(PROMPTS[0], method="ar", max_new_tokens=8, ignore_eos=True).tokens
    wrong[4] = (wrong[4] + 1) % 160
    real = engine.generate

    def spoiled(*arguments: Any, **options: Any) -> Any:
        found = real(*arguments, **options)
        if options.get("method") == "ngram":
            found.tokens[:] = wrong
        return found

    monkeypatch.setattr(engine, "generate", spoiled)
    (proof,) = prove(engine, PROMPTS[:1], Settings(max_new_tokens=8, ignore_eos=True), ["ngram"])
    assert not proof.lossless


def test_bench(command: Command, paired: Paired) -> None:
    result = command("bench", paired(), "--max-new-tokens", 12, "--repeats", 1, "--max-prompts", 2, "--json")
    rows = {row["method"]: row for row in result.json["methods"]}
    assert rows.keys() >= {"plain", "ngram", "speculative"}
    assert all(row["lossless"] for row in rows.values())


# -- lossless ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "form, draft, target, strict",
    [
        ("fp32", "own", "foreign", True),
        ("int4", "own", "foreign", True),
        ("int4", "own", "foreign", False),
        ("int8", "foreign", "foreign", True),
        ("int4", "foreign", "own", True),
    ],
)
def test_methods_write_plain_text(
    paired: Paired, form: Format, draft: str, target: str, method: str, strict: bool
) -> None:
    engine = load(paired(form, draft, target), threads=THREADS, strict=strict)
    drafts = {"proposers": ("ngram", "speculative")} if method == "chain" else {}
    greedy = Settings(max_new_tokens=80, ignore_eos=True).changed(**drafts)
    for settings in (
        greedy,
        greedy.changed(temperature=0.9, top_k=40, seed=4, acceptance="coupled", max_new_tokens=50),
    ):
        (proof,) = prove(engine, PROMPTS, settings, [method])
        assert proof.lossless, proof.differences
        assert proof.exact or not engine.exact_rows, proof.differences
        assert proof.equal >= len(PROMPTS) // 2
    accepted = drafted = 0
    for prompt in PROMPTS:
        result = engine.generate(prompt, greedy, method=method, fallback=False)
        assert result.stats.dropped_reason is None
        assert result.lossless
        assert result.exact == engine.exact_rows
        accepted, drafted = accepted + result.stats.accepted, drafted + result.stats.drafted
    assert 0 < accepted <= drafted
    if method != "speculative" or form == "int4":  # else the draft is the target
        assert accepted < drafted


def test_a_conversation_reuses_its_slot(paired: Paired) -> None:
    engine = load(paired(), threads=THREADS)
    first = engine.generate(PROMPTS[0], method="speculative", max_new_tokens=20, ignore_eos=True)
    tokens = [*engine.codec.encode(PROMPTS[0]), *first.tokens, 5, 6]
    second = engine.generate(tokens, method="speculative", max_new_tokens=20, ignore_eos=True)
    assert second.stats.reused_tokens >= len(tokens) - 3
    fresh = load(paired(), threads=THREADS).generate(tokens, method="ar", max_new_tokens=20, ignore_eos=True)
    assert second.tokens == fresh.tokens
    several = engine.generate_batch(PROMPTS[:3], method="ngram", max_new_tokens=10, ignore_eos=True)
    assert [one.tokens for one in several] == [
        engine.generate(prompt, method="ar", max_new_tokens=10, ignore_eos=True).tokens for prompt in PROMPTS[:3]
    ]


def test_to_the_end_of_the_context(paired: Paired) -> None:
    engine = load(paired(), threads=THREADS, context=60)
    for method in ("ar", "ngram", "speculative"):
        result = engine.generate(PROMPTS[0], method=method, max_new_tokens=1000, ignore_eos=True, fallback=False)
        assert result.finish == "context"
        assert result.stats.dropped_reason is None
    whole = load(paired(), threads=THREADS)
    known = hf.weights(CONFIG, 1)["model.norm.weight"]  # any numbers
    tokens = (np.abs(known).repeat(40) * 1000).astype(int) % 150 + 2
    prompt = tokens[: whole.context - 5].tolist()
    plain = whole.generate(prompt, method="ar", max_new_tokens=50, ignore_eos=True)
    found = whole.generate(prompt, method="speculative", max_new_tokens=50, ignore_eos=True, fallback=False)
    assert plain.finish == found.finish == "context"
    assert plain.tokens == found.tokens


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["self-spec", "swift", "medusa", "blockwise", "paradecode"])
def test_methods_that_need_graphs_of_our_own(command: Command, paired: Paired, method: str) -> None:
    result = command("run", paired(), "--prompt", "The", "--method", method)
    result.refused(1, f"method {method!r} is not in this bundle", "exported by optimum", "docs/architectures.md")
    chained = command("run", paired(), "--prompt", "The", "--set", f"proposers=ngram,{method}")
    chained.refused(1, "exported by optimum", "docs/architectures.md")


@pytest.mark.parametrize(
    "options",
    [
        ("--set", "branch=3"),
        ("--set", "branch=2,2"),
        ("--attention", "int8", "--operators", "stock"),
        ("--draft-attention", "int4", "--operators", "stock"),
    ],
)
def test_options_that_need_graphs_of_our_own(command: Command, paired: Paired, options: tuple[str, ...]) -> None:
    result = command("run", paired(), "--prompt", "The", "--method", "speculative", *options)
    result.refused(1, "exported by optimum", "docs/architectures.md")


def test_trees_of_a_foreign_draft(command: Command, paired: Paired) -> None:
    bundle = paired("int4", "foreign", "own")
    deep = command("run", bundle, "--prompt", "The", "--method", "speculative", "--set", "branch=2,2")
    deep.refused(1, "the draft's graph was exported by optimum")
    options = ("--method", "speculative", "--set", "branch=3", "--max-new-tokens", 30, "--no-fallback", "--json")
    comb = command("run", bundle, "--prompt", "The", *options).json  # a comb is a chain of the draft's passes
    assert comb["stats"]["dropped_reason"] is None
    assert comb["stats"]["drafted"] > 0


def test_export_refuses_with_the_list(command: Command, source: Path, tmp_path: Path) -> None:
    result = command("export", source, "-o", tmp_path / "bundle", "--method", "swift")
    result.refused(1, "--method swift", "goes through another exporter", *ARCHITECTURES)
    assert not list(tmp_path.iterdir())


class Trees:
    """A proposer of trees."""

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        return Proposal(np.array([5, 6]), np.array([-1, -1]))


def test_a_proposer_of_trees_is_dropped_on_stock_operators(paired: Paired) -> None:
    engine: Engine = load(paired(), threads=THREADS, operators="stock")
    plain = engine.generate(PROMPTS[0], method="ar", max_new_tokens=12, ignore_eos=True)
    result = engine.generate(PROMPTS[0], proposer=Trees(), max_new_tokens=12, ignore_eos=True)
    assert result.tokens == plain.tokens
    assert "takes chains" in str(result.stats.dropped_reason)
    if NATIVE:
        engine = load(paired(), threads=THREADS)
        plain = engine.generate(PROMPTS[0], method="ar", max_new_tokens=12, ignore_eos=True)
        result = engine.generate(PROMPTS[0], proposer=Trees(), max_new_tokens=12, ignore_eos=True)
        assert (result.tokens, result.stats.dropped_reason) == (plain.tokens, None)


def test_what_is_refused_in_python_too(paired: Paired) -> None:
    with pytest.raises(BundleError, match="exported by optimum"):
        load(paired("fp32"), operators="native")
    with pytest.raises(InvalidRequest, match="exported by optimum"):
        load(paired()).generate("The", method="speculative", branch=(2,))
