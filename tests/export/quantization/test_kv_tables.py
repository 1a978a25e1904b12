"""Tables for coded keys: learned values, their quality, that they are reproducible, and the gate that follows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from edgespec.errors import BundleError, ExportError
from edgespec.export.architectures.rope import inverse_frequencies
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.export.quantization import coded_keys as attention
from edgespec.export.quantization.coded_keys import (
    LEAST_AGREEMENT,
    MOST_PERPLEXITY_CHANGE,
    TABLES,
    Scores,
    check_attention,
)
from edgespec.export.quantization.key_tables import (
    learn_head,
    learn_tables,
    means_of_channels,
    spread,
    uniform_levels,
    uniform_ranges,
    windows,
)
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.formats import LEARNT, KeyFormat
from edgespec.runtimes.files.kv import table_shape
from edgespec.runtimes.files.manifest import MANIFEST
from edgespec.runtimes.ort.native_library import native_library
from tests.conftest import TARGET, Written

native = pytest.mark.skipif(native_library().path is None, reason="no native operators here")
HEAD = 24


@pytest.fixture(scope="module")
def rows() -> NDArray[np.float32]:
    """Keys [2000, 24] of one head: channels of different widths and shapes, one of them constant."""
    random = np.random.default_rng(3)
    values = random.standard_normal((2000, HEAD)) * np.linspace(0.1, 4, HEAD) + np.linspace(-3, 3, HEAD)
    values[:, 1] = random.exponential(2, 2000)
    values[:, 2] = np.where(random.random(2000) < 0.5, -3, 3) + 0.2 * random.standard_normal(2000)
    values[:, 3] = 1.5
    return values.astype(np.float32)


def error(rows: NDArray[np.float32], name: KeyFormat, table: NDArray[np.float32]) -> NDArray[np.float64]:
    """Mean square of what coding loses, by channel [24]; written down without the code under test."""
    if name == "int4":
        scale, zero = table[:, :HEAD].astype(np.float64)
        levels = np.clip(np.rint((rows - zero) / np.where(scale > 0, scale, 1)), 0, 15)
        return np.asarray(np.square(rows - zero - scale * levels).mean(0))
    sub = table.shape[1]
    parts = rows.reshape(len(rows), HEAD // sub, sub, 1)
    codes = np.square(parts - table[: HEAD // sub]).sum(2).argmin(-1)  # [n, subs]
    back = table[np.arange(HEAD // sub)[None], :, codes].reshape(len(rows), HEAD)
    return np.asarray(np.square(rows - back).mean(0))


def test_means_beat_even_levels_and_those_the_plain_range(rows: NDArray[np.float32]) -> None:
    low, high = rows.min(0), rows.max(0)
    plain = np.zeros((2, 32), np.float32)
    plain[:, :HEAD] = (high - low) / 15, low
    even, means, pairs = (learn_head(rows, name, 32) for name in LEARNT)
    by_range, by_fit = error(rows, "int4", plain), error(rows, "int4", even)
    by_means, by_pairs = error(rows, "nomad1", means), error(rows, "nomad2", pairs)
    assert (by_fit <= by_range + 1e-9).all()
    assert by_fit.mean() < 0.9 * by_range.mean()
    assert (by_means <= by_fit + 1e-6).all()
    assert by_means.mean() < 0.9 * by_fit.mean()
    assert by_means.mean() < by_pairs.mean() < 0.2 * rows.var(0).mean()


def test_more_rounds_never_lose(rows: NDArray[np.float32], monkeypatch: pytest.MonkeyPatch) -> None:
    before = np.inf
    for rounds in (0, 1, 5, 25):
        monkeypatch.setattr("edgespec.export.quantization.key_tables.ROUNDS", rounds)
        now = sum(error(rows, name, learn_head(rows, name, 32)).mean() for name in ("nomad1", "nomad2"))
        assert now <= before
        before = now


def test_padding_is_zero_and_nothing_is_random(rows: NDArray[np.float32]) -> None:
    for name in LEARNT:
        table = learn_head(rows, name, 32)
        np.testing.assert_array_equal(table, learn_head(rows.copy(), name, 32))
        beyond = table[:, HEAD:] if name == "int4" else table[HEAD // table.shape[1] :]
        assert beyond.size
        assert not beyond.any()
        assert table.dtype == np.float32
        assert np.isfinite(table).all()


def test_a_constant_channel_is_exact(rows: NDArray[np.float32]) -> None:
    values = rows[:, 3:4].T
    scale, zero = uniform_ranges(values)
    assert zero + scale * uniform_levels(values, scale, zero)[0, 0] == 1.5
    assert set(means_of_channels(values)[0]) == {np.float32(1.5)}


def test_fewer_keys_than_centroids() -> None:
    few = np.arange(5 * HEAD, dtype=np.float32).reshape(5, HEAD)
    for name in LEARNT:
        assert np.isfinite(learn_head(few, name, 32)).all()
    assert error(few, "nomad1", learn_head(few, "nomad1", 32)).max() == 0


def test_windows_of_a_text() -> None:
    text = list(range(1000))
    made = list(windows(text, 300))
    assert {len(window) for window in made} == {300}
    assert {window[0] for window in made} == {0, 125, 250, 375, 500, 625, 750, 875}
    assert made[-1][-1] == (875 + 299) % 1000
    assert list(windows(list(range(40_000)), 10_000))[1][0] == 10_000
    assert [len(window) for window in windows(text[:50], 300)] == [50] * 8


def test_half_of_the_keys_are_turned_all_over_the_context(written: Callable[..., Written]) -> None:
    facts = written("llama_tied_gqa").part.facts
    keys = np.random.default_rng(0).standard_normal((2, 2, 100, facts.head_dim)).astype(np.float16)
    at = np.arange(100)
    turned = spread(keys, at, facts)
    np.testing.assert_array_equal(turned[:, :, 1::2], keys[:, :, 1::2])
    wanted = np.random.default_rng(0).integers(0, facts.context, 50)
    assert wanted.max() > 400
    angle = (wanted[3] - 6) * inverse_frequencies(facts.rope, facts.head_dim, facts.context)[0]
    half = facts.head_dim // 2
    as_complex = keys[0, 1, 6, :half] + 1j * keys[0, 1, 6, half:]
    got = turned[0, 1, 6, :half] + 1j * turned[0, 1, 6, half:]
    np.testing.assert_allclose(got, as_complex * np.exp(1j * angle), atol=4e-3)
    assert spread(keys, at + facts.context - 100, facts) is keys  # they already cover the range


def test_either_kind_of_slot_will_do(written: Callable[..., Written]) -> None:
    slot = written("llama_tied_gqa").slot("strict")
    tokens = np.random.default_rng(1).integers(2, 160, 300).tolist()
    seen: list[tuple[int, int]] = []
    tables = learn_tables(slot, tokens, LEARNT, lambda done, of: seen.append((done, of)))
    assert {name: table.shape for name, table in tables.items()} == {
        name: table_shape(name, slot.model.facts) for name in LEARNT
    }
    assert seen == [(0, 2), (1, 2), (2, 2)]
    again = learn_tables(slot, tokens, ["nomad1"], lambda done, of: None)
    np.testing.assert_array_equal(again["nomad1"], tables["nomad1"])


# -- the gate ----------------------------------------------------------------------------------------------------------


def test_the_gate() -> None:
    best, surprise = np.arange(1000), np.full(1000, 2.0)
    exact = Scores(best, surprise)
    assert exact.gate(exact).model_dump() == {"perplexity_change": 0.0, "agreement": 1.0, "passed": True}
    flipped = np.where(best < 1000 * (1 - LEAST_AGREEMENT) + 1, -1, best)
    assert not Scores(flipped, surprise).gate(exact).passed
    assert Scores(np.where(best < 40, -1, best), surprise).gate(exact).passed
    dearer = Scores(best, surprise + np.log1p(MOST_PERPLEXITY_CHANGE) + 1e-6).gate(exact)
    assert not dearer.passed
    assert dearer.perplexity_change == pytest.approx(MOST_PERPLEXITY_CHANGE, rel=1e-3)
    assert Scores(best, surprise - 1).gate(exact).passed


def export(folder: Path, *names: str, **options: Any) -> Bundle:
    export_model(ExportOptions(TARGET, folder, attention=names, threads=2, **options), golden=False)
    return Bundle.open(folder)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return export(tmp_path_factory.mktemp("kv") / "out", "nomad", "int4", "int8")


@native
def test_what_the_bundle_says(exported: Bundle) -> None:
    part = exported.manifest.target.attention
    assert part is not None
    assert (part.default, part.learnt, part.tables) == ("nomad", ["int4", "nomad1"], TABLES)
    assert list(part.gates) == ["nomad", "int4", "int8"]
    assert all(gate.passed and abs(gate.perplexity_change) < 0.01 for gate in part.gates.values())
    assert part.positions > 500
    assert 0 < part.depth < 1024
    assert part.text == "calibration.txt"
    assert len(part.text_sha256 or "") == 64
    tables = load_file(exported.path / TABLES)
    assert {name: table.shape for name, table in tables.items()} == {
        name: table_shape(name, exported.manifest.target.facts) for name in ("int4", "nomad1")
    }
    data = json.loads((exported.path / MANIFEST).read_text("utf-8"))
    assert data["target"]["attention"].keys() == {
        "default", "tables", "learnt", "gates", "positions", "depth", "text", "text_sha256"}  # fmt: skip
    assert data["target"]["attention"]["gates"]["int4"].keys() == {"perplexity_change", "agreement", "passed"}


@native
def test_tables_are_checked_like_any_other_file(exported: Bundle, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(exported.path, tmp_path / "out"))
    whole = (folder / TABLES).read_bytes()
    (folder / TABLES).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(BundleError, match=r"kv/tables.safetensors: altered"):
        Bundle.open(folder)
    (folder / TABLES).unlink()
    with pytest.raises(BundleError, match="missing"):
        Bundle.open(folder)
    data = json.loads((folder / MANIFEST).read_text("utf-8"))
    del data["files"][TABLES]
    (folder / MANIFEST).write_text(json.dumps(data), "utf-8")
    with pytest.raises(BundleError, match="does not list it"):
        Bundle.open(folder)


@native
def test_exact_attention_learns_and_measures_nothing(tmp_path: Path) -> None:
    part = export(tmp_path / "out", "f32").manifest.target.attention
    assert part is not None
    assert (part.default, part.tables, part.gates) == ("f32", None, {})
    assert not (tmp_path / "out" / "kv").exists()


@native
def test_what_fails_the_gate_is_no_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "LEAST_AGREEMENT", 1.1)
    part = export(tmp_path / "out", "nomad", "nomad2").manifest.target.attention
    assert part is not None
    assert part.default == "f16"
    assert part.learnt == ["nomad1", "nomad2"]
    assert not any(gate.passed for gate in part.gates.values())


# -- errors ------------------------------------------------------------------------------------------------------------


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ExportError, match="unknown attention 'int3'"):
        check_attention(["int3"], "auto", 1000)
    with pytest.raises(ExportError, match="--operators stock was given"):
        check_attention(["nomad"], "stock", 1000)
    monkeypatch.setattr(attention, "native_library", lambda: native_library().__class__(None, "", "no compiler"))
    with pytest.raises(ExportError, match="needs native operators: no compiler"):
        check_attention(["f32"], "auto", 1000)
    assert check_attention([], "stock", 0) == []


@native
def test_too_little_text(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("Speak, I say. " * 20, "utf-8")
    with pytest.raises(ExportError, match="at least 256 tokens of calibration text"):
        export(tmp_path / "out", "nomad", calibration=text)
    assert not (tmp_path / "out").exists()
    assert check_attention(["f32", "f16"], "auto", 10) == ["f32", "f16"]
