"""Contract of every class of slots: one table of calls, on one small model, compared with its text token by token.

A call that a slot lacks is refused, and a refusal changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.decoding.target import BEST, HYPOTHESES, OPTIONAL, Pass, SkipSet
from edgespec.errors import EdgespecError, InvalidRequest
from edgespec.export.emit.device import add_device_graphs
from edgespec.export.foreign.model import ForeignModel
from edgespec.export.foreign.write import write_foreign
from edgespec.export.quantization.weights import WeightChoice
from edgespec.runtimes.files.manifest import SkipSetPart
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.guided import Guided
from edgespec.runtimes.slots.native_batch import NativeBatch
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot
from tests.conftest import Reference, Written
from tests.support import hf
from tests.support.device import HostModel
from tests.support.foreign import write_export
from tests.support.passes import run_draft, run_hypotheses, run_layers, run_rest, states

NAME = "llama_tied_gqa"
ATOL = 1e-4
SKIP = SkipSet((1,), (0,))
Logits = NDArray[np.float32]

# abilities of each class of slots besides ``Target``'s
CAN: dict[str, set[str]] = {
    "native": {"tree", "draft", "skip", "hypotheses", "layers", "hidden", "copy"},
    "batch": {"tree", "draft", "skip", "hypotheses", "layers", "hidden", "copy"},
    "stock": {"tree", "draft", "skip", "hypotheses", "copy"},  # layers and hidden states in graphs with heads
    "optimum": {"hypotheses", "copy"},
    "device": {"tree", "draft", "skip", "hidden"},
    "guided": {"tree", "layers", "hidden"},
}


@pytest.fixture(scope="module")
def slots(writer: Callable[..., Written], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Name of ``CAN`` -> a slot that holds nothing."""
    models: dict[str, Any] = {}

    def model(kind: str) -> Any:
        if kind == "optimum":
            source = write_export(tmp_path_factory.mktemp("export"), hf.CONFIGS[NAME], hf.SEEDS[NAME], positions=True)
            opened = ForeignModel.open(source, None)
            folder = tmp_path_factory.mktemp("part")
            made = write_foreign(folder, opened.open_graph(), opened.facts, WeightChoice.of("fp32", None, None))
            return Model(folder, made.part, "plain", 1)
        written = writer("stock" if kind in ("stock", "device") else "native", NAME)
        if kind == "device":
            skip = SkipSetPart(attention=list(SKIP.attention), mlp=list(SKIP.mlp))
            part = add_device_graphs(written.folder, written.arch, written.part, "webgpu", skip)
            host = HostModel(written.folder, part, "webgpu")
            host.most_rows = 10**6
            return host
        return written.model()

    def get(kind: str) -> Any:
        own = {"batch": "native", "guided": "native"}.get(kind, kind)
        if own not in models:
            models[own] = model(own)
        if kind == "batch":
            return NativeBatch(models[own], 2, context=200).slots[1]
        slot = open_slot(models[own], reserve=1)
        if kind == "guided":  # of no weight: the text is that of the half that was asked
            return Guided(slot, open_slot(models[own], reserve=1), 1, [3], 1.0)
        return slot

    return get


@pytest.fixture(params=CAN)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def slot(slots: Callable[[str], Any], kind: str) -> Any:
    return slots(kind)


@pytest.fixture
def text(reference: Callable[[str], Reference]) -> list[int]:
    """Tokens of a checkpoint's own text."""
    return reference(NAME).tokens.reshape(-1).tolist()[:24]


def rows(slot: Any, tokens: Sequence[int], parents: Sequence[int] | None = None) -> Logits:
    """Logits of a pass, copied."""
    above = None if parents is None else np.array(parents, np.int64)
    found: Logits = slot.forward(np.array(tokens, np.int64), above).logits.copy()
    return found


def after(slot: Any, text: Sequence[int]) -> Logits:
    """Logits [n, vocab] after each token, one at a time; the slot holds all of them afterwards."""
    slot.follow([])
    found = []
    for token in text:
        found.append(rows(slot, [token])[0])
        slot.keep([0])
    return np.stack(found)


