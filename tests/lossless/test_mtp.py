"""Drafting by the layer inside a checkpoint reproduces plain decoding's text, greedy, sampled and quantized."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from edgespec.decoding.settings import Settings
from edgespec.engine.loading import load
from edgespec.errors import ExportError
from edgespec.export.bundle.writer import staged_folder
from edgespec.export.loading import load_source
from edgespec.export.measuring.diagnose import Trials
from edgespec.export.measuring.guesses import written
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model, open_target, write_models
from edgespec.export.quantization.weights import WeightChoice
from edgespec.runtimes.files.formats import Format
from edgespec.runtimes.files.manifest import Operators
from tests.support import hf
from tests.support.mtp import write_mtp
from tests.support.planned import plan_of
from tests.support.requests import assert_plain_text, said_of

PROMPTS = ("The harbour lights came on", "and the ferry", "went down")
HYBRID, DENSE = "qwen3_5_delta", "qwen3_tied"


@pytest.mark.parametrize(
    "operators, name, form",
    [
        ("native", HYBRID, "int4"),
        ("native", HYBRID, "int8"),
        ("native", HYBRID, "fp32"),
        ("stock", DENSE, "int8"),
    ],
    indirect=["operators"],
)
def test_the_layer_of_the_checkpoint_is_lossless(tmp_path: Path, operators: Operators, name: str, form: Format) -> None:
    model = write_mtp(tmp_path / "model", name, agrees=True)
    options = ExportOptions(str(model), tmp_path / "bundle", ["mtp"], form, operators=operators, threads=1)
    manifest = export_model(options, golden=False)
    assert manifest.drafter is not None
    assert manifest.drafter.decoder is not None
    assert manifest.drafter.decoder.kind == "mtp"
    assert manifest.memory["weight_bytes"]["drafter"] == (options.output / manifest.drafter.weights).stat().st_size
    planned = plan_of(model, format=form, methods=["mtp"], operators=manifest.target.layout)
    assert planned.memory == manifest.memory
    assert planned.drafter is not None
    assert planned.drafter.facts == manifest.drafter.facts
    greedy = Settings(max_new_tokens=40, ignore_eos=True, fallback=False, adaptive=False, gamma=3)
    drawn = greedy.changed(temperature=0.5, seed=3, acceptance="coupled")
    with load(options.output, threads=1, operators=operators) as engine:
        assert_plain_text(engine, "mtp", PROMPTS, greedy, drawn)
        if operators == "native":  # the attention of stock operators sums the rows of trees in another order
            assert_plain_text(engine, "mtp", PROMPTS, *(how.changed(branch=(2,)) for how in (greedy, drawn)))


def test_a_cut_head(native: None, tmp_path: Path) -> None:
    model = write_mtp(tmp_path / "model", HYBRID, agrees=True)
    manifest = export_model(
        ExportOptions(str(model), tmp_path / "bundle", ["mtp"], draft_vocab=140, threads=1), golden=False
    )
    assert manifest.drafter is not None
    assert manifest.drafter.head_vocab is not None
    assert manifest.drafter.cut
    assert manifest.drafter.head_vocab.size == 140
    with load(tmp_path / "bundle", threads=1) as engine:
        settings = Settings(max_new_tokens=24, ignore_eos=True, adaptive=False)
        assert engine.generate(PROMPTS[0], settings, method="mtp").tokens == engine.generate(
            PROMPTS[0], settings, method="ar"
        ).tokens  # fmt: skip


@contextmanager
def untied(model: Path) -> Iterator[dict[str, NDArray[Any]]]:
    """Yield the tensors of a model to change: with an LM head, and with layers that add nothing."""
    config = json.loads((model / "config.json").read_text("utf-8"))
    for one in (config, config.get("text_config", {})):
        one["tie_word_embeddings"] = False
    (model / "config.json").write_text(json.dumps(config), "utf-8")
    tensors = load_file(model / "model.safetensors")
    for name, values in tensors.items():
        if name.endswith(("o_proj.weight", "o_proj.bias", "down_proj.weight", "out_proj.weight")):
            values[:] = 0
    yield tensors
    save_file(tensors, model / "model.safetensors", {"format": "pt"})


def test_the_other_order_is_said_where_it_would_help(native: None, tmp_path: Path) -> None:
    """A layer that was trained with the hidden state first, in the layout of those that have the embedding first."""
    model = write_mtp(tmp_path / "model", DENSE, agrees=True)
    with untied(model) as tensors:  # after each token comes the next one
        tensors["model.norm.weight"][:] = tensors["mtp.norm.weight"][:] = 1
        tensors["lm_head.weight"] = np.roll(tensors["model.embed_tokens.weight"], 1, 0)
        half = tensors["mtp.fc.weight"].shape[0]
        tensors["mtp.fc.weight"] = np.roll(tensors["mtp.fc.weight"], half, 1)
    hint = said_of(ExportOptions(str(model), tmp_path / "bundle", ["mtp"], "fp32", threads=1))
    assert "would be right with the hidden state before the embedding" in hint
    assert not (tmp_path / "bundle").exists()


def test_the_state_before_the_norm_is_said_where_it_would_help(native: None, tmp_path: Path) -> None:
    """A layer that was trained on it, of a model whose final norm turns signs."""
    model = write_mtp(tmp_path / "model", DENSE, agrees=True)
    with untied(model) as tensors:  # each token is written again
        signs = tensors["model.norm.weight"]
        signs[:] = np.where(np.arange(len(signs)) % 3, -1, 1)
        tensors["mtp.norm.weight"] = signs.copy()
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * signs
        half = tensors["mtp.fc.weight"].shape[0]
        tensors["mtp.fc.weight"][:] = np.eye(half, 2 * half, half)
        tensors["mtp.pre_fc_norm_hidden.weight"][:] = 1
        tensors["mtp.pre_fc_norm_embedding.weight"][:] = 0  # so that the other order is of no help
    hint = said_of(ExportOptions(str(model), tmp_path / "bundle", ["mtp"], "fp32", threads=1))
    assert "would be right with the hidden state before the model's final norm, which" in hint


def test_norms_without_the_models_one_are_said_where_they_would_help(native: None, tmp_path: Path) -> None:
    """A converter has added the 1 to the layer's norms; with it twice, the last one turns every sign."""
    model = write_mtp(tmp_path / "model", HYBRID, agrees=True)
    with untied(model) as tensors:  # after each token comes the next one
        tensors["model.language_model.norm.weight"][:] = tensors["mtp.norm.weight"][:] = -1.5
        tensors["lm_head.weight"] = -np.roll(tensors["model.language_model.embed_tokens.weight"], 1, 0)
        for name in tensors:
            if (name.startswith("mtp.") and name.endswith("norm.weight")) or "mtp.pre_fc_norm" in name:
                tensors[name] = tensors[name] + np.float32(1)
    hint = said_of(ExportOptions(str(model), tmp_path / "bundle", ["mtp"], "fp32", threads=1))
    assert "would be right with its norms as they are stored" in hint


