"""Drafters that read hidden states: heads, blocks, early exits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.control.adaptive import Adaptive, Control
from edgespec.decoding.drafter import Drafter
from edgespec.decoding.loop import DecodeOptions, decode
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.stats import Stats
from edgespec.drafters.heads import Blockwise, Medusa
from edgespec.formulas.cost import CostModel
from edgespec.formulas.statistics import chi_square
from edgespec.formulas.tree import chain
from edgespec.plugins.paradecode.drafter import ParaDecode
from tests.support.reference import Function, LayeredFunctionTarget
from tests.support.toy import emitted, exact, hash_logits, plain, sample_texts

VOCAB = 7
TREE = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]


def model(seed: int) -> Function:
    return hash_logits(seed, VOCAB)


def mixed(good: Function, bad: Function, every: int) -> Function:
    """Return mostly the tokens of ``good``, and others at every ``every``-th length."""

    def logits(prefix: tuple[int, ...]) -> NDArray[np.float32]:
        row = (bad if len(prefix) % every == 0 else good)(prefix)
        return row * 4  # confident

    return logits


def ahead(function: Function, steps: int) -> Function:
    """Return the logits of ``function`` after ``steps`` + 1 more tokens of its greedy choice."""

    def logits(prefix: tuple[int, ...]) -> NDArray[np.float32]:
        for _ in range(steps + 1):
            prefix = (*prefix, int(np.argmax(function(prefix))))
        return function(prefix)

    return logits


def target(seed: int, every: int = 3, cut: bool = False) -> LayeredFunctionTarget:
    function, other = model(seed), model(seed + 1000)
    return LayeredFunctionTarget(
        function,
        VOCAB,
        exits={layer: mixed(function, other, every + layer) for layer in (1, 2, 3)},
        heads=[mixed(ahead(function, i), other, every + i) for i in range(3)],
        tokens=np.array([0, 2, 3, 5, 6]) if cut else None,
    )


MAKERS: dict[str, Callable[[LayeredFunctionTarget], Drafter]] = {
    "medusa tree": lambda model: Medusa(model, "medusa", TREE),
    "medusa chain": lambda model: Medusa(model, "medusa", chain([[1.0]] * 3, 3)),
    "blockwise": lambda model: Blockwise(model, "medusa", 3),
    "blockwise refined": lambda model: Blockwise(model, "medusa", 3, cycles=2),
    "one exit": lambda model: ParaDecode(model, (2,), 0.5),
    "three exits": lambda model: ParaDecode(model, (1, 2, 3), 0.5),
    "never sure": lambda model: ParaDecode(model, (2,), 1.0),
    "always sure": lambda model: ParaDecode(model, (1, 2), 0.0, most=3),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("cut", [False, True])
def test_greedy_text_is_that_of_plain_decoding(name: str, cut: bool) -> None:
    for seed in range(60):
        model_ = target(seed, 2 + seed % 3, cut)
        options = DecodeOptions(max_new_tokens=1 + seed % 40, gamma=1 + seed % 6, eos=frozenset({seed % VOCAB}))
        got = emitted(model_, MAKERS[name](model_), [1, 2, seed % VOCAB], options)
        expected = plain(model(seed), VOCAB, [1, 2, seed % VOCAB], options.max_new_tokens, options.eos)
        assert got == expected


@pytest.mark.parametrize("name", MAKERS)
def test_guesses_are_accepted(name: str) -> None:
    model_, stats = target(5, 4), Stats()
    for _ in decode(model_, MAKERS[name](model_), [1, 2], DecodeOptions(max_new_tokens=60), stats):
        pass
    assert stats.dropped_reason is None
    assert (stats.accepted > 5) == (name != "never sure")


def test_deferred_layers_are_run_once() -> None:
    """No row runs a layer twice: with all guesses right the work is that of plain decoding."""
    function = model(3)
    sure = LayeredFunctionTarget(function, VOCAB, exits={k: lambda p: function(p) * 9 for k in (1, 3)})
    sure.function = function
    stats = Stats()
    # ties would make exits unsure: compare with what an exit of these logits can know
    for _ in decode(sure, ParaDecode(sure, (1, 3), 0.0, most=4), [1], DecodeOptions(max_new_tokens=41), stats):
        pass
    assert stats.accepted == stats.drafted > 20
    assert sure.layer_rows == 41 * sure.layers


@pytest.mark.parametrize("name", ["one exit", "three exits", "medusa tree", "medusa chain"])
def test_inside_adaptive_control(name: str) -> None:
    for seed in range(20):
        model_ = target(seed, 4)
        policy = Adaptive([Control(MAKERS[name](model_), CostModel({1: 1.0, 8: 1.2}, 0.2), gamma_max=5)])
        got = emitted(model_, policy, [3], DecodeOptions(max_new_tokens=50, gamma=5))
        assert got == plain(model(seed), VOCAB, [3], 50)


@pytest.mark.parametrize("name", ["medusa tree", "blockwise", "blockwise refined"])
def test_sampled_text_is_that_of_plain_decoding_with_the_seed(name: str) -> None:
    """Deterministic guesses are verified by matching."""
    for seed in range(20):
        params = SamplingParams(temperature=0.9, seed=seed)
        options = DecodeOptions(max_new_tokens=30, sampling=params)
        one, other = target(seed), target(seed)
        assert emitted(one, MAKERS[name](one), [4], options) == emitted(
            other, ParaDecode(other, (2,), 1.0), [4], options
        )


def test_a_head_that_yields_nan_is_dropped() -> None:
    def broken(prefix: tuple[int, ...]) -> NDArray[np.float32]:
        return np.full(VOCAB, np.nan, np.float32) if len(prefix) > 8 else np.arange(VOCAB, dtype=np.float32)

    for name in ("medusa tree", "one exit"):
        model_, stats = LayeredFunctionTarget(model(1), VOCAB, exits={2: broken}, heads=[broken] * 3), Stats()
        tokens = [
            t
            for r in decode(model_, MAKERS[name](model_), [1], DecodeOptions(max_new_tokens=30), stats)
            for t in r.tokens
        ]
        assert tokens == plain(model(1), VOCAB, [1], 30)
        assert "NaN" in str(stats.dropped_reason)


# -- sampling by rejection: q is the exit's own distribution -----------------------------------------------------------


def table(seed: int, vocab: int, scale: float) -> Function:
    """Build a second-order Markov model of ``vocab`` tokens with random logits times ``scale``."""
    logits = np.random.default_rng(seed).normal(size=(vocab, vocab, vocab)) * scale

    def function(prefix: tuple[int, ...]) -> NDArray[np.float32]:
        return logits[prefix[-2], prefix[-1]].astype(np.float32)

    return function


SAMPLED: dict[str, tuple[tuple[int, ...], float, list[int] | None]] = {
    "one exit": ((2,), 0.3, None),
    "two exits": ((1, 3), 0.45, None),
    "always": ((2,), 0.0, None),
    "a cut vocabulary": ((2,), 0.3, [0, 2, 3]),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_early_exits_keep_the_distribution(name: str) -> None:
    exits, threshold, tokens = SAMPLED[name]
    function, vocab, new = table(1, 4, 1.3), 4, 3
    near = {layer: table(10 + layer, 4, 0.6) for layer in exits}

    def said(layer: int) -> Function:
        return lambda prefix: function(prefix) + near[layer](prefix)

    model_ = LayeredFunctionTarget(
        function, vocab, exits={k: said(k) for k in exits}, tokens=None if tokens is None else np.array(tokens)
    )
    counts = sample_texts(
        model_, ParaDecode(model_, exits, threshold), [1, 2, 1], new, lambda i: SamplingParams(1.0, seed=i), 4000
    )
    assert chi_square(counts, exact(function, vocab, [1, 2, 1], new, SamplingParams(1.0))) > 1e-3
    if name == "always":  # the test has power: another model's distribution is refused
        assert chi_square(counts, exact(said(2), vocab, [1, 2, 1], new, SamplingParams(1.0))) < 1e-6
