"""Attention formats through the front door: each is lossless against plain decoding with the same attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.engine.result import Result
from edgespec.errors import InvalidRequest
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.export.quantization import coded_keys as attention
from edgespec.planning.buffers import model_kv
from edgespec.reports.proof import check_golden
from edgespec.runtimes.files.formats import Attention
from edgespec.runtimes.options import LoadOptions
from edgespec.runtimes.ort.native_library import native_library
from tests.conftest import DRAFT, PROMPTS, TARGET, THREADS, fixed_skip_set

pytestmark = pytest.mark.skipif(native_library().path is None, reason="no native operators here")

METHODS = ("ngram", "self-spec", "speculative")
FORMATS = ("f32", "f16", "int8", "int4", "nomad", "nomad2")
SETTINGS: dict[str, Any] = {"max_new_tokens": 150, "ignore_eos": True, "fallback": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a bundle with every method and every table."""
    folder = tmp_path_factory.mktemp("attention")
    export_model(
        ExportOptions(
            TARGET,
            folder / "bundle",
            ("speculative", "self-spec"),
            draft=DRAFT,
            skip_set=fixed_skip_set(folder, TARGET),
            threads=THREADS,
            attention=("f16", "int4", "nomad", "nomad2"),
        ),
        golden=False,
    )
    return folder / "bundle"


@pytest.fixture(scope="module")
def engine(folder: Path) -> Callable[..., Engine]:
    made: dict[tuple[object, ...], Engine] = {}

    def get(attention: str | None, draft: str | None = None) -> Engine:
        if (attention, draft) not in made:
            made[attention, draft] = load(
                folder, threads=THREADS, operators="native", attention=attention, draft_attention=draft
            )
        return made[attention, draft]

    return get


@pytest.fixture(scope="module")
def plainly(engine: Callable[..., Engine]) -> Callable[[str, str], Result]:
    """(attention, prompt) -> plain decoding, which the methods share."""
    return cache(lambda name, prompt: engine(name).generate(prompt, method="ar", **SETTINGS))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["int8", "int4", "nomad", "nomad2"])
def test_greedy_equals_plain(
    engine: Callable[..., Engine], plainly: Callable[[str, str], Result], name: str, method: str
) -> None:
    made, accepted = engine(name), 0
    for prompt in PROMPTS[:5]:
        result = made.generate(prompt, method=method, **SETTINGS)
        assert result.tokens == plainly(name, prompt).tokens
        assert result.exact
        assert result.lossless
        assert result.draft_attention is None
        accepted += result.stats.accepted
    assert accepted > 0


def test_long_texts_cross_the_window(engine: Callable[..., Engine]) -> None:
    made = engine("nomad")
    longer = {**SETTINGS, "max_new_tokens": 420}
    plain = made.generate(PROMPTS[0], method="ar", **longer)
    assert made.generate(PROMPTS[0], method="self-spec", **longer).tokens == plain.tokens
    assert made.generate(PROMPTS[0], method="ngram", **longer).tokens == plain.tokens
    # a request that goes back further than the exact recent keys reach
    again = made.codec.encode(PROMPTS[0]) + plain.tokens[:100]
    assert made.generate(again, method="ar", max_new_tokens=50, ignore_eos=True).tokens == plain.tokens[100:150]


@pytest.mark.parametrize("draft", ["int4", "nomad", "nomad2"])
@pytest.mark.parametrize("name", ["f16", "int8", "f32"])
def test_drafts_with_coarser_keys_change_no_text(
    engine: Callable[..., Engine], plainly: Callable[[str, str], Result], name: str, draft: str
) -> None:
    made, accepted = engine(name, draft), 0
    for prompt in PROMPTS[:3]:
        expected = plainly(name, prompt)
        result = made.generate(prompt, method="self-spec", **SETTINGS)
        assert result.tokens == expected.tokens
        assert result.exact
        assert result.lossless
        assert result.draft_attention == draft == result.as_dict()["draft_attention"]
        assert f"drafts read {draft} keys, verification {name}" in result.details
        assert result.approximations == expected.approximations
        accepted += result.stats.accepted
    assert accepted > 0
    other = made.generate(PROMPTS[0], method="ngram", max_new_tokens=5)
    assert other.draft_attention is None
    assert "draft_attention" not in other.as_dict()


