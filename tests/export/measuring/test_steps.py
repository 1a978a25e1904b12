"""What leaving out sub-layers saves, and how far logits are from their source, on examples worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from edgespec.decoding.target import SkipSet
from edgespec.export.measuring import skip_search
from edgespec.export.measuring.acceptance import Acceptance
from edgespec.export.measuring.parity import compare_logits, error_by_layer, plain_logits, relative_error
from edgespec.export.measuring.skip_search import StepCosts, measure_steps
from edgespec.export.quantization.reference import reference_logits
from edgespec.planning import profiles as quiet
from tests.conftest import TARGET, Written

COSTS = StepCosts(plain=10.0, attention=1.0, mlp=2.5, verify={1: 8.0, 2: 8.8, 3: 9.6})


def test_a_draft_step_saves_what_is_left_out() -> None:
    assert COSTS.draft_ms(SkipSet((0, 1), (2,))) == 10 - 2 * 1 - 2.5
    assert COSTS.draft_ms(SkipSet((0,), (1, 2))) == 10 - 1 - 2 * 2.5
    assert COSTS.draft_ms(SkipSet((), tuple(range(9)))) == pytest.approx(0.2)  # never less than a fiftieth


def test_predicted_speed_is_over_the_fastest_plain_decoding() -> None:
    """One guess of two is accepted, and both of them in a quarter; a draft step takes 4 ms, plain decoding 10."""
    found = COSTS.speedups(Acceptance((100, 50), (50, 25)), 4.0)
    assert found == pytest.approx({1: 10 * 1.5 / (4 + 8.8), 2: 10 * 1.75 / (2 * 4 + 9.6)})


def test_each_kind_is_timed_with_the_other_one_running(
    writer: Callable[..., Written], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is told: a layer's attention takes 2 ms, its MLP 3."""
    slot = writer("stock", TARGET, "fp32").slot("gated")
    every = tuple(range(slot.layers))
    left_out: list[SkipSet | None] = []
    real = slot.forward_draft

    def forward_draft(tokens: Any, offset: int, skip: SkipSet | None) -> Any:
        left_out.append(skip)
        return real(tokens, offset, skip)

    def told(run: Callable[[int], None], sizes: Any, repeats: int) -> dict[int, list[float]]:
        times = {}
        for size in sizes:
            left_out.clear()
            run(size)
            times[size] = [float(size)]
            if left_out:
                skip = left_out[0] or SkipSet()
                times[size] = [1 + 5.0 * slot.layers - 2 * len(skip.attention) - 3 * len(skip.mlp)]
        return times

    monkeypatch.setattr(slot, "forward_draft", forward_draft)
    monkeypatch.setattr(skip_search, "measure_all", told)
    slot.prefill([1, 2, 3])
    found = measure_steps(slot, 4, larger=(9,))
    assert (found.plain, found.attention, found.mlp) == (1 + 5.0 * len(every), 2.0, 3.0)
    assert found.verify == {n: float(n) for n in (1, 2, 3, 4, 5, 6, 9)}


@pytest.mark.parametrize(("spreads", "kept"), [((1.0,), 1.0), ((3.0, 2.0, 1.0), 1.0), ((3.0, 2.0, 4.0), 2.0)])
def test_passes_of_a_busy_machine_are_timed_again(
    monkeypatch: pytest.MonkeyPatch, spreads: tuple[float, ...], kept: float
) -> None:
    """Up to a steady try, or three; the steadiest counts, and says what it was."""
    tries = iter(spreads)
    monkeypatch.setattr(quiet, "BUSY", 1.5)
    monkeypatch.setattr(
        skip_search, "_time_steps", lambda *_: StepCosts(1.0, 0.0, 0.0, {1: 1.0}, spread=next(tries), others=0.0)
    )
    slot: Any = None  # nothing of it is timed here
    found = measure_steps(slot, 4)
    assert list(tries) == []
    assert found.spread == kept
    assert bool(found.busy) == (kept > 1.5)
    assert StepCosts.from_dict(found.as_dict()) == found


def test_logits_are_compared() -> None:
    exact = np.array([[0, 0, 0, 0], [math.log(6), 0, 0, 0]], np.float32)
    ours = np.array([[0, 0, 0, 0], [0, math.log(2), 0, 0]], np.float32)
    found = compare_logits(exact, ours, np.array([2, 1]))
    # 1 of 4 and 1 of 9 by the source, 1 of 4 and 2 of 5 by ours
    assert found["perplexity_source"] == pytest.approx(math.sqrt(4 * 9))
    assert found["perplexity"] == pytest.approx(math.sqrt(4 * 2.5))
    assert found["logit_max_error"] == pytest.approx(math.log(6))
    assert found["logit_rms_error"] == pytest.approx(math.sqrt((math.log(6) ** 2 + math.log(2) ** 2) / 8))
    assert found["logit_std"] == pytest.approx(float(np.std([0] * 7 + [math.log(6)])))
    assert found["top1_agreement"] == 0.5


def test_errors_of_weights_are_relative_and_by_layer() -> None:
    sums = {
        "model.layers.0.mlp.up_proj.weight": (1.0, 16.0),
        "model.layers.1.mlp.up_proj.weight": (3.0, 20.0),
        "model.layers.1.mlp.down_proj.weight": (6.0, 80.0),
        "lm_head.weight": (50.0, 50.0),
    }
    assert error_by_layer(sums, 3) == pytest.approx([0.25, 0.3, 0.0])
    assert relative_error(sums.values()) == pytest.approx(math.sqrt(60 / 166))


def test_rows_of_a_text_are_those_of_the_source(writer: Callable[..., Written]) -> None:
    made = writer("stock", "llama_tied_gqa", "fp32")
    tokens = np.random.default_rng(1).integers(2, 150, 30).tolist()
    rows = np.array([0, 3, 28])
    ours = plain_logits(made.slot("strict"), tokens, rows)
    np.testing.assert_allclose(ours, reference_logits(made.arch, tokens, rows.tolist(), None), atol=1e-3)
