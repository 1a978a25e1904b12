"""Groups of heads over hidden states, and LM heads with fewer columns."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.decoding.target import BEST, Output
from edgespec.runtimes.files.formats import FORMATS, Format
from edgespec.runtimes.files.manifest import HeadGroup
from edgespec.runtimes.slots.native import NativeSlot
from edgespec.runtimes.slots.slot import Slot
from tests.support.passes import run_draft, run_heads, run_layers
from tests.support.planned import COUNT, CUT_SIZE, GROUPS, MEDUSA, Array, Planned, final, text
from tests.support.slots import assert_same_kv


def silu(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return x / (1 + np.exp(-x))


def by_hand(made: Planned, group: HeadGroup, hidden: Array) -> NDArray[np.float64]:
    """Compute the logits of ``group`` from ``hidden`` in float64, [count, r, size]."""
    tensors = {name: value.astype(np.float64) for name, value in made.tensors.items()}
    x = hidden.astype(np.float64)
    h = x / np.sqrt((x**2).mean(-1, keepdims=True) + made.written.arch.eps) * tensors["norm"]
    if group.kind == "medusa":
        y = np.stack(
            [h + silu(h @ tensors[f"medusa.{i}.weight"].T + tensors[f"medusa.{i}.bias"]) for i in range(COUNT)]
        )
    elif group.kind == "blockwise":
        inner = silu(h @ tensors["blockwise.inner.weight"].T + tensors["blockwise.inner.bias"])
        outer = inner @ tensors["blockwise.outer.weight"].T + tensors["blockwise.outer.bias"]
        y = h + outer.reshape(len(x), COUNT, -1).transpose(1, 0, 2)
    else:
        y = (h @ tensors[f"exit.{group.layer}.weight"].T)[None]
    if group.own:
        return np.stack([y[i] @ tensors[f"medusa.{i}.lm_head.weight"].T for i in range(COUNT)])
    head = tensors["head"] if made.tokens is None else tensors["head"][made.tokens]
    return np.asarray(y @ head.T)


def all_logits(slot: Slot, group: str, hidden: Array) -> Array:
    found = run_heads(slot, group, hidden)
    assert found.logits is not None
    assert found.best is None
    return found.logits.copy()


@pytest.mark.parametrize("name", MEDUSA)
def test_heads_are_what_the_formulas_say(planned: Callable[..., Planned], name: str) -> None:
    made = planned(name)
    slot = made.slot(2)
    hidden, _ = final(slot, text(slot, 37))
    for group in made.written.part.heads:
        for rows in (1, 2, 37):
            got = all_logits(slot, group.name, hidden[:rows])
            expected = by_hand(made, group, hidden[:rows])
            assert got.shape == expected.shape
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4, err_msg=f"{group.name}, {rows} rows")


@pytest.mark.parametrize("name", MEDUSA)
@pytest.mark.parametrize("form", FORMATS)
def test_heads_say_the_same_whatever_stands_beside(planned: Callable[..., Planned], form: Format, name: str) -> None:
    made = planned(name, form)
    slot = made.slot(2)
    hidden, _ = final(slot, text(slot, 20))
    for group in made.written.part.heads:
        together = all_logits(slot, group.name, hidden)
        for row in range(20):
            np.testing.assert_array_equal(all_logits(slot, group.name, hidden[row : row + 1])[:, 0], together[:, row])


@pytest.mark.parametrize("name", MEDUSA)
@pytest.mark.parametrize("form", FORMATS)
def test_the_best_are_those_of_all_logits(planned: Callable[..., Planned], form: Format, name: str) -> None:
    made = planned(name, form)
    slot = made.slot(2)
    hidden, _ = final(slot, text(slot, 12))
    hidden[4] = 0  # every logit is the same: without a bias the lowest token is the best
    for group in made.written.part.heads:
        logits = all_logits(slot, group.name, hidden)
        found = run_heads(slot, group.name, hidden, 3)
        assert found.best is not None
        order = np.argsort(-logits, -1, kind="stable")[..., :3]
        tokens = order if made.tokens is None else made.tokens[order]
        np.testing.assert_array_equal(found.best[0], tokens)
        np.testing.assert_array_equal(found.best[1], np.take_along_axis(logits, order, -1))
        if group.kind == "exit":
            first = np.arange(3) if made.tokens is None else made.tokens[:3]
            np.testing.assert_array_equal(found.best[0][0, 4], first)


def test_more_than_a_cut_head_has(planned: Callable[..., Planned]) -> None:
    made = planned("cut")
    slot = made.slot()
    best = run_heads(slot, "medusa", final(slot, [5])[0], CUT_SIZE + 2).best
    assert best is not None
    assert made.tokens is not None
    assert (best[0][..., CUT_SIZE:] == -1).all()
    np.testing.assert_array_equal(np.sort(best[0][0, 0, :CUT_SIZE]), made.tokens)


def same_columns(slot: Slot, found: Array | None, expected: Array) -> None:
    """Compare bits on native operators; stock ones sum a column in an order that depends on its place."""
    assert found is not None
    np.testing.assert_allclose(found, expected, rtol=0, atol=0 if isinstance(slot, NativeSlot) else 1e-4)


@pytest.mark.parametrize("form", FORMATS)
def test_a_cut_head_gives_columns_of_the_whole_one(planned: Callable[..., Planned], form: Format) -> None:
    whole, cut = planned("shared", form), planned("cut", form)
    slot, other = whole.slot(), cut.slot(2)
    hidden, _ = final(slot, text(slot, 19))
    for group in GROUPS:
        columns = all_logits(slot, group.name, hidden)[..., cut.tokens]
        found = run_heads(other, group.name, hidden)
        same_columns(other, found.logits, columns)
        np.testing.assert_array_equal(found.tokens, cut.tokens)


@pytest.mark.parametrize("form", FORMATS)
def test_a_draft_with_a_cut_head_only(planned: Callable[..., Planned], form: Format) -> None:
    whole, cut = planned("shared", form), planned("only", form)
    slot, draft = whole.slot(), cut.slot()
    tokens = text(slot, 19)
    logits = slot.forward(tokens).logits.copy()
    assert cut.tokens is not None
    same_columns(draft, draft.forward(tokens).logits, logits[:, cut.tokens])
    same_columns(draft, run_draft(draft, tokens).logits[0], logits[-1, cut.tokens])
    if BEST in draft.can:
        best = draft.forward(tokens, None, True).best
        assert best is not None
        np.testing.assert_array_equal(best[0], cut.tokens[logits[:, cut.tokens].argmax(1)])


def test_an_exit_that_changes_nothing_is_the_lm_head(planned: Callable[..., Planned]) -> None:
    """Its matrix is the identity; in float32 a product with it changes no bit."""
    slot = planned("shared").slot(2)
    hidden, logits = final(slot, text(slot, 21))
    np.testing.assert_array_equal(all_logits(slot, "exit.last", hidden)[0], logits)


def test_an_exit_reads_the_stream_of_its_layer(planned: Callable[..., Planned]) -> None:
    made = planned("shared")
    slot = made.slot()
    tokens = text(slot, 9)
    early = run_layers(slot, tokens, 0, 0, 1)
    np.testing.assert_allclose(all_logits(slot, "exit.1", early), by_hand(made, GROUPS[2], early), rtol=0, atol=1e-4)


@pytest.mark.parametrize("form", FORMATS)
def test_heads_leave_the_slot_alone(planned: Callable[..., Planned], form: Format) -> None:
    """Output of an empty slot, between forward and keep, and after keep; rows kept out of place included."""
    made = planned("shared", form)
    slot, quiet = made.slot(), made.slot()
    tokens = text(slot, 60, 2)
    hidden, _ = final(quiet, tokens[:5])

    def heads() -> Output:
        return run_heads(slot, "medusa", hidden, 2)

    heads()
    assert slot.tokens == []
    for one in (slot, quiet):
        one.prefill(tokens[:20].tolist())
    for at in range(20, 40, 2):
        rows = np.array([tokens[at], 7, tokens[at + 1]])
        parents = np.array([-1, 0, 0])
        results = []
        for one in (slot, quiet):
            results.append(one.forward(rows, parents).logits.copy())
            if one is slot and at % 4:
                heads()
            one.keep([0, 2])
            if one is slot:
                heads()
        np.testing.assert_array_equal(*results)
    assert_same_kv(slot, quiet)
    np.testing.assert_array_equal(slot.forward(tokens[40:45]).logits.copy(), quiet.forward(tokens[40:45]).logits)


def test_many_rows_of_heads_over_a_small_cache(planned: Callable[..., Planned]) -> None:
    slot = planned("shared").slot(2)
    hidden = np.random.default_rng(1).standard_normal((slot.capacity + 300, slot.model.facts.hidden)).astype(np.float32)
    whole = all_logits(slot, "medusa", hidden)
    np.testing.assert_array_equal(all_logits(slot, "medusa", hidden[-3:]), whole[:, -3:])
    assert all_logits(slot, "medusa", hidden[:0]).shape == (COUNT, 0, slot.vocab_size)
