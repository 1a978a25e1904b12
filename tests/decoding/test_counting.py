"""Statistics of a request: what is counted adds up."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from edgespec.decoding.stats import RoundTime, Stats

ROUNDS = st.lists(
    st.integers(0, 6).flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted), st.integers(0, 1))),
    max_size=30,
)


@given(rounds=ROUNDS)
def test_counters_add_up(rounds: list[tuple[int, int, int]]) -> None:
    stats = Stats()
    for drafted, accepted, bonus in rounds:
        time = RoundTime(0.0, 1.0, 1 + drafted, False, "a", accepted + bonus, drafted, accepted, 1.0 + drafted)
        stats.add(time, 0.0)
        if drafted:
            stats.add_guesses(time, min(accepted + 1, drafted), True, True)
    assert stats.rounds == len(rounds) == sum(stats.histogram)
    assert stats.accepted == sum(at * count for at, count in enumerate(stats.histogram)) == sum(stats.accepted_at)
    assert stats.drafted == sum(drafted for drafted, _, _ in rounds)
    assert stats.tokens == sum(accepted + bonus for _, accepted, bonus in rounds)
    assert len(stats.offered) == len(stats.accepted_at) == len(stats.acceptance_at)
    assert all(0 <= accepted <= offered for accepted, offered in zip(stats.accepted_at, stats.offered, strict=True))
    # a position is put to the test only after the one before it was accepted
    assert all(later <= earlier for earlier, later in zip(stats.accepted_at, stats.offered[1:], strict=False))
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
    assert set(Stats().as_dict()) == {
        "prompt_tokens",
        "reused_tokens",
        "tokens",
        "rounds",
        "drafted",
        "accepted",
        "acceptance_rate",
        "tokens_per_round",
        "histogram",
        "offered",
        "accepted_at",
        "prefill_ms",
        "draft_ms",
        "verify_ms",
        "other_ms",
        "tokens_per_second",
        "dropped_reason",
        "recent",
        "predicted_speedup",
        "measured_speedup",
        "work_per_token",
        "plain_rounds",
        "drafted_rounds",
        "probes",
        "fallbacks",
        "recoveries",
        "drops",
        "switches",
        "shadow",
    }
