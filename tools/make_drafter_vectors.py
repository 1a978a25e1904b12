"""Make vectors of drafters: tokens sampled from draft logits, and the estimates of a search for skip sets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.noise import Noise
from edgespec.decoding.proposal import Proposal
from edgespec.decoding.target import SkipSet
from edgespec.drafters.sampling_drafts import Draw, SiblingPolicy, draw_chain, draw_siblings, draw_tree
from edgespec.formulas.confidence import BOUNDS, Confidence
from edgespec.formulas.cost import CostModel
from edgespec.plugins.swift.drafter import StepCost
from edgespec.plugins.swift.search import OnlineSearch
from tools.vector_rows import params_of, row

VOCAB = 40
TEXT = [3, 7, 7, 1, 12]
WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 6},
    {"temperature": 1.0, "acceptance": "coupled"},
    {"temperature": 0.0, "repetition_penalty": 1.4},
    {"temperature": 0.9, "top_p": 0.8, "repetition_penalty": 1.2},
]
SHAPES: list[dict[str, Any]] = [
    {"kind": "chain"},
    {"kind": "chain", "stop": 0.2},
    {"kind": "tree", "branch": [2]},
    {"kind": "tree", "branch": [3, 2]},
    {"kind": "siblings", "most": [3, 2]},
    {"kind": "siblings", "most": [4], "stop": 0.15, "price": 0.02},
]
SCALE = 3.0  # of the draft's logits


def _logits(seed: int, last: int | None) -> NDArray[np.float32]:  # [VOCAB]
    """Give what the draft says after a guess; None = after the text."""
    return row(131 * seed + (0 if last is None else last + 1), VOCAB, SCALE)


def _draw(shape: dict[str, Any], length: int, seed: int, given: dict[str, Any]) -> Proposal:
    draw = Draw(TEXT, VOCAB, params_of(given, seed), Noise(seed))

    def step(last: int | None) -> NDArray[np.float32]:
        return _logits(seed, last)

    def level(nodes: Sequence[int], guesses: Sequence[int], parents: Sequence[int]) -> NDArray[np.float32]:
        return np.stack([step(None if node < 0 else guesses[node]) for node in nodes])

    stop = shape.get("stop")
    weak = None if stop is None else lambda chance: chance < stop
    if shape["kind"] == "chain":
        return draw_chain(step, draw, length, weak)
    if shape["kind"] == "tree":
        return draw_tree(level, draw, shape["branch"], length)
    price = shape.get("price")
    policy = SiblingPolicy(shape["most"], None if price is None else lambda depth, expected, rows: price * rows)
    return draw_siblings(step, draw, length, weak, policy)


def drawing() -> Iterator[dict[str, Any]]:
    """Chains, trees and chains with siblings, greedy and sampled; ``q``: the distribution of each sampled token."""
    for seed, (given, shape) in enumerate((given, shape) for given in WAYS for shape in SHAPES):
        for length in (1, 5):
            made = _draw(shape, length, seed, given)
            drawn = None if made.probs is None else made.probs[range(len(made)), made.tokens].tolist()
            yield {
                "seed": seed,
                "shape": shape,
                "params": given,
                "length": length,
                "tokens": made.tokens.tolist(),
                "parents": None if made.parents is None else made.parents.tolist(),
                "q": drawn,
            }


def confidences() -> Iterator[dict[str, Any]]:
    """Give what is known of a draft's guesses after each that was tested: [probability, right, chance, mean]."""
    rng = np.random.default_rng(6)
    given: list[tuple[list[float], float | None]] = [([], None), ([0.1 * (1 + at) for at in range(8)], 0.6)]
    for rates, mean in given:
        made, steps = Confidence(rates, mean), []
        for probability in [*BOUNDS, *rng.uniform(0, 1, 200).tolist()]:
            right = bool(rng.random() < probability**0.5)
            made.learn(probability, right)
            steps.append([probability, float(right), made.chance(probability), made.mean])
        yield {"rates": rates, "mean": mean, "steps": steps}


def searches() -> Iterator[dict[str, Any]]:
    """Return a search's estimates after each scored set; separate generators choose the sets that it would try.

    With ``planes`` a sub-layer may also be read by only its high plane.
    """
    for layers, planes in ((4, False), (8, False), (12, False), (5, True), (9, True)):
        rng, inner, whole = np.random.default_rng(layers), range(1, layers - 1), tuple(range(layers))
        initial = SkipSet((1,), (2,))
        if planes:
            initial = SkipSet((1,), (), tuple(layer for layer in whole if layer != 1), whole, True)
        cost = StepCost(0.4 / layers, 0.5 / layers, 0.0, 0.18 / layers, 0.22 / layers, 0.05)
        curve = CostModel({1: 1.0, 2: 1.2, 8: 2.1})
        search, steps = OnlineSearch(layers, initial, cost, curve.v), []
        pool = [initial, *(_some(rng, list(inner), planes) for _ in range(7))]
        for _ in range(60):
            skip = pool[int(rng.integers(len(pool)))]
            matched = int(rng.binomial(16, max(0.1, 0.97 - 0.04 * (len(skip.attention) + len(skip.mlp)))))
            changed = search.record_result(skip, matched, 16)
            steps.append({
                "skip": _lists(skip), "matched": matched, "changed": changed, "acceptance": search.acceptance(skip),
                "speed": search.speed(skip), "best": _lists(search.best),
            })  # fmt: skip
        yield {"layers": layers, "initial": _lists(initial), "high_head": initial.high_head, "steps": steps}


def _lists(skip: SkipSet) -> list[list[int]]:
    return [list(some) for some in (skip.attention, skip.mlp, skip.high_attention, skip.high_mlp)]


def _some(rng: np.random.Generator, inner: list[int], planes: bool) -> SkipSet:
    attention, mlp = ([layer for layer in inner if rng.random() < 0.4] for _ in range(2))
    mlp = mlp or [inner[0]]
    if not planes:
        return SkipSet(tuple(attention), tuple(mlp))
    high = [[0, *(layer for layer in inner if layer not in left and rng.random() < 0.5)] for left in (attention, mlp)]
    return SkipSet(tuple(attention), tuple(mlp), tuple(high[0]), tuple(high[1]), True)
