"""Tiny models, adversarial drafters and statistics shared by the tests of decoding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.drafter import NOTHING, Drafter, DraftRequest
from edgespec.decoding.loop import DecodeOptions, decode
from edgespec.decoding.policy import Policy
from edgespec.decoding.proposal import EMPTY, Proposal, Verdict
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.stats import Stats
from edgespec.decoding.target import BEST, Output, Pass, Target
from edgespec.decoding.verify import EXACT, Accept
from edgespec.drafters.plain import Plain
from edgespec.formulas.cost import CostModel
from tests.support.reference import FunctionTarget, TableTarget

_MASK = (1 << 64) - 1


def hash_logits(seed: int, vocab: int, levels: int = 5) -> Callable[[tuple[int, ...]], NDArray[np.float32]]:
    """Make a model whose logits are small integers (many ties) hashed from the whole prefix."""
    tokens = np.arange(1, vocab + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)

    def logits(prefix: tuple[int, ...]) -> NDArray[np.float32]:
        state = seed * 0x2545F4914F6CDD1D & _MASK
        for token in prefix:
            state = ((state ^ token) * 0x100000001B3 + 0x9E3779B9) & _MASK
            state ^= state >> 29
        x = (tokens ^ np.uint64(state)) * np.uint64(0xBF58476D1CE4E5B9)
        return np.asarray((x >> np.uint64(40)) % np.uint64(levels), np.float32)

    return logits


def emitted(
    target: Target,
    drafter: Policy | Drafter,
    prompt: Sequence[int],
    options: DecodeOptions,
) -> list[int]:
    """All tokens of a request."""
    return [token for round_ in decode(target, drafter, prompt, options) for token in round_.tokens]


def plain(
    function: Callable[[tuple[int, ...]], NDArray[np.float32]],
    vocab: int,
    prompt: Sequence[int],
    new: int,
    eos: Iterable[int] = (),
    context: int = 512,
) -> list[int]:
    """Greedy decoding written down as directly as possible, without the loop under test."""
    tokens = list(prompt)
    while len(tokens) < min(len(prompt) + new, context):
        tokens.append(int(np.argmax(function(tuple(tokens)))))
        if tokens[-1] in set(eos):
            break
    return tokens[len(prompt) :]


class Scripted(Drafter):
    """A drafter that calls a function of (tokens, budget)."""

    name = "scripted"
    wants = NOTHING

    def __init__(self, guess: Callable[[list[int], int], Proposal]) -> None:
        self.guess = guess
        self.seen: list[tuple[Proposal, Verdict]] = []

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        return self.guess(tokens, budget)

    def observe(self, proposal: Proposal, verdict: Verdict, output: Output) -> None:
        assert len(output.logits) == len(proposal) + 1
        self.seen.append((proposal, verdict))


def chain(tokens: Sequence[int] | NDArray[np.int64]) -> Proposal:
    return Proposal(np.array(tokens, np.int64)) if len(tokens) else EMPTY


def random_tree(rng: np.random.Generator, nodes: int, vocab: int, guess: Callable[[list[int]], int]) -> Proposal:
    """Make a tree of any shape; each node is right (``guess`` of its path) or random, siblings may be equal."""
    tokens: list[int] = []
    parents: list[int] = []
    paths: list[list[int]] = []
    for i in range(nodes):
        parent = int(rng.integers(-1, i))
        above = paths[parent] if parent >= 0 else []
        token = guess(above) if rng.random() < 0.6 else int(rng.integers(vocab))
        tokens.append(token)
        parents.append(parent)
        paths.append([*above, token])
    return Proposal(np.array(tokens, np.int64), np.array(parents, np.int64))


class FixedCosts(CostModel):
    """Costs that no clock corrects."""

    def observe_verify(self, n: int, ms: float, times: int = 1) -> None:
        pass

    def observe_draft(self, n: int, ms: float, times: int = 1) -> None:
        pass


class SampledTree(Drafter):
    """Two levels of siblings, all sampled from one q, with or without replacement."""

    name = "sampled-tree"

    def __init__(self, q: NDArray[np.float64], widths: Sequence[int], replacement: bool) -> None:
        self.q, self.widths, self.replacement = q, widths, replacement  # q: [vocab (pending token), vocab]
        self.rng = np.random.default_rng(0)

    def begin(self, request: DraftRequest) -> None:
        self.rng = np.random.default_rng(request.noise.seed & _MASK)

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        out: list[int] = []
        parents: list[int] = []
        level = [(-1, tokens[-1])]
        for width in self.widths[:budget]:
            following = []
            for node, token in level:
                drawn = self.rng.choice(self.q.shape[1], width, self.replacement, self.q[token])
                for child in drawn.tolist():
                    following.append((len(out), child))
                    out.append(child)
                    parents.append(node)
            level = following
        probs = np.stack([self.q[tokens[-1] if p < 0 else out[p]] for p in parents])
        return Proposal(np.array(out, np.int64), np.array(parents, np.int64), probs, self.replacement)

    def observe(self, proposal: Proposal, verdict: Verdict, output: Output) -> None:
        pass


class CutTarget(TableTarget):
    """A draft whose LM head knows some tokens only: column i is token ``known[i]``."""

    def __init__(self, table: NDArray[np.floating], known: Sequence[int], named: bool = True) -> None:
        super().__init__(table)
        self.columns = len(known)
        self.known = np.array(known, np.int64)
        self.head_tokens = self.known if named else None

    def run(self, wanted: Pass) -> Output:
        return Output(super().run(wanted).logits[:, self.known])


class ShortTarget(TableTarget):
    """A draft whose passes may score only the first tokens; ``scored``: how many each pass did."""

    can = frozenset({"parents", "skip", BEST})

    def __init__(self, table: NDArray[np.floating]) -> None:
        super().__init__(table)
        self.scored: list[int] = []

    def run(self, wanted: Pass) -> Output:
        self.scored.append(self.vocab_size if wanted.skip is None else wanted.skip.head_rows)
        logits = super().run(wanted._replace(skip=None, top=0)).logits[:, : self.scored[-1]]
        return Output(logits, best=(logits.argmax(1), logits.max(1)) if wanted.top else None)


def naive_distribution(logits: Sequence[float], params: SamplingParams, prefix: Sequence[int]) -> NDArray[np.float64]:
    """Hugging Face's processors and warpers, written naively: one full sort, no shortcuts."""
    row = np.array(logits, np.float64)
    for token, bias in params.logit_bias.items():
        row[token] += bias
    for token in set(prefix):
        row[token] *= params.repetition_penalty if row[token] < 0 else 1 / params.repetition_penalty
    if params.temperature == 0:
        return np.asarray(np.arange(len(row)) == row.argmax(), np.float64)
    row = row / params.temperature
    if params.top_k:
        row[row < np.sort(row)[-min(params.top_k, len(row))]] = -np.inf
    probs = np.exp(row - row.max())
    probs /= probs.sum()
    if params.top_p < 1:
        order = np.argsort(-probs, kind="stable")
        before = np.cumsum(probs[order]) - probs[order]
        probs[order[before >= params.top_p]] = 0
        probs /= probs.sum()
    probs[probs < params.min_p * probs.max()] = 0
    return np.asarray(probs / probs.sum())