def same(found: Logits, expected: Logits) -> None:
    np.testing.assert_allclose(found, expected, atol=ATOL)


@pytest.mark.parametrize("kind", sorted(CAN.keys() - {"guided"}), indirect=True)
def test_logits_are_the_checkpoints(slot: Any, reference: Callable[[str], Reference]) -> None:
    known = reference(NAME)
    tokens = known.tokens.reshape(-1)
    np.testing.assert_allclose(rows(slot, tokens[:64].tolist())[-1], after(slot, tokens[:64].tolist())[-1], atol=ATOL)
    at = [row for row in known.rows.tolist() if row < 64]
    assert at
    slot.follow([])
    same(rows(slot, tokens[:64].tolist())[at], known.logits[: len(at)])


def test_a_pass_of_many_rows_is_that_of_one_after_the_other(slot: Any, text: list[int]) -> None:
    expected = after(slot, text)
    for held in (0, 5, 17):
        slot.prefill(text[slot.follow(text[:held]) : held])
        assert slot.tokens == text[:held]
        same(rows(slot, text[held:]), expected[held:])
        assert slot.tokens == text[:held]  # no row is kept without a call of keep


def test_what_is_read_ahead_is_as_if_it_was_written(slot: Any, text: list[int]) -> None:
    expected = after(slot, text)
    assert slot.follow([]) == 0
    slot.prefill(text[:9])
    slot.prefill(text[9:20])
    assert slot.tokens == text[:20]
    same(rows(slot, text[20:]), expected[20:])


def test_refused_rows_leave_nothing(slot: Any, text: list[int]) -> None:
    expected = after(slot, text)
    slot.follow(text[:8])
    rows(slot, [text[8], 1, 1, 1])
    slot.keep([0])
    rows(slot, [*text[9:12], 2])
    slot.keep([0, 1, 2])
    assert slot.tokens == text[:12]
    same(rows(slot, text[12:]), expected[12:])


def test_it_goes_back_to_what_two_texts_share(slot: Any, text: list[int]) -> None:
    expected = after(slot, text)
    assert slot.follow([*text[:11], 1, 1]) == 11
    slot.prefill([1, 1])
    assert slot.crop(11) == 11
    assert slot.tokens == text[:11]
    same(rows(slot, text[11:]), expected[11:])


def test_every_branch_of_a_tree_is_a_text_of_its_own(slot: Any, kind: str, text: list[int]) -> None:
    expected = after(slot, text)
    slot.follow(text[:6])
    tree, parents = [text[6], 1, text[7], 2, text[8]], [-1, 0, 0, 1, 2]
    if "tree" not in CAN[kind]:
        assert not slot.trees
        return
    found = rows(slot, tree, parents)
    same(found[[0, 2, 4]], expected[[6, 7, 8]])
    slot.keep([0, 2, 4])
    assert slot.tokens == text[:9]
    same(rows(slot, text[9:]), expected[9:])


def greedy(slot: Any, text: list[int]) -> None:
    logits = rows(slot, text[10:])
    found = slot.forward(np.array(text[10:], np.int64), None, True)
    if BEST not in slot.can:  # all logits will do
        same(found.logits, logits)
        return
    np.testing.assert_array_equal(found.best[0], logits.argmax(-1))
    np.testing.assert_allclose(found.best[1], logits.max(-1), atol=ATOL)


def draft(slot: Any, text: list[int]) -> None:
    logits = rows(slot, text[10:14])
    same(run_draft(slot, np.array(text[10:13], np.int64)).logits, logits[2:3])
    same(run_draft(slot, np.array(text[13:14], np.int64), 3).logits, logits[3:])


def skip(slot: Any, text: list[int]) -> None:
    whole = rows(slot, text[10:11])
    found = run_draft(slot, np.array(text[10:11], np.int64), 0, SKIP).logits
    assert found.shape == whole.shape
    assert not np.allclose(found, whole, atol=ATOL)


