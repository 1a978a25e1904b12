"""Numbers at their ends: logits that overflow are an error of that request, and extreme settings draw something."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgespec.decoding.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.errors import EdgespecError
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.runtimes.files.manifest import Operators
from tests.support import hf
from tests.support.requests import Get, ask

TOO_MUCH, OTHER = 7, [5, 6, 9]


@pytest.fixture
def overflowing(operators: Operators, tmp_path: Path) -> Engine:
    """Finite float32 weights whose logits overflow where token 7 was the last one, and nowhere else."""
    config = hf.CONFIGS["llama_tied_gqa"] | {"tie_word_embeddings": False}
    model = hf.write_checkpoint(tmp_path / "model", config, 1)
    (file,) = model.glob("*.safetensors")
    weights = load_file(file)
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):  # only the last token decides
            weights[name] = np.zeros_like(weights[name])
    embedding = weights["model.embed_tokens.weight"].astype(np.float32)
    embedding[:, 0] = 0
    embedding[TOO_MUCH] = np.eye(1, embedding.shape[1], dtype=np.float32)[0]
    head = weights["lm_head.weight"].astype(np.float32)
    head[3, 0] = 1e19  # of finite squares, as the export wants weights
    weights["model.norm.weight"] = np.where(np.arange(embedding.shape[1]) == 0, 1e19, 1).astype(np.float32)
    save_file(weights | {"model.embed_tokens.weight": embedding, "lm_head.weight": head}, file, {"format": "pt"})
    export_model(
        ExportOptions(str(model), tmp_path / "bundle", ["self-spec"], "fp32", threads=1, trials=1), golden=False
    )
    return load(tmp_path / "bundle", threads=1, operators=operators)


@pytest.mark.parametrize("how", [{}, {"temperature": 0.7, "seed": 1}, {"logprobs": True}, {"repetition_penalty": 1.3}])
def test_logits_that_overflow_are_named_and_the_engine_goes_on(overflowing: Engine, how: dict[str, Any]) -> None:
    for method in ("ar", "ngram", "self-spec", "auto"):
        wanted = {"method": method, "max_new_tokens": 6} | how
        before = ask(overflowing, OTHER, **{**wanted, "acceptance": "coupled"}).tokens
        with pytest.raises(EdgespecError, match="expected finite logits"):
            ask(overflowing, [*OTHER, TOO_MUCH], **wanted)
        assert ask(overflowing, OTHER, **{**wanted, "acceptance": "coupled"}).tokens == before
    with pytest.raises(EdgespecError, match="expected finite logits"):
        overflowing.generate_batch([OTHER, [*OTHER, TOO_MUCH]], method="ar", max_new_tokens=4, **how)
    assert overflowing.sessions.held()[0] == 0  # no session is lost


EXTREMES: tuple[dict[str, Any], ...] = (
    {"temperature": 1e-30},
    {"temperature": 1e30},
    {"temperature": 1e-3, "top_p": 1e-9},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.0, "top_k": 1, "top_p": 1e-9, "min_p": 1.0},
    {"repetition_penalty": 1e30},
    {"repetition_penalty": 1e-30, "temperature": 0.5},
    {"logit_bias": {5: 1e30}},
    {"logit_bias": dict.fromkeys(range(20), -1e30), "temperature": 1e-9},
)


@pytest.mark.parametrize("extreme", EXTREMES, ids=json.dumps)
def test_extreme_settings_write_plain_decodings_text(engine: Get, extreme: dict[str, Any]) -> None:
    made = engine()
    try:
        sampling = SamplingParams(seed=4, acceptance="coupled", **extreme)
    except EdgespecError:  # refused by name is as good
        return
    texts = [ask(made, method=method, sampling=sampling, max_new_tokens=12).tokens for method in ("ar", "speculative")]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 12
    drawn = ask(made, method="speculative", max_new_tokens=12, seed=4, **extreme)  # by rejection
    assert len(drawn.tokens) == 12
