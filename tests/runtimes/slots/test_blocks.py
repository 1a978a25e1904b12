"""Slots of a batch share the blocks of a common prefix: all bits stay the same, and no block is lost or leaked."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgespec.decoding.target import Pass
from edgespec.errors import BundleError
from edgespec.runtimes.files.formats import KV_BLOCK
from edgespec.runtimes.files.kv import ATTENTION, KvFormat
from edgespec.runtimes.files.session_file import fill
from edgespec.runtimes.slots.native import NativeSlot
from edgespec.runtimes.slots.native_batch import BatchSlot, NativeBatch, shared_bytes
from edgespec.runtimes.slots.shared import Model
from tests.conftest import Written
from tests.support.coded import Prepared, prepare
from tests.support.passes import run_draft

WIDTH, WIDE = 4, 16  # slots
CODED = {
    "f16": ATTENTION["f16"],
    "int8": ATTENTION["int8"],
    "nomad": ATTENTION["nomad"],
    "codes beside": KvFormat("f16", "f16", codes="nomad2", sinks=4, draft_window=64),
}
STATES = ("lfm2_conv", "qwen3_5_delta")
KINDS = (*CODED, *STATES)


@pytest.fixture(scope="module")
def coded(native: None, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare(tmp_path_factory.mktemp("coded"), "padded")


@pytest.fixture(scope="module")
def models(coded: Prepared, writer: Callable[..., Written]) -> Callable[[str], Model]:
    """Name of ``KINDS`` -> a model that runs on two threads."""
    made: dict[str, Model] = {}

    def get(name: str) -> Model:
        if name not in made:
            if name in STATES:
                found = writer("native", name).model("native")
                made[name] = Model(found.folder, found.part, "native", 2)
            else:
                made[name] = coded.slot(CODED[name], 2).model
        return made[name]

    return get


def text(seed: int, count: int, vocab: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(2, vocab, count).tolist()
    return tokens


def check_counts(batch: NativeBatch) -> None:
    """Every block is counted as often as slots refer to it, and free where none does."""
    pool = batch.pool
    numbers = [pool.numbers(slot.number) for slot in batch.slots]
    used = np.bincount(list(chain.from_iterable(numbers)), minlength=len(pool.counts))
    np.testing.assert_array_equal(pool.counts, used)
    for slot, mine in zip(batch.slots, numbers, strict=True):
        assert (slot._table[len(mine) :] == -1).all()
        assert len(mine) * KV_BLOCK >= len(slot.tokens)
    heads = WIDTH * len(batch.slots[0]._head)
    kept = sum(slot._books.checkpoint_bytes for slot in batch.slots)
    assert abs(batch.kv_bytes - heads - kept - np.count_nonzero(used) * pool.block_bytes) <= WIDTH


def check_alike(slot: BatchSlot, alone: NativeSlot) -> None:
    assert slot.tokens == alone.tokens
    mine = slot.snapshot() if slot.tokens else {}  # states of no tokens are undefined, and never read
    for name, values in alone.snapshot().items() if mine else ():
        np.testing.assert_array_equal(mine[name], values, err_msg=name)


class Pair:
    """A batch, and separate slots that receive the same texts, but never share anything."""

    def __init__(self, model: Model) -> None:
        self.batch, self.vocab = NativeBatch(model, WIDTH), model.facts.vocab
        self.alone: list[NativeSlot] = [NativeSlot(model) for _ in range(WIDTH)]

    def start(self, at: int, seed: int, count: int) -> None:
        tokens = text(seed % 3, count, self.vocab)
        for slot in (self.batch.slots[at], self.alone[at]):
            slot.prefill(tokens[slot.follow(tokens) :])

    def fork(self, at: int, other: int, count: int) -> None:
        lender = self.batch.slots[other]
        tokens = list(lender.tokens)
        same = self.batch.slots[at].copy_prefix_from(lender, min(count, len(tokens)))
        self.alone[at].prefill(tokens[self.alone[at].follow(tokens[:same]) : same])
        assert lender.tokens == tokens

    def rounds(self, seed: int, count: int) -> None:
        """All slots in one pass, chains and trees, of which random paths are kept; drafts before it."""
        random = np.random.default_rng(seed)
        wanted: list[tuple[BatchSlot, Pass]] = []
        for slot, alone in zip(self.batch.slots, self.alone, strict=True):
            rows = random.integers(2, self.vocab, count)
            tree = np.array([-1, *(int(random.integers(0, row)) for row in range(1, count))])
            np.testing.assert_array_equal(run_draft(slot, rows[:1]).logits, run_draft(alone, rows[:1]).logits)
            wanted.append((slot, Pass(rows, tree if random.random() < 0.5 else None)))
        outputs = self.batch.run(wanted)
        for (slot, each), output in zip(wanted, outputs, strict=True):
            alone, path = self.alone[slot.number], [0]
            np.testing.assert_array_equal(output.logits, alone.run(each).logits)
            for row in range(1, count):
                parent = row - 1 if each.parents is None else each.parents[row]
                if parent == path[-1] and random.random() < 0.7:
                    path.append(row)
            slot.keep(path)
            alone.keep(path)

    def crop(self, at: int, count: int) -> None:
        same = self.batch.slots[at].crop(min(count, len(self.batch.slots[at].tokens)))
        tokens = list(self.batch.slots[at].tokens)
        assert len(tokens) == same
        self.alone[at].prefill(tokens[self.alone[at].follow(tokens) :])

    def close(self, at: int) -> None:
        self.batch.slots[at].close()
        self.alone[at] = NativeSlot(self.batch.model)

    def check(self) -> None:
        check_counts(self.batch)
        for slot, alone in zip(self.batch.slots, self.alone, strict=True):
            check_alike(slot, alone)


SLOTS, TOKENS, SEEDS = st.integers(0, WIDTH - 1), st.integers(0, 300), st.integers(0, 1000)
STEPS = st.one_of(
    st.tuples(st.just("start"), SLOTS, SEEDS, TOKENS),
    st.tuples(st.just("fork"), SLOTS, SLOTS, TOKENS),
    st.tuples(st.just("fork"), SLOTS, SLOTS, st.sampled_from([128, 256, 300])),
    st.tuples(st.just("rounds"), SEEDS, st.integers(1, 9)),
    st.tuples(st.just("crop"), SLOTS, TOKENS),
    st.tuples(st.just("close"), SLOTS),
)


@pytest.mark.parametrize("name", KINDS)
@given(steps=st.lists(STEPS, min_size=3, max_size=12))
@settings(max_examples=12, deadline=None)
def test_any_starts_forks_and_ends(models: Callable[[str], Model], name: str, steps: list[tuple[str, int]]) -> None:
    pair = Pair(models(name))
    pair.start(0, 0, 290)
    for step, *arguments in steps:
        if step == "fork" and arguments[0] == arguments[1]:
            continue
        if max(len(slot.tokens) for slot in pair.batch.slots) + 20 > pair.batch.model.facts.context:
            break
        getattr(pair, step)(*arguments)
    pair.check()
    for slot in pair.batch.slots:
        slot.close()
    check_counts(pair.batch)
    assert not pair.batch.pool.counts.any()


@pytest.mark.parametrize("name", KINDS)
def test_a_common_beginning_lies_there_once(models: Callable[[str], Model], name: str) -> None:
    """Three continue from it, from within a block; the first one goes back into it; then it is closed."""
    pair = Pair(models(name))
    slots, each = pair.batch.slots, pair.batch.pool.block_bytes
    pair.start(0, 0, 290)
    for at in (1, 2, 3):
        pair.fork(at, 0, 290)
    assert shared_bytes(slots) == 3 * 2 * each
    for seed in range(3):
        pair.rounds(seed, 5)
    assert shared_bytes(slots) == 3 * 2 * each  # all writes come after it
    pair.check()
    pair.crop(0, 200)
    assert shared_bytes(slots) >= (2 * 2 if name in STATES or name == "nomad" else 3 * 2) * each
    pair.rounds(7, 5)
    pair.check()
    pair.close(0)
    pair.rounds(8, 5)
    pair.check()
    assert shared_bytes(slots) == 2 * 2 * each


def test_what_is_written_over_a_shared_block_is_written_into_a_copy(models: Callable[[str], Model]) -> None:
    pair = Pair(models("f16"))
    first, second = pair.batch.slots[:2]
    pair.start(0, 0, 290)
    pair.fork(1, 0, 290)
    pair.crop(1, 100)
    assert pair.batch.pool.numbers(0)[0] == pair.batch.pool.numbers(1)[0]
    pair.rounds(1, 3)
    assert pair.batch.pool.numbers(0)[0] != pair.batch.pool.numbers(1)[0]
    pair.check()
    # texts that are restored from a file overwrite the slot's text
    pair.fork(1, 0, 290)
    tokens = [*first.tokens[:130], *text(9, 100, pair.vocab)]
    saved = NativeSlot(pair.batch.model)
    saved.prefill(tokens)
    fill(second.take_up(tokens, len(tokens)), saved.held()[0])
    assert second.taken_up()
    check_alike(second, saved)
    assert pair.batch.pool.numbers(0)[0] == pair.batch.pool.numbers(1)[0]
    assert pair.batch.pool.numbers(0)[1] != pair.batch.pool.numbers(1)[1]
    check_alike(first, pair.alone[0])


@pytest.mark.parametrize("number", [-1, 1 << 20, -(1 << 31), (1 << 31) - 1])
def test_a_number_that_is_no_block_is_refused(models: Callable[[str], Model], number: int) -> None:
    slot = NativeBatch(models("f16"), 2).slots[1]
    slot.prefill([5] * 200)
    right, slot._table[1] = int(slot._table[1]), number
    with pytest.raises(BundleError, match=r"block 1 of slot 1 is number"):
        slot.forward(np.array([5]))
    slot._table[1] = right
    slot.forward(np.array([5]))


def resident(array: NDArray[np.uint8]) -> int:
    """Count the resident bytes of an array on separate pages."""
    page, found = mmap.PAGESIZE, np.zeros(-(-array.nbytes // mmap.PAGESIZE), np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    address, size = (ctypes.c_size_t(number) for number in (array.ctypes.data, array.nbytes))
    assert not libc.mincore(address, size, ctypes.c_void_p(found.ctypes.data))
    return page * int((found & 1).sum())


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read where Linux tells it")
def test_many_texts_with_one_beginning_take_its_memory_once(
    models: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's count for sixteen slots equals the pool's."""
    monkeypatch.setattr("edgespec.runtimes.slots.shared.HUGE", 1 << 60)  # pages are as small as they can be
    batch = NativeBatch(models("f16"), WIDE)
    pool, first = batch.pool, batch.slots[0]
    most = models("f16").facts.context - 64
    first.prefill(text(1, most, models("f16").facts.vocab))

    pages = WIDE * 3 * mmap.PAGESIZE  # that heads and tables share with blocks
    once = resident(pool._bytes)
    assert once == pytest.approx(-(-most // KV_BLOCK) * pool.block_bytes, abs=pages)
    for slot in batch.slots[1:]:
        slot.copy_prefix_from(first, most // KV_BLOCK * KV_BLOCK)
    assert resident(pool._bytes) <= once + pages
    assert batch.kv_bytes == len(pool.numbers(0)) * pool.block_bytes
    batch.run([(slot, Pass(np.array([5]))) for slot in batch.slots])
    assert batch.kv_bytes == (len(pool.numbers(0)) + WIDE - 1) * pool.block_bytes
    assert resident(pool._bytes) <= batch.kv_bytes + pages
    for slot in list(batch.slots):
        slot.close()
    assert resident(pool._bytes) <= pages
