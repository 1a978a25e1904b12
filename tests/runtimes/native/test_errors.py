"""The native operator by hand: inputs that it rejects, with messages.  Nothing ends the process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from edgespec.errors import BundleError
from edgespec.runtimes.files.manifest import Operators
from edgespec.runtimes.slots.native_runner import Gates
from tests.conftest import Written, use_operators
from tests.support.native_graph import Raw, doctored, program_text, with_program
from tests.support.planned import CUT_SIZE, PLANS, with_heads

NAME = "qwen2_untied"
Write = Callable[..., Written]
Feeds = dict[str, NDArray[Any]]


@pytest.fixture(params=["native"])
def operators(request: pytest.FixtureRequest) -> Operators:
    return use_operators(request)


@pytest.fixture
def raw(written: Write) -> Raw:
    return Raw(written(NAME), slots=2)


# -- inputs ----------------------------------------------------------------------------------------------------------

TOKEN, POSITION, SLOT, VISIBLE, PARENT, PLACE = range(6)


@pytest.mark.parametrize(
    "line, row, value, message",
    [
        (TOKEN, 1, -1, "token -1 is outside the vocabulary"),
        (TOKEN, 1, 10**6, "token 1000000 is outside the vocabulary"),
        (TOKEN, 1, 1 << 40, "is outside the vocabulary"),
        (POSITION, 2, -1, "row 2 of the plan is out of range"),
        (POSITION, 2, 10**6, "position 1000000 is beyond the table of angles"),
        (POSITION, 2, 1 << 62, "is beyond the table of angles"),
        (SLOT, 0, -1, "slot -1 does not exist"),
        (SLOT, 2, 2, "slot 2 does not exist"),
        (SLOT, 0, 1, "rows must be in order of their slots"),
        (SLOT, 2, 1, "a parent lies in another slot"),
        (VISIBLE, 0, -1, "row 0 of the plan is out of range"),
        (VISIBLE, 0, 129, "row 0 of the plan is out of range"),
        (PARENT, 1, 1, "row 1 of the plan is out of range"),
        (PARENT, 1, -2, "row 1 of the plan is out of range"),
        (PLACE, 0, -1, "row 0 goes to place -1 of a cache of 128 tokens"),
        (PLACE, 2, 128, "row 2 goes to place 128 of a cache of 128 tokens"),
        (PLACE, 2, 1 << 62, "of a cache of 128 tokens"),
    ],
)
def test_a_plan_out_of_range(raw: Raw, line: int, row: int, value: int, message: str) -> None:
    feeds = raw.feeds([5, 6, 7])
    feeds["plan"][line, row] = value
    with pytest.raises(Exception, match=message):
        raw.run(feeds)
    assert not raw.kv.array.any()  # refused before anything was written


def test_rows_that_see_more_than_there_is_room_for(raw: Raw) -> None:
    """Each place exists, but two rows have the same one: they count as if they were consecutive."""
    feeds = raw.feeds([5, 6, 7])
    feeds["plan"][POSITION], feeds["plan"][VISIBLE], feeds["plan"][PLACE] = 5, 127, 127
    with pytest.raises(Exception, match="row 1 sees more tokens than its cache holds"):
        raw.run(feeds)
    assert not raw.kv.array.any()


TOP, KEYS, VALUES, CODES, READ_CODES, WINDOW, SINKS, RING = range(8)
FIT = "KV formats that do not fit together"


@pytest.mark.parametrize(
    "at, value, message",
    [
        (TOP, -1, "expected top within 0 to 1024"),
        (TOP, 1025, "expected top within 0 to 1024"),
        (KEYS, -1, "unknown KV format"),
        (KEYS, 7, "unknown KV format"),
        (KEYS, 6, FIT),
        (KEYS, 3, "the tables do not fit"),
        (VALUES, 3, FIT),
        (READ_CODES, 1, FIT),
        (CODES, 4, "the tables do not fit"),
        (SINKS, 17, "at most 16 sinks"),
        (SINKS, -1, "at most 16 sinks"),
        (WINDOW, -1, "not smaller than its window"),
        (RING, 8, "a ring of whole tiles"),
        (RING, -16, "a ring of whole tiles"),
        (RING, 1 << 25, "a ring of whole tiles"),
        (RING, 1 << 20, "of a cache of 0 tokens"),  # the ring itself is larger than the cache
    ],
)
def test_controls_out_of_range(raw: Raw, at: int, value: int, message: str) -> None:
    feeds = raw.feeds([5, 6, 7])
    feeds["control"][at] = value
    with pytest.raises(Exception, match=message):
        raw.run(feeds)


@pytest.mark.parametrize(
    "name, array, message",
    [
        ("plan", np.zeros((5, 3), np.int64), "plan"),
        ("plan", np.zeros(18, np.int64), "plan"),
        ("plan", np.zeros((6, 3), np.int32), "tensor.int32."),
        ("rows", np.array([3]), "a row that reaches the LM head does not exist"),
        ("rows", np.array([-1]), "a row that reaches the LM head does not exist"),
        ("gates", np.ones(1, bool), "gates"),
        ("moves", np.array([[0, 0, 128]]), "a move is out of range"),
        ("moves", np.array([[2, 0, 1]]), "a move is out of range"),
        ("moves", np.array([[0, -2, 1]]), "a move is out of range"),
        ("moves", np.zeros((1, 2), np.int64), "moves"),
        ("control", np.zeros(7, np.int64), "control"),
        ("tables", np.zeros(3, np.float32), "the tables do not fit"),
        ("kv", np.zeros(100, np.uint8), "kv"),
        ("kv", np.zeros((1, 100), np.uint8), "of a cache of 0 tokens"),
        ("kv", np.zeros((0, 100), np.uint8), "slot 0 does not exist"),
        ("hidden_in", np.zeros(7, np.float32), "hidden"),
        ("hidden_in", np.zeros((3, 64), np.float64), "tensor.double."),
    ],
)
def test_inputs_of_another_shape(raw: Raw, name: str, array: NDArray[Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        raw.run(raw.feeds([5, 6, 7]) | {name: array})


def test_a_pass_of_no_rows(raw: Raw) -> None:
    shapes = [array.shape for array in raw.run(raw.feeds([]))]
    assert shapes == [(0, raw.facts.vocab), (0, 0), (0, 0), (0, raw.facts.hidden)]
    with pytest.raises(Exception, match="a row that reaches the LM head does not exist"):
        raw.run(raw.feeds([]) | {"rows": np.array([0])})


def test_no_row_need_reach_the_head(raw: Raw) -> None:
    logits, *_ = raw.run(raw.feeds([5, 6]) | {"rows": np.zeros(0, np.int64)})
    assert logits.shape == (0, raw.facts.vocab)
    assert raw.kv.array[0].any()


# -- hidden states and heads -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def headed(native: None, checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Write a model with heads of every kind."""
    return with_heads(tmp_path_factory.mktemp("headed"), checkpoint(NAME), PLANS["cut"], "int4").written


