"""Several requests at once: the same texts as separate requests, and one run of the node for all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from edgespec.control.adaptive import Control
from edgespec.engine import batch as batches
from edgespec.engine.engine import Engine
from edgespec.errors import InvalidRequest
from edgespec.runtimes.slots.native_batch import NativeBatch
from tests.conftest import PROMPTS
from tests.support.rounds import Rounds
from tests.support.toy import FixedCosts, Scripted, chain

METHODS = ("ar", "ngram", "speculative", "self-spec", "swift", "medusa", "blockwise", "paradecode")
Get = Callable[..., Engine]
NATIVE = pytest.mark.parametrize("operators", ["native"], indirect=True)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "changes",
    [
        {"adaptive": False, "gamma": 3},
        {"temperature": 0.9, "seed": 4, "acceptance": "coupled"},
        {"repetition_penalty": 1.3, "logprobs": True},
    ],
)
def test_every_text_is_that_of_the_request_alone(engine: Get, method: str, changes: dict[str, Any]) -> None:
    made = engine()
    how: dict[str, Any] = {"method": method, "max_new_tokens": 24, "ignore_eos": True, **changes}
    results = made.generate_batch(list(PROMPTS[:6]), batch=3, **how)
    for prompt, result in zip(PROMPTS, results, strict=False):
        alone = made.generate(prompt, **how)
        assert result.stats.dropped_reason is None
        if made.operators.kind == "stock" and not (result.stats.exact and alone.stats.exact):
            continue  # the clock chose a tree, whose rows stock operators add up in another order
        assert (result.tokens, result.text, result.finish) == (alone.tokens, alone.text, alone.finish)
        assert result.logprobs == alone.logprobs
        if "adaptive" in changes:  # else the clock decides whether trees were verified
            assert result.exact == alone.exact


@pytest.mark.parametrize("method", ["ar", "ngram"])
def test_sequences_end_at_different_times_and_others_take_their_place(engine: Get, method: str) -> None:
    made = engine()
    prompts = [PROMPTS[at] for at in (0, 18, 3, 7, 1, 5, 12)]
    how: dict[str, Any] = {"method": method, "max_new_tokens": 60, "stop": ("\n\n", "the")}
    results = made.generate_batch(prompts, batch=2, **how)
    alone = [made.generate(prompt, **how) for prompt in prompts]
    assert [(r.tokens, r.text, r.finish) for r in results] == [(r.tokens, r.text, r.finish) for r in alone]
    assert len({len(result.tokens) for result in results}) > 2


def test_each_prompt_may_have_a_seed(engine: Get) -> None:
    made = engine()
    how: dict[str, Any] = {"method": "ar", "temperature": 1.0, "max_new_tokens": 16, "ignore_eos": True}
    results = made.generate_batch([PROMPTS[0]] * 4, seeds=[1, 2, 3, 1], batch=3, **how)
    assert [result.tokens for result in results] == [
        made.generate(PROMPTS[0], seed=seed, **how).tokens for seed in (1, 2, 3, 1)
    ]
    assert len({tuple(result.tokens) for result in results}) == 3
    with pytest.raises(InvalidRequest, match="1 seeds for 2 prompts"):
        made.generate_batch(list(PROMPTS[:2]), seeds=[1], **how)
    assert made.generate_batch([], seeds=[]) == []


def test_a_cancel_ends_all_of_a_batch(engine: Get) -> None:
    made, cancel = engine(), threading.Event()
    how: dict[str, Any] = {"max_new_tokens": 60, "ignore_eos": True}

    class Setting:
        rounds = 0

        def propose(self, tokens: list[int], budget: int) -> list[int]:
            self.rounds += 1
            if self.rounds == 5:
                cancel.set()
            return []

    results = made.generate_batch(list(PROMPTS[:5]), batch=2, cancel=cancel, proposer=Setting(), **how)
    assert [result.finish for result in results] == ["cancelled"] * 5
    assert 0 < len(results[0].tokens) < 60
    assert [result.tokens for result in results[2:]] == [[]] * 3
    alone = made.generate(PROMPTS[0], method="ar", **how)
    assert results[0].tokens == alone.tokens[: len(results[0].tokens)]
    assert made.generate_batch(list(PROMPTS[:2]), method="ar", **how)[0].tokens == alone.tokens  # it is usable


@NATIVE
def test_passes_are_gathered(engine: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    run = NativeBatch.run

    def counted(self: NativeBatch, passes: Sequence[Any]) -> Any:
        sizes.append(len(passes))
        return run(self, passes)

    monkeypatch.setattr(NativeBatch, "run", counted)
    engine().generate_batch(list(PROMPTS[:5]), method="ar", max_new_tokens=10, ignore_eos=True, batch=4)
    assert sizes == [4] * 10  # the fifth comes when all four have ended, so it runs without others


@NATIVE
def test_a_pass_is_never_longer_than_the_node_takes(engine: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "LONGEST_PASS", 7)
    how: dict[str, Any] = {"method": "speculative", "adaptive": False, "gamma": 3, "max_new_tokens": 16}
    results = engine().generate_batch(list(PROMPTS[:4]), batch=4, **how)
    assert [result.tokens for result in results] == [engine().generate(p, **how).tokens for p in PROMPTS[:4]]


@NATIVE
def test_sessions_of_a_batch_are_kept(fresh: Get) -> None:
    made = fresh()
    before = made.kv_bytes()
    made.generate_batch(list(PROMPTS[:2]), batch=2, max_new_tokens=4)
    kept = made.kv_bytes()
    assert kept > before
    made.generate_batch(list(PROMPTS[:2]), batch=2, max_new_tokens=4)
    assert made.kv_bytes() == kept
    made.close()
    assert made.kv_bytes() == 0


def test_a_bad_prompt_ends_a_batch_and_the_next_one_works(engine: Get) -> None:
    made = engine()
    with pytest.raises(InvalidRequest):
        made.generate_batch([PROMPTS[0], [10**9], PROMPTS[1]], max_new_tokens=4)
    assert not made.sessions._busy
    assert len(made.generate_batch(list(PROMPTS[:2]), max_new_tokens=4, ignore_eos=True)) == 2
    with pytest.raises(InvalidRequest, match="batch is 0"):
        made.generate_batch([PROMPTS[0]], batch=0)


def test_control_decides_for_the_whole_pass() -> None:
    """Rows that are free for one sequence are not where four of them fill the pass."""
    flat_then_steep = {1: 1.0, 4: 1.05, 8: 2.0, 16: 4.0}

    def best(width: int) -> int:
        drafter = Scripted(lambda tokens, budget: chain([0] * budget))
        control = Control(drafter, FixedCosts(flat_then_steep, 0.02), prior=0.6)
        return len(Rounds(control, width=width).propose([1], 4))

    assert best(1) == 3
    assert best(4) == 0
