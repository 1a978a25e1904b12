"""Counting, intervals, figures, proofs and golden vectors."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.settings import Settings
from edgespec.decoding.stats import Stats
from edgespec.engine.engine import Engine, Prompt
from edgespec.engine.result import Result
from edgespec.errors import InvalidRequest
from edgespec.reports import golden, proof
from edgespec.reports.bench import BASELINE, Entry, MethodFigures, bench_all, bootstrap, check_plot, plot
from edgespec.reports.proof import Difference, MethodProof, check_golden, prove
from edgespec.runtimes.files.manifest import GoldenVector
from edgespec.runtimes.opening import open_slot
from tests.conftest import PROMPTS, THREADS

Get = Callable[..., Engine]

# -- counting ----------------------------------------------------------------------------------------------------------

ROUNDS = st.lists(
    st.integers(0, 6).flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted), st.integers(0, 1))),
    max_size=30,
)


@given(rounds=ROUNDS)
def test_counters_add_up(rounds: list[tuple[int, int, int]]) -> None:
    stats = Stats()
    for drafted, accepted, bonus in rounds:
        stats.record(accepted + bonus, drafted, accepted, min(accepted + 1, drafted))
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


# -- intervals ---------------------------------------------------------------------------------------------------------

RATIOS = st.lists(st.floats(0.125, 8), min_size=1, max_size=12)
SLOW = settings(max_examples=20, deadline=None)


@SLOW
@given(values=RATIOS)
def test_an_interval_lies_among_the_values(values: list[float]) -> None:
    low, high = bootstrap(values)
    assert min(values) <= low <= high <= max(values)
    assert (low, high) == bootstrap(values)  # the same every time


@SLOW
@given(values=RATIOS, factor=st.sampled_from([0.25, 2.0, 16.0]))
def test_an_interval_scales_with_its_values(values: list[float], factor: float) -> None:
    low, high = bootstrap(values)
    assert bootstrap([factor * value for value in values]) == (factor * low, factor * high)


@SLOW
@given(values=RATIOS)
def test_a_smaller_share_is_inside_a_larger(values: list[float]) -> None:
    low, high = bootstrap(values)
    inner = bootstrap(values, share=0.5)
    assert low <= inner[0] <= inner[1] <= high


def test_equal_values_leave_no_doubt() -> None:
    assert bootstrap([1.5]) == bootstrap([1.5] * 9) == (1.5, 1.5)


def test_an_interval_covers_the_true_median_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(3)
    covered = 0
    for _ in range(60):
        low, high = bootstrap(np.exp(generator.normal(0, 0.2, 15)).tolist())
        covered += low <= 1 <= high
    assert covered >= 50


# -- figures -----------------------------------------------------------------------------------------------------------


def result(tokens: int, rounds: int, drafted: int, accepted: int, *, exact: bool = True) -> Result:
    stats = Stats(tokens=tokens, rounds=rounds, drafted=drafted, accepted=accepted)
    return Result("", [], "length", stats, None, "ngram", f"after {rounds}", True, exact, [])


def test_figures_of_a_method() -> None:
    figures = MethodFigures(
        "ngram", [2.0, 4.0, 5.0], [1.5, 2.0, 1.0], [result(9, 3, 8, 6), result(11, 7, 8, 4, exact=False)], 1, 7
    )
    assert figures.as_dict() == {
        "method": "ngram",
        "tokens_per_second": 250.0,
        "speedup": 1.5,
        "speedup_low": bootstrap(figures.ratios)[0],
        "speedup_high": bootstrap(figures.ratios)[1],
        "pairs": 3,
        "tokens_per_round": 2.0,
        "acceptance_rate": 0.625,
        "lossless": True,
        "exact": False,
        "same_text": 1,
        "runs": 2,
        "extra_bytes": 7,
        "reason": "after 7",
        "bundle": "",
        "format": "",
        "weight_bytes": 0,
        "batch_tokens_per_second": None,
    }


def test_figures_of_a_method_that_drafted_nothing() -> None:
    figures = MethodFigures("ar", [1.0], [1.0], [result(0, 0, 0, 0)]).as_dict()
    assert (figures["tokens_per_round"], figures["acceptance_rate"]) == (0, 0)


def test_methods_take_turns(engine: Get) -> None:
    seen: list[tuple[int, int, str]] = []
    wanted = Settings(max_new_tokens=12, ignore_eos=True)
    prompts: list[Prompt] = [PROMPTS[0], engine().codec.encode(PROMPTS[1])]
    found = bench_all(
        [Entry(engine(), ["ngram", "self-spec"])], prompts, wanted, 2, progress=lambda *at: seen.append(at)
    )
    assert [figures.method for figures in found] == [BASELINE, "ngram", "self-spec"]
    assert [done for done, _, _ in seen] == list(range(1, 19))
    assert {of for _, of, _ in seen} == {18}
    turns = [tuple(name for _, _, name in seen[at : at + 3]) for at in range(0, 18, 3)]
    assert all(set(turn) == {BASELINE, "ngram", "self-spec"} for turn in turns)
    assert len(set(turns)) == 3  # who begins changes from round to round
    for figures in found:
        assert len(figures.ms_per_token) == len(figures.ratios) == len(figures.results) == 4  # the first is not timed
        assert all(ms > 0 for ms in figures.ms_per_token)
        assert figures.same_text == 4 or figures.method == BASELINE
    for plain, other in zip(found[0].ms_per_token, found[1].ms_per_token, strict=True):
        assert any(math.isclose(plain / other, ratio) for ratio in found[1].ratios)
    assert median(found[0].ratios) == 1


def test_a_plot(tmp_path: Path) -> None:
    found = [MethodFigures(name, [1.0], [ratio], [result(1, 1, 1, 1)]) for name, ratio in ((BASELINE, 1), ("x$y$", 2))]
    plot(found, tmp_path / "speed.png", r"$\bad{$ title")
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_that_cannot_be_written_is_refused_early(tmp_path: Path) -> None:
    check_plot(tmp_path / "x.png")
    for name in ("x.svg", "x", "none/x.png"):
        with pytest.raises(InvalidRequest):
            check_plot(tmp_path / name)


# -- proofs ------------------------------------------------------------------------------------------------------------


def rows_after(engine: Engine, tokens: list[int]) -> np.ndarray:
    """float32 [vocab]: the logits that follow ``tokens``."""
    slot = open_slot(engine.model, context=engine.context)
    slot.prefill(tokens[:-1])
    return np.array(slot.forward(np.array(tokens[-1:], np.int64)).logits[0])


@pytest.fixture
def plain(engine: Get) -> tuple[Engine, list[int], list[int]]:
    """An engine, a prompt and what plain decoding writes after it."""
    made = engine()
    prompt = made.codec.encode(PROMPTS[0])
    return made, prompt, made.generate(prompt, method="ar", max_new_tokens=12, ignore_eos=True).tokens


def continued(engine: Engine, prompt: list[int], head: list[int], count: int) -> list[int]:
    """``head`` and what plain decoding writes after it, ``count`` tokens in all."""
    rest = engine.generate(prompt + head, method="ar", max_new_tokens=count - len(head), ignore_eos=True).tokens
    return head + rest


def test_a_difference_is_measured_where_it_begins(
    plain: tuple[Engine, list[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, prompt, expected = plain
    row = rows_after(made, prompt + expected[:5])
    second = int(np.argsort(row)[-2])
    got = continued(made, prompt, [*expected[:5], second], len(expected))
    gap = float((row[expected[5]] - row[second]) / row.std())
    for limit, near in ((gap * 1.01, True), (gap * 0.99, False)):
        monkeypatch.setattr(proof, "near_tie_limit", lambda *_, most=limit: most)
        found = proof._difference(made, Settings(), 3, prompt, expected, got)
        assert (found.prompt, found.position, found.expected, found.got) == (3, 5, expected[5], second)
        assert found.gap == pytest.approx(gap, rel=1e-4)
        assert found.near_tie is near


def test_a_later_token_that_plain_decoding_would_not_write_is_no_near_tie(
    plain: tuple[Engine, list[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, prompt, expected = plain
    row = rows_after(made, prompt + expected[:5])
    gap = float(np.diff(np.sort(row)[-2:])[0] / row.std())
    got = continued(made, prompt, [*expected[:5], int(np.argsort(row)[-2])], len(expected))
    got[-1] = int(rows_after(made, prompt + got[:-1]).argmin())
    monkeypatch.setattr(proof, "near_tie_limit", lambda *_, most=gap + 0.01: most)
    assert not proof._difference(made, Settings(), 0, prompt, expected, got).near_tie


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.8, seed=5, acceptance="coupled"),
        SamplingParams(temperature=1.2, seed=6, top_k=40, repetition_penalty=1.2, acceptance="coupled"),
        SamplingParams(repetition_penalty=1.5),
    ],
)
def test_sampled_text_is_compared_with_its_noise(
    engine: Get, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What plain decoding draws after a changed token is the best of the scores there."""
    made = engine()
    prompt = made.codec.encode(PROMPTS[0])
    wanted = Settings(method="ar", max_new_tokens=12, ignore_eos=True, sampling=params)
    expected = made.generate(prompt, wanted).tokens
    head = expected[:4]
    second = wanted.changed(logit_bias={expected[4]: -math.inf}, max_new_tokens=1)  # the best but one, noise and all
    head.append(made.generate(prompt + head, second).tokens[0])
    got = head + made.generate(prompt + head, wanted, max_new_tokens=7).tokens
    found = proof._difference(made, wanted, 0, prompt, expected, got)
    assert (found.position, found.got) == (4, head[4])
    assert found.gap > 0
    for limit, near in ((found.gap + 1e-6, True), (found.gap - 1e-6, False)):
        monkeypatch.setattr(proof, "near_tie_limit", lambda *_, most=limit: most)
        assert proof._difference(made, wanted, 0, prompt, expected, got).near_tie is near