def test_gates_that_do_not_fit_together(headed: Written) -> None:
    raw = Raw(headed)
    at, feeds = raw.at, raw.feeds([5, 6, 7])
    for gates, message in (
        (raw.gates(off=[at.embed]), "neither gate is on"),
        (raw.gates(at.load), r"hidden states \[0, 64\]: expected \[3, 64\]"),
        (raw.gates(at.heads[0]), "LM heads whose rows do not fit together"),
        (raw.gates(at.heads[0], at.heads[1], off=[at.lm]), "LM heads whose rows do not fit together"),
        (raw.gates()[:-1], rf"expected {at.count} gates|gates"),
    ):
        with pytest.raises(Exception, match=message):
            raw.run(feeds | {"gates": gates})
    for shape in ((2, 64), (4, 64), (3, 63), (3, 65), (0, 0)):
        with pytest.raises(Exception, match=r"expected \[3, 64\]|hidden_in"):
            raw.run(feeds | {"gates": raw.gates(at.load), "hidden_in": np.zeros(shape, np.float32)})
    assert not raw.kv.array.any()


def test_tokens_are_not_looked_at_where_hidden_states_come_in(headed: Written) -> None:
    raw, other = Raw(headed), Raw(headed)
    at, feeds = raw.at, raw.feeds([5, 6, 7])
    embedded = raw.run(feeds | {"gates": feeds["gates"] & (np.arange(at.count) >= at.embed) | _only(at, at.hidden)})[3]
    assert embedded.shape == (3, raw.facts.hidden)
    expected = raw.run(feeds)[0]
    feeds["plan"][TOKEN] = [-1, 1 << 40, 7]
    loaded = {"gates": raw.gates(at.load, off=[at.embed]), "hidden_in": embedded}
    np.testing.assert_array_equal(other.run(feeds | loaded)[0], expected)
    with pytest.raises(Exception, match="token -1 is outside the vocabulary"):
        raw.run(feeds | loaded | {"gates": raw.gates(at.load)})


