"""The native operator by hand: what it refuses, in words, and passes that no slot makes.  Nothing ends the process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from edgespec.errors import BundleError
from edgespec.runtimes.files.manifest import FORMATS, Format, Operators
from edgespec.runtimes.slots.native_gates import Gates
from tests.conftest import Written, use_operators
from tests.support.native_pass import Raw, doctored, program_text, with_program
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
        (RING, 1 << 20, "of a cache of 0 tokens"),  # the ring alone is larger than the cache
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
        ("moves", np.array([[0, -1, 1]]), "a move is out of range"),
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
    """A model with heads of every kind."""
    return with_heads(tmp_path_factory.mktemp("headed"), checkpoint(NAME), PLANS["cut"], "int4").written


def test_gates_that_do_not_fit_together(headed: Written) -> None:
    raw = Raw(headed)
    at, feeds = raw.at, raw.feeds([5, 6, 7])
    for gates, message in (
        (raw.gates(off=[at.embed]), "neither gate is on"),
        (raw.gates(at.load), r"hidden states \[0, 64\]: expected \[3, 64\]"),
        (raw.gates(at.group(0)), "LM heads whose rows do not fit together"),
        (raw.gates(at.group(0), at.group(1), off=[at.lm]), "LM heads whose rows do not fit together"),
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
        gates = raw.gates(at.group(number), off=[at.lm])
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
        ("layer=0", "layer=-1", "expected no negative number"),
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
        ("silu x=", "silu x=63 eps=", "no such buffer|unknown key|expected"),
        ("n=64 times=3 out", "n=64 times=0 out", "times or first out of range"),
        ("split x=", "split first=1 x=", "expected n, and times as often"),
        ("times=3", "times=1025", "times or first out of range"),
        ("n=64 times=3 out", "n=64 times=4 out", "too narrow"),
        ("first=0", "first=1025", "times or first out of range"),
        ("rows=2", "rows=3", "rows out of place"),
        ("rows=2 times=3", "rows=1 times=3", "times or first out of place"),
        ("rows=1\nsilu", "rows=2\nsilu", "rows out of place"),
        ("heads act=", "heads rows=1 act=", "rows out of place"),
        ("glu act=", "glu rows=1 act=", "rows out of place"),
        ("attend layer=", "attend times=2 layer=", "times or first out of place"),
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


FUZZ = """
import sys
from pathlib import Path
import numpy as np
from edgespec.export.bundle.model import open_model
from edgespec.runtimes.files.manifest import ModelPart
from tests.conftest import Written
from tests.support.native_pass import Raw, program_text, with_program

folder, source, part, seed = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
made = Written(folder, open_model(source, None), ModelPart.model_validate_json(part), {})
random, text = np.random.default_rng(seed), program_text(made)
ran = refused = 0
for _ in range(120):
    words = text.split(" ")
    for _ in range(int(random.integers(1, 3))):
        at = int(random.integers(len(words)))
        key, equals, value = words[at].partition("=")
        new = str(random.choice(["0", "1", "2", "7", "16", "33", "100", "4000", "-1", "65536", "1000000000"]))
        other = words[int(random.integers(len(words)))]
        words[at] = key + equals + new if equals and value.lstrip("-").isdigit() else other
    try:
        raw = Raw(made, path=with_program(made, folder.parent / "fuzz", " ".join(words)))
        feeds = raw.feeds([5, 6, 7])
        if random.integers(2):
            group = raw.at.group(int(random.integers(len(made.part.heads))))
            feeds["gates"] = raw.gates(raw.at.hidden, raw.at.load, group, off=[raw.at.lm, raw.at.embed])
            feeds["hidden_in"] = random.standard_normal((3, raw.facts.hidden)).astype(np.float32)
        feeds["control"][0] = random.integers(3)
        raw.run(feeds)
        ran += 1
    except Exception as error:
        assert str(error), "an error without words"
        refused += 1
