"""Single rows of strict stock graphs: the probe's result holds for every pass, and with pairs no pass has one row."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

from edgespec.export import emit
from edgespec.runtimes.files.formats import FORMATS, Format
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.cpu import try_rows
from edgespec.runtimes.slots.pairs import VARIABLE
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot
from tests.conftest import Written
from tests.support.passes import run_draft, run_heads, run_hypotheses, run_layers, run_rest
from tests.support.planned import Planned, final, text
from tests.support.slots import STOCK
from tests.support.watched import watch

# together they have every operator of stock graphs
KINDS = ("builtin:shakespeare", "llama_biases_mqa", "gemma2_caps", "gpt2_default", "apertus_biases", "nanochat_capped")
# wide heads: test_wide_heads.py; gates on attention's output: of models that only native operators compute
ELSEWHERE = {"Pad", "Sigmoid"}
SIZES = (2, 3, 5, 8, 17)
DEPTHS = (0, 13, 61, 100)


@pytest.fixture
def operators() -> str:
    return "stock"


def differing(slot: Slot) -> list[tuple[int, int, int]]:
    """List (tokens before, rows, row) of rows whose logits differ from those of a separate pass."""
    tokens = np.random.default_rng(5).integers(2, slot.vocab_size, DEPTHS[-1] + SIZES[-1])
    found = []
    for depth in DEPTHS:
        slot.follow([])
        slot.prefill(tokens[:depth].tolist())
        rows, alone = tokens[depth : depth + SIZES[-1]], []
        for row in rows:
            alone.append(slot.forward(row[None]).logits[0].copy())
            slot.keep([0])
        for size in SIZES:
            slot.follow(tokens[:depth].tolist())
            logits = slot.forward(rows[:size]).logits
            found += [(depth, size, row) for row in range(size) if not np.array_equal(logits[row], alone[row])]
    return found


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", KINDS)
def test_rows_are_what_the_probe_says(
    written: Callable[..., Written], name: str, form: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    model = written(name, form).model("gated")
    said = try_rows(model)
    assert differing(open_slot(model)) == []  # no graph of today is "differ"
    model.pairs = False
    assert (differing(open_slot(model)) == []) == (said == "alone")
    quick = written(name, form).model("gated")
    open_slot(quick)
    assert quick.pairs == (said == "pairs")  # a slot without a known result tries it


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", KINDS)
def test_pairs_are_exact_everywhere(
    written: Callable[..., Written], name: str, form: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    watched = watch(monkeypatch)
    model = written(name, form).model("gated")
    assert try_rows(model) == "pairs"
    assert differing(open_slot(model)) == []
    assert watched.strict()
    assert watched.alone() == []


def test_a_machine_where_lone_rows_differ_is_noticed(
    written: Callable[..., Written], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever kernel it is, and only for as long as pairs are off."""
    monkeypatch.delenv(VARIABLE, raising=False)
    run = Model.run_bound

    def disturbed(self: Model, io: object) -> None:
        run(self, io)
        for name, shape in list(self._views):
            if name == "logits" and shape[1] == 1:
                self._views[name, shape].array[..., 0] += 1

    monkeypatch.setattr(Model, "run_bound", disturbed)
    for model in (written(KINDS[0], "int4").model("gated") for _ in range(2)):
        assert try_rows(model) == "pairs"
        assert differing(open_slot(model)) == []
    quick = written(KINDS[0], "int4").model("gated")
    open_slot(quick)
    assert quick.pairs
    monkeypatch.setenv(VARIABLE, "0")
    assert try_rows(quick) == "differ"


def operator_names(graph: onnx.GraphProto) -> Iterator[str]:
    for node in graph.node:
        yield node.op_type
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from operator_names(attribute.g)


def test_every_operator_that_stock_graphs_are_made_of_is_tried(written: Callable[..., Written]) -> None:
    tried = set()
    for name in KINDS:
        for form in FORMATS:
            made = written(name, form)
            file = made.folder / made.part.graphs["gated"].file
            tried |= set(operator_names(onnx.load(str(file), load_external_data=False).graph))
    folder = Path(str(emit.__file__)).parent
    sources = [(folder / f"{name}.py").read_text("utf-8") for name in ("stock", "attention", "pieces", "formats")]
    emitted = {name for source in sources for name in re.findall(r'\bnode\(\s*"(\w+)"', source)}
    assert emitted - tried == ELSEWHERE


@STOCK
@pytest.mark.parametrize("form", ["int4", "w8a8"])
@pytest.mark.parametrize("name", ["shared", "own cut"])
def test_heads_and_layers_have_no_lone_row(
    planned: Callable[..., Planned], name: str, form: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every call of a slot, one row gives the same bits as among others."""
    monkeypatch.setenv(VARIABLE, "1")
    watched = watch(monkeypatch)
    made = planned(name, form)
    slot = made.slot()
    tokens = text(slot, 24)
    hidden, _ = final(slot, tokens)
    for group in made.written.part.heads:
        whole = run_heads(slot, group.name, hidden).logits
        assert whole is not None
        whole = whole.copy()
        for row in (0, 7):
            lone = run_heads(slot, group.name, hidden[row : row + 1]).logits
            assert lone is not None
            np.testing.assert_array_equal(lone, whole[:, row : row + 1])
    slot.follow([])
    slot.prefill(tokens[:9].tolist())
    slot.prefill(tokens[9:10].tolist())  # a prefill's last piece
    rows = tokens[10:13]
    early = run_layers(slot, rows, 0, 0, 2).copy()
    np.testing.assert_array_equal(run_layers(slot, rows[:1], 0, 0, 2), early[:1])
    resumed = run_rest(slot, rows, early, 2).logits.copy()
    np.testing.assert_array_equal(run_rest(slot, rows[:1], early[:1], 2).logits, resumed[:1])
    np.testing.assert_array_equal(slot.forward(rows).logits, resumed)
    np.testing.assert_array_equal(slot.forward(rows[:1], np.array([-1])).logits, resumed[:1])
    np.testing.assert_array_equal(run_draft(slot, rows).logits, resumed[-1:])
    np.testing.assert_array_equal(run_draft(slot, rows[:1]).logits, resumed[:1])
    np.testing.assert_array_equal(slot.embed(rows[:1]), slot.embed(rows)[:1])
    scored = run_hypotheses(slot, rows[:1], np.array([10]), np.array([-1])).logits
    np.testing.assert_array_equal(scored, resumed[:1])
    assert watched.alone() == []


def test_a_text_may_fill_its_context_with_pairs(
    written: Callable[..., Written], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    made = written("llama_biases_mqa", "int4")
    slot, context = made.slot("gated"), made.part.facts.context
    tokens = np.random.default_rng(1).integers(2, slot.vocab_size, context)
    slot.prefill(tokens[:-1].tolist())
    last = slot.forward(tokens[-1:]).logits.copy()
    slot.follow(tokens[:-2].tolist())
    np.testing.assert_array_equal(slot.forward(tokens[-2:]).logits[1:], last)
