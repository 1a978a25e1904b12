"""Copying a slot's cache to another slot: the same memory, and the same bits from then on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from edgespec.errors import SessionError
from edgespec.runtimes.files.formats import LONGEST_PASS
from edgespec.runtimes.files.kv import ATTENTION
from edgespec.runtimes.slots.kv_reader import tokens_held
from edgespec.runtimes.slots.native import NativeSlot
from edgespec.runtimes.slots.native_batch import NativeBatch
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot
from tests.conftest import Written

STATES = (
    "lfm2_conv",
    "lfm3_default",
    "qwen3_5_delta",
    "qwen3_next_dense",
    "olmo_hybrid_nope",
    "granite_hybrid_dense",
)


def moved(slot: Slot, other: Slot) -> None:
    """Copy the cache of ``slot`` to ``other``."""
    saved = [array.copy() for array in slot.held()]
    for array, was in zip(other.take_up(slot.tokens, slot.high_water_mark), saved, strict=True):
        array[...] = was
    assert other.taken_up()


def go_on_alike(slot: Slot, other: Slot) -> None:
    """Chains of guesses, some refused, a turn back, and a growing cache."""
    random = np.random.default_rng(3)
    assert {name: rows.tobytes() for name, rows in slot.snapshot().items()} == {
        name: rows.tobytes() for name, rows in other.snapshot().items()
    }
    for number in range(6):
        tokens = random.integers(0, slot.vocab_size, 4)
        kept = range(int(random.integers(1, 5)))
        rows = [each.forward(tokens).logits.copy() for each in (slot, other)]
        np.testing.assert_array_equal(*rows)
        for each in (slot, other):
            each.keep(kept)
        if number == 2:
            back = slot.tokens[:-3]
            longer = [*back, *random.integers(0, slot.vocab_size, 100).tolist()]
            for each in (slot, other):
                same = each.follow(back)  # states go back to their last checkpoint, or begin again
                assert same == len(back) or slot.model.facts.convolutions
                each.prefill(longer[same:])
    assert slot.tokens == other.tokens


@pytest.mark.parametrize("name", ["llama_tied_gqa", *STATES])
@pytest.mark.parametrize("length", [0, 1, 150, 400])
def test_native(writer: Callable[..., Written], native: None, name: str, length: int) -> None:
    """A model with states copies them for texts of any length: passes go no further back than 144 rows."""
    slot, other = (writer("native", name).slot("native") for _ in range(2))
    slot.prefill(np.random.default_rng(1).integers(0, slot.vocab_size, length).tolist())
    slot.forward(np.arange(3))  # rejected draft tokens: their rows come after the text
    slot.keep([])
    moved(slot, other)
    go_on_alike(slot, other)


@pytest.mark.parametrize("name", ["llama_tied_gqa", *STATES])
def test_into_a_slot_that_held_another_text(writer: Callable[..., Written], native: None, name: str) -> None:
    """Nothing of it is left: checkpoints, states, rows that were to be moved."""
    found = writer("native", name)
    slot, other = found.slot("native"), found.slot("native")
    slot.prefill(np.random.default_rng(1).integers(0, slot.vocab_size, 250).tolist())
    other.prefill(np.random.default_rng(2).integers(0, slot.vocab_size, 350).tolist())
    other.forward(np.array([1, 2, 3]), np.array([-1, 0, 0]))
    other.keep([0, 2])
    moved(slot, other)
    go_on_alike(slot, other)


@pytest.mark.parametrize("name", STATES[2:])
@pytest.mark.parametrize("off", [-1, 1, -300, 1 << 40, -(1 << 40)])
def test_states_of_another_text_are_not_taken_up(
    writer: Callable[..., Written], native: None, name: str, off: int
) -> None:
    """Their number of tokens is stored with them; a convolution's rows have no such number."""
    found = writer("native", name)
    slot, other, fresh = (found.slot("native") for _ in range(3))
    assert isinstance(other, NativeSlot)
    text = np.random.default_rng(1).integers(0, slot.vocab_size, 300).tolist()
    slot.prefill(text)
    (saved,) = slot.held()
    (array,) = other.take_up(slot.tokens, slot.high_water_mark)
    array[...] = saved
    tokens_held(other._head, other.model.facts)[-1] += off
    assert not other.taken_up()
    assert other.tokens == []
    other.prefill(text)
    fresh.prefill(text)
    go_on_alike(fresh, other)


def test_native_with_a_ring_of_exact_keys(writer: Callable[..., Written], native: None) -> None:
    found = writer("native", "llama_tied_gqa")
    kv = ATTENTION["int8"].__class__("int8", "int8", window=64, sinks=4)
    model = Model(found.model("native").folder, found.model("native").part, "native", 1, kv)
    slot, other = NativeSlot(model), NativeSlot(model)
    slot.prefill(np.random.default_rng(1).integers(0, slot.vocab_size, 200).tolist())
    moved(slot, other)
    assert slot.follow(slot.tokens[: 200 - LONGEST_PASS - 1]) == other.follow(other.tokens[: 200 - LONGEST_PASS - 1])
    slot.prefill([1, 2])
    other.prefill([1, 2])
    go_on_alike(slot, other)


