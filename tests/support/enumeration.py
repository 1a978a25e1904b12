"""Verification without chance: every draft and every acceptance decision, each with its probability."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import permutations, product
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.noise import Noise
from edgespec.decoding.proposal import Proposal
from edgespec.decoding.verify import EXACT, Accept, RowSampler, verify

Model = Callable[[tuple[int, ...]], NDArray[np.float64]]  # prefix -> distribution [vocab]


class Coin:
    """A uniform number that is only ever compared: the comparison has a probability, and the test decides it."""

    def __init__(self, toss: Callable[[float], bool], scale: float = 1.0) -> None:
        self.toss, self.scale = toss, scale

    def __mul__(self, factor: float) -> Coin:
        return Coin(self.toss, self.scale * float(factor))

    def __lt__(self, bound: float) -> bool:
        return self.toss(min(1.0, float(bound) / self.scale))


class Coins(Noise):
    """Noise that follows a script of decisions and continues it with yes."""

    def __init__(self, script: Sequence[bool]) -> None:
        super().__init__(0)
        self.script, self.chances = list(script), list[float]()

    def toss(self, chance: float) -> bool:
        at = len(self.chances)
        if at == len(self.script):
            self.script.append(True)
        self.chances.append(chance if self.script[at] else 1 - chance)
        return self.script[at]

    def uniform(self, position: int, stream: int) -> Any:
        return Coin(self.toss)


class ModelRows(RowSampler):
    """The rows of a pass of ``model`` over a proposal after no tokens at all."""

    matching = False

    def __init__(self, model: Model, proposal: Proposal, block: bool) -> None:
        self.model, self.proposal, self.block = model, proposal, block

    def before(self, row: int) -> tuple[int, ...]:
        path: list[int] = []
        node = row - 1
        while node >= 0:
            path.insert(0, int(self.proposal.tokens[node]))
            node = self.proposal.parent(node)
        return tuple(path)

    def distribution(self, row: int) -> NDArray[np.float64]:
        return self.model(self.before(row))

    def choose(self, row: int) -> int:
        return -1  # whatever plain decoding draws: the caller knows its distribution

    def likeliest(self, row: int) -> int:
        return int(self.distribution(row).argmax())

    def rank(self, row: int, token: int) -> int:
        p = self.distribution(row)
        return int((p > p[token]).sum())

    def position(self, row: int) -> int:
        return len(self.before(row))


def outcomes(
    model: Model, proposal: Proposal, block: bool = False, accept: Accept = EXACT
) -> Iterator[tuple[float, tuple[int, ...], NDArray[np.float64]]]:
    """(probability, accepted tokens, distribution [vocab] of the token after them), over all decisions."""
    waiting: list[list[bool]] = [[]]
    while waiting:
        coins, left = Coins(waiting.pop()), list[NDArray[np.float64]]()
        known = len(coins.script)

        def drawn(p: NDArray[np.float64], u: object, left: list[NDArray[np.float64]] = left) -> int:
            left.append(p / p.sum())
            return -1

        rows = ModelRows(model, proposal, block)
        with patch("edgespec.decoding.verify.draw", drawn), patch("edgespec.decoding.verify.draw", drawn):
            verdict = verify(proposal, rows, coins, accept)
        waiting += [[*coins.script[:at], False] for at in range(known, len(coins.script))]
        text = tuple(int(proposal.tokens[node]) for node in verdict.path)
        if (chance := float(np.prod(coins.chances))) > 0:
            yield chance, text, left[0] if left else model(text)


def texts(
    model: Model,
    vocab: int,
    length: int,
    drafts: Iterable[tuple[float, Proposal]],
    block: bool = False,
    accept: Accept = EXACT,
) -> tuple[NDArray[np.float64], float]:
    """Distribution [vocab] * length of what a round and plain decoding after it write, and the mean accepted."""
    found, mean = np.zeros((vocab,) * length), 0.0
    for drafted, proposal in drafts:
        for chance, text, following in outcomes(model, proposal, block, accept):
            mean += drafted * chance * len(text)
            for token in range(vocab):
                start = (*text, token)[:length]
                here = drafted * chance * (following[token] if len(text) < length else token == 0)
                for rest in product(range(vocab), repeat=length - len(start)):
                    written = (*start, *rest)
                    found[written] += here * plain_chance(model, rest, start)
    return found, mean


def plain_chance(model: Model, text: Sequence[int], after: Sequence[int] = ()) -> float:
    """Probability that plain decoding writes ``text`` after a prefix."""
    prefix, chance = tuple(after), 1.0
    for token in text:
        chance *= float(model(prefix)[token])
        prefix = (*prefix, token)
    return chance


def plain_texts(model: Model, vocab: int, length: int) -> NDArray[np.float64]:
    """float64 [vocab] * length: the distribution of plain decoding."""
    found = np.zeros((vocab,) * length)
    for text in product(range(vocab), repeat=length):
        found[text] = plain_chance(model, text)
    return found


def random_model(seed: int, vocab: int, sharp: float = 1.0, holes: bool = False) -> Model:
    """Make a distribution for every prefix; with ``holes`` some tokens cannot follow."""
    known: dict[tuple[int, ...], NDArray[np.float64]] = {}

    def model(prefix: tuple[int, ...]) -> NDArray[np.float64]:
        if prefix not in known:
            rng = np.random.default_rng([seed, *prefix, len(prefix)])
            p = rng.dirichlet(np.full(vocab, sharp))
            hole = rng.integers(vocab) if holes else -1
            if hole >= 0 and p[hole] < 1:  # a sharp one may have all its probability there
                p[hole] = 0
            known[prefix] = p / p.sum()
        return known[prefix]

    return model


def chains(draft: Model, vocab: int, length: int, stop: int | None = None) -> Iterator[tuple[float, Proposal]]:
    """Every chain that a draft can draw, with its probability; a guess ``stop`` ends it."""
    for text in product(range(vocab), repeat=length):
        if stop in text:
            cut = text[: text.index(stop) + 1]
            if text[len(cut) :] != (0,) * (length - len(cut)):
                continue  # the same chain, seen already
            text = cut
        chance = plain_chance(draft, text)
        if chance > 0:
            probs = np.stack([draft(text[:i]) for i in range(len(text))])
            yield chance, Proposal(np.array(text), None, probs)


def siblings(q: NDArray[np.float64], count: int, replacement: bool) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Every way of drawing ``count`` tokens in order, with its probability."""
    vocab = range(len(q))
    for drawn in product(vocab, repeat=count) if replacement else permutations(vocab, count):
        chance, left = 1.0, 1.0
        for token in drawn:
            chance *= float(q[token]) / left if left > 1e-15 else 0.0
            left -= 0.0 if replacement else float(q[token])
        if chance > 0:
            yield chance, drawn


