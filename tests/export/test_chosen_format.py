"""The choice of a format: by quality loss, speed and memory."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from safetensors.numpy import save_file

from edgespec.errors import QualityError
from edgespec.export import chosen_format
from edgespec.export.format_choice import BOUND, GOOD, KL_BOUND, Candidate, FormatChoice, choose
from edgespec.export.measuring import loss
from edgespec.export.measuring.loss import NOTHING, Loss, compare
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import dry_run, export_model
from edgespec.export.plan_manifest import PlannedSource
from edgespec.export.source.source import Checkpoint, resolve
from tests.conftest import THREADS
from tests.support import foreign, gguf_files, hf

SMALL = "builtin:shakespeare"
MIB = 1 << 20
# of blocks whose size is a row's, those that are a scale times integers
HELD_BY_STOCK = {GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q5_0, GGMLQuantizationType.Q8_0}


def candidates(int4: Loss | None, int8: Loss | None, fits: str = "int4 int8 fp32") -> list[Candidate]:
    return [
        Candidate("int4", 100 * MIB, 200 * MIB, 1.6, "int4" in fits, int4),
        Candidate("int8", 180 * MIB, 300 * MIB, 1.0, "int8" in fits, int8),
        Candidate("fp32", 700 * MIB, 900 * MIB, 0.3, "fp32" in fits, NOTHING),
    ]


def lost(share: float, kl: float = 0.001) -> Loss:
    return Loss(share, kl, 500)


@pytest.mark.parametrize(
    "int4, int8, fits, picked",
    [
        (lost(0.009), lost(0.001), "int4 int8 fp32", "int4"),  # the fastest of those that lose next to nothing
        (lost(0.011), lost(0.001), "int4 int8 fp32", "int8"),
        (lost(-0.01, 0.03), lost(0.001), "int4 int8 fp32", "int8"),  # a lucky text: its predictions are others
        (lost(0.2, 0.3), lost(0.015, 0.004), "int4 int8 fp32", "fp32"),
        (lost(0.2, 0.3), lost(0.015, 0.004), "int4 int8", "int8"),  # the best that fits, within the bound
        (lost(0.015, 0.015), lost(0.0), "int4", "int4"),
        (lost(0.015, 0.004), lost(0.015, 0.002), "int4 int8", "int8"),
    ],
)
def test_the_fastest_that_keeps_the_quality(int4: Loss, int8: Loss, fits: str, picked: str) -> None:
    found = choose(candidates(int4, int8, fits), 400 * MIB)
    assert found.pick.format == picked
    assert found.as_dict()["format"] == picked


@pytest.mark.parametrize("int4", [lost(0.021), lost(0.0, 0.021), lost(0.12, 0.11), None])
def test_what_loses_more_than_the_bound_is_never_taken_unasked(int4: Loss | None) -> None:
    with pytest.raises(QualityError) as caught:
        choose(candidates(int4, lost(0.001), "int4"), 250 * MIB)
    assert caught.value.format == "int4"
    assert "only int4 fits 250.0 MiB" in caught.value.message
    assert "int8 needs 300.0 MiB" in caught.value.message
    assert "--format int4" in str(caught.value.hint)
    with pytest.raises(QualityError, match="nothing fits") as nothing:
        choose(candidates(int4, lost(0.001), ""), 100 * MIB)
    assert nothing.value.format == ""


def test_one_line_says_what_was_chosen() -> None:
    known = candidates(lost(0.12, 0.1), lost(0.002))
    assert choose(known, 10**9).line == (
        "int8, 0.2 % quality loss, 180.0 MiB; --format int4 is 1.6x as fast and loses 12 %"
    )
    assert choose(known, 10**9, calibrates=True).line.endswith("loses 12 % before calibration")
    estimated = [replace(one, loss=one.loss and replace(one.loss, estimated=True)) for one in known]
    assert choose(estimated, 10**9).line.startswith("int8, about 0.2 % quality loss (estimate), 180.0 MiB")
    assert choose(candidates(lost(0.0), lost(0.0)), 10**9).line == "int4, less than 0.1 % quality loss, 100.0 MiB"
    assert choose(candidates(None, lost(0.002)), 10**9).line.endswith("--format int4 is 1.6x as fast and loses more")
    little = candidates(None, Loss(0.0001, 0.001, 128, estimated=True))
    assert choose(little, 10**9).line.startswith("int8, less than 0.1 % quality loss (estimate), 180.0 MiB; ")
    blind = choose(candidates(None, None), 10**9, "no text")
    assert blind.line.startswith("int8, quality loss not measured (no text), 180.0 MiB; ")


def test_comparing_predictions() -> None:
    """Perplexity and divergence of logits with a known distance."""
    exact = np.log(np.array([[[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]], np.float32))
    ours = np.log(np.array([[[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]]], np.float32))
    found = compare(exact, ours, np.array([[0, 1]]))
    assert found.perplexity == pytest.approx(2**0.5 - 1, rel=1e-5)  # one of two tokens is half as likely
    assert found.kl == pytest.approx((0.5 * np.log(2) - 0.25 * np.log(2)) / 2, rel=1e-5)
    assert found.positions == 2


def planned(model: str | Path, **options: Any) -> dict[str, Any]:
    """Plan an export without a format."""
    found: dict[str, Any] = dry_run(ExportOptions(str(model), Path("nowhere"), choose=True, threads=THREADS, **options))
    return found


def outliers(folder: Path, size: float) -> Path:
    """Make the small model with one channel in 32 of every layer's inputs `size` times as large: the same function."""
    source = Checkpoint.open(resolve(SMALL))
    shutil.copytree(source.path, folder)
    tensors = {name: source.read(name) for name in source.tensors}
    factors = np.ones(tensors["model.norm.weight"].shape, np.float32)
    factors[::32] = size
    for name in tensors:
        if name.endswith(("input_layernorm.weight", "post_attention_layernorm.weight")):
            tensors[name] = tensors[name] / factors
        elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")):
            tensors[name] = tensors[name] * factors
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_model_that_four_bits_ruin_is_not_given_in_them(tmp_path: Path) -> None:
    """Large channels take the levels of their blocks away: int4 is ruined, int8 is not."""
    model = outliers(tmp_path / "model", 24.0)
    manifest = export_model(
        ExportOptions(str(model), tmp_path / "out", choose=True, quick=True, threads=THREADS), lambda *told: None
    )
    chosen = manifest.provenance["format_choice"]
    losses = {one["format"]: one["loss"] for one in chosen["candidates"]}
    assert losses["int4"]["perplexity_loss"] > 0.1
    assert losses["int8"]["perplexity_loss"] < GOOD
    assert manifest.target.format == chosen["format"] == "int8"
    assert manifest.parity["kl"] < KL_BOUND
    assert manifest.parity["perplexity"] < (1 + BOUND) * manifest.parity["perplexity_source"]
    options = ExportOptions(str(model), context=64)
    shapes = PlannedSource(options.model)
    four, eight = (chosen_format.candidate(options, form, 1 << 40, shapes).peak for form in ("int4", "int8"))
    with pytest.raises(QualityError) as caught:
        planned(model, budget=(four + eight) // 2, context=64)
    assert caught.value.format == "int4"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_float_checkpoint_is_measured(tmp_path: Path, dtype: hf.DType) -> None:
    found = planned(hf.write_checkpoint(tmp_path / "model", hf.CONFIGS["llama_tied_gqa"], 3, dtype))
    losses = {one["format"]: one["loss"] for one in found["choice"]["candidates"]}
    assert list(losses) == ["int4", "int8", "fp32"]
    assert losses["int8"]["kl"] < losses["int4"]["kl"]
    assert losses["fp32"] == NOTHING.as_dict()
    assert found["format"] == found["choice"]["format"]


@pytest.mark.parametrize("kind", [GGMLQuantizationType.F32, GGMLQuantizationType.F16, *gguf_files.BLOCKS])
def test_a_file_that_is_quantized_already_is_not_measured_in_four_bits(
    tmp_path: Path, kind: GGMLQuantizationType
) -> None:
    file = tmp_path / "tiny.gguf"
    gguf_files.write_gguf(file, "llama_tied_gqa", kind=kind)
    quantized = kind in gguf_files.BLOCKS
    if quantized:
        kept = planned(file)
        assert (kept["format"], kept["choice"]["format"]) == ("file", "file")
        assert kept["choice"]["line"].startswith("the file's own weights, ")
    found = planned(file, operators="stock") if quantized else planned(file)
    losses = {one["format"]: one["loss"] for one in found["choice"]["candidates"]}
    if kind in HELD_BY_STOCK:
        assert found["format"] == "file"
    elif quantized:
        assert losses["int4"] is None
        assert found["format"] == "int8"
        assert "--format int4 is" in found["choice"]["line"]
        assert found["choice"]["line"].endswith("loses more")
    else:
        assert losses["int4"]["positions"] > 0


@pytest.mark.parametrize("name", ["restore", "reader", "glyphs"])
def test_models_that_read_more_than_text_are_measured_on_a_text(name: str) -> None:
    """One is an encoder-decoder, one sees, one draws."""
    found = planned(f"builtin:{name}")["choice"]
    assert found["unmeasured"] is None
    assert found["candidates"][1]["loss"]["positions"] > 0
    assert "quality loss" in found["line"]


def test_a_model_that_hears_is_int8_and_says_that_nothing_was_measured() -> None:
    found = planned("builtin:spoken-digits")
    assert found["format"] == "int8"
    assert "int8, quality loss not measured (it reads recordings" in found["choice"]["line"]


def test_a_foreign_graph_is_int8_and_says_that_nothing_was_measured(tmp_path: Path) -> None:
    found = planned(foreign.write_export(tmp_path / "model", hf.CONFIGS["llama_tied_gqa"], 3))
    assert found["format"] == "int8"
    assert "not measured (its graph is not one of edgespec's own)" in found["choice"]["line"]


def test_a_large_model_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of the size of rounding lose about what rounding does."""
    measured = planned(SMALL)["choice"]
    monkeypatch.setattr(loss, "MEASURED", 1000)
    estimated = planned(SMALL)["choice"]
    assert "(estimate)" in estimated["line"]
    for own, theirs in zip(measured["candidates"][:2], estimated["candidates"][:2], strict=True):
        assert (own["loss"]["estimated"], theirs["loss"]["estimated"]) == (False, True)
        assert 0.4 < theirs["loss"]["kl"] / own["loss"]["kl"] < 2.5


def test_options_that_say_how_weights_are_stored_choose_too() -> None:
    assert ExportOptions(SMALL, quantizer="gptq").names_format
    assert ExportOptions(SMALL, target_kl=0.1).names_format
    assert not ExportOptions(SMALL, quick=True, draft="builtin:shakespeare-draft").names_format


def test_a_draft_has_the_chosen_format(tmp_path: Path) -> None:
    found = planned(SMALL, methods=("speculative",), draft="builtin:shakespeare-draft")
    assert found["format"] == found["choice"]["format"] == "int8"
    assert isinstance(choose(candidates(lost(0.0), lost(0.0)), 10**9), FormatChoice)
