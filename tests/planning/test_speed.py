"""Predicted speeds: bytes over bandwidth, and gains that were measured."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import onnxruntime
import pytest

from benchmarks.shapes import SHAPES
from edgespec.errors import InvalidRequest
from edgespec.planning import profiles
from edgespec.planning.profiles import Profile
from edgespec.planning.speed import Speed, read_bandwidth, speed_of
from edgespec.planning.traffic import kv_token_bytes, layer_weights, read_bytes
from edgespec.runtimes.files.formats import FORMATS
from edgespec.runtimes.files.manifest import Manifest
from edgespec.runtimes.options import RunOptions
from edgespec.runtimes.ort import native_library
from tests.support.planned import plan_of
from tests.support.planning import manifest, profile, trial

pytestmark = pytest.mark.usefixtures("native")
SPECULATIVE = ("ar", "ngram", "speculative")


def of(found: Manifest, method: str, known: Profile | None = None, **changes: Any) -> Speed:
    given = {name: changes.pop(name, None) for name in ("bandwidth", "depth")}
    return speed_of(found, RunOptions(method, **changes), known, **given)


def test_plain_decoding_is_bytes_over_bandwidth() -> None:
    found = manifest()
    weights, token = read_bytes(found.target, "native"), kv_token_bytes(found.target, "native")
    assert asdict(of(found, "ar", bandwidth=100.0 * weights, depth=0)) == {
        "speedup": 1.0,
        "tokens_per_second": 100.0,
        "plain_tokens_per_second": 100.0,
        "prefill_tokens_per_second": None,
        "basis": None,
    }
    deep = of(found, "ar", bandwidth=100.0 * weights, depth=1000)
    assert deep.tokens_per_second == pytest.approx(100 * weights / (weights + 1000 * token))
    assert of(found, "ar", bandwidth=1e9, context=4096) == of(found, "ar", bandwidth=1e9, depth=2048)
    assert of(found, "ar").tokens_per_second is None  # a device of which nothing is known


def test_a_profile_brings_bandwidth_and_prefill() -> None:
    found = manifest()
    known = profile(found, bandwidth=1e10, prefill={64: 500.0, 2048: 300.0})
    speed = of(found, "ar", known, bandwidth=1.0)
    assert speed == of(found, "ar", known)
    assert speed.plain_tokens_per_second == of(found, "ar", bandwidth=1e10).plain_tokens_per_second
    assert speed.prefill_tokens_per_second == pytest.approx(500.0)


@pytest.mark.parametrize("busy", [{"spread": 2.0}, {"others": 0.5}])
def test_a_busy_profile_is_not_used(monkeypatch: pytest.MonkeyPatch, busy: dict[str, float]) -> None:
    monkeypatch.setattr(profiles, "BUSY", 1.5)
    monkeypatch.setattr(profiles, "OTHERS", 0.2)
    found = manifest()
    known = profile(found, trials={"ngram": trial()}).model_copy(update=busy)
    assert of(found, "ngram", known, bandwidth=1e9) == of(found, "ngram", bandwidth=1e9)


def test_gains_are_measured_or_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a calibration with the very bundle come first, then the export's; nothing is guessed."""
    monkeypatch.setattr(profiles, "BUSY", 1.5)
    found = manifest(methods=("ar", "ngram", "self-spec", "speculative"))
    known = profile(found, trials={"ngram": trial(), "speculative": trial(speedup=1.9)})
    measured = {name: (of(found, name, known).speedup, of(found, name, known).basis) for name in found.methods}
    assert measured == {
        "ar": (1.0, None),
        "ngram": (1.25, "calibrated"),
        "self-spec": (1.1, "exported"),
        "speculative": (1.9, "calibrated"),
    }
    assert of(found, "ngram").speedup is None
    assert of(found, "ngram").gain == 1.0
    other = profile(manifest("int8"), trials={"speculative": trial(speedup=1.9)})
    assert (of(found, "speculative", other).speedup, of(found, "speculative", other).basis) == (1.6, "exported")
    assert of(found, "speculative", operators="stock").speedup is None  # the export ran native operators
    busy = found.model_copy(update={"cost": {"spread": 3.0}})
    assert of(busy, "speculative").speedup is None
    speed = of(found, "speculative", known)
    assert speed.plain_tokens_per_second is not None
    assert speed.tokens_per_second == pytest.approx(1.9 * speed.plain_tokens_per_second)


def test_sequences_share_a_pass_of_native_operators_and_take_turns_elsewhere() -> None:
    found = manifest(methods=SPECULATIVE)
    one, four = (of(found, "ar", bandwidth=1e10, depth=0, batch=batch) for batch in (1, 4))
    assert four == one
    stock = [of(found, "ar", bandwidth=1e10, depth=0, batch=batch, operators="stock") for batch in (1, 4)]
    assert stock[0].tokens_per_second == pytest.approx(4 * (stock[1].tokens_per_second or 0))
    deep = of(found, "ar", bandwidth=1e10, depth=1000, batch=4)
    assert (deep.tokens_per_second or 0) < (of(found, "ar", bandwidth=1e10, depth=1000).tokens_per_second or 0)
    assert of(found, "speculative", batch=4).speedup is None  # measured only for one sequence


def test_a_method_that_the_bundle_does_not_have() -> None:
    with pytest.raises(InvalidRequest, match=r"'medusa' is not in this bundle; it has: ar, ngram, self-spec"):
        of(manifest(), "medusa")


def test_nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "InferenceSession", None)
    for form in FORMATS:
        for operators in ("native", "stock"):
            assert of(manifest(form), "ngram", bandwidth=1e10, operators=operators).tokens_per_second


def test_bandwidth_is_measured_with_and_without_native_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library, "read_bandwidth", lambda *_, **__: 0.0)
    read_bandwidth.cache_clear()
    try:
        assert 1e8 < read_bandwidth(1) < 1e13
    finally:
        read_bandwidth.cache_clear()
    monkeypatch.undo()
    assert 1e8 < read_bandwidth(1) < 1e13


@pytest.mark.parametrize("rows", [None, 8192])
def test_a_planned_drafter_in_the_shape_of_a_real_model(tmp_path: Path, rows: int | None) -> None:
    """EAGLE-3's layer, with doubled inputs of q, k and v, and the matrix that fuses three taps."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["llama-3.2-1b"]), "utf-8")
    hidden, inner, heads, keys, dim = 2048, 8192, 32, 8, 64
    layer = 2 * hidden * dim * (heads + 2 * keys) + hidden * dim * heads + 3 * hidden * inner
    planned = plan_of(tmp_path, methods=["eagle"], draft_vocab=rows).drafter
    assert planned is not None
    head = (rows or planned.facts.vocab) * hidden
    assert layer_weights(planned.facts, head) == pytest.approx(layer + 3 * hidden**2, rel=1e-3)
    assert planned.facts.parameters - layer_weights(planned.facts, head) == head
