"""Passes of several sequences that run as one give each of them the bits of a separate pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from edgespec.decoding.target import Output, Pass
from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.formats import LONGEST_PASS, Attention
from edgespec.runtimes.files.kv import ATTENTION
from edgespec.runtimes.files.manifest import Operators
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.native_batch import BatchSlot, NativeBatch
from edgespec.runtimes.slots.shared import Model, own_pages
from edgespec.runtimes.slots.slot import Slot
from tests.conftest import Written, use_operators

NAME = "builtin:shakespeare"


@pytest.fixture(params=["native"])
def operators(request: pytest.FixtureRequest) -> Operators:
    return use_operators(request)


@pytest.fixture(params=["f16", "int8"])
def model(written: Callable[..., Written], request: pytest.FixtureRequest) -> Model:
    made = written(NAME, "int4")
    form: Attention = request.param
    return Model(made.folder, made.part, made.main, 2, ATTENTION[form])


Item = tuple[BatchSlot, Pass]


def text(model: Model, count: int, seed: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(2, model.facts.vocab, count).tolist()
    return tokens


def random_pass(slot: BatchSlot, tokens: list[int], tree: bool, rng: np.random.Generator) -> Item:
    """Make a pass of ``tokens`` over ``slot``, as a chain or as a random ``tree``."""
    parents = None
    if tree:
        parents = np.array([int(rng.integers(-1 if row == 0 else 0, max(row, 1))) for row in range(len(tokens))])
        parents[0] = -1
    return slot, Pass(np.array(tokens, np.int64), parents)


def random_path(wanted: Pass, rng: np.random.Generator) -> list[int]:
    """Choose rows of a pass to keep, each after its parent, the root first."""
    path = [0]
    assert wanted.tokens is not None
    for row in range(1, len(wanted.tokens)):
        if (row - 1 if wanted.parents is None else wanted.parents[row]) == path[-1] and rng.random() < 0.7:
            path.append(row)
    return path


def check_output(output: Output, expected: Output, best: bool) -> None:
    """Compare the bits of two passes, with their ``best`` tokens where those were asked for."""
    np.testing.assert_array_equal(output.logits, expected.logits)
    if best:
        assert output.best is not None
        for got, wished in zip(output.best, expected.best or (), strict=True):
            np.testing.assert_array_equal(got, wished)


@pytest.mark.parametrize("best", [False, True])
def test_chains_and_trees_of_sequences_of_any_length(model: Model, best: bool) -> None:
    """Rounds of four sequences, one of them long enough to be cut into splits, in a batch and separately."""
    rng = np.random.default_rng(1)
    lengths = (3, 700, 40, 129)
    batch = NativeBatch(model, len(lengths))
    alone: list[Slot] = [open_slot(model) for _ in lengths]
    for number, length in enumerate(lengths):
        for slot in (batch.slots[number], alone[number]):
            slot.prefill(text(model, min(length, model.facts.context - 64), number))
    for turn in range(6):
        wanted: list[Item] = []
        for number in rng.permutation(len(lengths))[: 4 if turn % 2 else 3]:
            tokens = text(model, int(rng.integers(1, 7)), 10 * turn + int(number))
            wanted.append(random_pass(batch.slots[number], tokens, turn % 3 == 2, rng))
        outputs = batch.run([(slot, each._replace(top=int(best))) for slot, each in wanted])
        for (own, each), output in zip(wanted, outputs, strict=True):
            slot = alone[own.number]
            check_output(output, slot.run(each._replace(top=int(best))), best)
            path = random_path(each, rng)
            for at in (slot, own):
                at.keep(path)
    for number, slot in enumerate(alone):
        mine = batch.slots[number].snapshot()
        assert batch.slots[number].tokens == slot.tokens
        for name, values in slot.snapshot().items():
            np.testing.assert_array_equal(mine[name], values)


@pytest.mark.parametrize("at_once", [True, False])
def test_growth_keeps_what_every_slot_holds(model: Model, at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the system gives room for all there may be, or the pool grows by copying."""

    def refused(shape: tuple[int, ...], dtype: type[np.generic], sparse: bool = False) -> Any:
        if sparse:
            raise MemoryError
        return own_pages(shape, dtype)

    if not at_once:
        monkeypatch.setattr("edgespec.runtimes.slots.blocks.own_pages", refused)
    batch = NativeBatch(model, 3)
    small, first = batch.kv_bytes, batch.pool.bound
    for number, slot in enumerate(batch.slots):
        slot.prefill(text(model, 20 + number, number))
    before = [slot.snapshot() for slot in batch.slots]
    batch.slots[1].prefill(text(model, 400, 7))
    assert batch.kv_bytes > small
    assert (batch.pool.bound is first) == at_once
    for number in (0, 2):
        for name, values in batch.slots[number].snapshot().items():
            np.testing.assert_array_equal(values, before[number][name])
    outputs = batch.run([(slot, Pass(np.array([5], np.int64))) for slot in batch.slots])
    for slot, output in zip(batch.slots, outputs, strict=True):
        other = open_slot(model)
        other.prefill(slot.tokens)
        np.testing.assert_array_equal(output.logits, other.forward(np.array([5], np.int64)).logits)


def test_a_slot_still_works_alone(model: Model) -> None:
    batch = NativeBatch(model, 2)
    slot, other = batch.slots[1], open_slot(model)
    tokens = text(model, 30, 3)
    tree, parents = np.array(tokens[:4], np.int64), np.array([-1, 0, 0, 2], np.int64)
    for at in (slot, other):
        at.prefill(tokens)
        at.forward(tree, parents)
        at.keep([0, 2, 3])  # moves rows, which the next pass carries out
    (output,) = batch.run([(slot, Pass(tree[:1]))])
    np.testing.assert_array_equal(output.logits, other.forward(tree[:1]).logits)


def test_what_a_batch_refuses(model: Model) -> None:
    batch, other = NativeBatch(model, 2), NativeBatch(model, 1)
    row = np.array([5], np.int64)
    first, second = batch.slots
    with pytest.raises(InvalidRequest, match="at most one pass of each slot"):
        batch.run([(first, Pass(row)), (first, Pass(row))])
    with pytest.raises(InvalidRequest, match="of this batch"):
        batch.run([(first, Pass(row)), (other.slots[0], Pass(row))])
    with pytest.raises(InvalidRequest, match="rows in a pass"):
        batch.run([(first, Pass(np.zeros(LONGEST_PASS, np.int64))), (second, Pass(row))])
    with pytest.raises(InvalidRequest, match="at least one slot"):
        NativeBatch(model, 0)
