"""A slot gives a row the same bits whatever was done before it and whatever stands beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgespec.decoding.target import SkipSet
from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.kv import ATTENTION, BLOCK
from edgespec.runtimes.files.manifest import FORMATS, Attention, Operators
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.native import NativeSlot
from edgespec.runtimes.slots.probe import rows_exact
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import PREFILL_CHUNK, Slot
from edgespec.runtimes.slots.stock import StockSlot
from tests.conftest import OPERATORS, Written, use_operators

Write = Callable[..., Written]
Logits = NDArray[np.float32]

# A trained model, hidden sizes off the grid of 32, an intermediate size off it, one key head for all.
MODELS = ("builtin:shakespeare", "qwen2_tied_gqa7", "llama_biases_mqa")
LONGEST = 40
SKIP = SkipSet((0,), (1,))
STOCK = pytest.mark.parametrize("operators", ["stock"], indirect=True)
NATIVE = pytest.mark.parametrize("operators", ["native"], indirect=True)


@pytest.fixture(params=OPERATORS)
def operators(request: pytest.FixtureRequest) -> Operators:
    """Everything here holds for both kinds, unless a test says otherwise."""
    return use_operators(request)


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


# -- rows --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "operators, graph", [("stock", "strict"), ("stock", "gated"), ("native", "native")], indirect=["operators"]
)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_rows_of_any_pass_equal_plain_decoding(written: Write, name: str, form: str, graph: str, threads: int) -> None:
    made = written(name, form)
    slot = made.slot(graph, threads)
    tokens = text(made, 51 + LONGEST)
    for depth in (0, 1, 51):
        past, following = tokens[:depth], tokens[depth : depth + LONGEST]
        plain = one_by_one(slot, past, following)
        for size in range(1, LONGEST + 1):
            slot.follow(past)
            np.testing.assert_array_equal(next_rows(slot, following[:size]), plain[:size], f"{size} rows after {depth}")


@NATIVE
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("form", FORMATS)
def test_rows_of_every_length_of_pass_equal_plain_decoding(written: Write, form: str, threads: int) -> None:
    made = written(MODELS[0], form)
    tokens, slot = text(made, 130), open_slot(made.model("native", threads))
    plain = one_by_one(slot, [], tokens)
    for size in range(1, 131):
        slot.follow([])
        np.testing.assert_array_equal(next_rows(slot, tokens[:size]), plain[:size], f"{size} rows")


@NATIVE
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("attention", ["f32", "f16", "int8"])
def test_rows_are_equal_whatever_the_cache_keeps(written: Write, attention: Attention, threads: int) -> None:
    made = written(MODELS[1], "int4")
    model = Model(made.folder, made.part, "native", threads, ATTENTION[attention])
    slot, tokens = open_slot(model, reserve=1), text(made, 2 * BLOCK + 20)
    for depth in (0, BLOCK - 3, 2 * BLOCK - 3):  # passes that begin, cross a block, and cross a split of attention
        past, following = tokens[:depth], tokens[depth : depth + 20]
        plain = one_by_one(slot, past, following)
        for size in (1, 2, 3, 5, 17, 20):
            slot.follow(past)
            np.testing.assert_array_equal(next_rows(slot, following[:size]), plain[:size], f"{size} rows after {depth}")


@STOCK
@pytest.mark.parametrize("form", FORMATS)
def test_gates_change_no_bit(written: Write, form: str) -> None:
    for name in MODELS:
        made = written(name, form)
        tokens = text(made, 30)
        plain, gated = made.slot("strict"), made.slot("gated")
        np.testing.assert_array_equal(one_by_one(plain, [], tokens), one_by_one(gated, [], tokens))
        assert_same_kv(plain, gated)


@pytest.mark.parametrize("form", FORMATS)
def test_the_probe_agrees(written: Write, form: str) -> None:
    made = written(MODELS[0], form)
    slot, quiet = made.slot(threads=2), made.slot(threads=2)
    assert rows_exact(slot)
    assert slot.tokens == []
    tokens = text(made, 40)
    slot.prefill(tokens)
    quiet.prefill(tokens)
    assert rows_exact(slot)
    assert_same_kv(slot, quiet)  # what the slot holds stays
    np.testing.assert_array_equal(next_rows(slot, tokens[:3]), next_rows(quiet, tokens[:3]))


def test_the_probe_notices_a_row_that_depends_on_its_neighbours(
    written: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = written(MODELS[0], "int4").slot()
    original = slot.forward

    def disturbed(tokens: NDArray[np.int64], parents: NDArray[np.int64] | None = None) -> object:
        output = original(tokens, parents)
        if len(tokens) == 5:
            output.logits[0, 0] = np.nextafter(output.logits[0, 0], np.float32(np.inf))
        return output

    monkeypatch.setattr(slot, "forward", disturbed)
    assert not rows_exact(slot)


# -- prefill -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", MODELS[:2])
def test_prefill_in_any_chunks_gives_the_same_cache(written: Write, name: str, form: str, threads: int) -> None:
    made = written(name, form)
    tokens = text(made, 2 * PREFILL_CHUNK + 1)
    slot = made.slot(threads=threads)
    plain = one_by_one(slot, tokens[:-1], tokens[-1:])
    whole = slot.snapshot()
    cuts = [[1], [16], [17], [33, 5], [PREFILL_CHUNK + 1], [3, 1, 4, 1, 5, 9, 2, 6], [2 * PREFILL_CHUNK]]
    for sizes in cuts:
        slot.follow([])
        at = step = 0
        while at < len(tokens) - 1:
            size = min(sizes[step % len(sizes)], len(tokens) - 1 - at)
            slot.prefill(tokens[at : at + size])
            at, step = at + size, step + 1
        np.testing.assert_array_equal(next_rows(slot, tokens[-1:]), plain, f"prefill in {sizes}")
        slot.keep([0])
        for key, values in slot.snapshot().items():
            np.testing.assert_array_equal(values, whole[key], f"{key} after prefill in {sizes}")


@pytest.mark.parametrize("form", FORMATS)
def test_prefilled_and_decoded_caches_are_the_same(written: Write, form: str) -> None:
    """What a conversation left behind is as good as a fresh prefill of it."""
    made = written(MODELS[0], form)
    tokens = text(made, 90)
    decoded, prefilled = made.slot(), made.slot()
    one_by_one(decoded, [], tokens)
    prefilled.prefill(tokens)
    assert_same_kv(decoded, prefilled)


def test_an_empty_prefill_does_nothing(written: Write) -> None:
    slot = written(MODELS[0]).slot()
    slot.prefill([])
    assert slot.tokens == []


# -- follow, keep, rollback --------------------------------------------------------------------------------------------


def test_follow_keeps_the_common_prefix(written: Write) -> None:
    made = written(MODELS[0])
    tokens, slot = text(made, 12), made.slot()
    slot.prefill(tokens)
    assert slot.follow([*tokens, 5]) == 12
    assert slot.follow(tokens[:7]) == 7
    assert slot.tokens == tokens[:7]
    assert slot.follow([*tokens[:3], tokens[3] + 1, *tokens[4:]]) == 3
    assert slot.follow([]) == 0
    assert slot.tokens == []


@pytest.mark.parametrize("form", FORMATS)
def test_rejected_rows_leave_no_trace(written: Write, form: str) -> None:
    made = written(MODELS[0], form)
    tokens = text(made, 60)
    slot, fresh = made.slot(), made.slot()
    slot.prefill(tokens[:20])
    slot.forward(ids([tokens[20], 7, 7, 7]))
    slot.keep([0])
    slot.forward(ids([tokens[21], tokens[22], 9]))
    slot.keep([0, 1])
    fresh.prefill(tokens[:23])
    assert_same_kv(slot, fresh)
    np.testing.assert_array_equal(next_rows(slot, tokens[23:28]), next_rows(fresh, tokens[23:28]))


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["prefill", "forward", "tree", "draft", "crop", "masked"]), st.integers(1, 19)),
    max_size=12,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=OPERATIONS, seed=st.integers(0, 1000))
@pytest.mark.parametrize("form", ["int4", "fp32"])
def test_any_history_equals_a_fresh_slot(
    written: Write, form: str, operations: list[tuple[str, int]], seed: int
) -> None:
    made = written(MODELS[2], form)
    random = np.random.default_rng(seed)
    slot = made.slot()
    for kind, count in operations:
        tokens = ids(text(made, count, int(random.integers(1 << 30))))
        if kind == "prefill":
            slot.prefill(tokens.tolist())
        elif kind == "forward":
            slot.forward(tokens)
            slot.keep(range(int(random.integers(count + 1))))
        elif kind == "tree":  # the first child of each node is kept in place: no KV row moves, so bits are comparable
            slot.forward(tokens, ids([-1, *(int(random.integers(i)) for i in range(1, count))]))
            slot.keep([0])
        elif kind == "draft":
            for offset in range(min(count, 4)):
                slot.forward_skipped(tokens[offset : offset + 1], offset, SKIP)
        elif kind == "masked":
            slot.forward_hypotheses(tokens, np.full(count, len(slot.tokens) // 2), np.full(count, -1), SKIP)
        else:
            slot.follow(slot.tokens[: int(random.integers(len(slot.tokens) + 1))])
    fresh = made.slot()
    fresh.prefill(slot.tokens)
    assert_same_kv(slot, fresh)
    following = text(made, 6, seed)
    np.testing.assert_array_equal(next_rows(slot, following), next_rows(fresh, following))


# -- memory ------------------------------------------------------------------------------------------------------------


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
    facts, headroom = made.part.facts, made.part.headroom
    slot = made.slot()
    tokens = text(made, 30)
    slot.prefill(tokens)
    before, first = slot.snapshot(), slot.capacity
    assert first >= 30 + headroom
    slot.reserve(10)
    assert slot.capacity == first
    slot.reserve(300)
    assert slot.capacity >= 300 + headroom
    for name, values in slot.snapshot().items():
        np.testing.assert_array_equal(values, before[name])
    slot.reserve(10**6)
    most = facts.context + headroom
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
        "ids": ids(tokens)[None],
        "pos": np.arange(9)[None],
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
            slot.forward_skipped(ids([3]), 0, SKIP)
            size = 1 + (step + number) % 4
            rows = next_rows(slot, tokens[at : at + size])
            np.testing.assert_array_equal(rows, alone[number][step : step + size][: len(rows)])
            slot.keep([0])


# -- drafts and masks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS)
def test_draft_passes_leave_the_committed_cache_alone(written: Write, form: str) -> None:
    made = written(MODELS[0], form)
    tokens, slot, quiet = text(made, 40), made.slot(), made.slot()
    slot.prefill(tokens[:20])
    quiet.prefill(tokens[:20])
    for at in range(20, 36, 2):
        before = slot.snapshot()
        for offset in range(5):
            slot.forward_skipped(ids([tokens[at] if offset == 0 else 3]), offset, SKIP)
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
    np.testing.assert_allclose(slot.forward_draft(ids(tokens[5:])).logits[0], expected[-1], rtol=0, atol=1e-5)
    np.testing.assert_allclose(
        slot.forward_skipped(ids(tokens[5:]), 0, SkipSet()).logits[0], expected[-1], rtol=0, atol=1e-5
    )
    assert np.abs(slot.forward_skipped(ids(tokens[5:]), 0, SKIP).logits[0] - expected[-1]).max() > 1e-2


@STOCK
def test_a_graph_without_gates_refuses_to_skip(written: Write) -> None:
    slot = written(MODELS[0]).slot("plain")
    with pytest.raises(InvalidRequest, match=r"no gates(.|\n)*--method self-spec"):
        slot.forward_skipped(ids([3]), 0, SKIP)


@pytest.mark.parametrize("name", MODELS)
def test_hypotheses_equal_forward(written: Write, name: str) -> None:
    made = written(name)
    tokens, slot = text(made, 30), made.slot()
    slot.prefill(tokens[:20])
    expected = next_rows(slot, tokens[20:])
    chain = np.arange(-1, 9)
    got = slot.forward_hypotheses(ids(tokens[20:]), np.full(10, 20), chain).logits
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
    # two texts in the same pass, hidden from each other, and one that continues only the beginning
    pairs = np.concatenate([np.arange(-1, 4), [-1, *np.arange(5, 9)]])
    seen = np.repeat([20, 12], 5)
    got = slot.forward_hypotheses(ids([*tokens[20:25], *tokens[12:17]]), seen, pairs).logits.copy()
    np.testing.assert_allclose(got[:5], expected[:5], rtol=0, atol=1e-5)
    shorter = made.slot()
    shorter.prefill(tokens[:12])
    np.testing.assert_allclose(got[5:], next_rows(shorter, tokens[12:17]), rtol=0, atol=1e-5)
    # with sub-layers left out
    skipped = slot.forward_hypotheses(ids(tokens[20:]), np.full(10, 20), chain, SKIP).logits[9:].copy()
    np.testing.assert_allclose(skipped, slot.forward_skipped(ids(tokens[20:]), 0, SKIP).logits, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(next_rows(slot, tokens[20:]), expected)


# -- the end of the context --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["int4", "fp32"])
def test_the_last_places_of_the_context_work(written: Write, form: str) -> None:
    made = written(MODELS[2], form)
    context = made.part.facts.context
    tokens, slot = text(made, context + made.part.headroom), made.slot()
    assert slot.context == context
    plain = one_by_one(slot, tokens[: context - 2], tokens[context - 2 : context])
    slot.follow(tokens[: context - 2])
    # the last round of a tree may reach this far beyond
    rows = next_rows(slot, tokens[context - 2 : context + made.part.headroom - 2])
    np.testing.assert_array_equal(rows[:2], plain)
    assert np.isfinite(rows).all()
    with pytest.raises(InvalidRequest, match="does not fit the cache"):
        slot.forward(ids(tokens[: made.part.headroom + 3]))


def test_a_slot_may_have_less_context_than_its_model(written: Write) -> None:
    model = written(MODELS[2]).model()
    assert open_slot(model, context=100).context == 100
    assert open_slot(model, context=10**6).context == model.facts.context
    assert open_slot(model, context=100, reserve=1).capacity < 200
