"""A file's own weights on stock operators: the values that MatMulNBits holds exactly, with exact rows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from edgespec import load
from edgespec.export import chosen_format, options
from edgespec.export.bundle.model import write_model
from edgespec.export.bundle.model_part import ModelSpec, open_model
from edgespec.export.emit.plan import kept_types
from edgespec.export.loading import load_source
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.export.quantization.file_blocks import stock_rows
from edgespec.export.source.source import Checkpoint
from edgespec.runtimes.files.formats import FILE_KINDS, GGML, STOCK_BLOCKS, Kind
from edgespec.runtimes.files.packing import unpack_levels
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.cpu import try_rows
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot
from tests.export.test_file_weights import DOWN, NAME, QUERY, check_rows
from tests.export.test_grouped_weights import LAYOUTS, write
from tests.runtimes.native.test_packing import Held, expected, random_rows
from tests.support.gguf_files import with_types, write_gguf

TYPES = [name for name, kind in FILE_KINDS.items() if kind in STOCK_BLOCKS and not kind.startswith("u")]
GROUPED = ["gptq4 of 128", "gptq4 of 32, symmetric", "gptq4 by importance of each", "gptq8 by importance, symmetric",
           "gptq8 of 128", "awq of 32", "compressed int8 with zero points"]  # fmt: skip


def values(kind: Kind, rows: Any, n: int, k: int) -> NDArray[np.float32]:
    """Multiply levels less their zero points by their scales, as MatMulNBits is defined."""
    own, found = STOCK_BLOCKS[kind], []
    for packed, scales, zeros in stock_rows(kind, rows, n, k):
        assert packed.shape[1:] == (-(-k // own.size), own.size * own.bits // 8)
        levels = unpack_levels(packed, own.bits).astype(np.float32)
        assert (zeros.shape[1] > 0) == own.zeros
        zero = unpack_levels(zeros, own.bits)[:, : scales.shape[1], None] if own.zeros else 1 << (own.bits - 1)
        found.append(((levels - np.float32(zero)) * scales[..., None]).reshape(len(levels), -1)[:, :k])
    return np.concatenate(found)


@pytest.mark.parametrize("name", TYPES)
def test_levels_are_the_files_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, k = FILE_KINDS[name], 512 if GGML.get(FILE_KINDS[name], GGML["q4_1"]).group > 32 else 96
    monkeypatch.setattr("edgespec.export.quantization.file_blocks.PIECE", 10 * k)  # several pieces
    rows = random_rows(name, 37, k)
    with np.errstate(all="ignore"):
        wanted = expected(name, rows)
        np.testing.assert_array_equal(values(kind, Held(rows), 37, k), wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_levels_are_the_checkpoints_numbers(tmp_path: Path, layout: str) -> None:
    kind, packer, settings = LAYOUTS[layout]
    truth = write(tmp_path, packer, settings)
    source = Checkpoint.open(tmp_path)
    for name, wanted in truth.items():
        if "_proj" in name:
            rows = source.blocks(name)
            assert rows is not None
            order = slice(None) if rows.order is None else rows.order
            found = values(FILE_KINDS[kind], rows, *wanted.shape)
            np.testing.assert_array_equal(found, wanted.astype(np.float32)[:, order], err_msg=name)


def written(folder: Path, path: Path) -> tuple[Any, Slot, Model]:
    """Write the stock graphs of a model, and open the one whose rows are exact."""
    arch = open_model(path, 128)
    made = write_model(folder, arch, ModelSpec("file", gated=True, layout="stock"))
    assert set(made.part.graphs) == {"gated", "plain", "standard"}
    assert made.part.bytes_per_weight is not None
    model = Model(folder, made.part, "gated", 1)
    found = try_rows(model)
    assert found in ("alone", "pairs")
    model.pairs = found == "pairs"
    return arch, open_slot(model), model


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q5_0"])
def test_rows_of_a_gguf_are_exact(tmp_path: Path, kind: str) -> None:
    write_gguf(tmp_path / "model.gguf", NAME, kind=GGMLQuantizationType[kind])
    arch, slot, _ = written(tmp_path, tmp_path / "model.gguf")
    assert kept_types(arch, "stock") == ([kind], [])
    check_rows(arch, slot)
    slot.close()


@pytest.mark.parametrize("kind", ["Q6_K", "Q3_K", "IQ4_XS", "Q4_K"])
def test_matrices_of_different_types(tmp_path: Path, kind: str) -> None:
    """Queries, keys and values are stored separately where their types differ; what cannot be held becomes int8."""
    types = {DOWN: kind, QUERY: "IQ4_NL"}
    change = with_types(**{name.replace(".", "__"): each for name, each in types.items()})
    write_gguf(tmp_path / "model.gguf", NAME, kind=GGMLQuantizationType.Q8_0, change=change)
    arch, slot, _ = written(tmp_path, tmp_path / "model.gguf")
    assert kept_types(arch, "stock")[1] == (["Q4_K"] if kind == "Q4_K" else [])
    check_rows(arch, slot, 5e-3)
    slot.close()


@pytest.mark.parametrize("layout", GROUPED)
def test_rows_of_a_checkpoint_are_exact(tmp_path: Path, layout: str) -> None:
    kind, packer, settings = LAYOUTS[layout]
    write(tmp_path / "model", packer, settings)
    arch, slot, _ = written(tmp_path, tmp_path / "model")
    assert kept_types(arch, "stock") == ([kind], ["BF16"])
    check_rows(arch, slot, 5e-3)  # the LM head is int8
    nodes = (tmp_path / "model.strict.onnx").read_bytes()
    assert (b".order" in nodes) == ("importance" in layout)
    assert (b".zeros" in nodes) == STOCK_BLOCKS[FILE_KINDS[kind]].zeros
    slot.close()


def without_native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "lacks_packing", lambda: "no compiler")


@pytest.mark.parametrize("quick", [True, False])
def test_a_file_keeps_its_weights_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: bool
) -> None:
    without_native(monkeypatch)
    _, packer, settings = LAYOUTS["gptq4 by importance of each"]
    write(tmp_path / "model", packer, settings)
    given = ExportOptions(str(tmp_path / "model"), tmp_path / "bundle", quick=quick, choose=True)
    manifest = export_model(given, golden=False)
    assert (manifest.target.format, manifest.target.layout) == ("file", "stock")
    assert any("int8 instead of BF16" in note for note in manifest.provenance["notes"])
    assert bool(manifest.parity) != quick  # what int8 loses is measured unless the export is quick
    with load(tmp_path / "bundle", threads=1) as engine:
        assert engine.exact_rows
        plain = engine.generate("the", method="ar", max_new_tokens=24, ignore_eos=True)
        drafted = engine.generate("the", method="ngram", max_new_tokens=24, ignore_eos=True)
    assert drafted.exact
    assert drafted.tokens == plain.tokens


def test_types_that_cannot_be_held_are_measured_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_native(monkeypatch)
    given = ExportOptions(str(tmp_path / "model.gguf"), tmp_path / "bundle", quick=True, choose=True)
    write_gguf(tmp_path / "model.gguf", NAME, kind=GGMLQuantizationType.Q4_1)
    assert not chosen_format.keeps_file(load_source(ExportOptions(**{**vars(given), "choose": False})))
    assert load_source(given).options.format != "file"
    change = with_types(blk__0__ffn_down__weight="Q4_K")
    write_gguf(tmp_path / "model.gguf", NAME, kind=GGMLQuantizationType.Q8_0, change=change)
    source = load_source(ExportOptions(given.model, given.output, quick=True, format="file"))
    assert any("int8 instead of Q4_K, which stock operators cannot hold exactly" in note for note in source.notes)


def test_commands_without_native_operators(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", NAME, kind=GGMLQuantizationType.Q8_0)

    def edgespec(*words: str) -> str:
        done = subprocess.run([sys.executable, "-m", "edgespec", *words], capture_output=True, text=True, timeout=300,
                              env={**os.environ, "EDGESPEC_NATIVE": "0"})  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    bundle = str(tmp_path / "bundle")
    assert "weights are the file's own (Q8_0)" in edgespec(
        "export", str(tmp_path / "model.gguf"), "--format", "file", "--quick", "-o", bundle
    )
    assert "exact: 1 of 1 prompts equal" in edgespec("verify", bundle)