def hypotheses(slot: Any, text: list[int]) -> None:
    expected = np.stack([rows_after(slot, text[:at], text[at]) for at in (4, 7, 10)])
    slot.follow(text[:10])
    slot.prefill(text[len(slot.tokens) : 10])
    found = run_hypotheses(slot, np.array([text[4], text[7], text[10]]), np.array([4, 7, 10]), np.array([-1, -1, -1]))
    same(found.logits, expected)


def rows_after(slot: Any, held: list[int], token: int) -> Logits:
    slot.prefill(held[slot.follow(held) :])
    return rows(slot, [token])[0]


def layers(slot: Any, text: list[int]) -> None:
    logits, tokens = rows(slot, text[10:14]), np.array(text[10:14], np.int64)
    for first in range(slot.layers + 1):
        hidden = run_layers(slot, tokens, 0, 0, first)
        assert hidden.shape[0] == 4
        same(run_rest(slot, tokens, hidden, first).logits, logits)


def hidden(slot: Any, text: list[int]) -> None:
    found = states(slot, np.array(text[10:14], np.int64))
    assert found.hidden is not None
    last = np.array(found.hidden)
    assert len(last) == 4
    if "layers" in slot.can:
        same(run_layers(slot, np.array(text[10:14], np.int64), 0, 0, slot.layers), last)


CALLS: dict[str, Callable[[Any, list[int]], None]] = {
    "best": greedy,
    "draft": draft,
    "skip": skip,
    "hypotheses": hypotheses,
    "layers": layers,
    "hidden": hidden,
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_does_what_it_says_or_is_refused_and_changes_nothing(
    slot: Any, kind: str, call: str, text: list[int]
) -> None:
    expected = after(slot, text)
    slot.follow(text[:10])
    assert (HYPOTHESES in slot.can) == ("hypotheses" in CAN[kind])
    assert slot.trees == ("tree" in CAN[kind])
    if call in CAN[kind] or call == "best":
        CALLS[call](slot, text)
        slot.follow(text[:10])
    else:
        with pytest.raises((EdgespecError, AssertionError)):
            CALLS[call](slot, text)
        assert slot.tokens == text[:10]
    same(rows(slot, text[10:]), expected[10:])


# a pass that asks for each field
FIELDS: dict[str, Any] = {
    "parents": np.array([-1, 0, 0, 1]),
    "hidden": True,
    "aux_hidden": True,
    "scored": 1,
    "read": True,
    "draft": True,
    "offset": 2,
    "visible": np.full(4, 3),
    "inputs": np.zeros((4, 64), np.float32),
    "fused": True,
    "layers": (0, 1),
    "skip": SKIP,
    "group": "medusa",
    "block": True,
    "adapters": np.zeros(4, np.int64),
}


def test_every_field_that_a_slot_lacks_is_refused_by_name(slot: Any, kind: str, text: list[int]) -> None:
    """In one place, before anything runs."""
    assert FIELDS.keys() | {"of"} == OPTIONAL.keys()
    expected = after(slot, text)
    slot.follow(text[:10])
    tokens = np.array(text[10:14], np.int64)
    lacking = [name for name in FIELDS if name not in slot.can]
    assert lacking
    for name in [*lacking, "of"]:
        value = slot if name == "of" else FIELDS[name]
        with pytest.raises(InvalidRequest, match=OPTIONAL[name]):
            slot.run(Pass(tokens)._replace(**{name: value}))
    assert slot.tokens == text[:10]
    same(rows(slot, text[10:]), expected[10:])


def test_a_text_is_copied_from_slot_to_slot(slots: Callable[[str], Any], slot: Any, kind: str, text: list[int]) -> None:
    if not isinstance(slot, Slot):
        return
    expected, other = after(slot, text), slots(kind)
    copied = other.copy_prefix_from(slot, 10)
    assert copied == (10 if "copy" in CAN[kind] else 0)
    assert other.tokens == text[:copied]
    same(rows(other, text[copied:]), expected[copied:])
