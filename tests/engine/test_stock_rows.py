"""Stock operators say whether rows have the same bits in every pass here: tried at the first open, then known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.export.emit import pieces
from edgespec.planning.profiles import this_machine
from edgespec.runtimes.slots.cpu import depths_exact, try_rows
from edgespec.runtimes.slots.pairs import VARIABLE
from edgespec.runtimes.slots.shared import Model
from tests.support.wide import Depths, stock_model, walk, wide_bundle

PROMPT = "There was nothing left to do but wait. She had"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def differing(tmp_path: Path) -> Path:
    return wide_bundle(tmp_path / "differing", exact=False)


def opened(folder: Path, **options: object) -> Engine:
    return load(folder, threads=1, operators="stock", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_the_probe_agrees_with_every_pass(
    tmp_path: Path, head_dim: int, pairs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pairs:
        monkeypatch.setenv(VARIABLE, "1")
    assert depths_exact(stock_model(tmp_path, head_dim, "fp32", 1))
    # as in versions that knew nothing of wide heads: their sums differ on some processors
    monkeypatch.setattr(pieces, "WHOLE_SUM", 1 << 20)
    (tmp_path / "without").mkdir()
    model = stock_model(tmp_path / "without", head_dim, "fp32", 1)
    assert depths_exact(model) == (not Depths(model, 1024).differing(walk(1024)))


def test_contexts_shorter_than_any_depth(tmp_path: Path) -> None:
    assert depths_exact(stock_model(tmp_path, 256, "fp32", 1, positions=4))


def test_a_bundle_whose_rows_differ_calls_itself_approximate(differing: Path) -> None:
    with opened(differing) as engine:
        assert not engine.exact_rows
        result = engine.generate(PROMPT, method="speculative", max_new_tokens=20, fallback=False)
        assert (result.exact, result.lossless) == (False, True)
        assert engine.generate(PROMPT, method="ar", max_new_tokens=4).exact


def test_one_of_today_is_exact_and_is_tried_once(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = wide_bundle(tmp_path / "today")
    tried: list[int] = []

    def counted(model: Model) -> str:
        tried.append(1)
        return try_rows(model)

    monkeypatch.setattr("edgespec.engine.strict_probe.try_rows", counted)
    (own_cache / "rows.json").unlink(missing_ok=True)
    for _ in range(2):
        with opened(folder) as engine:
            assert engine.exact_rows
            assert engine.generate(PROMPT, method="speculative", max_new_tokens=20, fallback=False).exact
    assert len(tried) == 1
    with opened(folder, strict=False) as engine:
        assert not engine.exact_rows
    with load(folder, threads=2, operators="stock") as engine:  # several threads are another matter
        assert engine.exact_rows
    assert len(tried) == 2
    other = this_machine().model_copy(update={"onnxruntime": "another version"})
    monkeypatch.setattr("edgespec.engine.strict_probe.this_machine", lambda: other)
    opened(folder).close()
    assert len(tried) == 3


def test_a_record_of_somebody_else_is_no_record(differing: Path, own_cache: Path) -> None:
    opened(differing).close()
    file = own_cache / "rows.json"
    known = json.loads(file.read_text("utf-8"))
    forged = {key: "alone" if value == "differ" else value for key, value in known.items()}
    assert forged != known
    file.write_text(json.dumps(forged), "utf-8")
    with opened(differing) as engine:
        assert not engine.exact_rows
