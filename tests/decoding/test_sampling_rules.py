"""The distribution test of ``test_distribution`` under every sampling rule."""

from __future__ import annotations

import pytest

from edgespec.decoding.sampling import SamplingParams
from tests.decoding.test_distribution import p_value

GRID = {
    "temperature": SamplingParams(0.6),
    "top-k": SamplingParams(0.9, top_k=3),
    "top-p": SamplingParams(1.3, top_p=0.8),
    "min-p": SamplingParams(1.0, min_p=0.2),
    "penalty and bias": SamplingParams(1.0, repetition_penalty=1.6, logit_bias={2: 0.7}),
    "all": SamplingParams(0.9, top_k=3, top_p=0.95, min_p=0.05, repetition_penalty=1.2),
}


@pytest.mark.parametrize("rule", GRID)
def test_every_sampling_rule_keeps_the_distribution(rule: str) -> None:
    assert p_value("draft model", GRID[rule]) > 1e-3


@pytest.mark.parametrize("name", ["tree without replacement", "comb"])
def test_all_rules_at_once_keep_the_distribution(name: str) -> None:
    assert p_value(name, GRID["all"]) > 1e-3


@pytest.mark.parametrize("name", ["draft model"])
def test_coupled_sampling_keeps_the_distribution(name: str) -> None:
    assert p_value(name, SamplingParams(0.9, top_p=0.9, acceptance="coupled")) > 1e-3
