"""Drafts by high planes: whatever they read of a bundle with two planes, the text is that of both."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import edgespec
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.errors import InvalidRequest
from edgespec.export.measuring import skip_search
from edgespec.runtimes.files.manifest import MANIFEST, read_manifest
from edgespec.runtimes.options import LoadOptions
from edgespec.server.app import make_app
from edgespec.server.models import Models
from edgespec.server.scheduler import Limits
from tests.conftest import PROMPTS, TARGET
from tests.support import hf

pytestmark = pytest.mark.usefixtures("native")
SOME = [PROMPTS[0], PROMPTS[9]]
ALL = range(6)
# what self-spec reads: as no export prepared it, all three choices, one sub-layer
SETS: dict[str, dict[str, Any] | None] = {
    "default": None,
    "three": {"attention": [1], "mlp": [4], "high_attention": [0, 2, 3], "high_mlp": [1, 2, 3, 5], "high_head": True},
    "one": {"high_mlp": [2]},
    "cut": {"high_attention": [*ALL], "high_mlp": [*ALL], "high_head": True, "head_rows": 64},
}
MORE: dict[str, dict[str, Any]] = {
    "self-spec": {"adaptive": False, "gamma": 5},
    "swift": {"search": 1.0, "kind": "planes-test"},
    "chain": {"proposers": ("ngram", "self-spec"), "adaptive": False},
    "auto": {},
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planes") / "int8"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(skip_search, "LEAST_ROWS", 128)  # also of 1,024 tokens
        return edgespec.export(TARGET, folder, format="int8", methods=["swift"], threads=2)


@pytest.fixture(scope="module")
def opened(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Engine]]:
    made: dict[str, Engine] = {}

    def get(name: str) -> Engine:
        if name not in made:
            folder = shutil.copytree(exported, tmp_path_factory.mktemp(name) / "bundle")
            data = json.loads((folder / MANIFEST).read_text("utf-8"))
            del data["methods"]["self-spec"]  # as exports were that did not measure it
            if (skip := SETS[name]) is not None:
                data["methods"]["self-spec"] = {"skip": skip}
            (folder / MANIFEST).write_text(json.dumps(data), "utf-8")
            made[name] = load(folder, threads=2)
        return made[name]

    yield get
    for engine in made.values():
        engine.close()


@pytest.mark.parametrize("method", MORE)
@pytest.mark.parametrize("name", SETS)
def test_greedy_equals_plain(
    opened: Callable[[str], Engine], name: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path))
    engine, drafted, accepted = opened(name), 0, 0
    for prompt in SOME:
        how: dict[str, Any] = {"max_new_tokens": 80, "ignore_eos": True}
        plain = engine.generate(prompt, method="ar", **how)
        result = engine.generate(prompt, method=method, fallback=False, **how, **MORE[method])
        assert result.tokens == plain.tokens
        assert result.exact
        drafted, accepted = drafted + result.stats.drafted, accepted + result.stats.accepted
    assert 0 < accepted <= drafted
    if (name, method) == ("default", "self-spec"):
        assert 0.7 < accepted / drafted < 1  # a plane is nearly the model, and not the model


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
@pytest.mark.parametrize("name", ["three", "cut"])
def test_sampled_text(opened: Callable[[str], Engine], name: str, acceptance: str) -> None:
    engine = opened(name)
    how: dict[str, Any] = {"temperature": 0.8, "seed": 3, "max_new_tokens": 60, "ignore_eos": True}
    how |= {"acceptance": acceptance, "repetition_penalty": 1.1, "logit_bias": {100: 0.5, 3: -1.0}}
    first, second = (engine.generate(SOME[0], method="self-spec", fallback=False, **how) for _ in range(2))
    assert first.tokens == second.tokens
    assert first.lossless
    assert first.stats.accepted > 0
    if acceptance == "coupled":
        assert first.tokens == engine.generate(SOME[0], method="ar", **how).tokens


def test_a_batch_drafts_by_planes(opened: Callable[[str], Engine]) -> None:
    engine = opened("default")
    settings = edgespec.Settings(method="self-spec", max_new_tokens=40, fallback=False, ignore_eos=True)
    found = engine.generate_batch(SOME, settings)
    for prompt, result in zip(SOME, found, strict=True):
        assert result.tokens == engine.generate(prompt, method="ar", max_new_tokens=40, ignore_eos=True).tokens
        assert result.stats.accepted > 0


def test_a_server_drafts_by_planes(exported: Path) -> None:
    """One text, a stream, and several texts at once, alternating with a plain one."""
    models = Models({"int8": exported}, LoadOptions(threads=2), Limits(parallel=2))
    ask = {"model": "int8", "max_tokens": 24, "temperature": 0}
    with TestClient(make_app(models), base_url="http://localhost:8000") as client, ThreadPoolExecutor(4) as pool:

        def text(prompt: str, method: str) -> tuple[str, int]:
            how = {"method": method, "fallback": False}
            answer = client.post("/v1/completions", json=ask | {"prompt": prompt, "edgespec": how}).json()
            return answer["choices"][0]["text"], answer["edgespec"][0]["accepted"]

        plain = [text(prompt, "ar")[0] for prompt in SOME]
        found = list(pool.map(lambda prompt: text(prompt, "self-spec"), SOME * 2))
    assert [written for written, _ in found] == plain * 2
    assert all(accepted for _, accepted in found)


# kinds of layers, weights of which some are int4, keys in int8: what is exported, and from what
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "experts": ("qwen3_moe_plain", {}),
    "convolutions": ("lfm2_conv", {}),
    "states": ("qwen3_5_delta", {}),
    "int8 keys": (TARGET, {"attention": ["int8"]}),
    "mixed": (TARGET, {"format": "int4", "target_size": 1_450_000, "head_format": "int8"}),
}
WAYS: dict[str, dict[str, Any]] = {
    "chain": {"method": "self-spec", "adaptive": False, "gamma": 4},
    "controlled, sampled": {"method": "self-spec", "temperature": 0.8, "seed": 5, "acceptance": "coupled"},
    "tree": {"method": "swift", "branch": (3,), "search": 1.0, "kind": "planes-test"},
    "n-grams first": {"method": "chain", "proposers": ("ngram", "self-spec")},
}


@pytest.mark.parametrize("kind", KINDS)
def test_planes_of_every_kind(
    kind: str, checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each way reproduces plain decoding's text, continues its own as in conversations, and so do both in a batch."""
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text").write_text("There was nothing left to do but wait, and so she sat down. " * 16)
    source, more = KINDS[kind]
    given: dict[str, Any] = {"format": "int8", "methods": ["swift"], "calibration": tmp_path / "text", "threads": 1}
    name = source if source == TARGET else str(checkpoint(source))
    made = edgespec.export(name, tmp_path / "bundle", context=hf.CONTEXTS.get(source), **given | more)
    how: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True, "fallback": False}
    with load(made, threads=1) as engine, load(made, threads=1) as plain:
        assert engine.bundle.manifest.target.planes
        assert engine.bundle.manifest.methods["self-spec"].measured
        drafted = 0
        for way in WAYS.values():
            drawn = {name: way[name] for name in way if name in ("temperature", "seed", "acceptance")}
            text = engine.codec.encode(SOME[0])
            for _ in range(2):
                result = engine.generate(text, **how | way)
                assert result.tokens == plain.generate(text, method="ar", **how | drawn).tokens, way
                assert result.exact
                text = [*text, *result.tokens, *engine.codec.encode(" and")]
                drafted += result.stats.drafted
            assert result.stats.reused_tokens > 0
        assert drafted > 40
        batch = engine.generate_batch(SOME, edgespec.Settings().changed(**how | WAYS["chain"]))
        assert [one.tokens for one in batch] == [plain.generate(one, method="ar", **how).tokens for one in SOME]