print(ran, refused)
"""


@pytest.mark.parametrize("form, name", [("int4", "shared"), ("fp32", "own")])
def test_no_program_ends_the_process(
    native: None, checkpoint: Callable[[str], Path], tmp_path: Path, form: Format, name: str
) -> None:
    made = with_heads(tmp_path, checkpoint(NAME), PLANS[name], form).written
    doctored(made, tmp_path / "model", lambda model: None)
    arguments = [str(tmp_path / "model"), str(checkpoint(NAME)), made.part.model_dump_json(), "1"]
    command = [sys.executable, "-c", FUZZ, *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[3])
    assert ran.returncode == 0, ran.stderr[-2000:]
    worked, refused = map(int, ran.stdout.split())
    assert refused > 20
    assert worked + refused == 120


# -- several sequences in one pass -----------------------------------------------------------------------------------


def beside(*parts: Feeds) -> Feeds:
    """One pass of the rows of several, in order of their slots."""
    both, rows = dict(parts[0]), 0
    plans = []
    for part in parts:
        plan = part["plan"].copy()
        plan[PARENT] = np.where(plan[PARENT] < 0, -1, plan[PARENT] + rows)
        rows += plan.shape[1]
        plans.append(plan)
    return both | {"plan": np.concatenate(plans, 1), "rows": np.arange(rows)}


@pytest.mark.parametrize("form", FORMATS)
def test_rows_of_several_slots_equal_passes_of_their_own(written: Write, form: Format) -> None:
    made = written(NAME, form)
    together, apart = Raw(made, 3, 512), Raw(made, 3, 512)
    random = np.random.default_rng(2)
    past = [0, 0, 0]
    for sizes in [(40, 1, 100), (1, 1, 1), (5, 17, 2), (33, 3, 90), (1, 100, 80)]:
        parts = [
            together.feeds(random.integers(2, made.part.facts.vocab, n).tolist(), past[slot], slot)
            for slot, n in enumerate(sizes)
        ]
        rows = together.run(beside(*parts))[0]
        np.testing.assert_array_equal(rows, np.concatenate([apart.run(part)[0] for part in parts]))
        np.testing.assert_array_equal(together.kv.array, apart.kv.array)
        past = [at + n for at, n in zip(past, sizes, strict=True)]


def test_moves_come_before_the_pass(written: Write) -> None:
    made = written(NAME, "int4")
    tokens = [5, 6, 7, 8, 9]
    raw, plain = Raw(made, 2), Raw(made, 2)
    for slot in (0, 1):
        plain.run(plain.feeds(tokens, 0, slot))
        feeds = raw.feeds(tokens, 0, slot)
        feeds["plan"][PLACE, 3:] = [100, 101]  # the last two stand elsewhere, and are moved
        raw.run(feeds)
    moves = {"moves": np.array([[1, 100, 3], [1, 101, 4]])}
    alone = raw.run(raw.feeds([10, 11], 5, 0))[0]
    expected = plain.run(plain.feeds([10, 11], 5, 1))[0]
    np.testing.assert_array_equal(raw.run(raw.feeds([10, 11], 5, 1) | moves)[0], expected)
    assert not np.array_equal(alone, expected)  # the other slot was not touched
    raw.run(raw.feeds([]) | {"moves": np.array([[0, 100, 3], [0, 101, 4]])})
    np.testing.assert_array_equal(raw.run(raw.feeds([10, 11], 5, 0))[0], expected)


# -- the likeliest tokens only ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("top", [1, 2, 7, 64])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", [NAME, "builtin:shakespeare"])
def test_the_likeliest_are_those_of_all_logits(written: Write, name: str, form: Format, top: int) -> None:
    made = written(name, form)
    raw = Raw(made)
    tokens = np.random.default_rng(3).integers(2, made.part.facts.vocab, 20).tolist()
    feeds = raw.feeds(tokens)
    logits, no_ids, *_ = raw.run(feeds)
    assert no_ids.shape == (20, 0)
    feeds["control"][TOP] = top
    none, ids, values, _ = raw.run(feeds)
    assert none.shape == (0, made.part.facts.vocab)
    order = np.argsort(-logits, 1, kind="stable")[:, :top]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_array_equal(values, np.take_along_axis(logits, order, 1))
    np.testing.assert_array_equal(ids[:, 0], logits.argmax(1))


def test_the_first_of_equals_wins(written: Write, tmp_path: Path) -> None:
    """All logits are zero where the last norm is."""

    def silence(model: onnx.ModelProto) -> None:
        for item in model.graph.initializer:
            if item.name == "model.norm.weight":
                zeros = np.zeros(made.part.facts.hidden, np.float32)
                item.CopyFrom(onnx.numpy_helper.from_array(zeros, item.name))

    made = written("builtin:shakespeare", "int4")
    raw = Raw(made, path=doctored(made, tmp_path / "graph", silence))
    feeds = raw.feeds([5, 6, 7])
    assert not raw.run(feeds)[0].any()
    feeds["control"][TOP] = 40
    ids = raw.run(feeds)[1]
    np.testing.assert_array_equal(ids, np.tile(np.arange(40), (3, 1)))


def test_more_than_there_are(written: Write) -> None:
    made = written(NAME, "int4")
    raw, vocab = Raw(made), made.part.facts.vocab
    feeds = raw.feeds([5])
    feeds["control"][TOP] = vocab + 3
    _, ids, values, _ = raw.run(feeds)
    assert sorted(ids[0, :vocab]) == list(range(vocab))
    assert ids[0, vocab:].tolist() == [-1] * 3
    assert np.isneginf(values[0, vocab:]).all()
