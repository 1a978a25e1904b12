"""Contents of a slot: growth, rollback, drafts and masks, and the end of the context."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.decoding.target import SkipSet
from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.formats import FORMATS
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.native import NativeSlot
from edgespec.runtimes.slots.stock import StockSlot
from tests.support.passes import run_draft, run_hypotheses
from tests.support.slots import (
    MODELS,
    SKIP,
    STOCK,
    Write,
    assert_same_kv,
    ids,
    next_rows,
    one_by_one,
    text,
)


@pytest.mark.parametrize("form", FORMATS)
def test_growth_in_the_middle_of_a_text_changes_no_bit(written: Write, form: str) -> None:
    made = written(MODELS[1], form)
    tokens = text(made, 200)
    model = made.model()
    roomy = open_slot(model, reserve=400)
    expected = one_by_one(roomy, tokens[:50], tokens[50:])
    growing = open_slot(model, reserve=1)
    capacities = set()
    growing.prefill(tokens[:50])
    at = 50
    for size in [1, 3, 2, 5] * 60:
        piece = tokens[at : at + size]
        if not piece:
            break
        np.testing.assert_array_equal(next_rows(growing, piece), expected[at - 50 : at - 50 + len(piece)])
        growing.keep(range(len(piece)))
        capacities.add(growing.capacity)
        at += len(piece)
    assert at == len(tokens)
    assert len(capacities) >= 2
    assert_same_kv(growing, roomy)


def test_reserve_keeps_what_is_there_and_knows_its_limits(written: Write) -> None:
    made = written(MODELS[2])
    facts, extra = made.part.facts, made.part.extra_rows
    slot = made.slot()
    tokens = text(made, 30)
    slot.prefill(tokens)
    before, first = slot.snapshot(), slot.capacity
    assert first >= 30 + extra
    slot.reserve(10)
    assert slot.capacity == first
    slot.reserve(300)
    assert slot.capacity >= 300 + extra
    for name, values in slot.snapshot().items():
        np.testing.assert_array_equal(values, before[name])
    slot.reserve(10**6)
    most = facts.context + extra
    assert slot.capacity == most
    size = slot.kv.nbytes(facts, most) if isinstance(slot, NativeSlot) else facts.kv_bytes_per_token * most
    assert slot.kv_bytes == size
    assert slot.tokens == tokens


@STOCK
def test_past_and_present_are_the_same_memory(written: Write) -> None:
    """An output bound elsewhere would mean that the cache is silently not written."""
    made = written(MODELS[0])
    slot = made.slot()
    assert isinstance(slot, StockSlot)
    for wanted in (1, 400):
        slot.reserve(wanted)
        outputs = {value.data_ptr() for value in slot._io.get_outputs()}
        for name, bound in slot._kv.items():
            assert bound.value.data_ptr() == bound.array.ctypes.data, name
            assert bound.array.ctypes.data in outputs, name
            assert slot._bound[name] is bound
    tokens = text(made, 9)
    slot.prefill(tokens)
    for values in slot.snapshot().values():
        assert (np.abs(values).sum(-1) > 0).all()


@STOCK
def test_the_cache_holds_what_the_graph_returns(written: Write) -> None:
    """The same pass through separate, fresh buffers gives the same keys, values and logits."""
    made = written(MODELS[0])
    facts, tokens = made.part.facts, text(made, 9)
    slot = made.slot("plain")
    logits = next_rows(slot, tokens)
    slot.keep(range(9))
    feeds: dict[str, NDArray[np.generic]] = {
        "input_ids": ids(tokens)[None],
        "position_ids": np.arange(9)[None],
        "seqlens_k": np.array([8], np.int32),
        "total": np.array(9, np.int32),
        "bias": np.zeros((1, 1, 9, 9), np.float32),
        "rows": np.arange(9),
    }
    names = [f"{layer}.{kind}" for layer in range(facts.layers) for kind in ("key", "value")]
    for name in names:
        feeds[f"past_key_values.{name}"] = np.zeros((1, facts.kv_heads, 0, facts.head_dim), np.float32)
    got, *present = made.model("plain").session.run(["logits", *(f"present.{name}" for name in names)], feeds)
    np.testing.assert_allclose(got[0], logits, rtol=0, atol=1e-5)
    for name, values in zip(names, present, strict=True):
        np.testing.assert_allclose(values[0, :, :9], slot.snapshot()[f"past_key_values.{name}"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", FORMATS)
def test_slots_over_one_model_do_not_disturb_each_other(written: Write, form: str) -> None:
    made = written(MODELS[0], form)
    texts = [text(made, length, length) for length in (40, 55, 130)]
    alone = [one_by_one(made.slot(), tokens[:-15], tokens[-15:]) for tokens in texts]
    model = made.model()
    slots = [open_slot(model, reserve=1) for _ in texts]
    for slot, tokens in zip(slots, texts, strict=True):
        slot.prefill(tokens[:-15])
    for step in range(15):
        for number, (slot, tokens) in enumerate(zip(slots, texts, strict=True)):
            at = len(tokens) - 15 + step
            run_draft(slot, ids([3]), 0, SKIP)
            size = 1 + (step + number) % 4
            rows = next_rows(slot, tokens[at : at + size])
            np.testing.assert_array_equal(rows, alone[number][step : step + size][: len(rows)])
            slot.keep([0])


@pytest.mark.parametrize("form", FORMATS)
def test_draft_passes_leave_the_committed_cache_alone(written: Write, form: str) -> None:
    made = written(MODELS[0], form)
    tokens, slot, quiet = text(made, 40), made.slot(), made.slot()
    slot.prefill(tokens[:20])
    quiet.prefill(tokens[:20])
    for at in range(20, 36, 2):
        before = slot.snapshot()
        for offset in range(5):
            run_draft(slot, ids([tokens[at] if offset == 0 else 3]), offset, SKIP)
        assert len(slot.tokens) == at
        for name, values in slot.snapshot().items():
            np.testing.assert_array_equal(values, before[name])
        np.testing.assert_array_equal(next_rows(slot, tokens[at : at + 3]), next_rows(quiet, tokens[at : at + 3]))
        slot.keep([0, 1])
        quiet.keep([0, 1])
    assert_same_kv(slot, quiet)


def test_an_unskipped_draft_pass_says_what_the_model_says(written: Write) -> None:
    made = written(MODELS[0])
    tokens, slot = text(made, 10), made.slot()
    slot.prefill(tokens[:5])
    expected = next_rows(slot, tokens[5:])
    np.testing.assert_allclose(run_draft(slot, ids(tokens[5:])).logits[0], expected[-1], rtol=0, atol=1e-5)
    np.testing.assert_allclose(
        run_draft(slot, ids(tokens[5:]), 0, SkipSet()).logits[0], expected[-1], rtol=0, atol=1e-5
    )
    assert np.abs(run_draft(slot, ids(tokens[5:]), 0, SKIP).logits[0] - expected[-1]).max() > 1e-2


@STOCK
def test_a_graph_without_gates_refuses_to_skip(written: Write) -> None:
    slot = written(MODELS[0]).slot("plain")
    with pytest.raises(InvalidRequest, match=r"leave layers out(.|\n)*--method self-spec"):
        run_draft(slot, ids([3]), 0, SKIP)


@pytest.mark.parametrize("name", MODELS)
def test_hypotheses_equal_forward(written: Write, name: str) -> None:
    made = written(name)
    tokens, slot = text(made, 30), made.slot()
    slot.prefill(tokens[:20])
    expected = next_rows(slot, tokens[20:])
    chain = np.arange(-1, 9)
    got = run_hypotheses(slot, ids(tokens[20:]), np.full(10, 20), chain).logits
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
    # two texts in the same pass, hidden from each other, and one that continues only the beginning
    pairs = np.concatenate([np.arange(-1, 4), [-1, *np.arange(5, 9)]])
    seen = np.repeat([20, 12], 5)
    got = run_hypotheses(slot, ids([*tokens[20:25], *tokens[12:17]]), seen, pairs).logits.copy()
    np.testing.assert_allclose(got[:5], expected[:5], rtol=0, atol=1e-5)
    shorter = made.slot()
    shorter.prefill(tokens[:12])
    np.testing.assert_allclose(got[5:], next_rows(shorter, tokens[12:17]), rtol=0, atol=1e-5)
    # with sub-layers left out
    skipped = run_hypotheses(slot, ids(tokens[20:]), np.full(10, 20), chain, SKIP).logits[9:].copy()
    np.testing.assert_allclose(skipped, run_draft(slot, ids(tokens[20:]), 0, SKIP).logits, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(next_rows(slot, tokens[20:]), expected)


@pytest.mark.parametrize("form", ["int4", "fp32"])
def test_the_last_places_of_the_context_work(written: Write, form: str) -> None:
    made = written(MODELS[2], form)
    context = made.part.facts.context
    tokens, slot = text(made, context + made.part.extra_rows), made.slot()
    assert slot.context == context
    plain = one_by_one(slot, tokens[: context - 2], tokens[context - 2 : context])
    slot.follow(tokens[: context - 2])
    # the last round of a tree may reach this far beyond
    rows = next_rows(slot, tokens[context - 2 : context + made.part.extra_rows - 2])
    np.testing.assert_array_equal(rows[:2], plain)
    assert np.isfinite(rows).all()
    with pytest.raises(InvalidRequest, match="does not fit the cache"):
        slot.forward(ids(tokens[: made.part.extra_rows + 3]))


def test_a_slot_may_have_less_context_than_its_model(written: Write) -> None:
    model = written(MODELS[2]).model()
    assert open_slot(model, context=100).context == 100
    assert open_slot(model, context=10**6).context == model.facts.context
    assert open_slot(model, context=100, reserve=1).capacity < 200
