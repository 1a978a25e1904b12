"""Texts and beams of a hundred sources are those of transformers, by length penalties and ways to stop early."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgespec.decoding.beams import BeamOptions
from edgespec.engine.encoding import Source
from edgespec.engine.loading import load
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.export.source.source import resolve
from tests.support import seq2seq

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("native")]
RESTORE, SOURCES, NEW = "builtin:restore", 50, 24
LINES = (Path(__file__).parents[1] / "data" / "restore.txt").read_text("utf-8").lower().split()
EARLY: tuple[bool | Literal["never"], ...] = (True, False, "never")
HOW = list(product((1, 2, 3, 5), (-0.5, 0.6, 1.0, 2.0), EARLY))


def trained(folder: Path) -> tuple[Path, Callable[[np.random.Generator], str]]:
    """Give builtin:restore, a T5, and pieces of texts."""

    def source(chance: np.random.Generator) -> str:
        start = int(chance.integers(0, len(LINES) - 12))
        return " ".join(LINES[start : start + int(chance.integers(3, 12))])

    return resolve(RESTORE), source


def bart(folder: Path) -> tuple[Path, Callable[[np.random.Generator], list[int]]]:
    """Write a BART of random weights that ends now and then, and give random sources."""
    found, vocab = seq2seq.saved("bart"), 2048
    config: dict[str, Any] = found["config"] | {"vocab_size": vocab, "pad_token_id": 0, "eos_token_id": 1,
                                                "decoder_start_token_id": 0}  # fmt: skip
    old, wide = found["config"]["vocab_size"], ("shared", "embed_tokens", "lm_head", "final_logits_bias")
    shapes = {name: [vocab if size == old and any(word in name for word in wide) else size for size in shape]
              for name, shape in found["tensors"].items()}  # fmt: skip
    seq2seq.write_checkpoint(folder, config, shapes)
    weights = load_file(folder / "model.safetensors")
    weights["final_logits_bias"][0, 1] += 5
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(resolve(RESTORE) / name, folder / name)
    return folder, lambda chance: [*chance.integers(3, vocab, int(chance.integers(3, 24))).tolist(), 1]


@pytest.mark.parametrize("kind", [trained, bart])
def test_texts_and_scores_are_those_of_transformers(kind: Callable[[Path], Any], tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder, source = kind(tmp_path / "model")
    export_model(ExportOptions(str(folder), tmp_path / "bundle", [], "fp32", threads=1, quick=True), golden=False)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).eval()
    chance, lengths = np.random.default_rng(0), set()
    with load(tmp_path / "bundle", threads=1) as engine:
        for number in range(SOURCES):
            beams, penalty, early = HOW[number * 5 % len(HOW)]
            given = engine.encode(source(chance))
            assert isinstance(given, Source)
            with torch.no_grad():
                wanted = model.generate(
                    torch.tensor([given.tokens]), num_beams=beams, length_penalty=penalty, early_stopping=early,
                    max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True, output_scores=True,
                )  # fmt: skip
            how = BeamOptions(beams, penalty, early) if beams > 1 else None
            found = engine.generate(given, engine.defaults.changed(max_new_tokens=NEW, beams=how))
            assert found.tokens == wanted.sequences[0, 1:].tolist(), (number, how)
            if how is not None:
                score = float(found.reason.split()[-1])
                assert score == pytest.approx(float(wanted.sequences_scores[0]), abs=1e-3)
            lengths.add(len(found.tokens))
    assert len(lengths) > 3