def test_the_rows_that_heads_give(headed: Written) -> None:
    raw = Raw(headed)
    at, feeds = raw.at, raw.feeds([5, 6, 7]) | {"rows": np.array([2, 0])}
    for number, group in enumerate(headed.part.heads):
        gates = raw.gates(at.heads[number], off=[at.lm])
        logits, ids, _, hidden = raw.run(feeds | {"gates": gates})
        assert (logits.shape, ids.shape, hidden.shape) == ((2 * group.count, CUT_SIZE), (2 * group.count, 0), (0, 64))
        none = raw.run(feeds | {"gates": gates, "rows": np.zeros(0, np.int64)})[0]
        assert none.shape == (0, CUT_SIZE)
    nothing = raw.run(feeds | {"gates": raw.gates(at.hidden, off=[at.lm])})
    assert [array.shape for array in nothing] == [(0, raw.facts.vocab), (0, 0), (0, 0), (3, 64)]


def _only(at: Gates, *on: int) -> NDArray[np.bool_]:
    gates = np.zeros(at.count, bool)
    gates[list(on)] = True
    return gates


# -- weights and programs --------------------------------------------------------------------------------------------


def matrix_of(model: onnx.ModelProto) -> onnx.TensorProto:
    return next(item for item in model.graph.initializer if item.name.endswith(".packed"))


def moved(model: onnx.ModelProto) -> None:
    for item in matrix_of(model).external_data:
        if item.key == "offset":
            item.value = str(int(item.value) + 4)


def shortened(model: onnx.ModelProto) -> None:
    tensor = matrix_of(model)
    tensor.dims[0] -= 64
    for item in tensor.external_data:
        if item.key == "length":
            item.value = str(tensor.dims[0])


def emptied(model: onnx.ModelProto) -> None:
    for item in model.graph.initializer:
        if item.name.endswith("norm.weight"):
            item.CopyFrom(onnx.numpy_helper.from_array(np.ones(3, np.float32), item.name))


@pytest.mark.parametrize(
    "change, message",
    [
        (moved, "packed weights must be aligned to 64 bytes"),
        (shortened, r"packed weights of \d+ bytes: expected \d+ for \[\d+, \d+\]"),
        (emptied, "a vector of weights is too short"),
    ],
)
def test_weights_that_do_not_fit(
    written: Write, tmp_path: Path, change: Callable[[onnx.ModelProto], None], message: str
) -> None:
    made = written(NAME, "int4")
    raw = Raw(made, path=doctored(made, tmp_path / "graph", change))
    with pytest.raises(Exception, match=message):
        raw.run(raw.feeds([5, 6, 7]))


