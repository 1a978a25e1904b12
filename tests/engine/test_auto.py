"""Method auto on real graphs: what a result says of it, and that its text is plain decoding's wherever it switches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from edgespec.control.adaptive import Control
from edgespec.control.auto import Auto, Candidate
from edgespec.control.learned import Standing
from edgespec.decoding.settings import Settings
from edgespec.decoding.stats import PLAIN
from edgespec.drafters.registry import AUTO
from edgespec.engine import methods
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.reports.bench import bench_all
from edgespec.runtimes.files.manifest import Operators
from tests.conftest import PROMPTS
from tests.support.planning import predicting

PROMPT, NEW = PROMPTS[0], 60
EVERY = 3  # rounds between two switches that are forced
PROMISES = {"speculative": 1.9, "medusa": 1.8, "self-spec": 1.7, "blockwise": 1.6, "swift": 1.5, "paradecode": 1.4}

Get = Callable[..., Engine]


@pytest.fixture
def fresh(bundle: Callable[..., Path], operators: Operators) -> Get:
    """Load an engine that has seen nothing and expects much of everything."""

    def get(form: str = "int4", promises: dict[str, float] = PROMISES, **how: Any) -> Engine:
        made = load(bundle(form), threads=1, **{"operators": operators, **how})
        made.bundle = replace(made.bundle, manifest=predicting(made.bundle.manifest, promises))
        return made

    return get


@pytest.fixture
def switching(monkeypatch: pytest.MonkeyPatch) -> None:
    """All methods are candidates, and every few rounds the next one has its turn, plain decoding too."""
    monkeypatch.setattr(methods, "CANDIDATES", 9)
    choose = Auto.choose

    def forced(self: Auto, tokens: list[int], budget: int) -> Any:
        if self._seen and self._seen % EVERY == 0:
            active = self._in_use.which
            following = 0 if active is None else active + 1
            self._change(following if following < len(self.candidates) else None, "forced")
        return choose(self, tokens, budget)

    monkeypatch.setattr(Auto, "choose", forced)
    monkeypatch.setattr(Auto, "_judge", lambda self, control: None)
    # they draft, although it is never faster on a model this small
    monkeypatch.setattr(Standing, "round_loss_limit", property(lambda self: inf))
    made = Candidate.made

    def always(self: Candidate) -> Control:
        control = made(self)
        control.fallback = False
        return control

    monkeypatch.setattr(Candidate, "made", always)


def ask(engine: Engine, prompt: Any = PROMPT, **settings: Any) -> Any:
    return engine.generate(prompt, **{"max_new_tokens": NEW, "ignore_eos": True, "method": AUTO, **settings})


@pytest.mark.parametrize("form", ["int4", "w8a8"])
def test_the_text_is_plain_decodings_wherever_it_switches(fresh: Get, switching: None, form: str) -> None:
    made = fresh(form)
    drafted = 0
    for prompt in PROMPTS[:4]:
        wanted = ask(made, prompt, method="ar", max_new_tokens=120).tokens
        result = ask(made, prompt, max_new_tokens=120, nodes=1)
        assert result.tokens == wanted
        assert result.exact
        assert result.lossless
        assert result.stats.dropped_reason is None
        assert not result.stats.drops
        taken = {switch["to"] for switch in result.stats.switches}
        assert taken == {*PROMISES, "ngram", PLAIN}
        assert result.method_used in PROMISES | {"ngram": 1.0}
        drafted += result.stats.drafted
        coupled: dict[str, Any] = {"temperature": 1.0, "seed": 4, "acceptance": "coupled"}
        assert ask(made, prompt, nodes=1, **coupled).tokens == ask(made, prompt, method="ar", **coupled).tokens
    assert drafted > 100


def test_batches_switch_too(fresh: Get, switching: None) -> None:
    made = fresh()
    prompts = list(PROMPTS[:5])
    settings = Settings(method=AUTO, max_new_tokens=40, ignore_eos=True).changed(nodes=1)
    results = made.generate_batch(prompts, settings, batch=3)
    assert [result.tokens for result in results] == [
        ask(made, prompt, method="ar", max_new_tokens=40).tokens for prompt in prompts
    ]
    assert all(result.stats.switches for result in results)
    assert not any(result.stats.drops for result in results)


def test_a_seeded_text_does_not_depend_on_what_was_learned(fresh: Get) -> None:
    sampled: dict[str, Any] = {"temperature": 1.0, "seed": 7}
    known = fresh()
    first = ask(known, **sampled)
    for _ in range(2):
        ask(known, PROMPTS[3])
    again = ask(known, **sampled)
    assert again.tokens == first.tokens == ask(fresh(), **sampled).tokens
    assert again.stats.histogram == first.stats.histogram


def test_only_what_is_in_use_is_loaded(fresh: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    made = fresh(promises={"medusa": 1.9, "speculative": 1.5})
    ask(made, fallback=False)
    assert not made._drafts
    monkeypatch.setattr(
        Auto, "_judge", lambda self, control: self._switch_candidate(0.5) if self._in_use.which == 0 else None
    )
    result = ask(made, max_new_tokens=120)
    assert [at["to"] for at in result.stats.switches][:1] == ["speculative"]
    assert "draft" in made._drafts


def test_a_draft_that_cannot_be_loaded_is_dropped_and_the_next_is_taken(
    fresh: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fresh(promises={"speculative": 1.9, "medusa": 1.8})

    def gone(self: Engine, *part: Any) -> Any:
        raise OSError("the draft is gone")

    monkeypatch.setattr(Engine, "_draft_model", gone)
    made.sessions.clear()
    wanted = ask(made, method="ar").tokens
    result = ask(made, nodes=1)
    assert result.tokens == wanted
    (drop,) = result.stats.drops
    assert (drop["method"], drop["error"]) == ("speculative", "OSError: the draft is gone")
    assert result.stats.dropped_reason is None
    assert "the draft is gone" in "; ".join(result.details)
    assert result.stats.switches[0]["to"] == "medusa"


def test_what_a_result_says(fresh: Get) -> None:
    made = fresh(promises={"speculative": 1.42})
    result = ask(made)
    assert result.method_requested == AUTO
    assert ask(made, method=None).method_requested is None
    assert "chosen: predicted 1.42x on the exporting machine" in result.details
    assert len(result.reason) < 120
    assert result.method_used in ("speculative", "ngram", "ar")
    found = result.as_dict()["stats"]["switches"]
    assert [set(one) for one in found] == [{"round", "from", "to", "why"}] * len(found)


def test_a_lane_begins_where_the_last_request_ended(fresh: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    """No method is faster: it starts plain the next time, and reports that."""
    made = fresh(promises={"speculative": 1.5})
    monkeypatch.setattr(Auto, "gain", lambda self: 0.9)
    ask(made, max_new_tokens=200)
    session = made.sessions.any()
    for learned in made.experience.methods.values():
        learned.standing.back_off("did not pay: 0.90x over 48 rounds")
    made.sessions.give_back(session)
    result = ask(made, max_new_tokens=10)
    assert (result.method_used, result.stats.drafted) == ("ar", 0)
    assert "from round 0 plain, in earlier requests speculative did not pay: 0.90x" in "; ".join(result.details)
    assert result.exact


def test_without_control_it_is_the_pick_alone(fresh: Get) -> None:
    made = fresh(promises={"self-spec": 1.5})
    result = ask(made, adaptive=False, gamma=2)
    assert (result.method_used, result.stats.switches) == ("self-spec", [])
    assert result.stats.drafted > 20


def test_bench_measures_it_like_any_method(fresh: Get) -> None:
    made = fresh(promises={"speculative": 1.9})
    settings = Settings(max_new_tokens=24, ignore_eos=True)
    figures = bench_all([(made, [AUTO, "speculative"])], [PROMPT], settings, repeats=1)
    plain, row, speculative = (one.as_dict() for one in figures)
    assert (plain["method"], row["method"], row["same_text"], row["runs"]) == ("plain", AUTO, 1, 1)
    assert 0 <= row["extra_bytes"] <= speculative["extra_bytes"]
    assert row["exact"]
