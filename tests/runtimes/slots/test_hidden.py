"""Parts of a model: hidden states out and in, and ranges of layers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from edgespec.decoding.target import BEST, Pass
from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.formats import FORMATS, Format
from edgespec.runtimes.files.kv import ATTENTION, KvFormat
from tests.support.coded import Prepared, prepare, random_tokens
from tests.support.passes import run_draft, run_heads, run_layers, run_rest, states
from tests.support.planned import NATIVE, Planned, final, text
from tests.support.slots import assert_same_kv


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("form", FORMATS)
def test_a_pass_in_two_parts_is_the_pass(planned: Callable[..., Planned], form: Format, threads: int) -> None:
    made = planned("shared", form)
    slot, whole = made.slot(threads), made.slot()
    tokens = text(slot, 200)
    for first in range(slot.layers + 1):
        at = 40
        slot.follow(tokens[:at].tolist())
        whole.follow(tokens[:at].tolist())
        for one in (slot, whole):
            one.prefill(tokens[len(one.tokens) : at].tolist())
        for n in range(1, 10):
            rows = tokens[at : at + n]
            front = run_layers(slot, rows, 0, 0, first)
            got = run_rest(slot, rows, front, first).logits.copy()
            np.testing.assert_array_equal(got, whole.forward(rows).logits, f"{n} rows, {first} layers first")
            slot.keep(range(n))
            whole.keep(range(n))
            at += n
        assert_same_kv(slot, whole)


@pytest.mark.parametrize("form", FORMATS)
def test_rows_run_one_by_one_resume_together(planned: Callable[..., Planned], form: Format) -> None:
    """ParaDecode does this: each row goes through the front separately, all of them through the back at once."""
    made = planned("shared", form)
    slot, whole = made.slot(2), made.slot()
    tokens = text(slot, 60, 3)
    for one in (slot, whole):
        one.prefill(tokens[:20].tolist())
    at = 20
    for n in (1, 5, 9, 2, 17):
        rows, early = tokens[at : at + n], 1 + n % 3
        parts = [run_layers(slot, rows[i : i + 1], i, 0, early) for i in range(n)]
        # the first of them continues to a later layer, which all reach in the end
        later = run_layers(slot, parts[0], 0, early, early + 1)
        hidden = np.concatenate(parts)
        np.testing.assert_array_equal(run_layers(slot, hidden, 0, early, early + 1)[:1], later)
        expected = whole.forward(rows).logits.copy()
        got = run_rest(slot, rows, hidden, early).logits.copy()
        np.testing.assert_array_equal(got, expected)
        if BEST in slot.can:
            best = run_rest(slot, rows, hidden, early, best=True)
            assert best.best is not None
            assert not best.logits.size
            np.testing.assert_array_equal(best.best[0], expected.argmax(1))
            np.testing.assert_array_equal(best.best[1], expected.max(1))
        slot.keep(range(n))
        whole.keep(range(n))
        at += n
    assert_same_kv(slot, whole)


@pytest.mark.parametrize("form", FORMATS)
def test_segments_of_layers_one_after_another(planned: Callable[..., Planned], form: Format) -> None:
    made = planned("shared", form)
    slot, whole = made.slot(2), made.slot()
    tokens = text(slot, 30, 5)
    for one in (slot, whole):
        one.prefill(tokens[:9].tolist())
    hidden, logits = final(whole, tokens[9:])
    stream = run_layers(slot, tokens[9:], 0, 0, 1)
    for first in range(1, slot.layers):
        stream = run_layers(slot, stream, 0, first, first + 1)
    np.testing.assert_array_equal(stream, hidden)
    np.testing.assert_array_equal(run_rest(slot, tokens[9:], stream, slot.layers).logits, logits)
    slot.keep(range(21))
    whole.keep(range(21))
    assert_same_kv(slot, whole)


@pytest.fixture(scope="module")
def coded(native: None, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare(tmp_path_factory.mktemp("coded"), "padded")


CODED = {
    "f16": ATTENTION["f16"],
    "int8": ATTENTION["int8"],
    "int4": ATTENTION["int4"],
    "nomad": ATTENTION["nomad"],
    "codes for drafts": KvFormat("f16", "f16", codes="nomad2", sinks=4, draft_window=64),
}


@pytest.mark.parametrize("name", CODED)
def test_layers_over_caches_of_any_format(coded: Prepared, name: str) -> None:
    """These include formats with a ring of exact keys, and with codes that only drafts read."""
    slot, whole = coded.slot(CODED[name], 2), coded.slot(CODED[name])
    tokens = np.array(random_tokens(slot.vocab_size, 340))
    for one in (slot, whole):
        one.prefill(tokens[:300].tolist())
    for at in range(300, 340, 8):
        rows = tokens[at : at + 8]
        run_draft(slot, rows[:1])
        front = np.concatenate([run_layers(slot, rows[i : i + 1], i, 0, 1) for i in range(8)])
        got = run_rest(slot, rows, front, 1).logits.copy()
        np.testing.assert_array_equal(got, whole.forward(rows).logits)
        slot.keep(range(8))
        whole.keep(range(8))
    assert_same_kv(slot, whole)


def test_hidden_states_are_kept_only_where_asked_for(planned: Callable[..., Planned]) -> None:
    slot = planned("shared").slot()
    tokens = text(slot, 9)
    assert slot.forward(tokens).hidden is None
    hidden = states(slot, tokens).hidden
    assert hidden is not None
    expected = hidden.copy()
    assert expected.shape == (9, slot.model.facts.hidden)
    if BEST in slot.can:
        np.testing.assert_array_equal(slot.run(Pass(tokens, top=1, hidden=True)).hidden, expected)
    front = run_layers(slot, tokens, 0, 0, 2)
    np.testing.assert_array_equal(run_rest(slot, tokens, front, 2, states=True).hidden, expected)
    assert slot.forward(tokens).hidden is None
    assert BEST not in slot.can or slot.forward(tokens, None, True).hidden is None


@NATIVE
def test_layers_that_there_are_not(planned: Callable[..., Planned]) -> None:
    slot = planned("shared").slot()
    hidden = np.zeros((3, slot.model.facts.hidden), np.float32)
    for first, last in ((-1, 2), (3, 2), (0, slot.layers + 1)):
        with pytest.raises(InvalidRequest, match="expected a range within"):
            run_layers(slot, np.zeros(3, np.int64), 0, first, last)
    with pytest.raises(InvalidRequest, match="expected a range within"):
        run_rest(slot, np.zeros(3, np.int64), hidden, slot.layers + 1)
    for wrong in (hidden[:2], hidden[:, 1:]):
        with pytest.raises(InvalidRequest, match=r"expected \[3, 128\]"):
            run_rest(slot, np.zeros(3, np.int64), wrong, 1)
    with pytest.raises(InvalidRequest, match="expected the hidden states before them"):
        run_layers(slot, np.zeros(3, np.int64), 0, 1, 2)
    with pytest.raises(InvalidRequest, match="no heads 'none'; it has: blockwise, medusa"):
        run_heads(slot, "none", hidden)
