"""Monitoring of a request: recent acceptance, prediction, work, fallbacks, drops, shadow checks."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.cli.answer import stats_lines
from edgespec.control.adaptive import Adaptive, Control
from edgespec.decoding import loop
from edgespec.decoding.loop import DecodeOptions, decode
from edgespec.decoding.proposal import Proposal, Verdict
from edgespec.decoding.settings import SHADOW
from edgespec.decoding.stats import PLAIN, WINDOW, Expected, RoundTime, Stats
from edgespec.decoding.target import Output
from edgespec.decoding.verify import verify
from edgespec.drafters.plain import Plain
from edgespec.engine.engine import STATS_EVERY, Engine
from edgespec.errors import InvalidRequest
from edgespec.formulas.cost import CostModel
from edgespec.plugins.lossy import All
from tests.conftest import PROMPTS
from tests.support.rounds import Rounds
from tests.support.toy import FixedCosts, Scripted, chain, hash_logits, hash_target, plain

VOCAB = 11
NOTHING = Output(np.zeros((1, 1), np.float32))


def right(seed: int) -> Callable[[list[int], int], Proposal]:
    """Guesses what the model says."""
    return lambda tokens, budget: chain(plain(hash_logits(seed, VOCAB), VOCAB, tokens, budget))


def watched(drafter: Any, new: int = 25, seed: int = 4, gamma: int = 3, **options: Any) -> tuple[list[int], Stats]:
    stats = Stats()
    rounds = decode(hash_target(seed), drafter, [1, 2], DecodeOptions(new, gamma, **options), stats)
    return [token for item in rounds for token in item.tokens], stats


# -- counting ----------------------------------------------------------------------------------------------------------


def test_plain_decoding_is_the_measure_of_work() -> None:
    _, stats = watched(Plain())
    assert (stats.work_per_token, stats.plain_rounds, stats.drafted_rounds) == (1.0, 25, 0)
    assert (stats.predicted_speedup, stats.measured_speedup) == (None, None)
    assert stats.recently() == {PLAIN: {"rounds": 25, "acceptance_rate": 0.0, "tokens_per_round": 1.0}}


def add(stats: Stats, *figures: Any, shared: bool = False, expected: Expected | None = None) -> None:
    """Count a round: (method, tokens, drafted, accepted, work, draft ms, verify ms)."""
    method, tokens, drafted, accepted, work, draft_ms, verify_ms = figures
    time = RoundTime(draft_ms, verify_ms, 1 + drafted, shared, method, tokens, drafted, accepted, work)
    stats.add(time, 0.0)
    if drafted:
        stats.add_guesses(time, min(accepted + 1, drafted), True, True, expected)


ROUNDS = st.lists(
    st.integers(0, 6).flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted), st.integers(0, 1))),
    max_size=30,
)


@given(rounds=ROUNDS)
def test_counters_add_up(rounds: list[tuple[int, int, int]]) -> None:
    stats = Stats()
    for drafted, accepted, bonus in rounds:
        add(stats, "a", accepted + bonus, drafted, accepted, 1.0 + drafted, 0.0, 1.0)
    assert stats.rounds == len(rounds) == sum(stats.histogram)
    assert stats.accepted == sum(at * count for at, count in enumerate(stats.histogram)) == sum(stats.accepted_at)
    assert stats.drafted == sum(drafted for drafted, _, _ in rounds)
    assert stats.tokens == sum(accepted + bonus for _, accepted, bonus in rounds)
    assert len(stats.drafted_at) == len(stats.accepted_at) == len(stats.acceptance_at)
    assert all(0 <= accepted <= offered for accepted, offered in zip(stats.accepted_at, stats.drafted_at, strict=True))
    # a position is put to the test only after the one before it was accepted
    assert all(later <= earlier for earlier, later in zip(stats.accepted_at, stats.drafted_at[1:], strict=False))
    assert 0 <= stats.acceptance_rate <= 1
    assert stats.tokens_per_round == (stats.tokens / len(rounds) if rounds else 0)


def test_nothing_counted_is_nothing() -> None:
    stats = Stats()
    assert (stats.tokens_per_round, stats.acceptance_rate, stats.tokens_per_second) == (0, 0, 0)
    assert stats.acceptance_at == []
    assert json.loads(json.dumps(stats.as_dict())) == stats.as_dict()


def test_times_make_speeds() -> None:
    stats = Stats(tokens=30, draft_ms=100, verify_ms=350, other_ms=50, prefill_ms=10**6)
    assert stats.decode_ms == 500
    assert stats.tokens_per_second == 60


def test_the_keys_of_statistics_are_stable() -> None:
    keys = """prompt_tokens reused_tokens tokens rounds drafted accepted acceptance_rate tokens_per_round
        histogram drafted_at accepted_at setup_ms prefill_ms draft_ms verify_ms other_ms
        tokens_per_second dropped_reason recent predicted_speedup measured_speedup work_per_token plain_rounds
        drafted_rounds probes fallbacks recoveries drops switches shadow"""
    assert set(Stats().as_dict()) == set(keys.split())


def test_refused_rows_and_draft_steps_are_work() -> None:
    stats, four_steps = Stats(), Expected(1.0, 1.0, None, 4 * 0.25)
    add(stats, "a", 1, 4, 0, 5, 1.0, 2.0, expected=four_steps)  # five rows and four steps for a token
    assert stats.work_per_token == 6
    add(stats, "a", 5, 4, 4, 5, 1.0, 2.0, expected=four_steps)
    assert stats.work_per_token == 2
    by_time = Stats()
    add(by_time, "a", 3, 2, 2, 3, 4.0, 6.0)  # a row takes 2 ms, so drafting was two rows
    assert by_time.work_per_token == pytest.approx(5 / 3)
    ahead = Stats()  # layers that ran while drafting are not counted twice
    add(ahead, "paradecode", 2, 1, 1, 2 * 0.5, 0.0, 1.0, expected=Expected(1.0, 1.0, None, 0.5))
    assert ahead.work_per_token == 0.75


def test_a_round_in_which_an_exit_was_asked_is_no_plain_step() -> None:
    stats = Stats()
    for _ in range(20):
        add(stats, PLAIN, 1, 0, 0, 0.2, 9.0, 3.0)  # the last fifth of the layers
    assert (stats.plain_rounds, stats.step_ms) == (20, None)
    for _ in range(20):
        add(stats, PLAIN, 1, 0, 0, 1, 0.0, 8.0)
    assert (stats.plain_rounds, stats.step_ms) == (40, 8.0)


def test_prediction_is_held_against_the_clock() -> None:
    stats, expected = Stats(), Expected(3.0, 2.0, 10.0, 0.0)
    add(stats, "a", 2, 2, 1, 3, 4.0, 16.0, expected=expected)
    assert (stats.predicted_speedup, stats.measured_speedup) == (1.5, 1.0)
    add(stats, "a", 9, 2, 2, 3, 4.0, 16.0, shared=True, expected=expected)  # others' rows were in that pass
    add(stats, PLAIN, 1, 0, 0, 1, 0.0, 99.0)
    assert (stats.predicted_speedup, stats.measured_speedup) == (1.5, 1.0)


def test_recent_rounds_are_forgotten() -> None:
    stats = Stats()
    for _ in range(5):
        add(stats, "old", 2, 1, 1, 2, 0.0, 1.0)
    for _ in range(WINDOW - 2):
        add(stats, "new", 1, 2, 0, 3, 0.0, 1.0)
    found = stats.recently()
    assert found["old"]["rounds"] == 2
    assert found["new"] == {"rounds": WINDOW - 2, "acceptance_rate": 0.0, "tokens_per_round": 1.0}


def test_control_tells_what_it_expects_and_when_it_falls_back_and_comes_back() -> None:
    inner = Scripted(lambda tokens, budget: chain([0] * budget))
    driven = Rounds(control := Control(inner, FixedCosts({1: 1.0, 2: 1.2}, 0.05)))
    stats = driven.stats
    rng = np.random.default_rng(0)
    states = []
    for i in range(900):
        proposal = driven.propose([1], 8)
        right = 0.95 if i < 200 or i >= 500 else 0.02
        accepted = 0
        while accepted < len(proposal) and rng.random() < right:
            accepted += 1
        inner.seen.clear()
        assert (driven.drafting.expected(proposal) is None) is (len(proposal) == 0)
        driven.learn(proposal, range(accepted))
        states.append((stats.fallbacks, stats.recoveries))
    assert states[199] == (0, 0)
    assert states[499][0] >= 1
    assert states[-1][1] >= 1
    assert states[-1][0] - states[-1][1] in (0, 1)
    assert stats.probes == control.probes > 0


def test_expectation_is_that_of_the_formula() -> None:
    control = Control(Scripted(right(4)), CostModel({1: 1.0, 2: 1.5}, 0.25), prior=0.5, fallback=False)
    driven = Rounds(control)
    proposal = driven.propose([1, 2], 1)
    assert len(proposal) == 1
    assert driven.drafting.expected(proposal) == Expected(1.5, 1.75, None, 0.25)
    control.cost.observe_verify(1, 8.0, 8)
    expected = driven.drafting.expected(driven.propose([1, 2], 1))
    assert expected is not None
    assert expected.plain_ms == 8.0


def test_a_request_counts_its_own_decisions() -> None:
    control = Control(Scripted(lambda tokens, budget: chain([0] * budget)), CostModel({1: 1.0, 2: 2.0}, 0.5))
    policy = Adaptive([control])
    for _ in range(2):
        stats = watched(policy, 200)[1]
        assert stats.probes == control.probes > 0
        assert (stats.drafted_rounds, stats.plain_rounds) == (control.drafted, stats.rounds - control.drafted)


# -- shadow checks -----------------------------------------------------------------------------------------------------


def test_lossless_methods_agree() -> None:
    for every in (1, 3):
        text, stats = watched(Scripted(right(4)), shadow=every)
        assert (stats.shadow_agreeing, stats.shadow_first) == (stats.shadow_checked, None)
        assert stats.shadow_agreement == 1.0
        assert stats.shadow_checked == len(text) if every == 1 else 0 < stats.shadow_checked < len(text)


@pytest.mark.parametrize("tree", [False, True])
def test_a_lossy_rule_is_found_out(monkeypatch: pytest.MonkeyPatch, tree: bool) -> None:
    """A rule that takes every first guess; every second one is wrong."""

    def guess(tokens: list[int], budget: int) -> Proposal:
        (best,) = plain(hash_logits(4, VOCAB), VOCAB, tokens, 1)
        wrong = (best + 1) % VOCAB
        taken = wrong if len(calls) % 2 else best
        calls.append(taken)
        return Proposal(np.array([best, taken]), np.array([-1, -1])) if tree else chain([taken])

    def lossy(proposal: Proposal, rows: Any, noise: Any, accept: Any) -> Verdict:
        node = len(proposal) - 1
        return Verdict([node], rows.choose(node + 1)) if len(proposal) else verify(proposal, rows, noise)

    monkeypatch.setattr(loop, "verify", lossy)
    calls: list[int] = []
    text, stats = watched(Scripted(guess), new=20, shadow=1)
    assert stats.shadow_checked == len(text) == 20
    assert stats.shadow_agreeing == 15  # with two tokens per round, one is the row's own choice
    at, expected, got = stats.shadow_first or (-1, -1, -1)
    assert (at, got) == (2, text[2])
    assert expected == plain(hash_logits(4, VOCAB), VOCAB, [1, 2, *text[:2]], 1)[0] != got


def test_without_shadow_nothing_is_compared() -> None:
    assert watched(Scripted(right(4)))[1].shadow_checked == 0


def test_the_keys_of_a_shadow_are_stable() -> None:
    stats = Stats(shadow_every=4)
    stats.compare(7, [(1, 1), (2, 3), (4, 5)])
    assert stats.as_dict()["shadow"] == {
        "every": 4,
        "checked": 3,
        "agreeing": 1,
        "agreement": 1 / 3,
        "first_disagreement": {"position": 8, "expected": 2, "got": 3},
    }
    shadow: Any = Stats().as_dict()["shadow"]
    assert shadow["first_disagreement"] is None


# -- where it is shown -------------------------------------------------------------------------------------------------


def test_what_people_read() -> None:
    cost = CostModel({1: 1.0, 2: 1.1}, 0.0)
    cost.observe_verify(1, 1.0, 15)
    _, stats = watched(Adaptive([Control(Scripted(right(4)), cost, fallback=False)]), shadow=2)
    stats.shadow_first = (3, 4, 5)
    text = "\n".join(stats_lines(stats))
    for part in ("rounds", "acceptance   100 %", "(last 64 rounds)", "predicted", "measured", "work", "back 0 times",
                 "prefill", "every 2 rounds; first other token at 3: 5, plain decoding 4"):  # fmt: skip
        assert part in text, part
    _, dropped = watched(Scripted(lambda *_: chain([99])))
    assert "dropped      scripted failed in propose: ValueError" in "\n".join(stats_lines(dropped))
    assert "nothing was drafted" in "\n".join(stats_lines(Stats()))
    json.dumps(dropped.as_dict(), allow_nan=False)


def test_a_caller_is_told_every_so_many_rounds_and_at_the_end(engine: Callable[..., Engine]) -> None:
    heard: list[int] = []
    how: dict[str, Any] = {"method": "ar", "ignore_eos": True, "max_new_tokens": 20}
    engine().generate(PROMPTS[0], on_stats=lambda stats: heard.append(stats.rounds), stats_every=8, **how)
    assert heard == [8, 16, 20]
    heard.clear()
    with engine().stream(PROMPTS[0], on_stats=lambda stats: heard.append(stats.tokens), **how) as stream:
        for _ in stream:
            pass
    assert heard == [STATS_EVERY, 20]
    with pytest.raises(InvalidRequest, match="stats_every 0"):
        engine().stream(PROMPTS[0], stats_every=0)


def test_shadow_of_a_request(engine: Callable[..., Engine]) -> None:
    how: dict[str, Any] = {"method": "ngram", "ignore_eos": True, "max_new_tokens": 20, "fallback": False}
    found = engine().generate(PROMPTS[0], shadow=1, **how).stats
    assert (found.shadow_every, found.shadow_checked, found.shadow_agreement) == (1, 20, 1.0)
    assert engine().generate(PROMPTS[0], **how).stats.shadow_every == 0
    for wrong in (-1, "x"):
        with pytest.raises(InvalidRequest, match="shadow"):
            engine().generate(PROMPTS[0], shadow=wrong)  # type: ignore[arg-type]


def test_a_lossy_rule_is_shadowed_unasked(engine: Callable[..., Engine]) -> None:
    how: dict[str, Any] = {"method": "speculative", "adaptive": False, "ignore_eos": True, "max_new_tokens": 60}
    result = engine().generate(PROMPTS[0], accept=All(), **how)
    found = result.stats
    assert (found.shadow_every, result.lossless) == (SHADOW, False)
    assert 0 < found.shadow_checked < 60
    every = engine().generate(PROMPTS[0], accept=All(), shadow=1, **how).stats
    assert every.shadow_checked == 60
    assert every.shadow_agreement < 1
    assert engine().generate(PROMPTS[0], accept=All(), shadow=0, **how).stats.shadow_checked == 0
