"""Two planes of int8: both are int8 bit for bit, and only the high one is a model of 4 bits, sub-layer by sub-layer."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.decoding.target import Pass, SkipSet
from edgespec.runtimes.files.manifest import ModelPart
from edgespec.runtimes.files.migration import migrated
from edgespec.runtimes.files.packing import Packed
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.native import NativeSlot
from edgespec.runtimes.slots.native_batch import NativeBatch
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot
from tests.conftest import Written
from tests.support.native_graph import Node, Rows, Weights, levels
from tests.support.passes import run_draft, run_hypotheses
from tests.support.slots import ids, text

Write = Callable[..., Written]
OLD = Path(__file__).parents[2] / "data" / "int8_one_plane.zip"  # what schema 3 wrote, and its logits then
NAMES = ["llama_tied_gqa", "qwen2_untied", "gpt2_default", "gemma2_caps"]
WIDTH, INNER, EXPERTS = 96, 64, 4

pytestmark = pytest.mark.usefixtures("native")


@pytest.fixture
def operators() -> str:
    return "native"


def all_high(slot: Slot) -> SkipSet:
    layers = tuple(range(slot.layers))
    return SkipSet(high_attention=layers, high_mlp=layers, high_head=True)


def high_slot(made: Written) -> Slot:
    """As ``--precision high`` opens it."""
    return open_slot(Model(made.folder, made.part.at_high_precision(), "native", 1), reserve=1)


# -- both planes -------------------------------------------------------------------------------------------------------


def test_a_bundle_with_one_plane_runs_as_it_did(tmp_path: Path) -> None:
    with zipfile.ZipFile(OLD) as file:
        file.extractall(tmp_path)
    stored = json.loads((tmp_path / "part.json").read_text("utf-8"))
    part = ModelPart.model_validate(migrated({"target": stored}, 3)["target"])
    kinds = {
        matrix["kind"] for matrix in json.loads((tmp_path / str(part.index)).read_text("utf-8"))["matrices"].values()
    }
    assert kinds == {"q8"}
    assert not part.planes
    expected = np.load(tmp_path / "logits.npy")
    slot = open_slot(Model(tmp_path, part, "native", 2))
    tokens = np.arange(3, 3 + len(expected), dtype=np.int64) % part.facts.vocab
    np.testing.assert_array_equal(slot.forward(tokens).logits, expected)
    assert not slot.planes
    last = run_draft(slot, tokens, 0, all_high(slot)).logits[0]  # no sub-layer is skipped
    np.testing.assert_array_equal(last, expected[-1])


def test_two_planes_are_one_bit_for_bit(tmp_path: Path, written: Write) -> None:
    """The same levels and scales as of the old bundle: those of a model written today, and of what it wrote."""
    with zipfile.ZipFile(OLD) as file:
        file.extractall(tmp_path)
    expected = np.load(tmp_path / "logits.npy")
    made = written("qwen2_tied_gqa7", "int8")
    assert made.part.planes
    tokens = np.arange(3, 3 + len(expected), dtype=np.int64) % made.part.facts.vocab
    np.testing.assert_array_equal(made.slot().forward(tokens).logits, expected)


# -- only the high plane -----------------------------------------------------------------------------------------------


def rounded_rows(x: NDArray[np.float32]) -> NDArray[np.float64]:  # [n, k]
    """Quantize activations and back: 127 levels a block of 32."""
    blocks = x.astype(np.float64).reshape(len(x), -1, 32)
    step = np.abs(blocks).max(-1, keepdims=True) / 127
    return (np.rint(blocks / step) * step).reshape(x.shape)


def matrix_of(weights: Weights, values: NDArray[np.float32], key: str = "w") -> tuple[str, NDArray[np.float64]]:
    """Add a matrix in two planes -> the fields of its step, and what its high plane stands for, [n, k]."""
    packed, (numbers, scales) = Packed("p8", *values.shape), levels(values)
    high, low = (np.concatenate(plane) for plane in zip(*packed.pack_planes([(numbers, scales)]), strict=True))
    middle = (numbers >> 4) * 16.0 + 7.5 - 128
    means = (middle * scales.astype(np.float16).astype(np.float64)[..., None]).reshape(len(values), -1)
    places = weights._keep(high), weights._keep(low)
    other = "low" if key == "w" else f"{key}low"
    return f"{key}={places[0]} {other}={places[1]} plane=0 kind=p8", means[:, : values.shape[1]]


def close(found: NDArray[np.float32], expected: NDArray[np.float64], tolerance: float) -> None:
    assert np.abs(found - expected).max() < tolerance * np.abs(expected).max()


def test_a_product_with_the_high_plane_is_numpys(tmp_path: Path) -> None:
    """Looked up, multiplied, and multiplied after what another product left: the offsets of activations follow."""
    random, weights = np.random.default_rng(0), Weights()

    def drawn(n: int) -> NDArray[np.float32]:
        return random.standard_normal((n, WIDTH)).astype(np.float32)

    table = drawn(40)
    (rows, looked_up), (first, a), (second, b) = (
        matrix_of(weights, each) for each in (table, drawn(INNER), drawn(INNER))
    )
    whole = f"w={weights.matrix(drawn(INNER), 'q8')} kind=q8"
    products = [f"linear act=0 {matrix} n={INNER} k={WIDTH} out={1 + at}"
                for at, matrix in enumerate((first, whole, second, whole))]  # fmt: skip
    stored = [f"store x={1 + at} k={INNER} at={WIDTH + at * INNER}" for at in range(4)]
    steps = [
        *(f"floats {at} {width}" for at, width in enumerate((WIDTH, INNER, INNER, INNER, INNER))),
        f"acts 0 {WIDTH}",
        f"embed {rows} n=40 k={WIDTH} out=0",
        f"quantize x=0 k={WIDTH} kind=q4 out=0",
        *products,
        f"store x=0 k={WIDTH}",
        *stored,
    ]
    node = Node(tmp_path, "\n".join(steps), weights, WIDTH + 4 * INNER)
    tokens = random.integers(0, 40, 9).tolist()

    def run(both: bool) -> list[NDArray[np.float32]]:
        hidden = node.run(Rows.chain(9, token=tokens), gates=[both], reach=[])[3]
        return list(np.split(hidden, [WIDTH + at * INNER for at in range(4)], 1))

    x, *found = run(False)
    close(x, looked_up[tokens], 1e-6)
    acts = rounded_rows(x)
    close(found[0], acts @ a.T, 1e-3)
    close(found[2], acts @ b.T, 1e-3)
    np.testing.assert_array_equal(found[1], found[3])  # one plane, read whole, before and after
    x, *found = run(True)
    assert np.abs(x - table[tokens]).max() < 0.03
    np.testing.assert_array_equal(found[1], found[3])


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_any_pass_have_the_same_bits(written: Write, name: str) -> None:
    made = written(name, "int8")
    slot, tokens = high_slot(made), text(made, 40)
    single = [slot_row(slot, tokens, at) for at in range(33)]
    for size in (2, 3, 4, 8, 16, 17, 33):
        slot.follow([])
        np.testing.assert_array_equal(slot.forward(ids(tokens[:size])).logits, single[:size])


def slot_row(slot: Slot, tokens: list[int], at: int) -> NDArray[np.float32]:  # [vocab]
    slot.follow(tokens[:at])
    slot.prefill(tokens[len(slot.tokens) : at])
    return slot.forward(ids(tokens[at : at + 1])).logits[0].copy()


@pytest.mark.parametrize("name", NAMES)
def test_a_draft_reads_what_it_is_told(written: Write, name: str) -> None:
    made = written(name, "int8")
    slot, tokens = made.slot(), text(made, 24)
    assert slot.planes
    slot.prefill(tokens[:20])
    full = slot.forward(ids(tokens[20:])).logits.copy()
    last = slot.layers - 1
    sets = [SkipSet(high_attention=(0,)), SkipSet(high_mlp=(last,)), SkipSet(high_head=True), all_high(slot),
            SkipSet((1,), (), (0,), (0, last)), SkipSet()]  # fmt: skip
    found = [run_draft(slot, ids(tokens[20:]), 0, skip).logits[0].copy() for skip in sets]
    for at, one in enumerate(found):
        assert all((one != other).any() for other in found[:at]), sets[at]
        assert np.corrcoef(one, full[-1])[0, 1] > 0.7
    np.testing.assert_array_equal(found[-1], full[-1])
    np.testing.assert_array_equal(slot.forward(ids(tokens[20:])).logits, full)  # nothing remains from the draft


def test_a_skip_set_of_high_planes_is_the_high_precision(written: Write) -> None:
    """The embedding is an exception: a draft reads both of its planes."""
    made = written("qwen2_untied", "int8")
    tokens = text(made, 12)
    one, other = made.slot(), high_slot(made)
    assert isinstance(one, NativeSlot)
    assert not other.planes
    one._plain[one._at.embedding_plane] = False
    drafts = [run_draft(one, ids(tokens[at : at + 1]), at, all_high(one)).logits[0].copy() for at in range(12)]
    np.testing.assert_array_equal(drafts, other.forward(ids(tokens)).logits)


@pytest.mark.parametrize("rows", [1, 16, 50, 97])
@pytest.mark.parametrize("name", ["qwen2_untied", "gemma2_caps", "gpt2_default"])
def test_a_cut_head_gives_the_first_columns(written: Write, name: str, rows: int) -> None:
    """Those of the whole head bit for bit, of one row and of several, and the best among them; then all again."""
    made = written(name, "int8")
    slot, tokens = made.slot(), text(made, 24)
    assert isinstance(slot, NativeSlot)
    slot.prefill(tokens[:20])
    full = slot.forward(ids(tokens[20:])).logits.copy()
    cut = replace(all_high(slot), head_rows=rows)
    whole = run_draft(slot, ids(tokens[20:]), 0, all_high(slot)).logits.copy()
    np.testing.assert_array_equal(run_draft(slot, ids(tokens[20:]), 0, cut).logits, whole[:, :rows])
    visible, parents = np.full(4, 20), np.arange(-1, 3)
    several = run_hypotheses(slot, ids(tokens[20:]), visible, parents, all_high(slot)).logits.copy()
    np.testing.assert_array_equal(
        run_hypotheses(slot, ids(tokens[20:]), visible, parents, cut).logits, several[:, :rows]
    )
    best = slot.run(Pass(ids(tokens[20:]), top=1, draft=True, skip=cut)).best
    assert best is not None
    assert (best[0] < rows).all()
    np.testing.assert_array_equal(slot.forward(ids(tokens[20:])).logits, full)


def test_slots_of_a_batch_draft_for_themselves(written: Write) -> None:
    made = written("llama_tied_gqa", "int8")
    alone, tokens = made.slot(), text(made, 30)
    batch = NativeBatch(made.model(), 2)
    for slot, length in zip(batch.slots, (11, 20), strict=True):
        slot.prefill(tokens[:length])
    batch.run([(slot, Pass(ids(tokens[len(slot.tokens) : len(slot.tokens) + 2]))) for slot in batch.slots])
    for slot in batch.slots:
        alone.follow(slot.tokens)
        alone.prefill(tokens[len(alone.tokens) : len(slot.tokens)])
        row, skip = ids(tokens[len(slot.tokens) : len(slot.tokens) + 1]), all_high(slot)
        found = run_draft(slot, row, 0, skip).logits.copy()
        np.testing.assert_array_equal(found, run_draft(alone, row, 0, skip).logits)


@pytest.mark.parametrize("name", ["qwen3_moe_plain", "lfm2_conv", "qwen3_5_delta"])
def test_experts_and_states(written: Write, name: str) -> None:
    """Every sub-layer of every kind has a plane to leave out, and rows stay equal."""
    made = written(name, "int8")
    slot, tokens = made.slot(), text(made, 20)
    slot.prefill(tokens[:12])
    full = slot.forward(ids(tokens[12:13])).logits[0].copy()
    for layer in range(slot.layers):
        for skip in (SkipSet(high_attention=(layer,)), SkipSet(high_mlp=(layer,))):
            assert (run_draft(slot, ids(tokens[12:13]), 0, skip).logits[0] != full).any(), skip
    high = high_slot(made)
    single = [slot_row(high, tokens, at) for at in range(12)]
    high.follow([])
    np.testing.assert_array_equal(high.forward(ids(tokens[:12])).logits, single)


def test_parts_in_int4_are_read_whole(written: Write, tmp_path: Path) -> None:
    made = written("llama_tied_gqa", "int4")
    slot, tokens = made.slot(), text(made, 6)
    full = slot.forward(ids(tokens)).logits[-1].copy()
    assert not slot.planes
    np.testing.assert_array_equal(run_draft(slot, ids(tokens), 0, all_high(slot)).logits[0], full)


# -- the file ----------------------------------------------------------------------------------------------------------


def test_low_planes_lie_behind_everything_else(written: Write) -> None:
    made = written("llama_tied_gqa", "int8")
    index = json.loads((made.folder / str(made.part.index)).read_text("utf-8"))
    native = index["native"]
    low = {name: entry for name, entry in native.items() if name.endswith(".low")}
    first = min(entry[0] for entry in low.values())
    assert max(entry[0] + entry[1] for name, entry in native.items() if name not in low) <= first
    assert made.part.low_nibble_bytes == sum(entry[1] for entry in low.values())
    packed = [Packed(**matrix) for matrix in index["matrices"].values()]
    assert made.part.low_nibble_bytes == sum(one.low_nbytes for one in packed)
