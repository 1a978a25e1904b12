"""Graphs and slots for devices, every architecture, on the CPU provider: what they compute, keep, move and carry."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from edgespec.decoding.target import BEST, DRAFT_BEST, Pass, SkipSet
from edgespec.errors import BundleError, DeviceError, ExportError, InvalidRequest
from edgespec.export.emit.device import add_device_graphs
from edgespec.runtimes.devices.model import DeviceModel
from edgespec.runtimes.devices.slot import DeviceSlot, tree_mask
from edgespec.runtimes.files.manifest import SkipSetPart
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.stock import HIDE
from tests.conftest import Reference, Written
from tests.export.architectures.test_architectures import LEAVES, PARENTS, Skipping, path_to, run
from tests.support import hf
from tests.support.device import HostModel
from tests.support.older import rename_ports
from tests.support.passes import run_draft, run_hypotheses

ALL = {config["model_type"]: name for name, config in reversed(hf.CONFIGS.items())}
CASES = sorted(set(ALL.values()) - hf.NATIVE_ONLY)
SKIP = SkipSetPart(attention=[1], mlp=[0])
ATOL = 1e-4

Made = Callable[[str], "tuple[Written, HostModel]"]


@pytest.fixture(scope="module")
def made(writer: Callable[..., Written]) -> Made:
    """Name of a configuration -> the written model, and its graphs for a device."""
    known: dict[str, tuple[Written, HostModel]] = {}

    def get(name: str) -> tuple[Written, HostModel]:
        if name not in known:
            written = writer("stock", name)
            part = add_device_graphs(written.folder, written.arch, written.part, "webgpu", SKIP)
            known[name] = written, HostModel(written.folder, part, "webgpu")
            known[name][1].most_rows = 10**6
        return known[name]

    return get


def slot_of(model: HostModel) -> DeviceSlot:
    slot = open_slot(model)
    assert isinstance(slot, DeviceSlot)
    return slot


@pytest.mark.parametrize("name", CASES)
def test_architectures_equal_transformers(made: Made, reference: Callable[[str], Reference], name: str) -> None:
    """At once, with a past, mixed; and the beginning row by row."""
    known, slot = reference(name), slot_of(made(name)[1])
    for sizes, most in (([1000], None), ([7, 5], None), ([200, 1, 3], None), ([1], 48)):
        logits = run(slot, known.tokens[:most].tolist(), sizes)
        at = known.rows < len(logits)
        np.testing.assert_allclose(logits[known.rows[at]], known.logits[at], atol=ATOL)


def test_graphs_of_older_bundles(made: Made, reference: Callable[[str], Reference], tmp_path: Path) -> None:
    """Their inputs have other names."""
    name = "llama_tied_gqa"
    known, (written, model) = reference(name), made(name)
    folder = Path(shutil.copytree(written.folder, tmp_path / "older"))
    for graph in model.part.graphs.values():
        if graph.device == "webgpu":
            proto = onnx.load(folder / graph.file, load_external_data=False)
            rename_ports(proto)
            (folder / graph.file).write_bytes(proto.SerializeToString())
    older = HostModel(folder, model.part, "webgpu")
    assert "ids" in {port.name for port in older.open("").get_inputs()}
    logits = run(slot_of(older), known.tokens[:9].tolist(), [5, 4])
    np.testing.assert_array_equal(logits, run(slot_of(model), known.tokens[:9].tolist(), [5, 4]))


@pytest.mark.parametrize("leaf", [4, 8])
@pytest.mark.parametrize("name", CASES)
def test_trees_and_moves(made: Made, reference: Callable[[str], Reference], name: str, leaf: int) -> None:
    """Rows of a tree equal those of chains; the kept path is moved where a fresh prefill would have put it."""
    known, (_, model) = reference(name).tokens, made(name)
    past, tree, path = known[:15].tolist(), known[15 : 15 + len(PARENTS)], path_to(leaf)
    slot, fresh = slot_of(model), slot_of(model)
    slot.prefill(past)
    fresh.prefill(past)
    rows = slot.forward(tree, np.array(PARENTS)).logits.copy()
    for other in LEAVES:
        along = path_to(other)
        np.testing.assert_allclose(rows[along], fresh.forward(tree[along]).logits, atol=ATOL)
    slot.keep(path)
    fresh.follow([])
    fresh.prefill(slot.tokens)
    held = fresh.snapshot()
    for key, values in slot.snapshot().items():
        np.testing.assert_allclose(values, held[key], atol=ATOL)
    np.testing.assert_allclose(slot.forward(known[30:33]).logits, fresh.forward(known[30:33]).logits, atol=ATOL)


@pytest.mark.parametrize("name", CASES)
def test_a_rollback_is_a_smaller_past(made: Made, reference: Callable[[str], Reference], name: str) -> None:
    known, (_, model) = reference(name).tokens, made(name)
    slot, fresh = slot_of(model), slot_of(model)
    slot.prefill(known[:20].tolist())
    slot.forward(known[20:26])
    slot.keep([0, 1])
    slot.follow(known[:13].tolist())
    fresh.prefill(known[:13].tolist())
    np.testing.assert_array_equal(slot.forward(known[5:8]).logits, fresh.forward(known[5:8]).logits)


@pytest.mark.parametrize("name", ["llama_tied_gqa", "gemma2_caps", "gpt_neox_parallel"])
def test_a_draft_leaves_out_what_its_graph_leaves_out(
    made: Made, reference: Callable[[str], Reference], name: str
) -> None:
    written, model = made(name)
    tokens, skip = reference(name).tokens[:12], SkipSet((1,), (0,))
    ops = Skipping(written.arch, tokens.tolist())
    ops.skip = skip
    expected: NDArray[np.float32] = ops.run(written.arch.trace())[0]
    slot = slot_of(model)
    for at in range(len(tokens)):
        logits = run_draft(slot, tokens[at : at + 1], at, skip).logits
        np.testing.assert_allclose(logits, expected[at : at + 1], atol=ATOL)
        found = run_draft(slot, tokens[at : at + 1], at, skip, best=True)
        assert found.best is not None
        assert found.chance is not None
        assert found.best[0][0] == expected[at].argmax()
        np.testing.assert_allclose(found.chance[0], 1 / np.exp(expected[at] - expected[at].max()).sum(), rtol=1e-3)
    with pytest.raises(InvalidRequest, match="the bundle's own skip set only"):
        run_draft(slot, tokens[:1], 0, SkipSet((0,), ()))
    with pytest.raises(InvalidRequest, match="run on the CPU only"):
        run_hypotheses(slot, tokens[:1], np.zeros(1, np.int64), np.full(1, -1))


def test_only_ids_leave_the_device(made: Made, reference: Callable[[str], Reference]) -> None:
    known, (_, model) = reference("llama_tied_gqa").tokens, made("llama_tied_gqa")
    slot = slot_of(model)
    assert BEST in slot.can
    assert DRAFT_BEST in slot.can
    slot.prefill(known[:10].tolist())
    slot.forward(known[10:11], None, True)
    slot.keep([0])
    before = model.crossed.to_device, model.crossed.to_host
    best = slot.forward(known[11:12], None, True).best
    assert best is not None
    assert model.crossed.to_device - before[0] < 200
    assert model.crossed.to_host - before[1] < 500
    assert best[0][0] == slot.forward(known[11:12]).logits[0].argmax()


def test_hidden_states_cross_row_by_row(made: Made, reference: Callable[[str], Reference]) -> None:
    known, (_, model) = reference("llama_tied_gqa").tokens, made("llama_tied_gqa")
    slot, facts = slot_of(model), model.facts
    slot.prefill(known[:5].tolist())
    before = model.crossed.to_host
    hidden = slot.run(Pass(known[5:14], top=1, hidden=True)).hidden
    assert hidden is not None
    assert len(hidden) == 9
    passed = model.crossed.to_host
    assert passed - before < 9 * 400  # only the likeliest tokens
    row = hidden[3:4].copy()
    assert model.crossed.to_host - passed == 4 * facts.hidden
    np.testing.assert_array_equal(row, np.asarray(hidden)[3:4])


def test_a_full_cache_and_foreign_bundles(made: Made, tmp_path: Path) -> None:
    written, model = made("llama_tied_gqa")
    slot = open_slot(model, context=32)
    with pytest.raises(InvalidRequest, match="does not fit the cache"):
        slot.forward(np.zeros(slot.capacity + 1, np.int64))
    with pytest.raises(InvalidRequest, match="do not fit the cache"):
        slot.reserve(slot.capacity + 1)
    model.most_rows = 16
    with pytest.raises(InvalidRequest, match="this device computes 16 at most right"):
        slot.forward(np.zeros(17, np.int64))
    model.most_rows = 10**6
    with pytest.raises(BundleError, match="no graphs for device webgpu"):
        HostModel(written.folder, written.part, "webgpu")
    with pytest.raises(InvalidRequest, match="no graph webgpu/heads/none"):
        model.open("heads/none")


def test_formats_that_no_device_has(writer: Callable[..., Written]) -> None:
    written = writer("stock", "llama_tied_gqa", "w8a8")
    with pytest.raises(ExportError, match="--device webgpu and --format w8a8"):
        add_device_graphs(written.folder, written.arch, written.part, "webgpu", None)


def test_a_failing_pass_is_an_error_of_the_device(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = made("llama_tied_gqa")
    slot = slot_of(model)

    def fail(*_: object) -> None:
        raise RuntimeError("device lost\nsecond line")

    monkeypatch.setattr(type(model.session), "run_with_iobinding", fail)
    with pytest.raises(DeviceError, match="device webgpu failed: device lost"):
        slot.forward(np.zeros(1, np.int64))


def test_a_buffer_that_does_not_fit(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = made("llama_tied_gqa")
    monkeypatch.setattr(model, "memory", "a device that is not there")
    with pytest.raises(DeviceError, match="device webgpu has no room for a buffer of 4 MiB") as error:
        DeviceModel.put(model, np.zeros(1 << 20, np.float32))
    assert error.value.hint == "load with a smaller context"


def test_masks_of_trees() -> None:
    mask = tree_mask([-1, 0, 0, 1])
    assert [[value == 0 for value in row] for row in mask.tolist()] == [
        [True, False, False, False],
        [True, True, False, False],
        [True, False, True, False],
        [True, True, False, True],
    ]
    assert mask.min() == HIDE


def test_a_device_model_is_a_model() -> None:
    assert issubclass(HostModel, DeviceModel)
