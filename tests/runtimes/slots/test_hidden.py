"""Parts of a model: hidden states out and in, ranges of layers, groups of heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.decoding.target import GreedyTarget, Heads, Resume
from edgespec.errors import InvalidRequest
from edgespec.export.source.source import resolve
from edgespec.runtimes.files.kv import ATTENTION, KvFormat
from edgespec.runtimes.files.manifest import FORMATS, Attention, Format, HeadGroup, Operators
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.native import NativeSlot
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot
from tests.conftest import OPERATORS, TARGET, use_operators
from tests.support.coded import Prepared, prepare, random_tokens
from tests.support.planned import COUNT, CUT_SIZE, GROUPS, PLANS, Array, Ids, Planned, with_heads

NATIVE = pytest.mark.parametrize("operators", ["native"], indirect=True)


@pytest.fixture(params=OPERATORS)
def operators(request: pytest.FixtureRequest) -> Operators:
    """Everything here holds for both kinds, unless a test says otherwise."""
    return use_operators(request)


MEDUSA = [name for name in PLANS if name != "only"]


@pytest.fixture(scope="session")
def planner(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Planned]:
    """(operators, name of ``PLANS``, format) -> the embedded model with random heads."""
    made: dict[tuple[str, ...], Planned] = {}

    def get(layout: Operators, name: str, form: Format = "fp32") -> Planned:
        key = layout, name, form
        if key not in made:
            made[key] = with_heads(tmp_path_factory.mktemp("heads"), resolve(TARGET), PLANS[name], form, layout)
        return made[key]

    return get


@pytest.fixture
def planned(planner: Callable[..., Planned], operators: Operators) -> Callable[..., Planned]:
    return lambda name, form="fp32": planner(operators, name, form)


def text(slot: Slot, count: int, seed: int = 0) -> Ids:
    return np.random.default_rng(seed).integers(2, slot.vocab_size, count)


def same_kv(slot: Slot, other: Slot) -> None:
    assert slot.tokens == other.tokens
    theirs = other.snapshot()
    for name, values in slot.snapshot().items():
        np.testing.assert_array_equal(values, theirs[name])


def final(slot: Slot, tokens: Sequence[int] | Ids) -> tuple[Array, Array]:
    """The last residual stream and the logits of rows that are not kept."""
    slot.keep_hidden = True
    output = slot.forward(np.asarray(tokens, np.int64))
    slot.keep_hidden = False
    assert output.hidden is not None
    return output.hidden.copy(), output.logits.copy()


# -- ranges of layers --------------------------------------------------------------------------------------------------


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
            front = slot.forward_layers(rows, 0, 0, first)
            got = slot.forward_resumed(rows, Resume(front, first)).logits.copy()
            np.testing.assert_array_equal(got, whole.forward(rows).logits, f"{n} rows, {first} layers first")
            slot.keep(range(n))
            whole.keep(range(n))
            at += n
        same_kv(slot, whole)


@pytest.mark.parametrize("form", FORMATS)
def test_rows_run_one_by_one_resume_together(planned: Callable[..., Planned], form: Format) -> None:
    """What ParaDecode does: each row goes through the front alone, all of them through the back at once."""
    made = planned("shared", form)
    slot, whole = made.slot(2), made.slot()
    tokens = text(slot, 60, 3)
    for one in (slot, whole):
        one.prefill(tokens[:20].tolist())
    at = 20
    for n in (1, 5, 9, 2, 17):
        rows, early = tokens[at : at + n], 1 + n % 3
        parts = [slot.forward_layers(rows[i : i + 1], i, 0, early) for i in range(n)]
        # the first of them goes on to a later layer, which all reach in the end
        later = slot.forward_layers(parts[0], 0, early, early + 1)
        resume = Resume(np.concatenate(parts), early)
        np.testing.assert_array_equal(slot.forward_layers(resume.hidden, 0, early, early + 1)[:1], later)
        expected = whole.forward(rows).logits.copy()
        got = slot.forward_resumed(rows, resume).logits.copy()
        np.testing.assert_array_equal(got, expected)
        if isinstance(slot, GreedyTarget):
            best = slot.forward_resumed(rows, resume, best=True)
            assert best.best is not None
            assert not best.logits.size
            np.testing.assert_array_equal(best.best[0], expected.argmax(1))
            np.testing.assert_array_equal(best.best[1], expected.max(1))
        slot.keep(range(n))
        whole.keep(range(n))
        at += n
    same_kv(slot, whole)


@pytest.mark.parametrize("form", FORMATS)
def test_segments_of_layers_one_after_another(planned: Callable[..., Planned], form: Format) -> None:
    made = planned("shared", form)
    slot, whole = made.slot(2), made.slot()
    tokens = text(slot, 30, 5)
    for one in (slot, whole):
        one.prefill(tokens[:9].tolist())
    hidden, logits = final(whole, tokens[9:])
    stream = slot.forward_layers(tokens[9:], 0, 0, 1)
    for first in range(1, slot.layers):
        stream = slot.forward_layers(stream, 0, first, first + 1)
    np.testing.assert_array_equal(stream, hidden)
    np.testing.assert_array_equal(slot.forward_resumed(tokens[9:], Resume(stream, slot.layers)).logits, logits)
    slot.keep(range(21))
    whole.keep(range(21))
    same_kv(slot, whole)


@NATIVE
@pytest.mark.parametrize("attention", ["f16", "int8"])
def test_layers_over_compact_caches(planned: Callable[..., Planned], attention: Attention) -> None:
    made = planned("shared", "int4").written
    model = Model(made.folder, made.part, made.main, 2, ATTENTION[attention])
    slot, whole = open_slot(model, reserve=1), open_slot(model, reserve=1)
    tokens = text(slot, 300, 7)
    for one in (slot, whole):
        one.prefill(tokens[:250].tolist())
    expected = whole.forward(tokens[250:260]).logits.copy()
    front = np.concatenate([slot.forward_layers(tokens[250 + i : 251 + i], i, 0, 2) for i in range(10)])
    np.testing.assert_array_equal(slot.forward_resumed(tokens[250:260], Resume(front, 2)).logits, expected)


@pytest.fixture(scope="module")
def coded(native: None, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare(tmp_path_factory.mktemp("coded"), "padded")


CODED = {
    "int4": ATTENTION["int4"],
    "nomad": ATTENTION["nomad"],
    "codes for drafts": KvFormat("f16", "f16", codes="nomad2", sinks=4, draft_window=64),
}


@pytest.mark.parametrize("name", CODED)
def test_layers_over_coded_keys(coded: Prepared, name: str) -> None:
    """With a ring of exact keys, and beside codes that only drafts read."""
    slot, whole = coded.slot(CODED[name], 2), coded.slot(CODED[name])
    tokens = np.array(random_tokens(slot.vocab_size, 340))
    for one in (slot, whole):
        one.prefill(tokens[:300].tolist())
    for at in range(300, 340, 8):
        rows = tokens[at : at + 8]
        slot.forward_draft(rows[:1])
        front = np.concatenate([slot.forward_layers(rows[i : i + 1], i, 0, 1) for i in range(8)])
        got = slot.forward_resumed(rows, Resume(front, 1)).logits.copy()
        np.testing.assert_array_equal(got, whole.forward(rows).logits)
        slot.keep(range(8))
        whole.keep(range(8))
    same_kv(slot, whole)


def test_hidden_states_are_kept_only_where_asked_for(planned: Callable[..., Planned]) -> None:
    slot = planned("shared").slot()
    tokens = text(slot, 9)
    assert slot.forward(tokens).hidden is None
    slot.keep_hidden = True
    hidden = slot.forward(tokens).hidden
    assert hidden is not None
    expected = hidden.copy()
    assert expected.shape == (9, slot.model.facts.hidden)
    if isinstance(slot, GreedyTarget):
        np.testing.assert_array_equal(slot.forward_best(tokens).hidden, expected)
    front = slot.forward_layers(tokens, 0, 0, 2)
    np.testing.assert_array_equal(slot.forward_resumed(tokens, Resume(front, 2)).hidden, expected)
    slot.keep_hidden = False
    assert slot.forward(tokens).hidden is None
    assert not isinstance(slot, GreedyTarget) or slot.forward_best(tokens).hidden is None


@NATIVE
def test_layers_that_there_are_not(planned: Callable[..., Planned]) -> None:
    slot = planned("shared").slot()
    hidden = np.zeros((3, slot.model.facts.hidden), np.float32)
    for first, last in ((-1, 2), (3, 2), (0, slot.layers + 1)):
        with pytest.raises(InvalidRequest, match="expected a range within"):
            slot.forward_layers(np.zeros(3, np.int64), 0, first, last)
    with pytest.raises(InvalidRequest, match="expected 0 to"):
        slot.forward_resumed(np.zeros(3, np.int64), Resume(hidden, slot.layers + 1))
    for wrong in (hidden[:2], hidden[:, 1:]):
        with pytest.raises(InvalidRequest, match=r"expected \[3, 128\]"):
            slot.forward_resumed(np.zeros(3, np.int64), Resume(wrong, 1))
    with pytest.raises(InvalidRequest, match=r"expected \[3, 128\]"):
        slot.forward_layers(np.zeros(3, np.int64), 0, 1, 2)
    with pytest.raises(InvalidRequest, match="no heads 'none'; it has: blockwise, medusa"):
        slot.forward_heads("none", hidden)


# -- heads -------------------------------------------------------------------------------------------------------------


def silu(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return x / (1 + np.exp(-x))


def by_hand(made: Planned, group: HeadGroup, hidden: Array) -> NDArray[np.float64]:
    """A group of heads in float64, [count, r, size]."""
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
    found = slot.forward_heads(group, hidden)
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
    hidden[4] = 0  # every logit is the same: where there is no bias the lowest token is the best
    for group in made.written.part.heads:
        logits = all_logits(slot, group.name, hidden)
        found = slot.forward_heads(group.name, hidden, 3)
        assert found.logits is None
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
    best = slot.forward_heads("medusa", final(slot, [5])[0], CUT_SIZE + 2).best
    assert best is not None
    assert made.tokens is not None
    assert (best[0][..., CUT_SIZE:] == -1).all()
    np.testing.assert_array_equal(np.sort(best[0][0, 0, :CUT_SIZE]), made.tokens)


def same_columns(slot: Slot, found: Array | None, expected: Array) -> None:
    """The same bits on native operators; stock ones sum a column in an order that depends on where it stands."""
    assert found is not None
    np.testing.assert_allclose(found, expected, rtol=0, atol=0 if isinstance(slot, NativeSlot) else 1e-4)


@pytest.mark.parametrize("form", FORMATS)
def test_a_cut_head_gives_columns_of_the_whole_one(planned: Callable[..., Planned], form: Format) -> None:
    whole, cut = planned("shared", form), planned("cut", form)
    slot, other = whole.slot(), cut.slot(2)
    hidden, _ = final(slot, text(slot, 19))
    for group in GROUPS:
        columns = all_logits(slot, group.name, hidden)[..., cut.tokens]
        found = other.forward_heads(group.name, hidden)
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
    same_columns(draft, draft.forward_draft(tokens).logits[0], logits[-1, cut.tokens])
    if isinstance(draft, GreedyTarget):
        best = draft.forward_best(tokens).best
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
    early = slot.forward_layers(tokens, 0, 0, 1)
    np.testing.assert_allclose(all_logits(slot, "exit.1", early), by_hand(made, GROUPS[2], early), rtol=0, atol=1e-4)


@pytest.mark.parametrize("form", FORMATS)
def test_heads_leave_the_slot_alone(planned: Callable[..., Planned], form: Format) -> None:
    """Heads of an empty slot, between forward and keep, and after keep; rows kept out of place included."""
    made = planned("shared", form)
    slot, quiet = made.slot(), made.slot()
    tokens = text(slot, 60, 2)
    hidden, _ = final(quiet, tokens[:5])

    def heads() -> Heads:
        return slot.forward_heads("medusa", hidden, 2)

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
    same_kv(slot, quiet)
    np.testing.assert_array_equal(slot.forward(tokens[40:45]).logits.copy(), quiet.forward(tokens[40:45]).logits)


def test_many_rows_of_heads_over_a_small_cache(planned: Callable[..., Planned]) -> None:
    slot = planned("shared").slot(2)
    hidden = np.random.default_rng(1).standard_normal((slot.capacity + 300, slot.model.facts.hidden)).astype(np.float32)
    whole = all_logits(slot, "medusa", hidden)
    np.testing.assert_array_equal(all_logits(slot, "medusa", hidden[-3:]), whole[:, -3:])
    assert all_logits(slot, "medusa", hidden[:0]).shape == (COUNT, 0, slot.vocab_size)
