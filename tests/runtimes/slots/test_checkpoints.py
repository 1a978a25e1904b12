"""Checkpoints of states: a text that goes back reads on from the last one before, and never from another state."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from edgespec.runtimes.files.formats import HELD_BYTES
from edgespec.runtimes.files.kv import checkpoint_bytes, state_width
from edgespec.runtimes.slots.checkpoints import ends_of_turns
from edgespec.runtimes.slots.native import NativeSlot
from edgespec.runtimes.slots.native_batch import NativeBatch
from tests.conftest import Written

pytestmark = pytest.mark.usefixtures("native")
NAMES = ["lfm2_conv", "qwen3_5_delta"]
TEXT = np.random.default_rng(1).integers(0, 160, 330).tolist()


@pytest.fixture
def slot(writer: Callable[..., Written], name: str) -> NativeSlot:
    found = writer("native", name).slot("native")
    assert isinstance(found, NativeSlot)
    return found


def lengths(slot: NativeSlot) -> list[int]:
    return slot._books.checkpoints


def read(slot: NativeSlot, tokens: list[int], marks: tuple[int, ...] = (), most: int = 4) -> int:
    """Continue to this text -> the number of tokens that were not read again."""
    slot.mark(marks, most)
    same = slot.follow(tokens)
    slot.prefill(tokens[same:])
    return same


def follows(slot: NativeSlot, fresh: NativeSlot) -> bool:
    """Whether the next row has the bits of one after a fresh prefill."""
    fresh.follow([])
    fresh.prefill(slot.tokens)
    rows = np.arange(4)
    return np.array_equal(slot.forward(rows).logits.copy(), fresh.forward(rows).logits)


@pytest.mark.parametrize("name", NAMES)
def test_a_text_goes_back_to_the_last_checkpoint(slot: NativeSlot, writer: Callable[..., Written], name: str) -> None:
    fresh = writer("native", name).slot("native")
    assert isinstance(fresh, NativeSlot)
    read(slot, TEXT, marks=(30, 100))
    assert lengths(slot) == [30, 100]
    assert read(slot, TEXT[:120] + TEXT[:60]) == 100
    assert follows(slot, fresh)
    assert lengths(slot) == [30, 100, 120]  # where the texts parted
    assert read(slot, TEXT[:120] + TEXT[200:] + TEXT[200:]) == 120
    assert follows(slot, fresh)
    assert read(slot, TEXT[:99] + TEXT[50:320]) == 30
    assert lengths(slot) == [30, 99]
    assert follows(slot, fresh)
    assert read(slot, TEXT[1:]) == 0
    assert lengths(slot) == []
    assert follows(slot, fresh)


@pytest.mark.parametrize("name", NAMES)
def test_another_state_is_noticed(slot: NativeSlot, writer: Callable[..., Written], name: str) -> None:
    """The comparisons of this file would find a checkpoint that holds one more token."""
    fresh = writer("native", name).slot("native")
    assert isinstance(fresh, NativeSlot)
    facts, text = slot.model.facts, TEXT[:100]
    slot.prefill(TEXT[:101])
    later = slot._books.states()
    slot.follow([])
    slot.prefill(text)
    if facts.delta:  # states of a token more, which say that they hold 100
        ends, rows = slot._books.states(), len(facts.convolutions) * (facts.taps - 1) * state_width(facts)
        held = ends[rows:].reshape(len(facts.convolutions), -1)[:, -HELD_BYTES // 4 :]
        later[rows:].reshape(len(held), -1)[:, -HELD_BYTES // 4 :] = held
    assert slot._books.put_states(later)
    slot._books.checkpoint()
    slot.prefill(TEXT[100:])
    assert read(slot, TEXT[:100] + TEXT[:9]) == 100
    assert not follows(slot, fresh)


@pytest.mark.parametrize("name", NAMES)
def test_their_number_is_bounded(slot: NativeSlot, name: str) -> None:
    """The first one and the newest ones stay."""
    empty = slot.kv_bytes
    read(slot, TEXT[:250], marks=(10, 20, 90, 110, 150, 200), most=3)
    assert lengths(slot) == [20, 150, 200]  # ten tokens are read again as fast
    assert slot.kv_bytes - slot._bound["kv"].array.nbytes == 3 * checkpoint_bytes(slot.model.facts)
    slot.mark((), 1)
    assert lengths(slot) == [200]
    slot.mark((), 0)
    assert slot.kv_bytes >= empty
    assert read(slot, TEXT[:40], marks=(30,), most=0) == 0
    assert lengths(slot) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_slot_of_a_batch_goes_back_alone(slot: NativeSlot, name: str) -> None:
    batch = NativeBatch(slot.model, 2)
    first, second = batch.slots
    read(first, TEXT[:200], marks=(60,))
    read(second, TEXT[100:300], marks=(70,))
    assert read(first, TEXT[:61] + TEXT[:30]) == 60
    assert read(second, TEXT[100:171] + TEXT[:30]) == 70
    assert follows(first, slot)
    assert follows(second, slot)


@pytest.mark.parametrize(
    "tokens, expected",
    [
        ([5] * 20 + [1] + [5] * 20 + [1] + [5] * 9, [21, 42]),  # system, user, a generation prompt
        ([5] * 20 + [1] + [5] * 60, [21, 80]),  # what follows is more than a generation prompt
        ([5] * 60, [59]),  # no turns: all that a prefill reads
        ([5] * 20 + [1] + [5] * 4 + [1], [21]),
        ([5] * 9, []),
    ],
)
def test_where_turns_end(tokens: list[int], expected: list[int]) -> None:
    assert ends_of_turns(tokens, {1, 2}) == expected


@pytest.mark.parametrize("name", NAMES)
def test_a_text_that_goes_back_twice(writer: Callable[..., Written], name: str) -> None:
    """A checkpoint holds only the rows for the next token, so the text cannot go back to between it and later ones."""
    slot, other = (writer("native", name).slot("native") for _ in range(2))
    assert isinstance(slot, NativeSlot)
    assert isinstance(other, NativeSlot)
    read(slot, TEXT, marks=(100,))
    read(slot, [*TEXT[:110], *TEXT[200:210]])
    assert read(slot, [*TEXT[:90], *TEXT[50:60]]) == 0
    read(other, [*TEXT[:90], *TEXT[50:60]])
    found, expected = slot.snapshot(), other.snapshot()
    assert all(np.array_equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", NAMES)
def test_states_and_parts_are_put_back(writer: Callable[..., Written], name: str) -> None:
    """Another slot that gets them continues with the same bits, and cannot go back to before them."""
    slot, other = (writer("native", name).slot("native") for _ in range(2))
    slot.prefill(TEXT[:300])
    pieces, state = [np.concatenate(slot.part(start, stop)) for start, stop in ((0, 256), (256, 300))], slot.state()
    other.take_up(TEXT[:300], 300)
    for (start, stop), piece in zip(((0, 256), (256, 300)), pieces, strict=True):
        (view,) = other.part(start, stop)
        view[:] = piece
    assert not other.put_state(state[:-4])
    assert other.put_state(state)
    assert other.taken_up()
    for one in (slot, other):
        one.prefill(TEXT[300:])
    logits = [one.forward(np.array(TEXT[:3], np.int64)).logits.copy() for one in (slot, other)]
    assert np.array_equal(*logits)
    assert slot.cropped(290) == 290 or name != "lfm2_conv"
    assert other.cropped(290) == 0
    assert other.cropped(300) == 300