def exact(
    function: Callable[[tuple[int, ...]], NDArray[np.float32]],
    vocab: int,
    prompt: Sequence[int],
    new: int,
    params: SamplingParams,
) -> dict[tuple[int, ...], float]:
    """Probability of every continuation of ``new`` tokens, by enumeration."""
    result = {}
    for text in product(range(vocab), repeat=new):
        chance, prefix = 1.0, list(prompt)
        for token in text:
            chance *= naive_distribution(function(tuple(prefix)).tolist(), params, prefix)[token]
            prefix.append(token)
        result[text] = chance
    return result


def sample_texts(
    target: Target,
    drafter: Policy | Drafter,
    prompt: Sequence[int],
    new: int,
    params: Callable[[int], SamplingParams],
    count: int,
    gamma: int = 2,
    accept: Accept = EXACT,
) -> Counter[tuple[int, ...]]:
    """Texts of ``count`` requests, each with the parameters that ``params`` gives for its number."""
    return Counter(
        tuple(emitted(target, drafter, prompt, DecodeOptions(new, gamma, sampling=params(i), accept=accept)))
        for i in range(count)
    )


def hash_target(seed: int, vocab: int = 11, context: int = 512) -> FunctionTarget:
    return FunctionTarget(hash_logits(seed, vocab), vocab, context)


PLAIN = Plain()


def same_texts(
    make: Callable[[int], tuple[Target, Policy | Drafter]],
    seeds: int,
    prompt: Sequence[int] = (1, 2),
    fresh: Callable[[int], Target] = hash_target,
) -> int:
    """Check that greedy and coupled texts of what ``make`` gives are plain decoding's -> accepted guesses."""
    accepted = 0
    for seed in range(seeds):
        new, gamma, eos = 5 + seed % 17, 1 + seed % 7, frozenset([seed % 11])
        for sampling in (
            SamplingParams(),
            SamplingParams(repetition_penalty=1.4, logit_bias={1: 1.0}),
            SamplingParams(0.9, seed=seed, acceptance="coupled"),
            SamplingParams(1.2, top_p=0.8, repetition_penalty=1.2, seed=seed, acceptance="coupled"),
        ):
            options, stats = DecodeOptions(new, gamma, eos, sampling), Stats()
            wanted = emitted(fresh(seed), Plain(), list(prompt), options)
            found = [t for r in decode(*make(seed), list(prompt), options, stats) for t in r.tokens]
            assert found == wanted
            assert stats.dropped_reason is None
            accepted += stats.accepted
    return accepted