def coarse(folder: Path, size: float) -> Path:
    """Write a model whose MTP layer drafts well, except in formats of few levels.

    A weight of ``size`` times the others is in each block of the matrix that fuses, where the input is always zero.
    """
    model = write_mtp(folder / "model", DENSE, agrees=True)
    tensors = load_file(model / "model.safetensors")
    fuse, norm = tensors["mtp.fc.weight"], tensors["mtp.pre_fc_norm_embedding.weight"]
    norm[::32] = 0
    fuse[:, : len(norm) : 32] = size
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    return model


@pytest.mark.parametrize(
    "size, form, head, option",
    [
        (500, "int4", None, "--format fp32"),
        (500, "int8", None, "--format fp32"),
        (30, "int8", "int4", "--head-format int8"),
        (30, "int4", "int4", "--head-format int8"),
    ],
)
def test_a_format_that_costs_the_guesses_is_said(
    native: None, tmp_path: Path, size: float, form: Format, head: Format | None, option: str
) -> None:
    """Other readings are not: without the hidden state, which is unused here, all of them draft the same tokens."""
    model = coarse(tmp_path, size)
    options = ExportOptions(str(model), tmp_path / "bundle", ["mtp"], form, head_format=head, threads=1)
    hint = said_of(options)
    assert f"would be right with {option}" in hint
    assert "the format that costs them" in hint
    assert "hidden state" not in hint
    assert [path.name for path in tmp_path.iterdir()] == ["model"]  # nothing is left


def test_formats_are_compared_with_the_format_of_the_head(native: None, tmp_path: Path) -> None:
    """With int4 for what fuses, int8 layers guess as badly as int4 ones; without, both guess well."""
    model = coarse(tmp_path, 30)
    shares = {}
    for head in ("int8", "int4"):
        options = ExportOptions(str(model), tmp_path / "bundle", ["mtp"], "fp32", threads=1)
        source = load_source(options)
        assert source.models.drafter is not None
        with staged_folder(tmp_path / head, False) as folder:
            slot, tokens = open_target(source, write_models(folder, source, options.choice))
            choice, texts = WeightChoice.of("int4", None, head), written(slot, tokens)
            shares[head] = Trials(source.models.drafter, choice, folder, slot, texts).formats()
            (folder / "edgespec.json").write_text("{}")
    assert shares["int8"]["int8"] >= shares["int8"]["fp32"] - 0.1 > 0.4
    assert shares["int4"]["int8"] < 0.2
    assert shares["int4"]["fp32"] == shares["int8"]["fp32"]


@pytest.mark.parametrize(
    "name, more, message",
    [
        (None, {}, "no layer for multi-token prediction"),
        (HYBRID, {"operators": "stock"}, "only native operators"),
        (HYBRID, {"methods": ["mtp", "eagle"], "drafter": "there"}, "one drafter"),
        (HYBRID, {"methods": ["ngram"], "drafter": "there"}, "not --method eagle"),
        (HYBRID, {}, "of the drafter's first guesses"),
    ],
)
def test_what_cannot_be_is_refused(
    native: None, tmp_path: Path, name: str | None, more: dict[str, object], message: str
) -> None:
    """The last case is a layer of random weights, such as a fine-tuning may leave."""
    made = write_mtp(tmp_path / "model", name) if name else hf.write_reference_checkpoint(tmp_path / "model", DENSE)
    options = ExportOptions(str(made), tmp_path / "bundle", **{"methods": ["mtp"], "threads": 1, **more})  # type: ignore[arg-type]
    with pytest.raises(ExportError, match=message):
        export_model(options, golden=False)
    assert not (tmp_path / "bundle").exists()
