"""Rotary tables of every type, against what transformers computes (tools/make_reference_ropes.py)."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from edgespec.errors import UnsupportedModel
from edgespec.export.architectures.rope import NEEDED, inverse_frequencies, rope_parameters, rope_tables
from tests.support.saved import REFERENCE

CASES: list[dict[str, Any]] = json.loads((REFERENCE / "ropes.json").read_text("utf-8"))
DIMS = 32


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['config']['rope_parameters']['rope_type']}")
def test_frequencies_are_those_of_transformers(case: dict[str, Any]) -> None:
    inverse, factor = inverse_frequencies(rope_parameters(case["config"]), DIMS, case["context"])
    np.testing.assert_allclose(inverse, case["inverse"], rtol=2e-6)
    assert factor == pytest.approx(case["factor"], rel=1e-6)


def test_every_type_has_a_reference() -> None:
    assert {case["config"]["rope_parameters"]["rope_type"] for case in CASES} == set(NEEDED) - {"default"}


def test_old_names_mean_the_same() -> None:
    new = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}}
    old = {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    assert rope_parameters(new) == rope_parameters(old)
    lists = {"short_factor": [1.0], "long_factor": [2.0]}
    outside = {"rope_scaling": {"type": "su", **lists}, "original_max_position_embeddings": 16}
    assert rope_parameters(outside)["rope_type"] == "longrope"
    assert rope_parameters(outside)["original_max_position_embeddings"] == 16


def test_longrope_is_chosen_once_by_the_context() -> None:
    (config,) = [case["config"] for case in CASES if case["context"] == 4097]
    parameters = rope_parameters(config)
    short, long = (rope_tables(parameters, DIMS, 8, context) for context in (4096, 4097))
    assert not np.allclose(short[0][5], long[0][5])
    np.testing.assert_array_equal(long[0], rope_tables(parameters, DIMS, 8, 131072)[0])


def test_tables_carry_the_factor() -> None:
    (case,) = [case for case in CASES if case["factor"] == 1.5]
    cos, sin = rope_tables(rope_parameters(case["config"]), DIMS, 40, case["context"])
    np.testing.assert_allclose(np.hypot(cos, sin), 1.5, rtol=1e-6)


@pytest.mark.parametrize(
    "scaling, what",
    [
        ({"rope_type": "mrope"}, "supported: default, linear, dynamic, yarn, longrope, llama3"),
        ({"rope_type": "linear"}, "needs a number factor"),
        ({"rope_type": "yarn", "original_max_position_embeddings": -1}, "original_max_position_embeddings"),
        ({"rope_type": "longrope", "long_factor": [1.0]}, "needs a list short_factor"),
        ({"rope_type": "dynamic", "factor": "2"}, "needs a number factor"),
        ({"rope_type": "default", "rope_theta": 0}, "needs a number rope_theta"),
    ],
)
def test_what_is_missing_is_named(scaling: dict[str, Any], what: str) -> None:
    with pytest.raises(UnsupportedModel, match=what):
        rope_parameters({"max_position_embeddings": 64, "rope_parameters": scaling})


def test_factors_of_another_size_are_refused() -> None:
    lists = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    scaling = {"rope_type": "longrope", "original_max_position_embeddings": 16, **lists}
    with pytest.raises(UnsupportedModel, match="expected 16 numbers in short_factor, got 8"):
        rope_tables(rope_parameters({"max_position_embeddings": 64, "rope_parameters": scaling}), DIMS, 8, 16)