def test_a_text_that_ends_early_differs(plain: tuple[Engine, list[int], list[int]]) -> None:
    made, prompt, expected = plain
    for pair in ((expected, expected[:4]), (expected[:4], expected)):
        found = proof._difference(made, Settings(), 0, prompt, *pair)
        assert (found.position, found.gap, found.near_tie) == (4, math.inf, False)
        assert found.as_dict()["gap"] is None
        json.dumps(found.as_dict(), allow_nan=False)


def test_what_a_proof_says() -> None:
    near, far = Difference(0, 1, 2, 3, 0.1, True), Difference(1, 1, 2, 3, 0.9, False)
    for differences, exact, lossless in (([], True, True), ([near], False, True), ([near, far], False, False)):
        found = MethodProof("ngram", 2, 20, 2 - len(differences), differences)
        assert (found.exact, found.lossless) == (exact, lossless)
        assert found.as_dict() == {
            "method": "ngram",
            "prompts": 2,
            "tokens": 20,
            "equal": 2 - len(differences),
            "exact": exact,
            "lossless": lossless,
            "differences": [vars(item) for item in differences],
        }


def test_every_method_is_proven_on_every_prompt(engine: Get) -> None:
    seen: list[tuple[int, int, str]] = []
    wanted = Settings(max_new_tokens=16, ignore_eos=True)
    found = prove(engine(), PROMPTS[:4], wanted, ["ngram", "self-spec"], lambda *at: seen.append(at))
    assert [(item.method, item.prompts, item.equal, item.tokens) for item in found] == [
        ("ngram", 4, 4, 64),
        ("self-spec", 4, 4, 64),
    ]
    assert seen == [(at + 1, 8, "ngram" if at < 4 else "self-spec") for at in range(8)]


