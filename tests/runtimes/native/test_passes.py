"""The native operator by hand: passes that no slot makes, of several sequences, and of the likeliest tokens only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from edgespec.runtimes.files.formats import FORMATS, Format
from edgespec.runtimes.files.manifest import Operators
from tests.conftest import Written, use_operators
from tests.runtimes.native.test_errors import PARENT, PLACE, TOP
from tests.support.native_graph import Raw, doctored

NAME = "qwen2_untied"
Write = Callable[..., Written]
Feeds = dict[str, NDArray[Any]]


@pytest.fixture(params=["native"])
def operators(request: pytest.FixtureRequest) -> Operators:
    return use_operators(request)


@pytest.fixture
def raw(written: Write) -> Raw:
    return Raw(written(NAME), slots=2)


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
        feeds["plan"][PLACE, 3:] = [100, 101]  # the last two are stored out of order, and are moved
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
