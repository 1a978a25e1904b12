"""A slot gives a row the same bits after any history and with any other rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgespec.runtimes.files.formats import FORMATS, KV_BLOCK, Attention
from edgespec.runtimes.files.kv import ATTENTION
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.cpu import rows_exact
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import PREFILL_CHUNK
from tests.support.passes import run_draft, run_hypotheses
from tests.support.slots import (
    LONGEST,
    MODELS,
    NATIVE,
    SKIP,
    STOCK,
    Write,
    assert_same_kv,
    disturb,
    ids,
    next_rows,
    one_by_one,
    text,
)


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
    slot, tokens = open_slot(model, reserve=1), text(made, 2 * KV_BLOCK + 20)
    for depth in (
        0,
        KV_BLOCK - 3,
        2 * KV_BLOCK - 3,
    ):  # passes that begin, cross a block, and cross a split of attention
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
    disturb(monkeypatch, slot, rows=5, row=0)
    assert not rows_exact(slot)


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
                run_draft(slot, tokens[offset : offset + 1], offset, SKIP)
        elif kind == "masked":
            run_hypotheses(slot, tokens, np.full(count, len(slot.tokens) // 2), np.full(count, -1), SKIP)
        else:
            slot.follow(slot.tokens[: int(random.integers(len(slot.tokens) + 1))])
    fresh = made.slot()
    fresh.prefill(slot.tokens)
    assert_same_kv(slot, fresh)
    following = text(made, 6, seed)
    np.testing.assert_array_equal(next_rows(slot, following), next_rows(fresh, following))