def test_a_bundle_that_nobody_prepared_drafts_by_its_planes(opened: Callable[[str], Engine]) -> None:
    engine = opened("default")
    assert "self-spec" in engine.methods
    part = engine.bundle.manifest.methods["self-spec"]
    assert part.skip is not None
    assert part.skip.whole
    assert part.skip.high_head
    assert part.skip.high_attention == part.skip.high_mlp == list(ALL)
    assert part.predicted_speedup is not None
    assert 1.1 < part.predicted_speedup < 1.6
    assert engine.choose(None).name == "self-spec"  # nothing better is there
    assert "self-spec" in [one.name for one in engine.choose("auto").candidates]


def test_the_export_measures_the_high_planes(exported: Path) -> None:
    """Without a requested self-draft, it measures acceptance by position and by the draft's probability."""
    manifest = read_manifest(exported)
    part = manifest.methods["self-spec"]
    assert part.skip is not None
    assert part.skip.head_rows in (0, 128, 256, 512)
    assert {f"cut_head_{rows}_ms" for rows in (128, 256, 512)} <= manifest.cost.keys()
    assert part.skip.whole
    assert part.draft_cost
    (measured,) = part.measured
    assert 0.6 < measured.acceptance[0] < 1
    assert len(measured.confidence) == 8
    assert measured.confidence[0] < measured.confidence[-1]
    with load(exported, threads=2) as engine:
        session = engine.generate(SOME[0], method="self-spec", max_new_tokens=40)
        assert session.exact


def test_where_there_are_no_planes_to_read(exported: Path) -> None:
    """On stock operators, and read as a model of 4 bits, the draft would be the model."""
    with load(exported, operators="stock", threads=2) as stock, load(exported, precision="high", threads=2) as high:
        assert "self-spec" not in high.methods
        with pytest.raises(InvalidRequest, match="needs native operators"):
            stock.generate(SOME[0], method="self-spec")
        assert stock.choose(None).name != "self-spec"
        for engine in (stock, high):
            plain = engine.generate(SOME[0], method="ar", max_new_tokens=40)
            assert engine.generate(SOME[0], method="swift", max_new_tokens=40, fallback=False).tokens == plain.tokens
