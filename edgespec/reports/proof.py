"""Proof that the methods of a bundle write what its plain decoding writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.noise import Noise
from edgespec.decoding.sampling import SamplingParams, adjusted, support
from edgespec.decoding.settings import Settings
from edgespec.drafters.registry import AR
from edgespec.engine.engine import Engine, Prompt
from edgespec.runtimes.files.attention import default_attention
from edgespec.runtimes.opening import open_slot

# A token may differ from plain decoding's only where the two logits are about as close as the rounding of a row
# explains.  That is measured on a few positions; others may differ more, hence the factor.
NEAR_TIE_FACTOR = 4.0
TREE_FACTOR = 2.0  # both logits may move by as much as was measured
NEAR_TIE_FLOOR = 1e-5  # standard deviations of a row
PROBED, TREE_PROBED = 24, 96  # positions
TREE_TEXTS = 8


@dataclass
class Difference:
    """The first place where a method's tokens leave plain decoding's.

    Attributes:
        prompt: number of the prompt.
        position: index of the new token.
        expected: plain decoding's token.
        got: the method's token.
        gap: how much higher the logit (and noise, when sampling) of plain decoding's token is, in standard deviations
            of the row; infinite where one text only ends before the other.
        near_tie: whether the gap is within what other kernels' rounding explains, and no later token of the method is
            further from what plain decoding writes after the same text.
    """

    prompt: int
    position: int
    expected: int
    got: int
    gap: float
    near_tie: bool

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity; the keys are stable."""
        return vars(self) | {"gap": self.gap if math.isfinite(self.gap) else None}


@dataclass
class MethodProof:
    """What was found of one method.

    Attributes:
        method: its name.
        prompts: how many were tried.
        tokens: how many tokens were compared.
        equal: prompts whose tokens are all equal.
        exact: all of them are.
        differences: the first difference of each other prompt.
    """

    method: str
    prompts: int = 0
    tokens: int = 0
    equal: int = 0
    differences: list[Difference] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Every prompt gave the same tokens."""
        return self.equal == self.prompts

    @property
    def lossless(self) -> bool:
        """Every difference is a near-tie."""
        return all(difference.near_tie for difference in self.differences)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the keys are stable."""
        return {
            "method": self.method,
            "prompts": self.prompts,
            "tokens": self.tokens,
            "equal": self.equal,
            "exact": self.exact,
            "lossless": self.lossless,
            "differences": [difference.as_dict() for difference in self.differences],
        }


def prove(
    engine: Engine,
    prompts: Sequence[Prompt],
    settings: Settings,
    methods: Sequence[str],
    progress: Callable[[int, int, str], None] | None = None,
) -> list[MethodProof]:
    """Compare every method with plain decoding, token by token, drafting in every round (no fall-back).

    With sampling the settings must be ``coupled`` and seeded: then plain decoding with the same seed is matched too.
    """
    wanted = settings.changed(fallback=False)
    expected = [engine.generate(prompt, wanted, method=AR).tokens for prompt in prompts]
    proofs = []
    for number, name in enumerate(methods):
        proof = MethodProof(name, prompts=len(prompts))
        of_trees: float | None = None  # their noise, measured at the first difference
        for at, prompt in enumerate(prompts):
            result = engine.generate(prompt, wanted, method=name)
            optimum = engine.bundle.manifest.target.origin == "optimum"
            chains = optimum or (engine.strict and not engine.exact_rows)
            got, trees = result.tokens, result.exact is False and (engine.strict or chains)
            proof.tokens += len(expected[at])
            if got == expected[at]:
                proof.equal += 1
            else:
                if trees and of_trees is None:
                    texts = zip(prompts[:TREE_TEXTS], expected, strict=False)
                    noise = _chain_noise if chains else _tree_noise
                    of_trees = max(noise(engine, _ids(engine, prompt) + text) for prompt, text in texts)
                proof.differences.append(_difference(engine, wanted, at, prompt, expected[at], got, of_trees or 0.0))
            if progress:
                progress(number * len(prompts) + at + 1, len(methods) * len(prompts), name)
        proofs.append(proof)
    return proofs


def check_golden(engine: Engine) -> tuple[int, int]:
    """(reproduced, all) of the bundle's golden vectors that fit the engine's context, by strict plain decoding.

    None where another attention than the bundle's default decodes: it writes a text of its own.
    """
    coded = engine.attention.kv is not None and engine.attention.name not in ("f32", "f16")
    default = default_attention(engine.bundle.manifest.target)
    if engine.attention.name != default and (coded or default not in ("f32", "f16")):
        return 0, 0
    vectors = engine.bundle.manifest.golden
    golden = [vector for vector in vectors if len(vector.prompt) + len(vector.tokens) <= engine.context]
    same = sum(
        engine.generate(vector.prompt, Settings(method=AR, max_new_tokens=len(vector.tokens))).tokens == vector.tokens
        for vector in golden
    )
    return same, len(golden)


