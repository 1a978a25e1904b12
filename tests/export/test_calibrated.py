"""Calibration by default: on the model's own writing, kept where it loses less, and what it says of itself."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from edgespec.errors import ExportError
from edgespec.export import calibrated, options
from edgespec.export.architectures.trace import walk
from edgespec.export.bundle.model_part import open_model
from edgespec.export.calibrated import note
from edgespec.export.loading import load_source
from edgespec.export.measuring.held_out import HeldOut, round_q4_0
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import dry_run, export_model
from edgespec.export.quantization.calibrate import chosen_levels
from edgespec.export.quantization.levels import Blocks, dequantize_block
from edgespec.export.quantization.own_text import write_own_text
from edgespec.export.quantization.quantizer import QUANTIZERS, Quantizer
from edgespec.export.quantization.reference import reference_logits
from edgespec.reports.advice import quality_words
from edgespec.runtimes.files.formats import FOUR_BITS, Format
from edgespec.runtimes.files.manifest import Manifest
from tests.conftest import TARGET, Written

TOKENS = 1024


@pytest.fixture(autouse=True)
def calibrates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "CALIBRATED", FOUR_BITS)
    monkeypatch.setattr(calibrated, "TOKENS", TOKENS)


def exported(folder: Path, model: str | Path = TARGET, **more: Any) -> Manifest:
    return export_model(ExportOptions(str(model), folder, context=256, threads=1, **more), golden=False)


@pytest.mark.parametrize("form", ["int4", "int4-k"])
def test_a_default_export_loses_less(tmp_path: Path, form: Format) -> None:
    made = exported(tmp_path / "out", format=form)
    quick = exported(tmp_path / "quick", format=form, quick=True)
    assert (made.target.quantizer, quick.target.quantizer) == ("gptq", "mse")
    assert made.parity["calibration"] == {"quantizer": "gptq", "kept": True, "tokens": 4 * 255,
                                          "text": "the model's own", "uncalibrated_matrices": 0}  # fmt: skip
    for figures in made.parity["held_out"].values():
        assert figures["model"] == figures["calibrated"]
        assert figures["calibrated"]["kl"] < figures["mse"]["kl"]
        assert figures["calibrated"]["kl"] < (0.8 if form == "int4" else 1) * figures["q4_0"]["kl"]  # as many bytes
    assert "held_out" not in quick.parity
    sizes = [(tmp_path / name / "model.data").stat().st_size for name in ("out", "quick")]
    assert sizes[0] == sizes[1]
    assert not [file for file in (tmp_path / "out").iterdir() if file.is_dir() or file.name.startswith(".")]
    assert any("calibrated by gptq on 1020 tokens" in line for line in made.provenance["notes"])


def test_an_encoder_decoder_is_calibrated_on_what_it_writes_about_sources(tmp_path: Path) -> None:
    made = export_model(
        ExportOptions("builtin:restore", tmp_path / "out", threads=1, attention=("int8",)), golden=False
    )
    figures = made.parity["held_out"]["own"]
    assert made.target.quantizer == "gptq"
    assert made.target.encoder is not None
    assert made.target.encoder.quantizer == "gptq"
    assert made.target.attention is not None
    assert made.target.attention.default == "int8"
    assert figures["model"] == figures["calibrated"]
    assert figures["calibrated"]["kl"] < 0.8 * figures["mse"]["kl"]
    assert "calibrated by gptq" in " ".join(made.provenance["notes"])
    assert quality_words(made.parity).count("KL") == 1


def test_a_model_that_hears_is_calibrated_on_recordings(tmp_path: Path) -> None:
    model, folder = "builtin:spoken-digits", Path(__file__).parents[1] / "data" / "digits"
    calibration = tmp_path / "sounds"
    calibration.mkdir()
    for at in range(3):  # the same ones again: enough pieces, and the held-out text is not new
        for file in folder.glob("*.wav"):
            shutil.copyfile(file, calibration / f"{file.stem}{at}.wav")
    made = export_model(
        ExportOptions(model, tmp_path / "out", threads=1, calibration=calibration, quantizer="gptq"), golden=False
    )
    assert made.target.encoder is not None
    assert made.target.quantizer == made.target.encoder.quantizer == "gptq"
    figures = made.parity["held_out"]["own"]
    assert figures["calibrated"]["kl"] < figures["mse"]["kl"]
    few = ExportOptions(model, tmp_path / "few", threads=1, calibration=folder)
    assert "4 pieces of recordings, fewer than 8" in " ".join(load_source(few).notes)
    for path, said in ((tmp_path / "none.wav", "expected a sound file"), (Path(__file__), "this model hears"),
                       (Path(__file__).parent, "there is no recording")):  # fmt: skip
        with pytest.raises(ExportError, match=said):
            load_source(ExportOptions(model, tmp_path / "none", calibration=path))


def test_it_is_shown(tmp_path: Path) -> None:
    made = exported(tmp_path / "out")
    words = quality_words(made.parity)
    assert words.count("KL") == words.count("Q4_0") == 2
    assert quality_words(exported(tmp_path / "quick", quick=True).parity) == ""
    for wrong in (
        "x",
        {"own": "x"},
        {"own": {"model": {"kl": 1}}},
        {"own": {"model": {"kl": 1, "top1_agreement": "x"}}},
    ):
        with pytest.raises(ValueError, match="held_out: expected kl and top1_agreement"):
            Manifest.model_validate(made.model_dump() | {"parity": made.parity | {"held_out": wrong}})


def test_the_quick_way_is_mse_to_the_bit(tmp_path: Path) -> None:
    exported(tmp_path / "quick", quick=True)
    exported(tmp_path / "mse", quantizer="mse")
    assert (tmp_path / "quick" / "model.data").read_bytes() == (tmp_path / "mse" / "model.data").read_bytes()
    with pytest.raises(ExportError, match="--quick and --quantizer gptq"):
        exported(tmp_path / "both", quick=True, quantizer="gptq")


def test_what_loses_more_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quantizer that is worse than mse: the bundle is that of --quick, and reports that."""
    worse = Quantizer("gptq", QUANTIZERS["rtn"].prepare, calibrated=True)
    monkeypatch.setattr(calibrated, "CALIBRATED", worse)
    made = exported(tmp_path / "out")
    exported(tmp_path / "quick", quick=True)
    assert made.target.quantizer == "mse"
    assert not made.parity["calibration"]["kept"]
    assert (tmp_path / "out" / "model.data").read_bytes() == (tmp_path / "quick" / "model.data").read_bytes()
    for figures in made.parity["held_out"].values():
        assert figures["model"] == figures["mse"]
    assert any("so levels are mse's" in line for line in made.provenance["notes"])


