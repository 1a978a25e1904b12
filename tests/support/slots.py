"""Rows, trees of rows and caches of slots, for tests that compare them bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.decoding.target import Output, Pass, SkipSet
from edgespec.runtimes.slots.slot import Slot
from tests.conftest import Written

Write = Callable[..., Written]
Logits = NDArray[np.float32]

# A trained model, hidden sizes off the grid of 32, an intermediate size off it, one key head for all.
MODELS = ("builtin:shakespeare", "qwen2_tied_gqa7", "llama_biases_mqa")
LONGEST = 40
SKIP = SkipSet((0,), (1,))
STOCK = pytest.mark.parametrize("operators", ["stock"], indirect=True)
NATIVE = pytest.mark.parametrize("operators", ["native"], indirect=True)


def text(made: Written, count: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(2, made.part.facts.vocab, count).tolist()
    return tokens


def ids(tokens: Sequence[int]) -> NDArray[np.int64]:
    return np.asarray(tokens, np.int64)


def one_by_one(slot: Slot, past: Sequence[int], tokens: Sequence[int]) -> Logits:
    """Plain decoding: logits [n, vocab] after each of ``tokens``, which follow ``past``."""
    slot.follow([])
    slot.prefill(past)
    rows = []
    for token in tokens:
        rows.append(slot.forward(ids([token])).logits[0].copy())
        slot.keep([0])
    return np.stack(rows)


def next_rows(slot: Slot, tokens: Sequence[int]) -> Logits:
    """Logits of a pass that is not kept."""
    return slot.forward(ids(tokens)).logits.copy()


def assert_same_kv(slot: Slot, other: Slot) -> None:
    assert slot.tokens == other.tokens
    theirs = other.snapshot()
    for name, values in slot.snapshot().items():
        np.testing.assert_array_equal(values, theirs[name])


ROOT = -1


def random_tree(random: np.random.Generator, rows: int) -> list[int]:
    """Parents: of one root or several, some deep, some wide."""
    reach = int(random.integers(1, rows + 1))  # how far back parents are
    roots = random.random() < 0.2
    return [ROOT] + [
        ROOT if roots and random.random() < 0.2 else int(random.integers(max(0, row - reach), row))
        for row in range(1, rows)
    ]


def depth_first(parents: Sequence[int], row: int = ROOT) -> list[int]:
    """Every row after its ancestors, and before the next child of any of them."""
    below = [child for child, parent in enumerate(parents) if parent == row]
    return [one for child in below for one in (child, *depth_first(parents, child))]


def path_to(parents: Sequence[int], row: int) -> list[int]:
    path = [row]
    while parents[path[0]] != ROOT:
        path.insert(0, parents[path[0]])
    return path


def disturb(monkeypatch: pytest.MonkeyPatch, slot: Slot, rows: int, row: int) -> None:
    """Change the last bit of a logit of ``row`` in every pass of ``rows`` rows over ``slot``."""
    original = slot.run

    def disturbed(wanted: Pass) -> Output:
        output = original(wanted)
        if wanted.tokens is not None and len(wanted.tokens) == rows:
            output.logits[row, 0] = np.nextafter(output.logits[row, 0], np.float32(np.inf))
        return output

    monkeypatch.setattr(slot, "run", disturbed)