def _difference(
    engine: Engine,
    settings: Settings,
    number: int,
    prompt: Prompt,
    expected: list[int],
    got: list[int],
    of_trees: float = 0.0,
) -> Difference:
    at = next((i for i, pair in enumerate(zip(expected, got, strict=False)) if pair[0] != pair[1]), -1)
    if at < 0:  # one is the beginning of the other
        at = min(len(expected), len(got))
        return Difference(number, at, -1, -1, float("inf"), False)
    tokens = _ids(engine, prompt) + got[:at]
    params, noise = settings.sampling, Noise(settings.sampling.seed)
    slot = open_slot(engine.model, context=engine.context, reserve=len(tokens) + len(got) + 2)
    slot.prefill(tokens[:-1])
    gaps: list[float] = []
    for token in got[at:]:
        scores = _scores(slot.forward(np.array(tokens[-1:], np.int64)).logits[0], params, noise, tokens)  # [vocab]
        best = scores[expected[at]] if not gaps else scores.max()
        gaps.append(float(best - scores[token]))
        slot.keep([0])
        tokens.append(token)
    limit = max(near_tie_limit(engine, tokens), TREE_FACTOR * of_trees)
    # the texts part for good, but each later token must still be what plain decoding all but writes after that text
    near = abs(gaps[0]) <= limit and max(gaps) <= limit
    return Difference(number, at, expected[at], got[at], gaps[0], near)


def _ids(engine: Engine, prompt: Prompt) -> list[int]:
    return engine.codec.encode(prompt) if isinstance(prompt, str) else list(prompt)


def near_tie_limit(engine: Engine, tokens: Sequence[int]) -> float:
    """How far apart two logits may be and still be a near-tie, in standard deviations of a row.

    Measured on this machine: the largest difference between a row computed alone and the same row at the head of a
    block.
    """
    slot = open_slot(engine.model, context=engine.context)
    probed = list(tokens[-PROBED:])
    largest = 0.0
    for at in range(1, len(probed) - 1):
        block = np.array(probed[at : at + 4], np.int64)
        slot.follow(probed[:at])
        slot.prefill(probed[len(slot.tokens) : at])
        alone = slot.forward(block[:1]).logits[0].copy()
        among = slot.forward(block).logits[0]
        largest = max(largest, float(np.abs(alone - among).max() / alone.std()))
    return max(NEAR_TIE_FACTOR * largest, NEAR_TIE_FLOOR)


def _tree_noise(engine: Engine, tokens: Sequence[int]) -> float:
    """How much logits of a text differ, in standard deviations, if it is written by trees instead of row by row.

    The rows of a tree add up in another order, and what they leave in the cache carries that on.  Where activations are
    quantized, a last bit may turn into another level: rarely, but then it is hundredths of a deviation.
    """
    first = max(1, len(tokens) - TREE_PROBED)
    chain, tree = (open_slot(engine.model, context=engine.context, reserve=len(tokens) + 8) for _ in range(2))
    for slot in (chain, tree):
        slot.prefill(tokens[:first])
    largest = 0.0
    for at in range(first, len(tokens) - 3, 4):
        block = np.array(tokens[at : at + 4], np.int64)
        plain = chain.forward(block).logits.copy()  # [4, vocab]
        chain.keep(range(4))
        spread = np.repeat(block, 2)[:-1]  # [7]: before every row but the first a sibling that nothing continues
        spread[1::2] = (block[1:] + 1) % tree.vocab_size
        parents = np.array([-1, 0, 0, 2, 2, 4, 4])
        rows = tree.forward(spread, parents).logits[::2]
        largest = max(largest, float((np.abs(plain - rows).max(-1) / plain.std(-1)).max()))
        tree.keep([0, 2, 4, 6])
    return largest


def _chain_noise(engine: Engine, tokens: Sequence[int]) -> float:
    """Like ``_tree_noise`` for a graph that takes chains alone: written four rows a pass instead of row by row."""
    first = max(1, len(tokens) - TREE_PROBED)
    alone, among = (open_slot(engine.model, context=engine.context, reserve=len(tokens) + 8) for _ in range(2))
    for slot in (alone, among):
        slot.prefill(tokens[:first])
    largest = 0.0
    for at in range(first, len(tokens) - 3, 4):
        block = np.array(tokens[at : at + 4], np.int64)
        rows = among.forward(block).logits.copy()  # [4, vocab]
        among.keep(range(4))
        for row in range(4):
            plain = alone.forward(block[row : row + 1]).logits[0]
            alone.keep([0])
            largest = max(largest, float(np.abs(plain - rows[row]).max() / plain.std()))
    return largest


def _scores(
    row: NDArray[np.float32],  # [vocab]
    params: SamplingParams,
    noise: Noise,
    prefix: Sequence[int],
) -> NDArray[np.float64]:
    """float64 [vocab]: what plain decoding takes the largest of, in standard deviations of the row."""
    scores = adjusted(row, params, prefix).astype(np.float64)
    if not params.greedy:
        allowed = support(row, params, prefix).ids
        drawn = np.full(len(row), -np.inf)
        drawn[allowed] = scores[allowed] + params.temperature * noise.gumbel(len(prefix), allowed)
        scores = drawn
    return scores / float(row.std())