# -- golden vectors ----------------------------------------------------------------------------------------------------

TEXT = "First line of the text here\n\nok\n" + "".join(f"This is line number {n} of a long text.\n" for n in range(40))


def test_golden_vectors_are_what_plain_decoding_writes(bundle: Callable[..., Path], engine: Get) -> None:
    vectors = golden.make_golden(bundle("int4"), TEXT, THREADS)
    assert len(vectors) == golden.PROMPTS
    lines = [engine().codec.encode(line) for line in TEXT.splitlines()]
    for vector in vectors:
        assert vector.method == "ar"
        assert 4 <= len(vector.prompt) <= golden.PROMPT_TOKENS
        assert any(line[: golden.PROMPT_TOKENS] == vector.prompt for line in lines)
        for method in ("ar", "ngram", "self-spec", "speculative"):
            made = engine().generate(vector.prompt, method=method, max_new_tokens=golden.NEW_TOKENS)
            assert made.tokens == vector.tokens
    assert golden.make_golden(bundle("int4"), TEXT, THREADS) == vectors


@pytest.mark.parametrize("text, count", [("a\nb\n" * 40, 8), ("word " * 400, 1), ("x", 1)])
def test_any_text_gives_golden_prompts(engine: Get, text: str, count: int) -> None:
    prompts = golden.golden_prompts(engine(), text)
    assert len(prompts) == count
    assert all(0 < len(prompt) <= golden.PROMPT_TOKENS for prompt in prompts)


def test_golden_vectors_that_fit_are_checked(engine: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine()
    prompt = made.codec.encode("ROMEO:")
    tokens = made.generate(prompt, method="ar", max_new_tokens=8).tokens
    wrong = [*tokens[:-1], (tokens[-1] + 1) % made.model.facts.vocab]
    vectors = [GoldenVector(prompt=prompt, method="ar", tokens=item) for item in (tokens, wrong, tokens * 500)]
    manifest = made.bundle.manifest.model_copy(update={"golden": vectors})
    monkeypatch.setattr(made, "bundle", type(made.bundle)(made.bundle.path, manifest))
    assert check_golden(made) == (1, 2)