@pytest.mark.parametrize("length", [0, 1, 90])
def test_stock(writer: Callable[..., Written], length: int) -> None:
    slot, other = (writer("stock", "llama_tied_gqa").slot("gated") for _ in range(2))
    slot.prefill(np.random.default_rng(1).integers(0, slot.vocab_size, length).tolist())
    moved(slot, other)
    go_on_alike(slot, other)


def test_what_is_out_of_reach_is_refused(writer: Callable[..., Written]) -> None:
    """A slot of a device has the base's: its memory cannot be read from here."""
    with pytest.raises(SessionError, match="cannot be saved"):
        Slot.held(writer("stock", "llama_tied_gqa").slot("gated"))


def begun_like(lender: Slot, other: Slot, fresh: Slot, text: list[int], length: int) -> None:
    """Check that ``other`` holds a prefix of the lender's text as if it had read it; the lender is unchanged."""
    same = other.copy_prefix_from(lender, length)
    assert same == len(other.tokens) == lender.cropped(length)
    assert other.tokens == text[:same]
    fresh.prefill(text[:same])
    for slot in (fresh, other):
        slot.prefill([1, 2, 3])
    go_on_alike(fresh, other)
    assert lender.tokens == text


def slots_of(model: Model, count: int, batch: bool) -> Sequence[NativeSlot]:
    """Return slots with separate memory, or those of a batch, which share blocks."""
    return NativeBatch(model, count).slots if batch else [NativeSlot(model) for _ in range(count)]


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("name", ["llama_tied_gqa", *STATES])
@pytest.mark.parametrize("length", [0, 1, 100, 128, 290, 300, 1000])
def test_a_slot_begins_like_another(
    writer: Callable[..., Written], native: None, name: str, length: int, batch: bool
) -> None:
    lender, other, fresh, alike = slots_of(writer("native", name).model("native"), 4, batch)
    assert isinstance(lender, NativeSlot)
    text = np.random.default_rng(1).integers(0, lender.vocab_size, 300).tolist()
    other.prefill(text[50:350])
    lender.mark([100, 200], 4)
    for slot in (lender, alike):
        slot.prefill(text[:290])
        slot.forward(np.array([*text[290:293], 1, text[293]]), np.array([-1, 0, 1, 2, 2]))
        slot.keep([0, 1, 2, 4])  # is moved by the next pass
        slot.prefill(text[294:])
        slot.forward(np.array([1, 2]))
        slot.keep([])
    assert lender.cropped(300) == 300
    begun_like(lender, other, fresh, text, length)
    go_on_alike(lender, alike)


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("name", ["llama_tied_gqa", *STATES])
def test_rows_that_are_still_to_be_moved_are_not_lent(
    writer: Callable[..., Written], native: None, name: str, batch: bool
) -> None:
    lender, other, fresh = slots_of(writer("native", name).model("native"), 3, batch)
    text = np.random.default_rng(1).integers(0, lender.vocab_size, 204).tolist()
    lender.prefill(text[:200])
    lender.forward(np.array([*text[200:202], 1, text[202], 2, text[203]]), np.array([-1, 0, 1, 1, 3, 3]))
    lender.keep([0, 1, 3, 5])
    assert lender.tokens == text
    assert other.copy_prefix_from(lender, 204) == 202
    fresh.prefill(text[:202])
    go_on_alike(fresh, other)


@pytest.mark.parametrize("batch", [False, True])
def test_a_slot_with_a_ring_begins_like_another(writer: Callable[..., Written], native: None, batch: bool) -> None:
    """Only exact keys of the newest tokens are kept, so it can go no further back than they reach."""
    found = writer("native", "llama_tied_gqa")
    kv = ATTENTION["int8"].__class__("int8", "int8", window=64, sinks=4)
    model = Model(found.model("native").folder, found.model("native").part, "native", 1, kv)
    text = np.random.default_rng(1).integers(0, model.facts.vocab, 300).tolist()
    for length in (300, 300 - LONGEST_PASS, 100):
        lender, other, fresh = slots_of(model, 3, batch)
        lender.prefill(text)
        assert lender.cropped(length) == (length if length > 100 else 0)
        begun_like(lender, other, fresh, text, length)


@pytest.mark.parametrize("length", [0, 1, 90, 200])
def test_a_stock_slot_begins_like_another(writer: Callable[..., Written], length: int) -> None:
    found = writer("stock", "llama_tied_gqa")
    lender, other, fresh = (found.slot("gated") for _ in range(3))
    text = np.random.default_rng(1).integers(0, lender.vocab_size, 150).tolist()
    lender.prefill(text)
    begun_like(lender, other, fresh, text, length)