def test_weights_beyond_the_file(written: Write, tmp_path: Path) -> None:
    made = written(NAME, "int4")
    path = doctored(made, tmp_path / "graph", lambda model: None)
    with (path.parent / "model.data").open("rb+") as file:
        file.truncate(100)
    with pytest.raises(BundleError, match="cannot load this graph"):
        Raw(made, path=path)


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("embed ", "embde ", "unknown step"),
        ("kind=q4", "kind=q5", "unknown kind of matrix"),
        ("kind=q4", "kind", "expected key=value"),
        ("layer=0", "lawyer=0", "unknown key lawyer"),
        ("layer=0", "layer=x", "expected an integer"),
        ("layer=0", "layer=-1", "expected layer of 0 to 4096"),
        ("scale=0", "scale=0x?", "expected a number"),
        ("floats 0 ", "floats 64 ", "expected an id and a width"),
        ("floats 0 ", "floats 0 -", "expected an id and a width"),
        ("acts 0 ", "acts 1 ", "declared twice|no such activations"),
        ("out=0", "out=63", "no such buffer"),
        ("heads=", "heads=1", "the heads of this layer|too narrow"),
        ("attend", "gate index=0 skip=1\nattend", "the heads of this layer"),
        ("skip=", "skip=9", "skips to no step"),
    ],
)
def test_a_program_that_cannot_be_read(written: Write, tmp_path: Path, old: str, new: str, message: str) -> None:
    made = written(NAME, "int4")
    text = program_text(made)
    assert old in text
    with pytest.raises(BundleError, match=message):
        Raw(made, path=with_program(made, tmp_path / "graph", text.replace(old, new, 1)))


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("load out=0", "load out=-1", "no such buffer"),
        ("load out=0 k=64", "load out=0 k=0", "expected k"),
        ("load out=0 k=64", "load out=0 k=32", "hidden states of different widths"),
        ("store x=0 k=64", "store x=0 k=65", "too narrow"),
        ("norm x=", "norm x=99 eps=", "no such buffer|expected k, norm"),
        ("silu x=", "silu x=63 eps=", "eps out of place"),
        ("n=64 times=3 out", "n=64 times=0 out", "expected times of 1 to 1024"),
        ("split x=", "split first=1 x=", "first out of place"),
        ("times=3", "times=1025", "expected times of 1 to 1024"),
        ("n=64 times=3 out", "n=64 times=4 out", "too narrow"),
        ("first=0", "first=1025", "expected first of 0 to 1024"),
        ("rows=2", "rows=3", "expected rows of 0 to 2"),
        ("rows=2 times=3", "rows=1 times=3", "times or first out of place"),
        ("rows=1\nsilu", "rows=2\nsilu", "rows out of place"),
        ("heads act=", "heads rows=1 act=", "rows out of place"),
        ("glu act=", "glu rows=1 act=", "rows out of place"),
        ("attend layer=", "attend times=2 layer=", "times out of place"),
    ],
)
def test_a_program_of_heads_that_cannot_be_read(
    headed: Written, tmp_path: Path, old: str, new: str, message: str
) -> None:
    text = program_text(headed)
    at = text.rindex(old)  # among the heads, not the layers
    with pytest.raises(BundleError, match=message):
        Raw(headed, path=with_program(headed, tmp_path / "graph", text[:at] + new + text[at + len(old) :]))


def test_a_program_that_names_a_weight_that_is_not_there(written: Write, tmp_path: Path) -> None:
    made = written(NAME, "int4")
    text = program_text(made).replace("w=0", "w=999", 1)
    raw = Raw(made, path=with_program(made, tmp_path / "graph", text))
    with pytest.raises(Exception, match="the program names weight 999 of"):
        raw.run(raw.feeds([5, 6, 7]))


def test_a_program_without_attention_keeps_nothing(written: Write, tmp_path: Path) -> None:
    made = written(NAME, "int4")
    lines = [
        line for line in program_text(made).splitlines() if line.split()[0] not in ("gate", "load", "heads", "attend")
    ]
    raw = Raw(made, path=with_program(made, tmp_path / "graph", "\n".join(lines)))
    feeds = raw.feeds([5, 6, 7])
    logits, *_ = raw.run(feeds)
    assert logits.shape[0] == 3
