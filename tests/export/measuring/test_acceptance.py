"""Acceptance of guesses, and costs of steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from edgespec.decoding.drafter import Drafter
from edgespec.decoding.loop import DecodeOptions, decode
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.target import Output, Pass, SkipSet
from edgespec.drafters.self_spec import SelfSpec
from edgespec.drafters.speculative import Speculative
from edgespec.engine.engine import Engine
from edgespec.export.measuring import skip_search
from edgespec.export.measuring.acceptance import Acceptance, ChainScorer
from edgespec.export.measuring.heads import DOUBT, TOP, ExitRecord, _along, choose_exits, head_ranks
from edgespec.export.measuring.parity import compare_logits, error_by_layer, plain_logits, relative_error
from edgespec.export.measuring.skip_search import StepCosts, measure_steps
from edgespec.export.quantization.reference import reference_logits
from edgespec.planning import profiles as quiet
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.slot import Slot
from tests.conftest import DRAFT, PROMPTS, TARGET, Written
from tests.lossless.test_matrix import plain_greedy
from tests.support.passes import run_heads, states


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
    drafter = SelfSpec(target, skip)
    found = chains.score(slot, skip)
    assert found == measured_by_the_loop(target, drafter, chains.tokens, chains.positions.tolist(), chains.gamma)
    assert 0 < sum(found.accepted) < sum(found.offered)


def test_draft_model_acceptance_is_that_of_the_loop(
    written: Callable[..., Written], scorer: tuple[Slot, ChainScorer]
) -> None:
    _, chains = scorer
    model = written(DRAFT, "fp32")
    drafter = Speculative(model.slot("plain", 2), model.part.facts.vocab)
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


@pytest.mark.parametrize("name", ["medusa", "blockwise"])
def test_right_guesses_by_rank_and_chains_of_them(engine: Callable[..., Engine], name: str) -> None:
    made = engine("fp32")
    slot = open_slot(made.model, reserve=1)
    tokens = made.codec.encode(PROMPTS[18])
    gamma = 5
    scorer = ChainScorer(slot, tokens, 24, gamma)
    (group,) = (group for group in made.bundle.manifest.target.heads if group.name == name)
    ranks, acceptance = head_ranks(slot, scorer, group)

    count = min(group.count, gamma - 1)
    hits, offered, accepted, rows = np.zeros((count, TOP)), [0] * count, [0] * count, 0
    for position in scorer.positions.tolist():
        text = tokens[: position + 1]
        text = text + plain_greedy(slot, text, gamma)
        for at in range(position, position + gamma - count):
            slot.follow([])
            slot.prefill(text[:at])
            hidden = states(slot, np.array(text[at : at + 1])).hidden
            assert hidden is not None
            best = run_heads(slot, name, hidden.copy(), TOP).best
            assert best is not None
            rows += 1
            good = True
            for head in range(count):
                right = best[0][head, 0] == text[at + head + 2]  # [TOP]
                hits[head] += right
                offered[head] += good
                good = good and bool(right[0])
                accepted[head] += good
    np.testing.assert_allclose(ranks, hits / (rows + DOUBT), rtol=1e-12)
    assert acceptance.offered == tuple(offered)
    assert acceptance.accepted == tuple(accepted)
    assert 0 < accepted[0] < rows


RECORD = ExitRecord(
    layers=(1, 2),
    confidence=np.array([[0.9, 0.1, 0.9, 0.1, 0.9], [0.9, 0.9, 0.1, 0.1, 0.1]]),
    right=np.array([[True, True, False, True, False], [True] * 5]),
    ms=(1.0, 2.0, 3.0),
    head_ms=0.5,
)


def test_the_cost_of_rounds_with_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worked out by hand; v(n) = 1 + (n - 1) / 2, at most two draft tokens per round.

    Round 1, tokens 0 to 2.  The first exit takes 0: 1 + 0.5, and 2 (v(2) - 1) = 1 for the layers between, later.  The
    second takes 1: 1 + 2 and two questions, 4.  A third guess is not allowed, its start is: 1.5.  The rest: 3 v(3) = 6.
    Round 2, token 3.  No exit: 4, and 3.  Round 3, token 4.  The first exit is wrong: 1.5 + 1, what follows it: 1.5,
    and 3 v(2) = 4.5.
    """
    monkeypatch.setattr("edgespec.export.measuring.heads.FLIGHT", 2)
    found = _along(RECORD, (0, 1), 0.5, 6.0, lambda n: 1 + (n - 1) / 2)
    assert found.layers == (1, 2)
    guessing = 1.5 + 1 + 4 + 1.5 + 4 + 1.5 + 1 + 1.5
    assert found.speedup == pytest.approx(5 * 6 / (guessing + 6 + 3 + 4.5))
    assert found.acceptance == pytest.approx(2 / 3)
    assert found.taken == pytest.approx(3 / 5)
    assert found.draft_cost == pytest.approx(guessing / 6 / 6)  # three guesses and three starts that ended a round


def test_the_exit_that_pays_is_chosen() -> None:
    always = np.array([[0.7] * 20, [0.7] * 20])
    flat = lambda n: 1.0  # noqa: E731
    for good in (0, 1):
        right = np.array([[good == 0] * 20, [good == 1] * 20])
        found = choose_exits(ExitRecord((1, 2), always, right, (1.0, 0.1, 9.0), 0.1), 10.0, flat)
        assert found.layers == (2,) if good else found.layers[0] == 1  # the wrong one is not asked before it
        assert found.threshold < 0.7
        assert found.speedup > 2


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
    """The clock is simulated: a layer's attention takes 2 ms, its MLP 3."""
    slot = writer("stock", TARGET, "fp32").slot("gated")
    every = tuple(range(slot.layers))
    left_out: list[SkipSet | None] = []
    real = slot.run

    def run(wanted: Pass) -> Output:
        if wanted.draft:
            left_out.append(wanted.skip)
        return real(wanted)

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

    monkeypatch.setattr(slot, "run", run)
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
    slot: Any = None  # the slot is not timed here
    found = measure_steps(slot, 4)
    assert list(tries) == []
    assert found.spread == kept
    assert bool(found.busy) == (kept > 1.5)


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
