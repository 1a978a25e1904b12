"""Embeddings: those of transformers' hidden states, with the same bits regardless of other texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import edgespec
from edgespec.engine import embedding
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.errors import ContextFull, EdgespecError, InvalidRequest
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.export.sentences import read_sentences
from edgespec.runtimes.files.manifest import MANIFEST, read_manifest
from tests.support import hf

Floats = NDArray[Any]
TEXTS = [[5, 9, 30], list(range(20, 90)), [7]]
POOLED: dict[str, Callable[[Floats], Floats]] = {
    "mean": lambda rows: rows.mean(0),
    "last": lambda rows: rows[-1],
    "cls": lambda rows: rows[0],
    "weighted": lambda rows: np.average(rows, 0, np.arange(1, len(rows) + 1)),
    "max": lambda rows: rows.max(0),
}
MODELS = ("llama_tied_gqa", "gemma3_new", "gpt_neox_parallel", "lfm2_conv", "qwen3_5_delta")


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Engine]]:
    """Export a tiny checkpoint in float32 -> its folder, and its engine."""
    folder = tmp_path_factory.mktemp(request.param)
    hf.write_reference_checkpoint(folder / "model", request.param)
    export_model(ExportOptions(str(folder / "model"), folder / "bundle", [], "fp32", threads=1), golden=False)
    with load(folder / "bundle", threads=1, attention="f32") as engine:
        yield folder / "model", engine


def expected(folder: Path, pooling: str) -> Floats:  # [texts, hidden]
    """Compute embeddings with transformers."""
    torch = pytest.importorskip("torch", reason="needs torch: pip install 'edgespec[train]'")
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        states = [model(torch.tensor([text])).last_hidden_state[0].numpy() for text in TEXTS]
    pooled = np.stack([POOLED[pooling](one) for one in states])
    return pooled / np.linalg.norm(pooled, axis=1, keepdims=True)


@pytest.mark.parametrize("pooling", embedding.POOLINGS)
def test_they_are_those_of_transformers(pair: tuple[Path, Engine], pooling: Any) -> None:
    model, engine = pair
    found = engine.embed(TEXTS, pooling=pooling)
    assert found.shape == (3, engine.bundle.manifest.target.facts.hidden)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected(model, pooling), rtol=0, atol=1e-4)


def test_nothing_beside_a_text_changes_its_bits(pair: tuple[Path, Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Other texts, chunks and earlier requests do not change it."""
    _, engine = pair
    together = engine.embed(TEXTS)
    engine.generate([3, 4, 5], max_new_tokens=4)
    alone = [engine.embed([text])[0] for text in TEXTS]
    for rows in (1, 7, 64):
        with monkeypatch.context() as patch:
            patch.setattr("edgespec.engine.sharing.PrefillBudget.rows", lambda *_, rows=rows: rows)
            alone += [engine.embed([text])[0] for text in TEXTS]
    for at, row in enumerate(alone):
        assert row.tobytes() == together[at % 3].tobytes()


def test_a_part_of_the_numbers_has_length_one(pair: tuple[Path, Engine]) -> None:
    _, engine = pair
    whole, part = engine.embed(TEXTS[:1])[0], engine.embed(TEXTS[:1], dimensions=8)[0]
    np.testing.assert_allclose(part, whole[:8] / np.linalg.norm(whole[:8]), atol=1e-6)


@pytest.fixture(scope="module")
def engine(bundles: Callable[..., Path]) -> Iterator[Engine]:
    with load(bundles("native"), threads=1) as loaded:
        yield loaded


def test_texts_are_those_of_their_tokens(engine: Engine) -> None:
    found = engine.embed(["Good night", engine.codec.encode("Good night"), "Speak!"])
    assert found[0].tobytes() == found[1].tobytes() != found[2].tobytes()
    assert engine.embed([]).shape == (0, engine.bundle.manifest.target.facts.hidden)
    assert not engine.reservations.taken


@pytest.mark.parametrize(
    "texts, more, error, message",
    [
        ("Good night", {}, InvalidRequest, "expected a list of texts"),
        ([""], {}, InvalidRequest, "empty"),
        ([[]], {}, InvalidRequest, "at least one token"),
        ([[1 << 30]], {}, InvalidRequest, "outside the vocabulary"),
        ([[1] * 5000], {}, ContextFull, "5000 tokens"),
        (["x"], {"pooling": "sum"}, InvalidRequest, "expected mean, last, cls"),
        (["x"], {"prompt": "query"}, InvalidRequest, "has no prompts"),
        (["x"], {"dimensions": 1 << 20}, InvalidRequest, "the model's width"),
    ],
)
def test_what_is_no_text_is_refused(engine: Engine, texts: Any, more: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        engine.embed(texts, **more)
    assert not engine.reservations.taken


def test_a_bundle_that_cannot_says_what_to_do(engine: Engine, bundles: Callable[..., Path]) -> None:
    stock = edgespec.load(bundles("stock"), operators="stock", threads=1)
    with stock, pytest.raises(InvalidRequest, match="native operators") as caught:
        stock.embed(["x"])
    assert "--operators native" in str(caught.value.hint)
    target = engine.bundle.manifest.target.model_copy(update={"final_norm": None})
    older = engine.bundle.manifest.model_copy(update={"target": target})
    bundle, engine.bundle = engine.bundle, replace(engine.bundle, manifest=older)
    try:
        with pytest.raises(InvalidRequest, match="exported without") as caught:
            engine.embed(["x"])
        assert "export it again" in str(caught.value.hint)
    finally:
        engine.bundle = bundle


def test_a_request_that_nobody_wants_ends(engine: Engine) -> None:
    import threading

    cancel = threading.Event()
    cancel.set()
    with pytest.raises(EdgespecError, match="cancelled"):
        engine.embed(["x"], cancel=cancel)


@pytest.mark.parametrize("said, pooling", [("mean_tokens", "mean"), ("lasttoken", "last"), ("cls_token", "cls")])
def test_a_model_says_how_its_states_are_pooled(tmp_path: Path, said: str, pooling: str | None) -> None:
    """By the file of sentence-transformers, and a bundle carries it."""
    hf.write_reference_checkpoint(tmp_path / "model", "llama_tied_gqa")
    assert read_sentences(tmp_path / "model", 64).pooling is None
    modes = {f"pooling_mode_{name}": name == said for name in ("cls_token", "mean_tokens", "max_tokens", "lasttoken")}
    (tmp_path / "model" / "1_Pooling").mkdir()
    (tmp_path / "model" / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64} | modes))
    assert read_sentences(tmp_path / "model", 64).pooling == pooling
    if pooling == "last":
        export_model(ExportOptions(str(tmp_path / "model"), tmp_path / "bundle", [], "int4", threads=1), golden=False)
        assert read_manifest(tmp_path / "bundle").pooling == "last"
        assert '"pooling": "last"' in (tmp_path / "bundle" / MANIFEST).read_text("utf-8")
        with load(tmp_path / "bundle", threads=1) as made:
            assert made.embed(TEXTS).tobytes() == made.embed(TEXTS, pooling="last").tobytes()