def trees(draft: Model, widths: Sequence[int], comb: bool, replacement: bool) -> Iterator[tuple[float, Proposal]]:
    """Every tree that a draft can draw, with its probability."""

    def grow(
        tokens: tuple[int, ...], parents: tuple[int, ...], level: tuple[int, ...], depth: int, chance: float
    ) -> Iterator[tuple[float, Proposal]]:
        if depth == len(widths):
            probs = np.stack([draft(path(tokens, parents, parent)) for parent in parents])
            yield chance, Proposal(np.array(tokens), np.array(parents), probs, replacement)
            return
        expanded = level[:1] if comb else level
        ways = [list(siblings(draft(path(tokens, parents, node)), widths[depth], replacement)) for node in expanded]
        for choice in product(*ways):
            new, above, factor = list(tokens), list(parents), chance
            for node, (here, drawn) in zip(expanded, choice, strict=True):
                factor *= here
                new += drawn
                above += [node] * len(drawn)
            yield from grow(tuple(new), tuple(above), tuple(range(len(tokens), len(new))), depth + 1, factor)

    return grow((), (), (-1,), 0, 1.0)


def path(tokens: Sequence[int], parents: Sequence[int], node: int) -> tuple[int, ...]:
    """Give the tokens down to a node."""
    found: list[int] = []
    while node >= 0:
        found.insert(0, tokens[node])
        node = parents[node]
    return tuple(found)