def test_who_is_not_calibrated(tmp_path: Path) -> None:
    assert exported(tmp_path / "int8", format="int8").target.quantizer == "mse"
    assert "calibration" not in exported(tmp_path / "fp32", format="fp32").parity


def test_a_text_that_was_given(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("A horse! a horse! my kingdom for a horse!\n" * 40, "utf-8")
    made = exported(tmp_path / "out", quantizer="awq", calibration=text)
    assert made.target.quantizer == "awq"  # as requested, despite its loss
    assert made.parity["calibration"]["text"] == "given"
    assert made.parity["calibration"]["tokens"] <= TOKENS


def test_a_plan_says_how_long_it_takes(tmp_path: Path) -> None:
    plan = dry_run(ExportOptions(TARGET, tmp_path / "out"))
    assert plan["quantizer"] == "gptq"
    assert any("calibrates on 1024 tokens of text that the model writes: less than a minute" in note
               for note in plan["notes"])  # fmt: skip


@pytest.mark.parametrize("name", ["olmoe_eight", "qwen3_5_moe_shared", "lfm2_moe_bias", "granite_hybrid_experts"])
def test_experts_are_calibrated(tmp_path: Path, checkpoint: Callable[[str], Path], name: str) -> None:
    """Those that many tokens come to; others are quantized without their inputs, and counted."""
    arch = open_model(checkpoint(name), None)
    rows = np.random.default_rng(1).integers(2, arch.facts.vocab, (40, 30))
    experts = arch.facts.experts
    assert experts is not None
    layers = sum(step.method == "experts" for step in walk(arch.trace()))
    names = [each for each in arch.tensors if len(arch.source.shape(each)) == 2]
    with (
        chosen_levels(arch, QUANTIZERS["gptq"], lambda _: Blocks(4), rows, tmp_path) as many,
        chosen_levels(arch, QUANTIZERS["gptq"], lambda _: Blocks(4), rows[:1], tmp_path) as few,
    ):
        assert many.uncalibrated < few.uncalibrated == 3 * experts.count * layers
        for each in names:
            got = list(many.pieces(arch.source, each, Blocks(4)))
            np.testing.assert_array_equal(np.concatenate([piece for piece, _ in got]), arch.source.read(each))


# -- generated text, and measurements on it ----------------------------------------------------------------------------


def test_own_text_follows_from_its_seed(written: Callable[..., Written]) -> None:
    slot = written("llama_biases_mqa", "fp32").slot()
    first = write_own_text(slot, 3, [1], {2}, 5)
    assert first.shape == (3, min(256, slot.context - 1))
    np.testing.assert_array_equal(first, write_own_text(slot, 3, [1], {2}, 5))
    assert not np.array_equal(first, write_own_text(slot, 3, [1], {2}, 6))
    assert (first[:, 0] == 1).all()
    ends = first[:, :-1] == 2
    assert (first[:, 1:][ends] == 1).all()


def test_own_text_is_drawn_from_the_model(written: Callable[..., Written]) -> None:
    """First tokens of many texts have the model's distribution, with either kind of operators."""
    model = written("llama_biases_mqa", "fp32")
    slot = model.slot()
    slot.follow([])
    logits = slot.forward(np.array([1])).logits[0].astype(np.float64)
    chances = np.exp(logits - logits.max())
    chances /= chances.sum()
    drawn = write_own_text(slot, 400, [1], (), 0, longest=2)[:, 1]
    likely = np.argsort(-chances)[:20]
    share, wanted = np.isin(drawn, likely).mean(), chances[likely].sum()
    assert abs(share - wanted) < 4 * np.sqrt(wanted * (1 - wanted) / 400)


def test_q4_0_is_that_of_gguf() -> None:
    weight = np.random.default_rng(2).standard_normal((64, 256), np.float32)
    weight[3], weight[5, :32] = 0, weight[5, :32] * 1e-4
    kind = gguf.GGMLQuantizationType.Q4_0
    theirs = gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind)
    np.testing.assert_array_equal(dequantize_block(*round_q4_0(weight, Blocks(4)), 256, 4), theirs)


def test_texts_of_different_lengths_are_compared_alone(written: Callable[..., Written]) -> None:
    model = written("llama_biases_mqa", "fp32")
    random = np.random.default_rng(3)
    long, short = (random.integers(2, model.arch.facts.vocab, shape) for shape in ((2, 40), (1, 9)))
    held = HeldOut(model.arch, {"long": long, "short": short})
    np.testing.assert_allclose(held._exact[2], reference_logits(model.arch, short[0].tolist()), atol=1e-4)
    figures = held.of(model.slot())
    assert {name: own["positions"] for name, own in figures.items()} == {"long": 80, "short": 9}
    assert all(own["kl"] < 1e-6 and own["top1_agreement"] == 1 for own in figures.values())
    assert all(own["kl"] > 1e-4 for own in held.q4_0().values())


def test_a_note_of_what_experts_missed() -> None:
    figures = {which: {"kl": 0.5} for which in ("mse", "calibrated")}
    facts = {"calibration": {"quantizer": "gptq", "tokens": 9, "kept": True, "uncalibrated_matrices": 4},
             "held_out": {"own": figures, "text": figures}}  # fmt: skip
    assert "too few tokens came to 4 matrices of experts" in str(note(facts))
    assert note({"calibration": {}}) is None