def test_sampling_with_a_seed(engine: Callable[..., Engine]) -> None:
    made = engine("int4", "nomad2")
    settings: dict[str, Any] = {"temperature": 0.9, "seed": 3, "max_new_tokens": 60, "acceptance": "coupled"}
    plain = engine("int4").generate(PROMPTS[1], method="ar", **settings)
    result = made.generate(PROMPTS[1], method="self-spec", fallback=False, **settings)
    assert result.tokens == plain.tokens
    assert result.exact


def test_results_name_the_attention(engine: Callable[..., Engine]) -> None:
    said = {name: engine(name).generate("The", max_new_tokens=1).approximations[2:] for name in FORMATS}
    assert said["f32"] == []
    assert said["f16"] == ["float16 keys", "float16 values"]
    assert said["int8"] == ["int8 keys", "int8 values"]
    assert said["int4"] == ["int4 keys, float16 for the newest 64", "int8 values"]
    assert said["nomad"] == ["nomad (d_sub 1) keys, float16 for the newest 64", "int8 values"]
    assert said["nomad2"] == ["nomad (d_sub 2) keys, float16 for the newest 128", "int8 values"]


def test_memory_shrinks(engine: Callable[..., Engine]) -> None:
    used = {}
    for name in FORMATS:
        made = engine(name)
        used[name] = made.model.kv.block_bytes(made.model.facts)
    assert used["f32"] > used["f16"] > used["int8"] > used["int4"] == used["nomad"] > used["nomad2"]


@pytest.mark.parametrize("draft", [None, "int4", "nomad2"])
def test_the_plan_counts_the_second_copy_of_keys(engine: Callable[..., Engine], draft: Attention | None) -> None:
    made = engine("int8", draft)
    manifest = made.bundle.manifest
    use = LoadOptions(operators="native", attention="int8", draft_attention=draft).resolve(manifest)
    assert model_kv(manifest.target, use, draft=False) == made.model.kv


# -- the default, and what is refused ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def by_default(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a bundle whose default is nomad."""
    folder = tmp_path_factory.mktemp("default") / "bundle"
    export_model(ExportOptions(TARGET, folder, threads=THREADS, attention=("nomad",)), golden=False)
    return folder


def test_the_default_of_the_bundle(by_default: Path) -> None:
    made = load(by_default, operators="native")
    assert (made.attention.name, made.model.kv.keys) == ("nomad", "nomad1")
    assert load(by_default, operators="native", attention="f16").model.kv.keys == "f16"
    stock = load(by_default, operators="stock")  # has float32 only, which nothing forbids
    assert (stock.attention.name, stock.attention.kv) == ("f32", None)


def test_what_is_refused(by_default: Path, folder: Path) -> None:
    for changes, words in (
        ({"attention": "int4"}, "attention int4 needs tables.*\n.*--attention int4"),
        ({"attention": "int3"}, "unknown attention 'int3'"),
        ({"draft_attention": "f16"}, "unknown draft attention 'f16'"),
        ({"draft_attention": "nomad"}, "drafts read nomad keys anyway"),
        ({"draft_attention": "int4"}, "draft attention int4 needs tables"),
        ({"operators": "stock", "attention": "nomad"}, "attention nomad needs native operators"),
        ({"operators": "stock", "draft_attention": "nomad"}, "draft attention nomad needs native operators"),
    ):
        wanted: dict[str, Any] = {"operators": "native", "check": False} | changes
        with pytest.raises(InvalidRequest, match=words):
            load(by_default, **wanted)
    with pytest.raises(InvalidRequest, match="was not made for"):
        load(by_default, operators="native", attention="f16", draft_attention="nomad")
    assert load(folder, operators="native", draft_attention="nomad").attention.draft == "nomad"


def test_nomad2_that_failed_its_gate_only_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "LEAST_AGREEMENT", 1.1)
    options = ExportOptions(
        TARGET,
        tmp_path / "out",
        ("self-spec",),
        skip_set=fixed_skip_set(tmp_path, TARGET),
        attention=("nomad2", "int4"),
    )
    export_model(options, golden=False)
    with pytest.raises(InvalidRequest, match="nomad2 failed this bundle's quality gate"):
        load(tmp_path / "out", operators="native", attention="nomad2")
    assert load(tmp_path / "out", operators="native", draft_attention="nomad2").attention.name == "f16"
    assert load(tmp_path / "out", operators="native", attention="int4").attention.name == "int4"


def test_golden_vectors_belong_to_the_default(folder: Path, engine: Callable[..., Engine]) -> None:
    assert check_golden(engine("nomad")) == (0, 0)
