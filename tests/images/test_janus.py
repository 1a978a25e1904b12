"""The half of Janus that draws: logits, guided codes and pictures are those of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgespec.engine.loading import load
from edgespec.errors import ExportError, InvalidRequest, UnsupportedModel
from edgespec.export.architectures import architecture
from edgespec.export.drafters.heads import HeadPlan
from edgespec.export.emit.plans import storage_plans
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.export.source.source import Checkpoint
from edgespec.runtimes.opening import open_slot
from tests.support.janus import ARCHIVE, IDS, PROMPT, SIDE, write_janus


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_janus(tmp_path_factory.mktemp("janus") / "model")


@pytest.mark.parametrize("operators", ["native", "stock"])
def test_what_is_drawn_is_what_transformers_draws(model: Path, operators: str, tmp_path: Path) -> None:
    options = ExportOptions(str(model), tmp_path / "bundle", ["self-spec", "ngram"], "fp32", trials=2, threads=1)
    export_model(options, golden=False)
    with load(tmp_path / "bundle", threads=1, operators=operators) as engine, np.load(ARCHIVE) as wanted:
        part, codes = engine.bundle.manifest.codes, wanted["codes"]
        assert part is not None
        tokens = np.array([*IDS, *(codes[:-1] + part.first)], np.int64)
        found = open_slot(engine.model).forward(tokens).logits[:, part.first :]
        np.testing.assert_allclose(found, wanted["logits"], atol=1e-4)
        for method in engine.methods:
            drawing = engine.draw(PROMPT, method=method, fallback=False)
            assert drawing.result.tokens == (codes + part.first).tolist(), method
        assert drawing.result.text == ""
        decoded = engine.code_decoder.run(codes.reshape(SIDE, SIDE))
        np.testing.assert_allclose(decoded, wanted["picture"], atol=1e-4)
        assert engine.draw(PROMPT, negative_prompt="a").result.tokens != drawing.result.tokens
        with pytest.raises(InvalidRequest, match="does not know"):
            engine.draw(" ")


def test_what_such_a_model_is_not_made_for_is_refused(model: Path) -> None:
    arch = architecture(Checkpoint.open(model))
    with pytest.raises(UnsupportedModel, match="LM head of two matrices"):
        storage_plans(arch, "fp32", None, HeadPlan(tapped=(1,)))
    (model / "generation_config.json").unlink()
    with pytest.raises(ExportError, match="deepseek-community/Janus-Pro-1B"):
        architecture(Checkpoint.open(model))
    assert architecture(Checkpoint.open(model), text_only=True).model_type == "llama"
