"""``--format int4-k``: a float model in 4 bits with their own scales, the important matrices in 6."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from edgespec import load
from edgespec.errors import BundleError, ExportError
from edgespec.export.bundle.model_part import open_model
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import dry_run, export_model
from edgespec.export.plan_manifest import plan_bundle
from edgespec.export.quantization.k_source import k_form, with_k_blocks
from edgespec.runtimes.files.bundle import check_sizes
from edgespec.runtimes.files.formats import GGML
from edgespec.runtimes.ort.native_library import native_library
from tests.conftest import DRAFT, TARGET
from tests.export.source.test_gguf_experts import write_mixture
from tests.support import hf

NAME = "llama_tied_gqa"
WIDE = hf.CONFIGS[NAME] | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}

pytestmark = pytest.mark.skipif(native_library().path is None, reason="no native operators here")


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """Write a model whose rows are multiples of 256."""
    return hf.write_checkpoint(tmp_path / "wide", WIDE | {"tie_word_embeddings": False}, 3)


def test_types_follow_from_the_place_of_a_matrix(wide: Path) -> None:
    arch = open_model(wide, 128)
    kinds = {name: form.kind for name in arch.tensors if hasattr(form := k_form(arch, name), "kind")}
    assert set(kinds.values()) == {"q4_k", "q6_k"}
    assert kinds[arch.head.weight] == "q6_k"
    assert kinds[arch.embedding] == "q4_k"
    values = [kinds[f"model.layers.{layer}.self_attn.v_proj.weight"] for layer in range(4)]
    assert values == [kinds[f"model.layers.{layer}.mlp.down_proj.weight"] for layer in range(4)]
    assert sorted(values) == ["q4_k", "q4_k", "q6_k", "q6_k"]


def test_rows_are_those_of_the_values(wide: Path) -> None:
    arch = open_model(wide, 128)
    made, source = with_k_blocks(arch)
    name = "model.layers.1.mlp.gate_proj.weight"
    rows = made.source.blocks(name)
    assert rows is not None
    assert rows.type == "Q4_K"
    some = np.array([3, 4, 9])
    got = dequantize(rows.read(some), GGMLQuantizationType.Q4_K)
    exact = arch.source.read(name)[some]
    assert np.square(got - exact).sum() < 0.01 * np.square(exact).sum()
    np.testing.assert_array_equal(rows.read(slice(3, 5)), rows.read(some)[:2])
    np.testing.assert_array_equal(made.source.read(name), arch.source.read(name))  # floats are the checkpoint's
    assert source.rows.errors[name][0] > 0


@pytest.mark.parametrize("quantizer", ["mse", "awq", "gptq"])
def test_an_export_and_its_text(wide: Path, tmp_path: Path, quantizer: str) -> None:
    options = ExportOptions(str(wide), tmp_path / "bundle", format="int4-k", quantizer=quantizer, threads=1)
    planned = plan_bundle(options)
    manifest = export_model(options)
    assert manifest.target.format == planned.target.format == "file"
    assert manifest.target.quantizer == quantizer
    assert manifest.target.bytes_per_weight == planned.target.bytes_per_weight
    kept = manifest.target.bytes_per_weight
    assert kept is not None
    few, many = (GGML[kind].bytes / 256 for kind in ("q4_k", "q6_k"))
    assert (kept.embedding, kept.head) == pytest.approx((few, many), rel=0.02)  # rows are filled up to whole tiles
    assert few < kept.layers < many
    assert manifest.files["model.data"].size == planned.files["model.data"].size
    assert 0 < manifest.parity["weight_error"] < 0.3
    with load(tmp_path / "bundle", threads=1) as engine:
        plain = engine.generate("the", method="ar", max_new_tokens=24, ignore_eos=True)
        drafted = engine.generate("the", method="ngram", max_new_tokens=24, ignore_eos=True)
    assert drafted.tokens == plain.tokens


def test_other_methods_and_rows_that_are_no_multiples(bundles: Callable[..., Path]) -> None:
    """Heads, a draft and early exits, on a model with rows of 128 and 352."""
    with load(bundles("native", "int4-k"), threads=1) as engine:
        assert engine.bundle.manifest.target.format == "file"
        draft = engine.bundle.manifest.draft
        assert draft is not None
        assert draft.format == "file"
        plain = engine.generate("To be", method="ar", max_new_tokens=24, ignore_eos=True)
        for method in ("speculative", "medusa", "paradecode"):
            assert engine.generate("To be", method=method, max_new_tokens=24, ignore_eos=True).tokens == plain.tokens


def test_experts(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    options = ExportOptions(
        str(checkpoint("olmoe_eight")), tmp_path / "bundle", format="int4-k", quantizer="gptq", threads=1
    )
    manifest = export_model(options, golden=False)
    assert manifest.target.format == "file"
    assert 0 < manifest.parity["weight_error"] < 0.3


def test_experts_whose_last_matrix_has_six_bits(tmp_path: Path) -> None:
    write_mixture(tmp_path / "model.gguf", "F16", "F16")
    options = ExportOptions(str(tmp_path / "model.gguf"), tmp_path / "bundle", format="int4-k", quantizer="mse",
                            threads=1)  # fmt: skip
    export_model(options, golden=False)
    program = (tmp_path / "bundle" / "model.native.onnx").read_bytes()
    assert b" downkind=q6_k " in program
    with load(tmp_path / "bundle", threads=1) as engine:
        assert len(engine.generate("To be", method="ar", max_new_tokens=8, ignore_eos=True).tokens) == 8


def test_calibration_is_compared_with_levels_without(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.export.options.CALIBRATED", ("int4-k",))
    monkeypatch.setattr("edgespec.export.calibrated.TOKENS", 512)
    manifest = export_model(ExportOptions(str(wide), tmp_path / "bundle", format="int4-k", threads=1), golden=False)
    assert manifest.parity["calibration"]["quantizer"] == "gptq"
    assert manifest.parity["held_out"]["own"]["mse"]["kl"] > 0


def test_a_dry_run(wide: Path, tmp_path: Path) -> None:
    options = ExportOptions(str(wide), tmp_path / "bundle", format="int4-k")
    assert dry_run(options)["format"] == "int4-k"
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"operators": "stock"}, "--format int4-k needs native operators"),
        ({"head_format": "int8"}, "its LM head has 6 bits already"),
        ({"model": "builtin:restore"}, "--format int4-k: there is no such thing for encoder-decoders"),
        ({"devices": ("webgpu",)}, "--device webgpu and --format int4-k"),
        ({"target_size": 1 << 20}, "--target-size and --format int4-k: expected int4"),
    ],
)
def test_what_does_not_go_with_it(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    options = replace(ExportOptions(TARGET, tmp_path / "bundle", format="int4-k"), **changes)
    with pytest.raises(ExportError, match=said):
        dry_run(options)


def test_a_draft_of_its_own_format(tmp_path: Path) -> None:
    options = ExportOptions(
        TARGET, tmp_path / "bundle", ("speculative",), "int4-k", draft=DRAFT, draft_format="int8", threads=1
    )
    manifest = export_model(options, golden=False)
    assert manifest.draft is not None
    assert manifest.draft.format == "int8"


def test_weights_of_fewer_than_four_bits_are_not_taken_for_a_damaged_file(wide: Path, tmp_path: Path) -> None:
    """Q2_K, of which a file may consist, has 2.6 bits."""
    manifest = plan_bundle(ExportOptions(str(wide), tmp_path / "bundle", format="int4-k"))
    facts, files = manifest.target.facts, dict(manifest.files)
    layer = facts.hidden * (facts.head_dim * 2 * (facts.heads + facts.kv_heads) + 2 * facts.intermediate)
    weights = facts.layers * layer + facts.vocab * facts.hidden
    for share, fits in ((84 / 256, True), (80 / 256, False)):
        entry = files[manifest.target.weights].model_copy(update={"size": int(weights * share) + 1})
        made = manifest.model_copy(update={"files": files | {manifest.target.weights: entry}})
        with nullcontext() if fits else pytest.raises(BundleError, match="those of a model of at least"):
            check_sizes(tmp_path, made)
